"""Replay buffers (arrays of all episodes end to end, and `episode_ends`): what their arrays are called here.

Two layouts are known. PushT's is recognised by its arrays and fully described (units, names, 10 Hz). Any other has its
usual names translated ("actions" is `action`) and keeps the rest; its control rate must stand in an array `fps`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable

PUSHT_FPS = 10.0
PUSHT_TASK = "Push the T-shaped block onto the T-shaped target."

KNOWN_NAMES = {
    "state": "observation.state",
    "states": "observation.state",
    "observations": "observation.state",
    "obs": "observation.state",
    "actions": "action",
    "reward": "next.reward",
    "rewards": "next.reward",
    "done": "next.done",
    "dones": "next.done",
    "img": "observation.image",
    "image": "observation.image",
}
BOOKKEEPING = ("episode_ends", "fps", "language", "task", "tasks")


@dataclass(frozen=True)
class Array:
    """An array that has not been read yet.

    Attributes:
        shape: [N, ...].
        dtype: as stored.
        read: gives the steps from a start to an end.
        lost: why it cannot be read, "" when it can.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], np.ndarray]
    lost: str = ""


@dataclass(frozen=True)
class Column:
    """One column of the table: the array it comes from, what it is, and how a block of steps is turned into it."""

    array: str
    feature: Feature
    convert: Callable[[np.ndarray], np.ndarray] = lambda block: block


@dataclass
class ReplayBufferSource:
    """A `Source` over arrays [N, ...] and `episode_ends` [E] (zarr and npz alike)."""

    path: Path
    format: str
    fps: float
    columns: dict[str, Column]
    arrays: Mapping[str, Array]
    episode_ends: np.ndarray
    prompts: list[str]
    absent: dict[str, str] = field(default_factory=dict)
    features: dict[str, Feature] = field(init=False)
    episode_ids: list[int] = field(init=False)
    num_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.features = {name: column.feature for name, column in self.columns.items()}
        self.episode_ids = list(range(len(self.episode_ends)))
        self.num_steps = int(self.episode_ends[-1])

    def episode_tasks(self, episodes: Sequence[int]) -> list[str]:
        """The prompt of each of these episodes."""
        return [self.prompts[episode] for episode in episodes]

    def file_of(self, episode: int) -> Path:
        """The dataset itself: one file, or one folder of chunks."""
        return self.path

    def read(self, keys: Sequence[str], episodes: Sequence[int]) -> EpisodeTable:
        """These columns of these episodes; see `Source.read`."""
        starts = np.concatenate([[0], self.episode_ends[:-1]])
        lengths = np.array([self.episode_ends[e] - starts[e] for e in episodes], np.int64)
        ends = np.cumsum(lengths)
        tasks = list(dict.fromkeys(self.prompts[e] for e in episodes))
        table = EpisodeTable(
            columns={},
            episode_ends=ends,
            fps=self.fps,
            task=np.repeat([tasks.index(self.prompts[e]) for e in episodes], lengths).astype(np.int32),
            tasks=tasks,
            source=str(self.path),
            names={key: self.columns[key].feature.names for key in keys if self.columns[key].feature.names},
            units={key: self.columns[key].feature.unit for key in keys if self.columns[key].feature.unit},
        )
        for key in keys:
            column = self.columns[key]
            read = self.arrays[column.array].read
            out = np.empty((int(ends[-1]), *column.feature.shape), column.feature.dtype)
            for episode, start, end in zip(episodes, ends - lengths, ends, strict=True):
                out[start:end] = column.convert(read(int(starts[episode]), int(self.episode_ends[episode])))
            table.columns[key] = out
        return table


def replay_buffer(
    path: Path,
    format: str,
    arrays: Mapping[str, Array],
    small: Mapping[str, np.ndarray],
    fps: float | None,
) -> ReplayBufferSource:
    """The source over a replay buffer.

    Args:
        path: of the dataset, for messages.
        format: what it is, for people.
        arrays: by name, arrays [N, ...].
        small: `episode_ends` and what else is not one value a step (`fps`, `language`).
        fps: overrides what the dataset says.

    Raises:
        DatasetError: no usable `episode_ends` or `action`, an array of another length, or no known control rate.
    """
    ends = _episode_ends(path, arrays, small)
    pusht = _is_pusht(arrays)
    columns = _pusht_columns(path, arrays) if pusht else _columns(path, arrays)
    if "action" not in columns:
        raise DatasetError(f"{path}: no array 'action' (or 'actions'); it has: {', '.join(sorted(arrays)) or 'none'}")
    absent = {key: lost for key, column in columns.items() if (lost := arrays[column.array].lost)}
    columns = {key: column for key, column in columns.items() if key not in absent}
    if fps is None:
        fps = float(np.asarray(small["fps"]).item()) if "fps" in small else PUSHT_FPS if pusht else None
    if fps is None or not fps > 0:
        raise DatasetError(
            f"{path}: the control rate is not known (no array 'fps'). "
            "Import it with its rate: rlsvc dataset import SRC DST --fps RATE"
        )
    return ReplayBufferSource(path, format, fps, columns, arrays, ends, _prompts(path, small, len(ends), pusht), absent)


def _episode_ends(path: Path, arrays: Mapping[str, Array], small: Mapping[str, np.ndarray]) -> np.ndarray:
    if "episode_ends" not in small:
        names = ", ".join(sorted([*arrays, *small])) or "none"
        raise DatasetError(f"{path}: no array 'episode_ends', so where an episode ends is not known; it has: {names}")
    ends = np.asarray(small["episode_ends"])
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends) or (np.diff(ends, prepend=0) <= 0).any():
        raise DatasetError(
            f"{path}: 'episode_ends' must be rising whole numbers, got {ends.dtype} {ends.shape}: {str(ends)[:80]}"
        )
    for name, array in arrays.items():
        if not array.shape or array.shape[0] != ends[-1]:
            raise DatasetError(
                f"{path}: array '{name}' has {array.shape[0] if array.shape else 'no'} steps, "
                f"episode_ends says {ends[-1]}; the dataset is incomplete or cut, copy or export it again"
            )
    return ends.astype(np.int64)


def _prompts(path: Path, small: Mapping[str, np.ndarray], episodes: int, pusht: bool) -> list[str]:
    for name in ("language", "task", "tasks"):
        if name in small:
            texts = [str(text) for text in np.atleast_1d(small[name])]
            if len(texts) == 1:
                return texts * episodes
            if len(texts) != episodes:
                raise DatasetError(
                    f"{path}: '{name}' has {len(texts)} texts, expected one, or one for each of {episodes} episodes"
                )
            return texts
    return [PUSHT_TASK if pusht else ""] * episodes


def _is_pusht(arrays: Mapping[str, Array]) -> bool:
    shapes = {name: array.shape[1:] for name, array in arrays.items()}
    return shapes.get("state") == (5,) and shapes.get("keypoint") == (9, 2) and shapes.get("action") == (2,)


def _pusht_columns(path: Path, arrays: Mapping[str, Array]) -> dict[str, Column]:
    points = tuple(f"keypoint_{i}_{axis}" for i in range(9) for axis in "xy")
    columns = {
        "observation.state": Column(
            "state", Feature((2,), "float32", "px", ("agent_x", "agent_y")), lambda block: block[:, :2]
        ),
        "observation.environment_state": Column(
            "keypoint", Feature((18,), "float32", "px", points), lambda block: block.reshape(len(block), 18)
        ),
        # x and y in px, the angle in rad: mixed, so without a unit.
        "block_pose": Column("state", Feature((3,), "float32", "", ("x", "y", "angle")), lambda block: block[:, 2:]),
        "action": Column("action", Feature((2,), "float32", "px", ("x", "y"))),
    }
    if "img" in arrays:
        columns["observation.image"] = _image_column(path, "img", arrays["img"])
    if "n_contacts" in arrays:
        columns["n_contacts"] = _number_column(arrays, "n_contacts")
    return columns


def _columns(path: Path, arrays: Mapping[str, Array]) -> dict[str, Column]:
    columns = {}
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf":
            raise DatasetError(f"{path}: array '{name}' has dtype {array.dtype}, expected numbers")
        image = len(array.shape) == 4 and array.shape[-1] in (1, 3)
        key = KNOWN_NAMES.get(name, name)
        if image and key == name and not name.startswith("observation."):
            key = f"observation.images.{name}"
        if key in columns:
            raise DatasetError(f"{path}: arrays '{columns[key].array}' and '{name}' are both '{key}'; rename one")
        columns[key] = _image_column(path, name, array) if image else _number_column(arrays, name)
    return columns


def _number_column(arrays: Mapping[str, Array], name: str) -> Column:
    array = arrays[name]
    dtype = {"f": "float32", "b": "bool"}.get(array.dtype.kind, "int64")
    shape = array.shape[1:] or (1,)
    return Column(name, Feature(shape, dtype), lambda block: block.reshape(len(block), *shape))


def _image_column(path: Path, name: str, array: Array) -> Column:
    def to_bytes(block: np.ndarray) -> np.ndarray:
        if block.dtype == np.uint8:
            return block
        pixels = (
            block.astype(np.uint8) if np.isfinite(block).all() and block.min() >= 0 and block.max() <= 255 else None
        )
        if pixels is None or not np.array_equal(pixels, block):
            raise DatasetError(
                f"{path}: image '{name}' is {block.dtype} from {block.min():g} to {block.max():g}, "
                "expected whole numbers from 0 to 255; scale and round it before the import"
            )
        return pixels

    return Column(name, Feature(array.shape[1:], "uint8"), to_bytes)
