"""Zarr replay buffers of the Diffusion Policy family: arrays [N, ...] under data/, `episode_ends` under meta/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.columns import BOOKKEEPING, Array, ReplayBufferSource, replay_buffer


def open_zarr(path: Path, fps: float | None = None) -> ReplayBufferSource:
    """The replay buffer in a zarr folder (format 2 or 3); chunks are read when asked for.

    Args:
        path: of the folder.
        fps: steps a second; None takes the buffer's own.

    Raises:
        DatasetError: not a zarr group, or not a replay buffer.
    """
    import zarr

    try:
        root: Any = zarr.open_group(str(path), mode="r")
        data = {name: root["data"][name] for name in sorted(root["data"].array_keys())}
        meta = {name: root["meta"][name] for name in root["meta"].array_keys() if name in BOOKKEEPING}
    except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
        raise DatasetError(
            f"{path}: not readable as a zarr replay buffer with the groups 'data' and 'meta' ({error}); copy it again"
        ) from error
    arrays = {}
    for name, array in data.items():
        # zarr gives the fill value, without a word, for a chunk that is not on disk.
        lost = array.nchunks - array.nchunks_initialized
        arrays[name] = Array(
            array.shape,
            np.dtype(array.dtype),
            lambda start, end, a=array, n=name: _block(path, n, a, start, end),
            f"{lost} of {array.nchunks} chunks of '{name}' are missing on disk; copy it again" if lost else "",
        )
    small = {name: _block(path, name, array, 0, array.shape[0]) for name, array in meta.items()}
    return replay_buffer(path, "zarr replay buffer", arrays, small, fps)


def _block(path: Path, name: str, array: Any, start: int, end: int) -> np.ndarray:
    # A damaged chunk surfaces as whatever its codec raises (RuntimeError from blosc).
    try:
        return np.asarray(array[start:end])
    except (RuntimeError, ValueError, OSError) as error:
        raise DatasetError(
            f"{path}: steps {start} to {end} of '{name}' are not readable ({error}); copy the dataset again"
        ) from error
