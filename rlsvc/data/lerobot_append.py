"""Append whole episodes to a LeRobot v3.0 dataset, so that a kill at any moment leaves a readable dataset.

Each episode gets files of its own (rows, one video a camera, one row of meta/episodes), which are never opened for
writing again: what comes later cannot damage them. LeRobot's format allows it, and its reader takes it as it is. Only
meta/tasks.parquet, meta/stats.json and meta/info.json are replaced, each by a rename. LeRobot's own writer keeps
parquet files open over many episodes instead, which no one can read when it is killed (lerobot#2529, #3522).

Letters: N steps of the episode.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.data import commit
from rlsvc.data.episode_stats import FeatureStats, merge_stats, number_stats
from rlsvc.data.lerobot_columns import arrow_column, declare, differences
from rlsvc.data.lerobot_meta import read_json, read_meta, read_parquet

CHUNKS_SIZE = 1000
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS = "meta/tasks.parquet"


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
            self._lock = _lock(root)
        except OSError as error:
            raise DatasetError(f"{root}: cannot be written ({error.strerror})") from error
        try:
            commit.recover(root)
            self._info: dict[str, Any] = {
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
            self._stats: dict[str, FeatureStats] = {}
            self._tasks: list[str] = []
            self._files: dict[str, int] = {}
            self._schema: Any = None
            if (root / "meta" / "info.json").exists():
                self._read(robot_type)
        except BaseException:
            self.close()
            raise

    @property
    def num_episodes(self) -> int:
        """Episodes that are durable."""
        return int(self._info["total_episodes"])

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
        info, stats, known = self._stage(columns, videos, image_stats, tasks)
        commit.seal(self.root, durable=self._durable)
        self._sealed = True
        try:
            commit.recover(self.root, durable=self._durable)
        except OSError as error:
            raise DatasetError(
                f"{self.root}: episode {self.num_episodes} is on the disk, and could not be put into place "
                f"({error.strerror}); open the dataset again"
            ) from error
        self._sealed = False
        self._info, self._stats, self._tasks = info, stats, known
        self._files = {kind: self._files.get(kind, -1) + 1 for kind in ("data", "meta/episodes", *self.cameras)}
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
    ) -> tuple[dict[str, Any], dict[str, FeatureStats], list[str]]:
        """Write the files that stand for the dataset with this episode; gives its info, statistics and tasks."""
        import pyarrow as pa

        stage = self.root / commit.STAGING / commit.UNDER_WAY
        length, index, first = len(tasks), self.num_episodes, int(self._info["total_frames"])
        prompts = list(dict.fromkeys(tasks))
        known = [*self._tasks, *(task for task in prompts if task not in self._tasks)]
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
        where = {kind: self._next_file(kind) for kind in ("data", "meta/episodes", *self.cameras)}
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
            target = stage / _path(self._info["video_path"], where[camera], camera)
            target.parent.mkdir(parents=True)
            videos[camera].rename(target)
        row |= {f"stats/{key}/{name}": value.tolist() for key, s in of_this.items() for name, value in s.items()}
        row |= {
            "meta/episodes/chunk_index": where["meta/episodes"][0],
            "meta/episodes/file_index": where["meta/episodes"][1],
        }
        table = pa.table({key: arrow_column(column) for key, column in rows.items()})
        _write_parquet(table, stage / _path(self._info["data_path"], where["data"]))
        described = pa.Table.from_pylist([row]) if self._schema is None else _like(row, self._schema)
        _write_parquet(described, stage / _path(EPISODES, where["meta/episodes"]))
        self._schema = described.schema
        if known != self._tasks:
            _write_tasks(known, stage / TASKS)
        stats = merge_stats(self._stats, of_this)
        plain = {key: {name: value.tolist() for name, value in s.items()} for key, s in stats.items()}
        _write_json(plain, stage / "meta" / "stats.json")
        info = self._info | {
            "total_episodes": index + 1,
            "total_frames": first + length,
            "total_tasks": len(known),
            "splits": {"train": f"0:{index + 1}"},
        }
        _write_json(info, stage / "meta" / "info.json")
        return info, stats, known

    def _next_file(self, kind: str) -> tuple[int, int]:
        """Chunk and file of the next file of a kind ("data", "meta/episodes", a camera)."""
        return divmod(self._files.get(kind, -1) + 1, int(self._info["chunks_size"]))

    def _read(self, robot_type: str | None) -> None:
        """Go on where a dataset ends, if it is of this robot."""
        info = read_json(self.root / "meta" / "info.json")
        different = differences(info, self._info)
        if different:
            raise DatasetError(
                f"{self.root}: the dataset is of another robot: {different}. Record into another folder, or open it "
                "with the robot that it was recorded with"
            )
        meta = read_meta(self.root)
        size = int(info.get("chunks_size", CHUNKS_SIZE))
        prefixes = {"data": "data"} | {camera: f"videos/{camera}" for camera in self.cameras}
        columns = [f"{prefix}/{part}_index" for prefix in prefixes.values() for part in ("chunk", "file")]
        for path in sorted((self.root / "meta" / "episodes").glob("*/*.parquet")):
            chunk, file = int(path.parent.name.removeprefix("chunk-")), int(path.stem.removeprefix("file-"))
            self._files["meta/episodes"] = chunk * size + file
            table = read_parquet(path, columns)
            for kind, prefix in prefixes.items():
                chunks, files = (table[f"{prefix}/{part}_index"].to_pylist() for part in ("chunk", "file"))
                last = max(c * size + f for c, f in zip(chunks, files, strict=True))
                self._files[kind] = max(self._files.get(kind, -1), last)
        self._schema = read_parquet(path).schema.remove_metadata()
        self._info = info
        self._tasks = [meta.tasks[i] for i in range(len(meta.tasks))]
        stored = read_json(self.root / "meta" / "stats.json")
        self._stats = {key: {name: np.atleast_1d(value) for name, value in s.items()} for key, s in stored.items()}


def refuse_other_content(root: Path) -> None:
    """Refuse a file, or a folder of other things.

    Raises:
        DatasetError: it is neither new, nor empty, nor a LeRobot v3.0 dataset.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise DatasetError(f"{root}: is a file, expected a new folder or a LeRobot v3.0 dataset")
    if (root / "meta" / "info.json").exists():
        version = read_json(root / "meta" / "info.json").get("codebase_version")
        if version != "v3.0":
            raise DatasetError(
                f"{root}: is a LeRobot dataset of {version}, expected v3.0; convert it first: rlsvc dataset import"
            )
        return
    # Whoever was killed in its first episode has left no more than this.
    begun = {commit.STAGING, "data", "videos", "meta"} if (root / commit.STAGING).is_dir() else set()
    foreign = sorted(path.name for path in root.iterdir() if path.name not in begun)
    if foreign:
        raise DatasetError(
            f"{root}: is no dataset: it holds {', '.join(foreign[:5])} and no meta/info.json; choose a new folder"
        )


def _path(template: str, where: tuple[int, int], camera: str = "") -> str:
    return template.format(chunk_index=where[0], file_index=where[1], video_key=camera)


def _lock(root: Path) -> int:
    """A lock on the folder itself, which the operating system gives back when this process ends, however it ends."""
    lock = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BusyError(
            f"{root}: another process is recording into this dataset; stop it, or choose another"
        ) from error
    return lock


def _like(row: Mapping[str, Any], schema: Any) -> Any:
    """One row of meta/episodes with the columns and types of the rows that are there."""
    import pyarrow as pa

    return pa.table({f.name: pa.array([row.get(f.name)], f.type) for f in schema}, schema=schema)


def _write_parquet(table: Any, path: Path) -> None:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def _write_tasks(tasks: Sequence[str], path: Path) -> None:
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    # LeRobot takes the prompts from pandas' index.
    pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(tasks, name="task")).to_parquet(path)


def _write_json(value: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False), "utf-8")
