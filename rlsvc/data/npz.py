"""Replay buffers in one .npz file: arrays [N, ...] and `episode_ends`; never pickled objects."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.columns import BOOKKEEPING, Array, ReplayBufferSource, replay_buffer


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of the file.

    Raises:
        DatasetError: not an npz file, truncated, or holding pickled objects.
    """
    try:
        # Opened here, since np.load leaves a file that it cannot read open.
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DatasetError(f"{path}: one array without names (.npy), expected an .npz file")
            return {name: file[name] for name in file.files}
    except DatasetError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise DatasetError(
            f"{path}: not readable as .npz ({error}); it is truncated, damaged, or holds pickled objects. "
            "Copy it again, or save it with plain arrays"
        ) from error


def open_npz(path: Path, fps: float | None = None) -> ReplayBufferSource:
    """The replay buffer in an .npz file; see `rlsvc.data.columns` for what it must hold.

    Args:
        path: of the file.
        fps: steps a second; None takes the file's own.

    Raises:
        DatasetError: it cannot be read, or is not a replay buffer.
    """
    data = read_arrays(path)
    steps = {name: array for name, array in data.items() if name not in BOOKKEEPING}
    arrays = {
        name: Array(array.shape, array.dtype, lambda start, end, a=array: a[start:end]) for name, array in steps.items()
    }
    small = {name: array for name, array in data.items() if name in BOOKKEEPING}
    return replay_buffer(path, "npz replay buffer", arrays, small, fps)
