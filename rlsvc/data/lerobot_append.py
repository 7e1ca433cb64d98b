"""Append whole episodes to a LeRobot v3.0 dataset, so that a kill at any moment leaves a readable dataset.

Each episode gets files of its own (its steps, one video a camera), which are never opened for writing again: what comes
later cannot damage them. LeRobot's format allows it, and its reader takes it as it is. Only what is in meta/ is
replaced, each file by a rename. LeRobot's own writer keeps parquet files open over many episodes instead, which no one
can read when it is killed (lerobot#2529, #3522).

Letters: N steps of the episode.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import DatasetError
from rlsvc.data import commit
from rlsvc.data.episode_stats import FeatureStats, merge_stats, number_stats
from rlsvc.data.lerobot_columns import arrow_column, declare, differences
from rlsvc.data.lerobot_files import (
    CHUNKS_SIZE,
    DATA,
    EPISODES,
    TASKS,
    VIDEO,
    file_path,
    like_rows,
    lock_folder,
    refuse_other_content,
    write_json,
    write_parquet,
    write_tasks,
)
from rlsvc.data.lerobot_meta import read_json, read_meta, read_parquet

ROWS_PER_FILE = 100
"""Episodes that a file of meta/episodes describes; it is small, has many columns, and is slow to open."""


@dataclass(frozen=True)
class _State:
    """What is known of the dataset as it stands.

    Attributes:
        info: meta/info.json.
        stats: meta/stats.json.
        tasks: prompts by task_index.
        files: number of the newest file of each kind ("data", EPISODES, a camera).
        rows: the newest file of meta/episodes, a pyarrow Table; None in a new dataset.
    """

    info: dict[str, Any]
    stats: dict[str, FeatureStats] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    rows: Any = None


class LeRobotAppender:
    """The one writer of a dataset. Not for several threads at once.

    Attributes:
        root: the folder.
        fps: steps a second.
        features: what a step holds, without LeRobot's bookkeeping.
        num_episodes: in the dataset, all durable.
    """

    def __init__(
        self,
        root: Path,
        features: Mapping[str, Feature],
        fps: float,
        robot_type: str | None,
        *,
        durable: bool = True,
        video_info: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open a dataset to append to it, or begin one. What a killed writer had sealed is put in first.

        Args:
            root: the folder; made when it is not there.
            features: of a step; images become videos.
            fps: steps a second.
            robot_type: of meta/info.json.
            durable: wait for the disk, so that episodes survive the machine's death and not the process's alone.
            video_info: by camera what a new dataset's info.json says of its videos, where they are not encoded here.

        Raises:
            DatasetError: something else is at `root`, or a dataset of another robot, rate or columns.
            BusyError: another process writes it.
        """
        # Here and not in the first episode's end: the import takes seconds.
        for module in ("pandas", "pyarrow.parquet"):
            importlib.import_module(module)
        self.root, self.fps, self.features = root, fps, dict(features)
        self._durable, self._sealed, self._lock = durable, False, -1
        refuse_other_content(root)
        declared = declare(features, fps)
        for camera, about in (video_info or {}).items():
            declared[camera]["info"] = dict(about)
        try:
            root.mkdir(parents=True, exist_ok=True)
            commit.sync(root.parent)
            self._lock = lock_folder(root)
        except OSError as error:
            raise DatasetError(f"{root}: cannot be written ({error.strerror})") from error
        try:
            commit.recover(root)
            new: dict[str, Any] = {
                "codebase_version": "v3.0",
                "fps": int(fps) if float(fps).is_integer() else fps,
                "features": declared,
                "total_episodes": 0,
                "total_frames": 0,
                "total_tasks": 0,
                "chunks_size": CHUNKS_SIZE,
                "data_files_size_in_mb": 100,
                "video_files_size_in_mb": 200,
                "data_path": DATA,
                "video_path": VIDEO,
                "robot_type": robot_type,
                "splits": {},
            }
            self._state = self._read(new) if (root / "meta" / "info.json").exists() else _State(new)
        except BaseException:
            self.close()
            raise

    @property
    def num_episodes(self) -> int:
        """Episodes that are durable."""
        return int(self._state.info["total_episodes"])

    @property
    def cameras(self) -> list[str]:
        """Features that are images."""
        return [key for key, feature in self.features.items() if feature.is_image]

    def begin(self) -> Path:
        """An empty folder on the dataset's file system, for the videos of one episode; whatever was in it is lost."""
        return commit.begin(self.root)

    def clear(self) -> None:
        """Delete what `begin` began. Never raises."""
        commit.clear(self.root)

    def append(
        self,
        columns: Mapping[str, np.ndarray],
        videos: Mapping[str, Path],
        image_stats: Mapping[str, FeatureStats],
        tasks: Sequence[str],
    ) -> int:
        """Put an episode in.

        Args:
            columns: every feature that is no image, [N, ...].
            videos: by camera an mp4 file of N frames, frame i at i / fps, in the folder that `begin` gave; moved.
            image_stats: by camera its statistics.
            tasks: [N] prompts.

        Returns:
            Its episode_index, once it is durable.

        Raises:
            OSError: it could not be written; the dataset is as before.
            DatasetError: it is durable, and could not be put into place; opening the dataset again does that.
        """
        if self._sealed:
            raise DatasetError(f"{self.root}: an episode waits to be put into place; open the dataset again")
        state = self._stage(columns, videos, image_stats, tasks)
        commit.seal(self.root, durable=self._durable)
        self._sealed = True
        try:
            commit.recover(self.root, durable=self._durable)
        except OSError as error:
            raise DatasetError(
                f"{self.root}: episode {self.num_episodes} is on the disk, and could not be put into place "
                f"({error.strerror}); open the dataset again"
            ) from error
        self._sealed, self._state = False, state
        return self.num_episodes - 1

    def close(self) -> None:
        """Let another process write."""
        self.clear()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _stage(
        self,
        columns: Mapping[str, np.ndarray],
        videos: Mapping[str, Path],
        image_stats: Mapping[str, FeatureStats],
        tasks: Sequence[str],
    ) -> _State:
        """Write the files that stand for the dataset with this episode."""
        import pyarrow as pa

        old = self._state
        stage = self.root / commit.STAGING / commit.UNDER_WAY
        length, index, first = len(tasks), self.num_episodes, int(old.info["total_frames"])
        prompts = list(dict.fromkeys(tasks))
        known = [*old.tasks, *(task for task in prompts if task not in old.tasks)]
        number = {task: i for i, task in enumerate(known)}
        book = {
            "timestamp": (np.arange(length) / self.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, index),
            "index": np.arange(first, first + length),
            "task_index": np.array([number[task] for task in tasks]),
        }
        rows = {key: columns[key] for key in self.features if key not in self.cameras} | book
        of_this = {key: number_stats(column) for key, column in rows.items() if column.dtype.kind in "biuf"}
        of_this |= image_stats
        begins = old.rows is None or old.rows.num_rows >= ROWS_PER_FILE
        files = {kind: old.files.get(kind, -1) + 1 for kind in ("data", *self.cameras)}
        files[EPISODES] = old.files.get(EPISODES, -1) + begins
        where = {kind: divmod(number, int(old.info["chunks_size"])) for kind, number in files.items()}
        row: dict[str, Any] = {
            "episode_index": index,
            "tasks": prompts,
            "length": length,
            "data/chunk_index": where["data"][0],
            "data/file_index": where["data"][1],
            "dataset_from_index": first,
            "dataset_to_index": first + length,
        }
        for camera in self.cameras:
            row |= {
                f"videos/{camera}/chunk_index": where[camera][0],
                f"videos/{camera}/file_index": where[camera][1],
                f"videos/{camera}/from_timestamp": 0.0,
                f"videos/{camera}/to_timestamp": length / self.fps,
            }
            target = stage / file_path(old.info["video_path"], where[camera], camera)
            target.parent.mkdir(parents=True)
            videos[camera].rename(target)
        row |= {f"stats/{key}/{name}": value.tolist() for key, s in of_this.items() for name, value in s.items()}
        row |= {
            "meta/episodes/chunk_index": where[EPISODES][0],
            "meta/episodes/file_index": where[EPISODES][1],
        }
        table = pa.table({key: arrow_column(column) for key, column in rows.items()})
        write_parquet(table, stage / file_path(old.info["data_path"], where["data"]))
        described = pa.Table.from_pylist([row]) if old.rows is None else like_rows(row, old.rows.schema)
        described = described if begins else pa.concat_tables([old.rows, described])
        write_parquet(described, stage / file_path(EPISODES, where[EPISODES]))
        if known != old.tasks:
            write_tasks(known, stage / TASKS)
        stats = merge_stats(old.stats, of_this)
        plain = {key: {name: value.tolist() for name, value in s.items()} for key, s in stats.items()}
        write_json(plain, stage / "meta" / "stats.json")
        info = old.info | {
            "total_episodes": index + 1,
            "total_frames": first + length,
            "total_tasks": len(known),
            "splits": {"train": f"0:{index + 1}"},
        }
        write_json(info, stage / "meta" / "info.json")
        return _State(info, stats, known, files, described)

    def _read(self, new: Mapping[str, Any]) -> _State:
        """Where a dataset ends, if it is of this robot; `new` is the info.json that a new one would have."""
        info = read_json(self.root / "meta" / "info.json")
        different = differences(info, new)
        if different:
            raise DatasetError(
                f"{self.root}: the dataset is of another robot: {different}. Record into another folder, or open it "
                "with the robot that it was recorded with"
            )
        meta = read_meta(self.root)
        size = int(info.get("chunks_size", CHUNKS_SIZE))
        prefixes = {"data": "data"} | {camera: f"videos/{camera}" for camera in self.cameras}
        columns = [f"{prefix}/{part}_index" for prefix in prefixes.values() for part in ("chunk", "file")]
        files: dict[str, int] = {}
        path = self.root
        for path in sorted((self.root / "meta" / "episodes").glob("*/*.parquet")):
            chunk, file = int(path.parent.name.removeprefix("chunk-")), int(path.stem.removeprefix("file-"))
            files[EPISODES] = chunk * size + file
            table = read_parquet(path, columns)
            for kind, prefix in prefixes.items():
                chunks, numbers = (table[f"{prefix}/{part}_index"].to_pylist() for part in ("chunk", "file"))
                last = max(c * size + f for c, f in zip(chunks, numbers, strict=True))
                files[kind] = max(files.get(kind, -1), last)
        stored = read_json(self.root / "meta" / "stats.json")
        stats = {key: {name: np.atleast_1d(value) for name, value in s.items()} for key, s in stored.items()}
        tasks = [meta.tasks[i] for i in range(len(meta.tasks))]
        return _State(info, stats, tasks, files, read_parquet(path).replace_schema_metadata(None))
