"""Write a table as a LeRobot v3.0 dataset, through lerobot's own writer."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable


def write_lerobot(
    table: EpisodeTable,
    path: str | Path,
    *,
    images: Literal["video", "image"] = "video",
    robot_type: str | None = None,
    overwrite: bool = False,
    on_episode: Callable[[int], None] | None = None,
) -> Path:
    """Write every column of a table; the folder appears whole or not at all.

    Args:
        table: floating, integer, boolean, text and uint8 (H, W, C) columns.
        path: of the new folder.
        images: "video" encodes images as mp4 (small, lossy); "image" keeps them exactly, as PNG in the parquet files.
        robot_type: for meta/info.json.
        overwrite: replaces a LeRobot dataset that is already there; anything else there is never touched.
        on_episode: called with the number of episodes written so far.

    Raises:
        DatasetError: something is in the way, the table is empty, or the disk is full.
    """
    path = Path(path)
    refuse_in_the_way(path, overwrite)
    if not table.num_steps:
        raise DatasetError(f"{path}: no steps to write")
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(table, temporary, images, robot_type, on_episode)
        replace_folder(temporary, path)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed there"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def refuse_in_the_way(path: Path, overwrite: bool) -> None:
    """Refuse to write over what is at `path`, unless it is a LeRobot dataset and `overwrite` is set.

    Raises:
        DatasetError: something is in the way.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not (path / "meta" / "info.json").exists():
        raise DatasetError(
            f"{path}: exists and is not a LeRobot dataset, so it is not overwritten; choose another path"
        )
    if not overwrite:
        raise DatasetError(
            f"{path}: a dataset is already there; choose another path, or pass --overwrite to replace it"
        )


def _write(
    table: EpisodeTable, root: Path, images: str, robot_type: str | None, on_episode: Callable[[int], None] | None
) -> None:
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    # Otherwise each episode with images shows a progress bar of its own.
    shown = not are_progress_bars_disabled()
    disable_progress_bars()

    features = {key: _declare(table, key, column, images) for key, column in table.columns.items()}
    dataset = LeRobotDataset.create(
        repo_id=f"local/{root.name.split('.')[1]}",
        fps=int(table.fps) if float(table.fps).is_integer() else table.fps,  # type: ignore[arg-type]
        features=features,
        root=root,
        robot_type=robot_type,
        use_videos=images == "video",
        video_backend="pyav",
        metadata_buffer_size=100,
    )
    try:
        for episode, (start, end) in enumerate(zip(table.episode_starts, table.episode_ends, strict=True), 1):
            for step in range(start, end):
                frame: dict[str, Any] = {key: _cell(column, step) for key, column in table.columns.items()}
                dataset.add_frame({**frame, "task": table.tasks[table.task[step]]})
            dataset.save_episode()
            if on_episode is not None:
                on_episode(episode)
    finally:
        dataset.finalize()
        if shown:
            enable_progress_bars()


def _declare(table: EpisodeTable, key: str, column: np.ndarray, images: str) -> dict[str, Any]:
    """The column's entry in `features` of info.json; `unit` is ours, lerobot carries it along."""
    if "/" in key:
        raise DatasetError(f"column '{key}': LeRobot feature names have no '/'; rename it")
    shape = column.shape[1:]
    if column.dtype == np.uint8 and len(shape) == 3:
        return {"dtype": images, "shape": shape, "names": ["height", "width", "channels"]}
    if column.dtype.kind in "OU":
        return {"dtype": "string", "shape": (1,), "names": None}
    if column.dtype.kind not in "biuf":
        raise DatasetError(f"column '{key}' has dtype {column.dtype}, which LeRobot does not store")
    declared: dict[str, Any] = {
        "dtype": column.dtype.name,
        "shape": shape or (1,),
        "names": list(table.names.get(key, ())) or None,
    }
    if table.units.get(key):
        declared["unit"] = table.units[key]
    return declared


def _cell(column: np.ndarray, step: int) -> Any:
    cell = column[step]
    return str(cell) if column.dtype.kind in "OU" else np.atleast_1d(cell)


def replace_folder(temporary: Path, path: Path) -> None:
    """Put the new folder in the old one's place at once; the old one is deleted only when the new one stands."""
    if path.exists() and _exchange(temporary, path):
        shutil.rmtree(temporary, ignore_errors=True)
        return
    old = path.parent / f"{temporary.name}.old"
    if path.exists():
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step, where the system (Linux) and the file system can; whether they did."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return exchange is not None and exchange(here, os.fsencode(one), here, os.fsencode(other), swap) == 0
