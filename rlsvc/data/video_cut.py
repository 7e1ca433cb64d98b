"""Part of a video as a file of its own: copied without loss where it begins and ends at key frames, else encoded again.

Frames go by their order, as everywhere here. Needs PyAV, which comes with the `lerobot` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.video import decode_frames
from rlsvc.data.video_encode import QUALITY_OF_COPIES, VideoFile, count_pixels

TIME_TOLERANCE = 1e-4
"""By how much, s, a copied frame may miss i / fps: what LeRobot's reader tolerates."""


class FrameReader:
    """Frames of video files, quick where parts of a file are asked for in order."""

    def __init__(self) -> None:
        """Nothing is open yet."""
        self._path: Path | None = None
        self._next = 0
        self._frames: Iterator[np.ndarray] = iter(())

    def read(self, path: Path, first: int, length: int) -> Iterator[np.ndarray]:
        """`length` frames [H, W, 3] uint8 from `first` on.

        Raises:
            DatasetError: the file is damaged, or ends before.
        """
        if path != self._path or first < self._next:
            self._path, self._next, self._frames = path, 0, decode_frames(path)
        for _ in islice(self._frames, first - self._next):
            self._next += 1
        for frame in islice(self._frames, length):
            self._next += 1
            yield frame
        if self._next < first + length:
            raise DatasetError(f"{path}: ends at frame {self._next}, the dataset says that it has {first + length}")


def cut_video(
    reader: FrameReader, path: Path, first: int, length: int, target: Path, fps: float
) -> tuple[bool, np.ndarray]:
    """Write `length` frames from `first` on as an mp4 file of their own.

    Args:
        reader: kept by the caller from one part to the next.
        path: of the video.
        first: by order, from 0.
        length: frames.
        target: new file.
        fps: frame i gets the time i / fps.

    Returns:
        Whether it was copied without loss, and the histogram [3, 256] of the frames (see `VideoFile`).

    Raises:
        DatasetError: the video is damaged or too short.
        OSError: the target cannot be written.
    """
    if _copy_packets(path, first, length, target, fps):
        histogram = np.zeros((3, 256), np.int64)
        for mine, copied in zip_longest(reader.read(path, first, length), decode_frames(target)):
            if mine is None or copied is None or not np.array_equal(mine, copied):
                break
            count_pixels(mine, histogram)
        else:
            return True, histogram
    video = VideoFile(target, fps, QUALITY_OF_COPIES)
    for frame in reader.read(path, first, length):
        video.add(frame)
    video.close()
    return False, video.histogram


def _copy_packets(path: Path, first: int, length: int, target: Path, fps: float) -> bool:
    """Copy the packets of these frames, if they stand alone and lie at i / fps; whether they do."""
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as source:
            stream = source.streams.video[0]
            packets = [packet for packet in source.demux(stream) if packet.size]
            shown = [packet.pts for packet in packets if packet.pts is not None]
            times, rank = sorted(shown), {pts: i for i, pts in enumerate(sorted(shown))}
            places = [i for i, pts in enumerate(shown) if first <= rank[pts] < first + length]
            if len(rank) != len(packets) or len(places) != length or stream.time_base is None:
                return False
            begin, end = places[0], places[-1] + 1
            alone = end - begin == length and packets[begin].is_keyframe and rank[shown[begin]] == first
            if not alone or (end < len(packets) and not packets[end].is_keyframe):
                return False
            base = times[first]
            off = [float((t - base) * stream.time_base) - i / fps for i, t in enumerate(times[first : first + length])]
            if max(map(abs, off)) > TIME_TOLERANCE:
                return False
            with av.open(str(target), "w", format="mp4") as container:
                copied = container.add_stream_from_template(stream, opaque=True)
                for packet, pts in zip(packets[begin:end], shown[begin:end], strict=True):
                    packet.pts = pts - base
                    if packet.dts is not None:
                        packet.dts -= base
                    packet.stream = copied
                    container.mux(packet)
    except (FFmpegError, IndexError) as error:
        raise DatasetError(f"{path}: not readable as video ({error}); it is truncated or damaged") from error
    return True
