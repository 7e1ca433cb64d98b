"""Replay: a ring of the newest rows of every stream, filled by chunks and sampled through a `ReplayView`.

A row is one step of one stream; `rlsvc.core.types.Chunk` says when it is a real transition. Adding a chunk takes three
steps: check it (all or nothing), work out on the host which slots it fills and which transitions begin or end
(`rlsvc.data.ring`), and write that to where the rows lie. On the device the writing is one compiled scatter into
donated arrays; row counts are padded to powers of two, so that it is compiled a few times and never again.

The rows are no store: the journal is. A replay that is filled again with the same chunks is the same one (`digest`).

Letters: S streams, C rows of a stream, R rows of a chunk, P rows after padding.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlsvc.core.errors import DatasetError, SpecError, UserError, nearest
from rlsvc.core.types import COMMANDED, INTERVENTION, REWARD_SOURCE, Chunk
from rlsvc.data.ring import Change, Ring
from rlsvc.data.sequence import ReplayView
from rlsvc.spec.replay import PrioritySpec, ReplaySpec

DEVICE_SHARE = 0.5
"""Largest share of accelerator memory that "auto" placement gives to the ring."""
MIN_ROWS = 64
"""Fewest rows that the compiled scatter is padded to."""
MAX_ROWS = 4096
"""Most rows of a stream that are written at once."""
ALWAYS = {"reward": "float32", "terminated": "bool"}
"""Columns of one number a row that every replay keeps."""
BOOKKEEPING = {"truncated": "bool", "is_first": "bool", "is_last": "bool", "episode": "int64", "step": "int32"}
"""Columns of one number a row that every chunk has; a replay keeps those that its schema names."""
NARROW = {np.dtype("int64"): np.dtype("int32"), np.dtype("float64"): np.dtype("float32")}
"""Dtypes that are kept in 32 bits, as JAX computes."""
RESERVED = ("observation", "mask", "weight", "index", "buffer")
"""What a batch calls its own parts."""
OPTIONAL = ("version", INTERVENTION, COMMANDED, REWARD_SOURCE)
"""May be in a chunk without being in the schema."""


class FeatureLike(Protocol):
    """What a column's entry in a schema must have (`rlsvc.core.contract.Feature`, `jax.ShapeDtypeStruct`)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""
        ...

    @property
    def dtype(self) -> Any:
        """A numpy dtype or its name."""
        ...


class Replay:
    """The newest C rows of each stream; see the module."""

    def __init__(
        self,
        spec: ReplaySpec,
        schema: Mapping[str, FeatureLike],
        streams: Sequence[int],
        *,
        observation: Sequence[str] | None = None,
        folder: Path | None = None,
        device: Any = None,
    ) -> None:
        """An empty replay.

        Args:
            spec: capacity, placement and priority.
            schema: columns to keep besides reward and terminated: observations, `action`, what else the policy hands
                out. int64 and float64 are kept in 32 bits, wherever the rows lie.
            streams: numbers of the streams that this replay takes (all of them, or a rank's share).
            observation: names of the columns that the policy sees; None takes those that begin with "observation.".
            folder: of the memory-mapped files; needed for placement "disk".
            device: for placement "device"; None is JAX's first.

        Raises:
            SpecError: a capacity that leaves too few rows to a stream.
            DatasetError: a column that cannot be kept; names it.
            UserError: the ring does not fit on the disk or the device.
        """
        spec.check(len(streams))
        self.spec = spec
        self.observation = tuple(name for name in schema if name.startswith("observation."))
        if observation is not None:
            self.observation = tuple(observation)
        self.schema = _resolve_schema(schema, self.observation)
        self.streams = tuple(int(stream) for stream in streams)
        shape = len(self.streams), spec.rows_per_stream(len(self.streams))
        self._ring = Ring(*shape)
        self._slot_of = {stream: slot for slot, stream in enumerate(self.streams)}
        self._seen: set[tuple[int, int, int]] = set()
        self._device = device or jax.local_devices()[0]
        row_bytes = sum(math.prod(column.shape) * column.stored.itemsize for column in self.schema.values())
        self.nbytes = math.prod(shape) * row_bytes
        self.placement = _place(spec.placement, self.nbytes, self._device)
        columns = {name: ((*shape, *column.shape), column.stored) for name, column in self.schema.items()}
        self._state: dict[str, Any] = {
            "columns": self._allocate(columns, folder),
            "real": self._ring.real,
            "starts": self._ring.starts,
            "first": self._ring.first,
            "count": self._ring.count,
            "mass": None if spec.priority is None else np.zeros(shape, np.float32),
            "top": None if spec.priority is None else np.float32(1.0),
        }
        if self.placement == "device":
            columns = self._state.pop("columns")
            self._state = {**_copy_to(self._state, self._device), "columns": columns}

    @property
    def num_rows(self) -> int:
        """Rows that are stored now."""
        return int(self._ring.size.sum())

    @property
    def num_transitions(self) -> int:
        """Real transitions that can be drawn now."""
        return int(self._ring.count.sum())

    @property
    def num_episodes(self) -> int:
        """Episodes of which at least one row is stored."""
        return self._ring.num_episodes

    def view(self) -> ReplayView:
        """What sampling needs; good until the next `add` or `update_priorities`."""
        beta = 0.0 if self.spec.priority is None else self.spec.priority.beta
        leaves = {name: value for name, value in self._state.items() if name != "top"}
        return ReplayView(**leaves, observation=self.observation, beta=beta)

    def add(self, chunk: Chunk) -> bool:
        """Store a chunk's rows, oldest rows making room.

        Returns:
            False when a chunk of this id was added before; nothing is stored then.

        Raises:
            DatasetError: a stream, column, shape or dtype that is not this replay's, or a number that is not finite;
                names it. Nothing is stored.
        """
        if chunk.id in self._seen:
            return False
        slot = self._check(chunk)
        self._seen.add(chunk.id)
        rank = np.arange(chunk.num_rows) - np.repeat(chunk.offsets[:-1], np.diff(chunk.offsets))
        # A stream's rows are written at most C - 1 at a time, so that no slot is written twice at once.
        piece = rank // min(self._ring.rows - 1, MAX_ROWS)
        for number in range(int(piece.max(initial=-1)) + 1):
            rows = slice(None) if not piece.any() else np.flatnonzero(piece == number)
            columns = {name: chunk.columns[name][rows] for name in (*self.schema, *BOOKKEEPING)}
            self._write(columns, self._ring.add(slot[rows], columns))
        return True

    def update_priorities(self, index: Any, priority: Any) -> None:
        """Set priorities of transitions that were drawn.

        Args:
            index: [B] or [K, B] int32 as in a batch; of a transition that stands there twice, the last one counts.
            priority: the same shape, not negative; one that is not finite leaves the old one.
        """
        if self.spec.priority is None:
            raise SpecError("this replay draws uniformly: set replay.priority to give priorities")
        write = _set_mass_jit if self.placement == "device" else partial(_set_mass, np)
        mass, top = self._state.pop("mass"), self._state.pop("top")
        mass, top = write(mass, top, self._state["real"], index, priority, self.spec.priority)
        self._state.update(mass=mass, top=top)

    def priorities(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps beside the journal's cursor, since rows come back from the journal without it."""
        return {} if self.spec.priority is None else {name: np.array(self._state[name]) for name in ("mass", "top")}

    def restore_priorities(self, saved: Mapping[str, np.ndarray]) -> None:
        """Put back what `priorities` gave, once the same chunks were added."""
        arrays = {name: np.array(value) for name, value in saved.items()}
        self._state.update(_copy_to(arrays, self._device) if self.placement == "device" else arrays)

    def digest(self) -> str:
        """sha256 over rows, their places and the ids seen (not priorities): equal replays have equal ones."""
        digest = hashlib.sha256(repr((self.streams, sorted(self._seen))).encode())
        for array in self._ring.arrays():
            digest.update(array.tobytes())
        for name in sorted(self.schema):
            column = np.asarray(self._state["columns"][name])
            digest.update(f"{name} {column.dtype} {column.shape}".encode())
            for slot, size in enumerate(self._ring.size):
                digest.update(column[slot, :size].tobytes())
        return digest.hexdigest()

    def _allocate(self, columns: dict[str, tuple[tuple[int, ...], np.dtype]], folder: Path | None) -> dict[str, Any]:
        if self.placement == "device":
            return {name: jnp.zeros(shape, dtype, device=self._device) for name, (shape, dtype) in columns.items()}
        if self.placement == "host":
            return {name: np.zeros(shape, dtype) for name, (shape, dtype) in columns.items()}
        if folder is None:
            raise SpecError("replay.placement: disk needs a folder for its files")
        folder.mkdir(parents=True, exist_ok=True)
        return {name: _memory_mapped(folder / f"{name}.bin", shape, dtype) for name, (shape, dtype) in columns.items()}

    def _check(self, chunk: Chunk) -> np.ndarray:
        """Refuse a chunk that does not fit; gives each row's slot, [R] int64."""
        where = f"chunk {chunk.number} of worker {chunk.worker}"
        for stream in chunk.streams.tolist():
            if stream not in self._slot_of:
                raise DatasetError(f"{where}: stream {stream} is not of this replay, which has {len(self.streams)}")
        lengths = np.diff(chunk.offsets)
        if len(chunk.offsets) != len(chunk.streams) + 1 or chunk.offsets[0] != 0 or (lengths < 0).any():
            raise DatasetError(f"{where}: offsets {chunk.offsets.tolist()} do not cut rows into the streams' shares")
        if len(set(chunk.streams.tolist())) < len(chunk.streams):
            raise DatasetError(f"{where}: a stream stands in it twice: {chunk.streams.tolist()}")
        known = {**{name: _column((), dtype) for name, dtype in BOOKKEEPING.items()}, **self.schema}
        for name in chunk.columns:
            if name not in known and name not in OPTIONAL:
                guess = nearest(name, known)
                hint = f" (did you mean '{guess}'?)" if guess else ""
                raise DatasetError(f"{where}: column '{name}' is not in the replay's schema{hint}: {', '.join(known)}")
        for name, column in known.items():
            if name not in chunk.columns:
                raise DatasetError(f"{where}: column '{name}' is missing; it has: {', '.join(chunk.columns)}")
            array, expected = chunk.columns[name], (chunk.num_rows, *column.shape)
            if array.shape != expected or array.dtype != column.dtype:
                raise DatasetError(
                    f"{where}: column '{name}' is {array.dtype}{list(array.shape)}, expected "
                    f"{column.dtype}{list(expected)}"
                )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0])
                raise DatasetError(
                    f"{where}: column '{name}' is not finite in row {row} (episode {chunk.columns['episode'][row]}, "
                    f"step {chunk.columns['step'][row]}). The simulator or the policy gave it; nothing was stored."
                )
            if (
                name in self.schema
                and column.stored != column.dtype
                and array.dtype.kind == "i"
                and not np.array_equal(array, array.astype(column.stored))
            ):
                raise DatasetError(f"{where}: column '{name}' has numbers beyond {column.stored}")
        return np.repeat([self._slot_of[stream] for stream in chunk.streams.tolist()], lengths).astype(np.int64)

    def _write(self, columns: dict[str, np.ndarray], change: Change) -> None:
        values = {name: columns[name] for name in self.schema}
        if self.placement != "device":
            for name, value in values.items():
                self._state["columns"][name][change.slot, change.position] = value
            if self.spec.priority is not None:
                self._state["mass"][change.slot, change.position] = 0
                self._state["mass"][change.begun_slot, change.begun] = self._state["top"]
            return
        rows = max(MIN_ROWS, 1 << (len(change.slot) - 1).bit_length())
        padded = {name: _pad(value, rows, self.schema[name].stored) for name, value in values.items()}
        # Slot S does not exist: what is padded with it is dropped. Few arrays, since each is a transfer of its own.
        where = np.full((5, rows), self._ring.streams, np.int32)
        where[:2, : len(change.slot)] = change.slot, change.position
        where[2:, : len(change.begun)] = change.begun_slot, change.begun, change.entry
        queue = np.stack([self._ring.first, self._ring.count])
        self._state = _scatter(self._state, padded, where, queue)


@dataclass(frozen=True)
class _Column:
    """Shape of one row, dtype in a chunk, and dtype in the ring."""

    shape: tuple[int, ...]
    dtype: np.dtype
    stored: np.dtype


def _column(shape: tuple[int, ...], dtype: Any) -> _Column:
    dtype = np.dtype(dtype)
    return _Column(tuple(shape), dtype, NARROW.get(dtype, dtype))


def _resolve_schema(schema: Mapping[str, FeatureLike], observation: Sequence[str]) -> dict[str, _Column]:
    for name in (*observation, "action"):
        if name not in schema:
            raise DatasetError(f"replay: '{name}' is not in the schema, which has: {', '.join(schema) or 'nothing'}")
    columns = {name: _column((), dtype) for name, dtype in ALWAYS.items()}
    for name, feature in schema.items():
        if name in RESERVED:
            raise DatasetError(f"replay: a column cannot be called '{name}', which is a part of every batch")
        dtype = np.dtype(feature.dtype)
        if dtype.kind not in "biuf":
            raise DatasetError(f"replay: column '{name}' is {dtype}; only numbers and booleans can be kept")
        columns[name] = _column(feature.shape, dtype)
    return columns


def _place(wanted: str, nbytes: int, device: Any) -> str:
    memory = device.memory_stats() if device.platform != "cpu" else None
    limit = memory["bytes_limit"] if memory else None
    if wanted == "auto":
        return "device" if limit is None or nbytes <= DEVICE_SHARE * limit else "host"
    if wanted == "device" and limit is not None and nbytes > limit:
        raise SpecError(
            f"replay.placement: the ring takes {nbytes / 2**30:.1f} GiB and the device has {limit / 2**30:.1f}. Lower "
            "replay.capacity, or set replay.placement to host or disk."
        )
    return wanted


def _memory_mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """A file of zeros as an array. All of it is allocated now: a full disk would later be a SIGBUS."""
    size = math.prod(shape) * dtype.itemsize
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(
            f"replay: {path} of {size / 2**30:.2f} GiB cannot be made ({error.strerror}). Free some space, or lower "
            "replay.capacity."
        ) from error
    return np.memmap(path, dtype, "r+", shape=shape)


def _copy_to(arrays: Any, device: Any) -> Any:
    # Copied: on the CPU a device array may share a numpy array's memory, and the ring goes on writing into that.
    return jax.tree.map(lambda x: jnp.array(jax.device_put(x, device), copy=True), arrays)


def _pad(array: np.ndarray, rows: int, dtype: np.dtype) -> np.ndarray:
    # Always a copy: the device may take it over as it is, and the chunk's arrays are not ours.
    padded = np.zeros((rows, *array.shape[1:]), dtype)
    padded[: len(array)] = array
    return padded


@partial(jax.jit, donate_argnums=0)
def _scatter(state: dict[str, Any], columns: dict[str, Any], where: Any, queue: Any) -> dict[str, Any]:
    """The state with P more rows; `where` is [5, P], the fields of a `Change`, and `queue` first and count, [2, S]."""
    slot, position, begun_slot, begun, entry = where
    new, old, mass = (slot, position), (begun_slot, begun), state["mass"]
    return {
        "columns": {name: ring.at[new].set(columns[name], mode="drop") for name, ring in state["columns"].items()},
        "real": state["real"].at[new].set(False, mode="drop").at[old].set(True, mode="drop"),
        "starts": state["starts"].at[begun_slot, entry].set(begun, mode="drop"),
        "first": queue[0],
        "count": queue[1],
        "mass": None if mass is None else mass.at[new].set(0.0, mode="drop").at[old].set(state["top"], mode="drop"),
        "top": state["top"],
    }


def _set_mass(
    xp: Any, mass: Any, top: Any, real: Any, index: Any, priority: Any, spec: PrioritySpec
) -> tuple[Any, Any]:
    """Mass and its largest value, with new priorities at `index`; of equal indices the last one counts."""
    rows = mass.shape[1]
    index, priority = xp.asarray(index).reshape(-1), xp.asarray(priority, xp.float32).reshape(-1)
    order = xp.argsort(index, stable=True)
    index, priority = index[order], priority[order]
    last = xp.concatenate([index[1:] != index[:-1], xp.ones(1, bool)])
    slot, position = index // rows, index % rows
    value = (xp.maximum(priority, 0) + xp.float32(spec.epsilon)) ** xp.float32(spec.alpha)
    taken = last & xp.isfinite(priority) & real[slot, position]
    top = xp.maximum(top, xp.where(taken, value, 0).max(initial=0))
    if xp is np:
        mass[slot[taken], position[taken]] = value[taken]
        return mass, top
    return mass.at[xp.where(taken, slot, mass.shape[0]), position].set(value, mode="drop"), top


_set_mass_jit = jax.jit(partial(_set_mass, jnp), donate_argnums=0, static_argnums=5)
