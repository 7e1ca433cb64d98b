"""Write video files. Needs PyAV, which comes with the `lerobot` extra.

Letters: H height, W width.
"""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODEC = "libx264"
PIXELS = "yuv420p"
KEYFRAME_INTERVAL = 10
QUALITY, QUALITY_OF_COPIES = 18, 10
"""Of x264 (crf), lower is better: of camera frames, and of frames that were encoded once already."""
OPTIONS = {"preset": "veryfast", "bf": "0", "g": str(KEYFRAME_INTERVAL), "threads": "2"}
"""Without B-frames a frame's time is i / fps exactly, and the file has no edit list. A key frame every
KEYFRAME_INTERVAL frames keeps random access cheap for whoever trains on it."""
SAMPLED_SIDE = 96
"""Statistics look at every k-th row and column, so that about this many are left on the shorter side."""


class VideoFile:
    """An mp4 file; frame i has the time i / fps.

    Attributes:
        frames: how many it has.
        histogram: [3, 256], how many of the sampled pixels have each value, by channel.
    """

    def __init__(self, path: Path, fps: float, quality: int = QUALITY) -> None:
        """Begin the file.

        Args:
            path: of the new file.
            fps: frames a second.
            quality: crf of x264.

        Raises:
            OSError: it cannot be made.
        """
        import av

        self._options = OPTIONS | {"crf": str(quality)}
        self.frames, self.histogram = 0, np.zeros((3, 256), np.int64)
        self._fps = Fraction(fps).limit_denominator(1001)
        # A file of Python's own, so that a full disk is an error here and not a silent gap in the file.
        self._file = _Whole(path)
        self._container: Any = av.open(self._file, "w", format="mp4")
        self._stream: Any = None

    def add(self, frame: np.ndarray) -> None:
        """Encode a frame [H, W, 3] uint8 RGB; H and W are even.

        Raises:
            OSError: the disk is full, or the encoder failed.
        """
        import av

        if self._stream is None:
            self._stream = self._container.add_stream(CODEC, rate=self._fps, options=self._options)
            self._stream.height, self._stream.width = frame.shape[:2]
            self._stream.pix_fmt = PIXELS
            self._stream.time_base = 1 / self._fps
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture.pts, picture.time_base = self.frames, 1 / self._fps
        self._mux(picture)
        self.frames += 1
        count_pixels(frame, self.histogram)

    def close(self) -> None:
        """Write what is left, and wait until it is on the disk.

        Raises:
            OSError: likewise.
        """
        from av.error import FFmpegError

        self._mux(None)
        try:
            self._container.close()
        except FFmpegError as error:
            raise self._file.error or OSError(str(error)) from error
        self._file.close()

    def _mux(self, picture: Any) -> None:
        from av.error import FFmpegError

        try:
            self._container.mux(self._stream.encode(picture))
        except FFmpegError as error:
            raise self._file.error or OSError(str(error)) from error
        if self._file.error is not None:
            raise self._file.error


def count_pixels(frame: np.ndarray, histogram: np.ndarray) -> None:
    """Add the sampled pixels of a frame [H, W, 3] uint8 to a histogram [3, 256], by channel and value."""
    step = max(1, min(frame.shape[:2]) // SAMPLED_SIDE)
    for channel in range(3):
        histogram[channel] += np.bincount(frame[::step, ::step, channel].ravel(), minlength=256)


class _Whole:
    """A file whose `write` takes all bytes or raises, and keeps what it raised, which libav does not."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self.seek, self.tell = self._file.seek, self._file.tell
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        try:
            while len(view):
                view = view[self._file.write(view) :]
        except OSError as error:
            self.error = error
            raise
        return len(data)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
