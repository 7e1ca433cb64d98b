"""Open any dataset, and load what a `DatasetSpec` selects of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError, nearest
from rlsvc.core.types import EpisodeTable
from rlsvc.data.source import Source
from rlsvc.spec.data import DatasetSpec

log = logging.getLogger(__name__)

FORMATS = ("lerobot", "zarr", "npz")


def load_table(dataset: DatasetSpec, keys: Sequence[str] | None = None) -> EpisodeTable:
    """The selected episodes of a dataset, in memory (decoded video is mapped from the dataset's cache).

    Args:
        dataset: path, format, and which tasks and episodes.
        keys: feature names; "task" may be named, and becomes a column of texts. None takes every feature that can be
            read; what the dataset declares and does not have is then logged and left out.

    Returns:
        Floating columns as float32, images as uint8 (H, W, C).

    Raises:
        DatasetError: not a dataset, damaged, numbers that are not finite, or a feature, episode or task that it lacks.
    """
    return load_source(open_source(dataset.path, dataset.format), dataset, keys)


def load_source(source: Source, dataset: DatasetSpec, keys: Sequence[str] | None = None) -> EpisodeTable:
    """As `load_table`, of a source that is open already."""
    names = _names(source, keys)
    episodes = select_episodes(source, dataset)
    table = source.read(names, episodes)
    _refuse_not_finite(source, table, episodes)
    if keys is not None and "task" in keys:
        table.columns["task"] = np.asarray(table.tasks, object)[table.task]
    return table


def open_source(path: str | Path, format: str = "auto", fps: float | None = None) -> Source:
    """Read a dataset's metadata.

    Args:
        path: a LeRobot or zarr folder, or an .npz file.
        format: one of FORMATS, or "auto".
        fps: steps a second, for a replay buffer that does not say.

    Raises:
        DatasetError: not a dataset, or damaged.
    """
    path = Path(path)
    if format == "auto":
        format = detect_format(path)
    elif not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    if format == "lerobot":
        from rlsvc.data.lerobot import LeRobotSource

        if fps is not None:
            raise DatasetError(f"{path}: a LeRobot dataset says its own fps, got another one ({fps:g})")
        return LeRobotSource(path)
    if format == "zarr":
        from rlsvc.data.zarr import open_zarr

        return open_zarr(path, fps)
    from rlsvc.data.npz import open_npz

    return open_npz(path, fps)


def detect_format(path: Path) -> str:
    """Which of FORMATS a path holds.

    Raises:
        DatasetError: none; says what was found there.
    """
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    found = format_of(path)
    if found:
        return found
    inside = datasets_inside(path)
    if inside:
        raise DatasetError(
            f"{path}: not a dataset itself; it holds {', '.join(p.name for p in inside)}: name one of them"
        )
    what = "a file" if path.is_file() else "a folder"
    raise DatasetError(
        f"{path}: {what} that is not a dataset. Expected a LeRobot folder (meta/info.json), a zarr replay buffer "
        "(data/ and meta/episode_ends) or an .npz file"
    )


def datasets_inside(path: Path) -> list[Path]:
    """The datasets that lie directly in a folder."""
    return [p for p in sorted(path.iterdir()) if format_of(p)] if path.is_dir() else []


def format_of(path: Path) -> str | None:
    """Which of FORMATS a path holds, or None."""
    if path.is_file():
        return "npz" if path.suffix == ".npz" else None
    if (path / "meta" / "info.json").exists():
        return "lerobot"
    if any((path / name).exists() for name in (".zgroup", ".zmetadata", "zarr.json")):
        return "zarr"
    return None


def select_episodes(source: Source, dataset: DatasetSpec) -> list[int]:
    """The numbers of the episodes that the spec selects, in order.

    Raises:
        DatasetError: an episode or a task that the dataset has not, or none left.
    """
    ids = source.episode_ids
    if dataset.episodes is not None:
        known = set(ids)
        unknown = [episode for episode in dataset.episodes if episode not in known]
        if unknown:
            raise DatasetError(f"{source.path}: no episode {unknown[0]}; it has {len(ids)}, from {ids[0]} to {ids[-1]}")
        if len(set(dataset.episodes)) != len(dataset.episodes):
            raise DatasetError(f"{source.path}: `episodes` names an episode twice")
        ids = list(dataset.episodes)
    if dataset.tasks is not None:
        tasks = source.episode_tasks(ids)
        for task in dataset.tasks:
            if task not in tasks:
                choices = sorted(set(tasks))
                guess = nearest(task, choices)
                hint = f" Did you mean '{guess}'?" if guess else ""
                raise DatasetError(
                    f"{source.path}: no episode has the task '{task}'.{hint} There are: {'; '.join(choices)}"
                )
        ids = [episode for episode, task in zip(ids, tasks, strict=True) if task in dataset.tasks]
    if not ids:
        raise DatasetError(f"{source.path}: no episode is selected")
    return ids


def _names(source: Source, keys: Sequence[str] | None) -> list[str]:
    if keys is None:
        for key, why in source.absent.items():
            log.warning("%s: '%s' left out: %s", source.path, key, why)
        return list(source.features)
    for key in keys:
        if key in source.absent:
            raise DatasetError(f"{source.path}: '{key}' cannot be read: {source.absent[key]}")
        if key != "task" and key not in source.features:
            guess = nearest(key, source.features)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise DatasetError(f"{source.path}: no feature '{key}'{hint}; it has: {', '.join(source.features)}")
    return [key for key in dict.fromkeys(keys) if key != "task"]


def _refuse_not_finite(source: Source, table: EpisodeTable, episodes: Sequence[int]) -> None:
    for key, column in table.columns.items():
        if column.dtype.kind != "f" or np.isfinite(column).all():
            continue
        bad = np.flatnonzero(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
        place = int(np.searchsorted(table.episode_ends, bad[0], side="right"))
        episode, row = episodes[place], int(bad[0] - table.episode_starts[place])
        raise DatasetError(
            f"{source.file_of(episode)}: '{key}' is not finite in {len(bad)} rows, first in episode {episode}, "
            f"row {row}: {np.array2string(column[bad[0]].ravel(), max_line_width=200, threshold=12)}. "
            "Mend the rows, leave the column out, or select `episodes` without them"
        )
