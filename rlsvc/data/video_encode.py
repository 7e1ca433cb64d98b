"""Video files written while their frames come, in a thread of their own. Needs PyAV, which comes with the `lerobot` extra.

Letters: H height, W width.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

CODEC = "libx264"
PIXELS = "yuv420p"
KEYFRAME_INTERVAL = 10
OPTIONS = {"preset": "veryfast", "crf": "18", "bf": "0", "g": str(KEYFRAME_INTERVAL), "threads": "2"}
"""Without B-frames a frame's time is i / fps exactly, and the file has no edit list. A key frame every
KEYFRAME_INTERVAL frames keeps random access cheap for whoever trains on it."""

NICENESS = 10
SAMPLED_SIDE = 96
"""Statistics look at every k-th row and column, so that about this many are left on the shorter side."""


class EncoderBehind(Exception):
    """The queue of frames that wait for the encoder is full."""


class VideoEncoder:
    """One mp4 file. Frame i gets the time i / fps.

    `put` comes from one thread and never waits for the encoder. The encoder's thread, and the codec's own, are nicer
    than the caller's, so that a control loop gets the core first.
    """

    def __init__(self, path: Path, fps: float, queue_frames: int) -> None:
        """Begin the file.

        Args:
            path: of the new file.
            fps: frames a second.
            queue_frames: most frames that may wait.
        """
        self.path = path
        self.frames = 0
        self.histogram = np.zeros((3, 256), np.int64)
        self._fps = Fraction(fps).limit_denominator(1001)
        self._queue: queue.Queue[np.ndarray | None] = queue.Queue(queue_frames)
        self._error: Exception | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name=f"encoder of {path.name}", daemon=True)
        self._thread.start()

    def put(self, frame: np.ndarray) -> None:
        """Hand over a frame [H, W, 3] uint8 RGB; it is copied.

        Raises:
            EncoderBehind: the queue is full; the frame was not taken.
            OSError: the file could not be written some frames ago (the disk is full).
        """
        if self._error is not None:
            raise self._error
        try:
            self._queue.put_nowait(np.array(frame, order="C"))
        except queue.Full:
            raise EncoderBehind from None

    def finish(self) -> None:
        """Wait until every frame is in the file, and the file on the disk.

        Raises:
            OSError: it could not be written.
        """
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Stop, whatever still waits, and delete the file. Never raises."""
        self._aborted = True
        with contextlib.suppress(queue.Full):  # the thread then sees the flag at its next frame
            self._queue.put_nowait(None)
        self._thread.join()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            with self.path.open("wb", buffering=0) as file:
                self._encode(file)
                os.fsync(file.fileno())
        except Exception as error:  # handed to whoever calls next
            self._error = error
            while not self._aborted and self._queue.get() is not None:
                pass

    def _encode(self, file: Any) -> None:
        import av

        # A file of Python's own, so that a full disk is an OSError here and not a silent gap in the file.
        with av.open(_Whole(file), "w", format="mp4") as container:
            stream: Any = None
            while (frame := self._queue.get()) is not None and not self._aborted:
                if stream is None:
                    stream = container.add_stream(CODEC, rate=self._fps, options=dict(OPTIONS))
                    stream.height, stream.width = frame.shape[:2]
                    stream.pix_fmt = PIXELS
                    stream.time_base = 1 / self._fps
                picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
                picture.pts, picture.time_base = self.frames, 1 / self._fps
                container.mux(stream.encode(picture))
                self._count(frame)
            if stream is not None and not self._aborted:
                container.mux(stream.encode())

    def _count(self, frame: np.ndarray) -> None:
        self.frames += 1
        step = max(1, min(frame.shape[:2]) // SAMPLED_SIDE)
        for channel in range(3):
            self.histogram[channel] += np.bincount(frame[::step, ::step, channel].ravel(), minlength=256)


class _Whole:
    """A raw file whose `write` takes all bytes or raises."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]
        return len(data)
