"""Training state on disk: `<run>/checkpoints/<step>/` with the arrays (orbax), meta.json, and what else is kept.

A checkpoint is written under a temporary name and renamed when it is whole, so that a folder with a step for a name is
always complete. Every process of a learner group calls `save`; the first one commits.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlsvc.core.errors import UserError
from rlsvc.nn.params import leaf_names, unflatten_params

META = "meta.json"
STATE = "state"
EXTRA = "extra.safetensors"
SCHEMA_VERSION = 1

# Orbax says thirty lines about each checkpoint, which a job's log would be full of.
logging.getLogger("absl").setLevel(logging.WARNING)


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and (entry / META).is_file())


def save(
    folder: Path, step: int, state: Any, meta: Mapping[str, Any], extra: Mapping[str, np.ndarray] | None = None
) -> Path:
    """Write and commit a checkpoint; one that is already there for this step is kept as it is.

    Args:
        folder: `<run>/checkpoints`.
        step: the run's clock.
        state: pytree of arrays.
        meta: plain values to keep beside it (counters).
        extra: host arrays by name to keep beside it, the first process's.

    Raises:
        UserError: the disk has no room; what was saved before is untouched.
    """
    final = folder / str(step)
    if step in steps(folder):
        return final
    first = jax.process_index() == 0
    arrays = dict(zip(leaf_names(state), jax.tree.leaves(state), strict=True))
    nbytes = sum(leaf.nbytes for leaf in arrays.values())
    with begun(folder, step, nbytes, first=first) as partial:
        _barrier(f"checkpoint-{step}-begin")
        with ocp.StandardCheckpointer() as writer:
            writer.save((partial / STATE).absolute(), arrays)
        if first and extra:
            save_file({name: np.ascontiguousarray(value) for name, value in extra.items()}, partial / EXTRA)
        if first:
            commit(partial, step, {"shapes": {name: list(leaf.shape) for name, leaf in arrays.items()}, **meta})
    _barrier(f"checkpoint-{step}-end")
    return final


@contextmanager
def begun(folder: Path, step: int, nbytes: int, *, first: bool = True) -> Iterator[Path]:
    """A folder of a temporary name for a checkpoint's files, which `commit` makes the checkpoint; an error removes it.

    Args:
        folder: `<run>/checkpoints`.
        step: the run's clock.
        nbytes: that its arrays will take.
        first: whether this process makes it; the others write into what the first one made.

    Raises:
        UserError: the disk has no room; what was saved before is untouched.
    """
    partial = folder / f".{step}.tmp"
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder, nbytes)
        for stale in folder.glob(".*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
    try:
        yield partial
    except (OSError, ValueError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if "No space left" in str(error) or getattr(error, "errno", None) == errno.ENOSPC:
            raise full(folder, step) from error
        raise


def commit(partial: Path, step: int, meta: Mapping[str, Any]) -> Path:
    """Write what is plain beside the arrays, and rename the folder to its step: from now on it is a checkpoint."""
    with (partial / META).open("w") as stream:
        json.dump({"schema_version": SCHEMA_VERSION, "step": step, **meta}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    final = partial.with_name(str(step))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    return final


def load(folder: Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """State and meta of a committed checkpoint.

    Args:
        folder: `<run>/checkpoints`.
        step: one of `steps(folder)`.
        like: pytree of arrays with the shapes and shardings to load into.

    Raises:
        UserError: a damaged checkpoint, or one of another policy or optimizer; names the folder and the array.
    """
    path = folder / str(step)
    try:
        meta = json.loads((path / META).read_text())
        _check_shapes(path, dict(meta["shapes"]), like)
        wanted = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)
        }
        with ocp.StandardCheckpointer() as reader:
            arrays = reader.restore((path / STATE).absolute(), wanted)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"checkpoint {path} cannot be read ({reason}). It is damaged; delete this folder to resume from the one "
            "before it."
        ) from error
    return unflatten_params(arrays, like), meta


def load_meta(folder: Path, step: int) -> dict[str, Any]:
    """What lies beside the state of a committed checkpoint: counters; {} when there is none of this step.

    Raises:
        UserError: it cannot be read.
    """
    path = folder / str(step) / META
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(
            f"checkpoint {path} cannot be read ({error}); delete this folder to resume from an older one"
        ) from error


def load_extra(path: Path) -> dict[str, np.ndarray]:
    """The arrays that were kept beside the state of the checkpoint in this folder; {} when there were none."""
    return load_file(path / EXTRA) if (path / EXTRA).is_file() else {}


def _check_shapes(path: Path, found: Mapping[str, list[int]], like: Any) -> None:
    wanted = dict(zip(leaf_names(like), (list(leaf.shape) for leaf in jax.tree.leaves(like)), strict=True))
    for name in sorted(wanted.keys() | found.keys()):
        if found.get(name) != wanted.get(name):
            raise UserError(
                f"checkpoint {path} is of another policy or optimizer: '{name}' has shape {found.get(name)} there and "
                f"{wanted.get(name)} in this run. Resume with the run's own values, or start a new run."
            )


def prune(folder: Path, keep_last: int, keep: set[int]) -> None:
    """Delete all but the last `keep_last` checkpoints and those in `keep`."""
    for step in steps(folder)[:-keep_last]:
        if step not in keep:
            shutil.rmtree(folder / str(step), ignore_errors=True)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def check_room(folder: Path, needed: int) -> None:
    """Refuse a checkpoint of `needed` bytes that does not fit the disk. Raises UserError."""
    if shutil.disk_usage(folder).free < needed * 1.1:
        raise full(folder, None, needed)


def full(folder: Path, step: int | None, needed: int | None = None) -> UserError:
    """The error of a full disk: of which step, and how many bytes were needed where that is known."""
    free = shutil.disk_usage(folder).free
    what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
    size = f" of {needed / 2**20:.0f} MiB" if needed else ""
    return UserError(
        f"disk full: {what}{size} does not fit in {folder} ({free / 2**20:.0f} MiB free). Earlier checkpoints are "
        "whole; free some space (or lower checkpoint.keep_last) and go on with --resume."
    )
