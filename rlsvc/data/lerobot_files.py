"""The files of a LeRobot v3.0 dataset: where they are, how they are written, and who may write them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.data import commit
from rlsvc.data.lerobot_meta import read_json

CHUNKS_SIZE = 1000
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
TASKS = "meta/tasks.parquet"


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


def file_path(template: str, where: tuple[int, int], camera: str = "") -> str:
    """A path template filled in; `where` is chunk and file."""
    return template.format(chunk_index=where[0], file_index=where[1], video_key=camera)


def lock_folder(root: Path) -> int:
    """A lock on the folder itself, which the operating system gives back when this process ends, however it ends.

    Raises:
        BusyError: another process has it.
    """
    lock = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BusyError(
            f"{root}: another process is recording into this dataset; stop it, or choose another"
        ) from error
    return lock


def like_rows(row: Mapping[str, Any], schema: Any) -> Any:
    """One row of meta/episodes with the columns and types of the rows that are there."""
    import pyarrow as pa

    # LeRobot keeps the extremes of booleans and integers as such, and statistics here are floats.
    return pa.table({f.name: pa.array([row.get(f.name)]).cast(f.type, safe=False) for f in schema}, schema=schema)


def write_parquet(table: Any, path: Path) -> None:
    """A pyarrow Table as a file."""
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def write_tasks(tasks: Sequence[str], path: Path) -> None:
    """meta/tasks.parquet: prompts by their order."""
    import pandas as pd

    path.parent.mkdir(parents=True, exist_ok=True)
    # LeRobot takes the prompts from pandas' index.
    pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(tasks, name="task")).to_parquet(path)


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """A JSON object as a file; NaN is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False, allow_nan=False), "utf-8")
