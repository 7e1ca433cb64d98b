"""Video files as frames, by their order (never by timestamp). Needs PyAV, which comes with the `lerobot` extra."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError


def count_frames(path: Path) -> int:
    """How many frames a video has, counted in its packets without decoding them.

    Raises:
        DatasetError: not a readable video.
    """
    import av
    from av.error import FFmpegError

    count = 0
    try:
        with av.open(str(path)) as container:
            for packet in container.demux(container.streams.video[0]):
                count += packet.size > 0
    except (FFmpegError, IndexError) as error:
        raise _damaged(path, error) from error
    return count


def decode_frames(path: Path) -> Iterator[np.ndarray]:
    """All frames in order: (H, W, 3) uint8 RGB.

    Raises:
        DatasetError: not a readable video, or damaged part of the way.
    """
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as container:
            container.streams.video[0].thread_type = "AUTO"
            for frame in container.decode(video=0):
                yield frame.to_ndarray(format="rgb24")
    except (FFmpegError, IndexError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> DatasetError:
    return DatasetError(f"{path}: not readable as video ({error}); it is truncated or damaged, copy it again")
