"""LeRobot datasets v3.0, v2.1 and v2.0 as a `Source`.

Rows are put in order by frame_index; timestamp is never used, since recorders that write the wall clock into it are
common and frame_index is then still right. v2.x is converted on the way in: nested element names are flattened, float64
becomes float32, its statistics, splits and timestamps are not carried over.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Feature
from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.cache import cached_frames
from rlsvc.data.lerobot_meta import (
    BOOKKEEPING,
    DTYPES,
    Episode,
    LeRobotMeta,
    column_array,
    read_meta,
    read_parquet,
    to_feature,
)


class LeRobotSource:
    """A LeRobot dataset on disk; see `Source` for the attributes."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            DatasetError: meta/ is missing, damaged or of another version.
        """
        self.path = path
        self.meta: LeRobotMeta = read_meta(path)
        self.format = f"LeRobot {self.meta.version}"
        self.fps = self.meta.fps
        self.episode_ids = list(self.meta.episodes)
        self.num_steps = sum(episode.length for episode in self.meta.episodes.values())
        self.absent = {
            key: why for key in self.meta.declared if key not in BOOKKEEPING and (why := self._why_absent(key))
        }
        self.features: dict[str, Feature] = {
            key: to_feature(declared)
            for key, declared in self.meta.declared.items()
            if key not in BOOKKEEPING and key not in self.absent
        }

    def _why_absent(self, key: str) -> str | None:
        declared = self.meta.declared[key]
        if declared["dtype"] not in DTYPES:
            return f"dtype '{declared['dtype']}' is not supported"
        info = declared.get("info") or declared.get("video_info") or {}
        if info.get("is_depth_map") or info.get("video.is_depth_map"):
            return "depth images are not supported"
        if key not in self.meta.cameras:
            return None
        spans = [episode.videos.get(key) for episode in self.meta.episodes.values()]
        if not any(span is not None and span.path.exists() for span in spans):
            return f"declared in meta/info.json, but none of its {len(spans)} episodes has a video file"
        return None

    def episode_tasks(self, episodes: Sequence[int]) -> list[str]:
        """The prompt of each of these episodes: that of its first row."""
        first = {}
        for path, members in self._by_file(episodes).items():
            table = read_parquet(path, ["episode_index", "task_index"])
            index, task = (column_array(path, name, table[name]) for name in ("episode_index", "task_index"))
            for episode in members:
                rows = np.flatnonzero(index == episode.index)
                first[episode.index] = self._prompt(path, int(task[rows[0]])) if len(rows) else ""
        return [first[episode] for episode in episodes]

    def file_of(self, episode: int) -> Path:
        """The parquet file of an episode."""
        return self.meta.episodes[episode].data

    def read(self, keys: Sequence[str], episodes: Sequence[int]) -> EpisodeTable:
        """These columns of these episodes; see `Source.read`."""
        videos = [key for key in keys if key in self.meta.cameras]
        numbers = [key for key in keys if key not in self.meta.cameras]
        lengths = np.array([self.meta.episodes[e].length for e in episodes], np.int64)
        ends = np.cumsum(lengths)
        starts = dict(zip(episodes, ends - lengths, strict=True))
        columns = {key: _empty(self.features[key], int(ends[-1])) for key in numbers}
        task_index = np.empty(int(ends[-1]), np.int64)
        for path, members in self._by_file(episodes).items():
            table = self._read_file(path, numbers)
            blocks = {key: _convert(path, key, table[key], self.features[key], self.path) for key in numbers}
            for episode in members:
                rows = self._rows(path, table, episode)
                span = slice(starts[episode.index], starts[episode.index] + episode.length)
                task_index[span] = column_array(path, "task_index", table["task_index"])[rows]
                for key in numbers:
                    columns[key][span] = blocks[key][rows]
        for key in videos:
            columns[key] = self._read_video(key, episodes)
        used = [int(i) for i in np.unique(task_index)]
        prompts = [self._prompt(self.path, i) for i in used]
        return EpisodeTable(
            columns={key: columns[key] for key in keys},
            episode_ends=ends,
            fps=self.fps,
            task=np.searchsorted(used, task_index).astype(np.int32),
            tasks=prompts,
            source=str(self.path),
            names={key: self.features[key].names for key in keys if self.features[key].names},
            units={key: self.features[key].unit for key in keys if self.features[key].unit},
        )

    def _by_file(self, episodes: Sequence[int]) -> dict[Path, list[Episode]]:
        files: dict[Path, list[Episode]] = {}
        for episode in (self.meta.episodes[e] for e in episodes):
            files.setdefault(episode.data, []).append(episode)
        return files

    def _read_file(self, path: Path, keys: Sequence[str]) -> Any:
        # v2.0 files of some exporters have no frame_index; their rows are then in recorded order.
        order = [key for key in ("frame_index",) if key in self.meta.declared]
        return read_parquet(path, [*keys, *order, "episode_index", "task_index"])

    def _rows(self, path: Path, table: Any, episode: Episode) -> np.ndarray:
        rows = np.flatnonzero(column_array(path, "episode_index", table["episode_index"]) == episode.index)
        if len(rows) != episode.length:
            raise DatasetError(
                f"{path}: {len(rows)} rows of episode {episode.index}, meta/ says {episode.length}; "
                "the file and the metadata do not belong together, copy both again or select `episodes` without it"
            )
        if "frame_index" not in table.column_names:
            return rows
        frame = column_array(path, "frame_index", table["frame_index"])[rows]
        order = np.argsort(frame, kind="stable")
        wrong = np.flatnonzero(frame[order] != np.arange(len(rows)))
        if len(wrong):
            raise DatasetError(
                f"{path}: frame_index of episode {episode.index} has {frame[order][wrong[0]]} where {wrong[0]} "
                "is due, so frames are lost or doubled and their order is not known; record it again "
                "or select `episodes` without it"
            )
        return rows[order]

    def _prompt(self, path: Path, task_index: int) -> str:
        if task_index not in self.meta.tasks:
            raise DatasetError(
                f"{path}: task_index {task_index} is not in meta/tasks; it has: {sorted(self.meta.tasks)}"
            )
        return self.meta.tasks[task_index]

    def _read_video(self, camera: str, episodes: Sequence[int]) -> np.ndarray:
        spans = []
        for episode in episodes:
            span = self.meta.episodes[episode].videos.get(camera)
            if span is None or not span.path.exists():
                where = span.path if span else "(no file named)"
                raise DatasetError(
                    f"{where}: no such video; episode {episode} of '{camera}' is missing. "
                    f"Copy it again, leave '{camera}' out of the observation, or select `episodes` without it"
                )
            spans.append(span)
        for path in dict.fromkeys(span.path for span in spans):
            if (gap := self.meta.video_gap(camera, path)) is not None:
                raise DatasetError(
                    f"{path}: meta/episodes says that no episode begins at frame {gap} (from_timestamp x fps), "
                    "though episodes lie end to end; which frames are whose is not known. "
                    f"Mend from_timestamp, or leave '{camera}' out"
                )
        return cached_frames(self.path, spans, self.features[camera].shape)


def _empty(feature: Feature, steps: int) -> np.ndarray:
    return np.empty((steps, *feature.shape), object if feature.dtype == TEXT else feature.dtype)


def _convert(path: Path, key: str, column: Any, feature: Feature, root: Path) -> np.ndarray:
    """A pyarrow column as an array [rows, *shape] of the feature's dtype."""
    import pyarrow as pa

    if column.null_count:
        raise DatasetError(
            f"{path}: column '{key}' has {column.null_count} empty rows; fill them or leave the column out"
        )
    array = column.combine_chunks()
    if feature.is_image:
        return np.stack([_decode_image(path, key, cell, feature.shape, root) for cell in array.to_pylist()])
    if feature.dtype == TEXT:
        return np.asarray(array.to_pylist(), object)
    rows = len(array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    values = column_array(path, key, array)
    shape = (rows, *feature.shape)
    if values.size != np.prod(shape, dtype=np.int64):
        raise DatasetError(
            f"{path}: column '{key}' has {values.size} numbers in {rows} rows, "
            f"meta/info.json declares shape {list(feature.shape)}"
        )
    return values.reshape(shape).astype(feature.dtype, copy=False)


def _decode_image(path: Path, key: str, cell: dict[str, Any], shape: tuple[int, ...], root: Path) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] else root / cell["path"]) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise DatasetError(f"{path}: an image of '{key}' is not readable ({error}); copy the file again") from error
    if pixels.shape != shape:
        raise DatasetError(f"{path}: an image of '{key}' is {pixels.shape}, meta/info.json declares {shape}")
    return pixels
