"""What a LeRobot dataset says about itself: meta/ of v3.0, v2.1 and v2.0, in one form.

Read with pyarrow and json alone, so that neither lerobot nor torch is needed to train; tests prove that it says what
LeRobotDatasetMetadata says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Feature
from rlsvc.core.errors import DatasetError

BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
NUMBERS = (
    *("bool", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES = (*NUMBERS, "string", "image", "video")
VERSIONS = ("v3.0", "v2.1", "v2.0")


@dataclass(frozen=True)
class VideoSpan:
    """The frames of one episode and camera: `length` frames from `first` on in `path`, which holds `total` in all."""

    path: Path
    first: int
    length: int
    total: int


@dataclass(frozen=True)
class Episode:
    """One episode: its rows are those of `data` whose episode_index is `index`."""

    index: int
    length: int
    data: Path
    videos: Mapping[str, VideoSpan]


@dataclass(frozen=True)
class LeRobotMeta:
    """meta/ of a LeRobot dataset.

    Attributes:
        root: the folder.
        version: "v3.0", "v2.1" or "v2.0".
        fps: steps a second.
        declared: `features` of info.json as it stands, bookkeeping columns included.
        tasks: prompt by task_index.
        episodes: by episode_index.
        info: info.json as it stands.
    """

    root: Path
    version: str
    fps: float
    declared: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[int, str]
    episodes: Mapping[int, Episode]
    info: Mapping[str, Any]

    @property
    def cameras(self) -> list[str]:
        """Features that are stored as video."""
        return [key for key, feature in self.declared.items() if feature.get("dtype") == "video"]

    def video_gap(self, camera: str, path: Path) -> int | None:
        """The first frame of a video file at which an episode should begin and none does, or None."""
        spans = [
            e.videos[camera] for e in self.episodes.values() if camera in e.videos and e.videos[camera].path == path
        ]
        due = 0
        for span in sorted(spans, key=lambda span: span.first):
            if span.first != due:
                return due
            due += span.length
        return None


def read_meta(root: Path) -> LeRobotMeta:
    """Read meta/.

    Raises:
        DatasetError: a file is missing or damaged, or the version is not one of VERSIONS.
    """
    info = read_json(root / "meta" / "info.json")
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise DatasetError(f"{root}: codebase_version '{version}', expected one of {', '.join(VERSIONS)}")
    fps, declared = info.get("fps"), info.get("features")
    if not isinstance(fps, int | float) or not fps > 0:
        raise DatasetError(f"{root / 'meta/info.json'}: fps is {fps!r}, expected a number above 0")
    if not isinstance(declared, dict) or not declared:
        raise DatasetError(f"{root / 'meta/info.json'}: no 'features'")
    for key, feature in declared.items():
        if (
            not isinstance(feature, dict)
            or not isinstance(feature.get("dtype"), str)
            or not _is_shape(feature.get("shape"))
        ):
            raise DatasetError(
                f"{root / 'meta/info.json'}: feature '{key}' is {str(feature)[:80]}, expected a dtype and a shape"
            )
    read = _read_v3 if version == "v3.0" else _read_v2
    try:
        tasks, episodes = read(root, info)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"{root / 'meta'}: does not follow LeRobot {version} ({type(error).__name__}: {error})"
        ) from error
    if not episodes:
        raise DatasetError(f"{root}: no episodes in meta/")
    return LeRobotMeta(root, version, float(fps), declared, tasks, episodes, info)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(n, int) and n > 0 for n in value)


def _read_v3(root: Path, info: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, Episode]]:
    import pyarrow as pa

    table = read_parquet(root / "meta" / "tasks.parquet")
    # The prompt is pandas' index, which has a name only in files that newer lerobot wrote.
    column = "task" if "task" in table.column_names else "__index_level_0__"
    tasks = dict(zip(table["task_index"].to_pylist(), table[column].to_pylist(), strict=True))
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise DatasetError(f"{root / 'meta/episodes'}: no parquet file, expected chunk-000/file-000.parquet")
    tables = []
    for file in files:
        names = [name for name in parquet_columns(file) if not name.startswith("stats/")]
        tables.append(read_parquet(file, names))
    rows = sorted(pa.concat_tables(tables, promote_options="default").to_pylist(), key=lambda row: row["episode_index"])
    cameras = [key for key, feature in info["features"].items() if feature.get("dtype") == "video"]
    totals: dict[Path, int] = {}
    for row in rows:
        for camera in cameras:
            path = _v3_video(root, info, row, camera)
            if path is not None:
                totals[path] = totals.get(path, 0) + row["length"]
    episodes = {}
    for row in rows:
        videos = {}
        for camera in cameras:
            path = _v3_video(root, info, row, camera)
            if path is not None:
                first = round(row[f"videos/{camera}/from_timestamp"] * info["fps"])
                videos[camera] = VideoSpan(path, first, row["length"], totals[path])
        data = root / info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        episodes[row["episode_index"]] = Episode(row["episode_index"], row["length"], data, videos)
    return tasks, episodes


def _v3_video(root: Path, info: Mapping[str, Any], row: Mapping[str, Any], camera: str) -> Path | None:
    chunk, file = row.get(f"videos/{camera}/chunk_index"), row.get(f"videos/{camera}/file_index")
    if chunk is None or file is None:
        return None
    return root / info["video_path"].format(video_key=camera, chunk_index=chunk, file_index=file)


def _read_v2(root: Path, info: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, Episode]]:
    tasks = {row["task_index"]: row["task"] for row in read_json_lines(root / "meta" / "tasks.jsonl")}
    cameras = [key for key, feature in info["features"].items() if feature.get("dtype") == "video"]
    chunks_size = info.get("chunks_size", 1000)
    episodes = {}
    for row in read_json_lines(root / "meta" / "episodes.jsonl"):
        index, length = row["episode_index"], row["length"]
        where = {"episode_chunk": index // chunks_size, "episode_index": index}
        data = resolve(root, info["data_path"].format(**where))
        videos = {}
        for camera in cameras:
            path = resolve(root, info["video_path"].format(**where, video_key=camera))
            videos[camera] = VideoSpan(path, 0, length, length)
        episodes[index] = Episode(index, length, data, videos)
    return tasks, dict(sorted(episodes.items()))


def resolve(root: Path, name: str) -> Path:
    """The file that a v2 path template names, or the one file of that name in another chunk folder.

    Some exporters write `chunk-{episode_index:03d}` into data_path where they mean the chunk, so that the template
    names a folder that is not there.
    """
    path = root / name
    if path.exists():
        return path
    parts = Path(name).parts
    found = sorted(root.glob("/".join([parts[0], "chunk-*", *parts[2:]]))) if len(parts) > 2 else []
    return found[0] if len(found) == 1 else path


def to_feature(declared: Mapping[str, Any]) -> Feature:
    """A feature of info.json in our terms: float64 is read as float32, images as uint8 (H, W, C)."""
    dtype, shape = declared["dtype"], tuple(int(n) for n in declared["shape"])
    if dtype in ("image", "video"):
        names = flat_names(declared.get("names"))
        if names[:1] in (("channel",), ("channels",), ("c",)):
            shape = (shape[1], shape[2], shape[0])
        return Feature(shape, "uint8")
    if dtype == "string":
        return Feature((), TEXT)
    dtype = "float32" if dtype.startswith("float") else "bool" if dtype == "bool" else "int64"
    return Feature(shape, dtype, str(declared.get("unit") or ""), flat_names(declared.get("names")))


def flat_names(names: Any) -> tuple[str, ...]:
    """Element names without their nesting: lists in lists and maps of lists (both are in use) become one tuple."""
    if names is None:
        return ()
    if isinstance(names, str):
        return (names,)
    if isinstance(names, Mapping):
        values = list(names.values())
        return flat_names(list(names)) if all(isinstance(value, int) for value in values) else flat_names(values)
    return tuple(name for item in names for name in flat_names(item))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        DatasetError: the file is missing, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: no such file; the dataset is incomplete, copy it again") from error
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{path}: not readable as JSON ({error}); it is truncated or damaged, copy it again"
        ) from error
    if not isinstance(value, dict):
        raise DatasetError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line.

    Raises:
        DatasetError: the file is missing, or a line is not JSON; names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError as error:
        raise DatasetError(f"{path}: no such file; the dataset is incomplete, copy it again") from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not readable as text ({error}); it is damaged, copy it again") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise DatasetError(
                    f"{path}: line {number} is not JSON ({error}); it is truncated or damaged, copy it again"
                ) from error
    return rows


def parquet_columns(path: Path) -> list[str]:
    """The column names of a parquet file.

    Raises:
        DatasetError: the file is missing or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Any:
    """A parquet file as a pyarrow Table.

    Args:
        path: of the file.
        columns: their names; None reads all.

    Raises:
        DatasetError: the file is missing or damaged, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        for name in columns or ():
            if name not in file.schema_arrow.names:
                raise DatasetError(f"{path}: no column '{name}'; it has: {', '.join(file.schema_arrow.names)}")
        return file.read(columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def column_array(path: Path, name: str, column: Any) -> np.ndarray:
    """A pyarrow column of numbers or booleans as numpy array [rows].

    pyarrow's own to_numpy would import pandas, which takes longer than reading the data.

    Args:
        path: of the file, for the message.
        name: of the column, for the message.
        column: an Array or ChunkedArray.

    Raises:
        DatasetError: some rows are empty, or hold no numbers.
    """
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise DatasetError(f"{path}: column '{name}' has {array.null_count} empty values; fill them or leave it out")
    if pa.types.is_boolean(array.type):
        return np.from_dlpack(array.cast(pa.uint8())).astype(bool)
    try:
        return np.from_dlpack(array)
    except pa.ArrowException as error:
        raise DatasetError(f"{path}: column '{name}' holds {array.type}, expected numbers") from error


def _damaged(path: Path, error: Exception) -> DatasetError:
    if not path.exists():
        return DatasetError(
            f"{path}: no such file; the dataset is incomplete, copy it again or select `episodes` without it"
        )
    first_line = str(error).partition("\n")[0]
    return DatasetError(
        f"{path}: not readable as parquet ({first_line}); the file of {path.stat().st_size} bytes is truncated "
        "or damaged. Copy it again, or select `episodes` without it"
    )
