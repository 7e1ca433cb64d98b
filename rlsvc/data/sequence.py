"""Sequences of L steps cut out of replay's rings, drawn uniformly or by priority, in jit or in numpy.

A sequence begins at a real transition (see `rlsvc.core.types.Chunk`) and goes on for L steps of the same episode. Where
the episode or the stored rows end before that, the last valid row is repeated and the mask is False.

How a start is drawn: every stream keeps, besides its ring of rows, a ring of the positions of its real transitions, in
the order of time. So one number below the count of all transitions names one of them, each equally likely, whatever
rows lie between them that are no transitions. The same expressions run on numpy and on JAX arrays.

Letters: S streams, C rows of a stream, B batch, L steps of a sequence, T observation steps, K batches, A action
dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlsvc.core.errors import DatasetError, SpecError
from rlsvc.spec.replay import MARGIN

SequenceBatch = dict[str, Any]
"""observation: by name [B, T + L, ...], row T - 1 + i is what action i was chosen on; action [B, L, A]; reward [B, L]
float32; terminated [B, L] bool; mask [B, L] bool, False where repeated; weight [B] float32 importance weights, ones
when uniform; index [B] int32, stream * C + position of the first step; every other column by name [B, L, ...]. K
batches have K for a leading axis."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "real", "starts", "first", "count", "mass"],
    meta_fields=["observation", "beta"],
)
@dataclass(frozen=True)
class ReplayView:
    """What sampling needs of a replay; a pytree whose every leaf has the stream axis first.

    It shares the replay's memory: it is good until the replay's next `add` or `update_priorities`.

    Attributes:
        columns: by name [S, C, ...].
        real: [S, C] bool, whether a real transition begins at the row. The newest row of a stream never is one, so
            walking on while `real` holds crosses neither an episode's end nor the seam between new rows and old ones.
        starts: [S, C] int32, a ring of positions in the stream: those of its real transitions, oldest first.
        first: [S] int32, where in `starts` the oldest one is.
        count: [S] int32, how many there are.
        mass: [S, C] float32, (priority + epsilon) ** alpha, 0 where not real; None draws uniformly.
        observation: names of the columns that the policy sees.
        beta: exponent of the importance weights.
    """

    columns: dict[str, Any]
    real: Any
    starts: Any
    first: Any
    count: Any
    mass: Any
    observation: tuple[str, ...]
    beta: float

    @property
    def on_host(self) -> bool:
        """Whether the rows are numpy arrays, in memory or on disk."""
        return isinstance(self.real, np.ndarray)

    @property
    def rows_per_stream(self) -> int:
        """C."""
        return self.real.shape[1]

    @property
    def num_transitions(self) -> Any:
        """Scalar: real transitions that can be drawn."""
        return self.count.sum()

    def sample(self, key: jax.Array, batch_size: int, length: int, n_obs_steps: int = 1) -> SequenceBatch:
        """B sequences of `length` steps, starts drawn with replacement; can be traced when not `on_host`.

        With no transition at all, the mask is False everywhere.

        Raises:
            SpecError: the streams are too short for the length.
        """
        return self.gather(self.draw(key, (batch_size,)), length, n_obs_steps)

    def sample_many(
        self, key: jax.Array, count: int, batch_size: int, length: int, n_obs_steps: int = 1
    ) -> SequenceBatch:
        """K = `count` batches at once: every array is [K, B, ...]. Raises as `sample`."""
        return self.gather(self.draw(key, (count, batch_size)), length, n_obs_steps)

    def draw(self, key: jax.Array, shape: tuple[int, ...]) -> Any:
        """int32 array of this shape: stream * C + position of real transitions."""
        if self.mass is not None:
            return self._draw_by_mass(key, shape)
        xp = np if self.on_host else jnp
        ends = xp.cumsum(self.count, dtype=xp.int32)
        if self.on_host:
            number = _generator(key).integers(0, max(int(ends[-1]), 1), shape, dtype=np.int32)
        else:
            number = jax.random.randint(key, shape, 0, ends[-1])
        stream = _count_below(ends, number)
        which = number - ends[stream] + self.count[stream]
        position = self.starts[stream, (self.first[stream] + which) % self.rows_per_stream]
        return (stream * self.rows_per_stream + position).astype(xp.int32)

    def _draw_by_mass(self, key: jax.Array, shape: tuple[int, ...]) -> Any:
        # A block, then a row in it: a sum of a million float32 numbers would be too coarse to tell rows apart.
        xp = np if self.on_host else jnp
        size = math.isqrt(self.mass.size - 1) + 1
        blocks = xp.pad(self.mass.reshape(-1), (0, -self.mass.size % size)).reshape(-1, size)
        two = (2, *shape)
        u = _generator(key).random(two, dtype=np.float32) if self.on_host else jax.random.uniform(key, two)
        block = _choose(blocks.sum(1).reshape(*(1,) * len(shape), len(blocks)), u[0])
        return (block * size + _choose(blocks[block], u[1])).astype(xp.int32)

    def gather(self, index: Any, length: int, n_obs_steps: int = 1) -> SequenceBatch:
        """The sequences that begin at `index`, [B] or [K, B] int32 as `draw` gives them.

        Raises:
            SpecError: the streams are too short for the length.
        """
        if self.rows_per_stream < length + MARGIN:
            raise SpecError(
                f"replay holds {self.rows_per_stream} rows of a stream, but sequences of {length} steps need "
                f"{length + MARGIN}. Raise replay.capacity, or use fewer environments or shorter sequences."
            )
        xp, rows = (np if self.on_host else jnp), self.rows_per_stream
        stream, position = (index // rows)[..., None], (index % rows)[..., None]

        def offsets(start: int, stop: int) -> Any:
            return xp.arange(start, stop, dtype=xp.int32).reshape(*(1,) * index.ndim, stop - start)

        def run(steps: Any) -> Any:  # True up to the first row that is no transition
            return xp.cumprod(self.real[stream, (position + steps) % rows].astype(xp.int32), -1) > 0

        mask = run(offsets(0, length))
        valid = mask.sum(-1, keepdims=True, dtype=xp.int32)
        earlier = run(-offsets(1, n_obs_steps)).sum(-1, keepdims=True, dtype=xp.int32)
        seen = (position + xp.clip(offsets(1 - n_obs_steps, length + 1), -earlier, valid)) % rows
        done = (position + xp.minimum(offsets(0, length), xp.maximum(valid - 1, 0))) % rows
        batch = {name: self.columns[name][stream, done] for name in self.columns if name not in self.observation}
        return {
            **batch,
            "observation": {name: self.columns[name][stream, seen] for name in self.observation},
            "mask": mask,
            "weight": self._weight(index),
            "index": index,
        }

    def _weight(self, index: Any) -> Any:
        """Importance weights (N p) ** -beta, divided by the largest one of the batch."""
        xp = np if self.on_host else jnp
        if self.mass is None:
            return xp.ones(index.shape, xp.float32)
        mass = xp.maximum(self.mass.reshape(-1)[index], np.finfo(np.float32).tiny)
        return (mass.min(-1, keepdims=True) / mass) ** xp.float32(self.beta)


@partial(jax.tree_util.register_dataclass, data_fields=["views"], meta_fields=["ratios"])
@dataclass(frozen=True)
class Mix:
    """Several replays that every batch takes a fixed number of rows from; made by `mix`.

    Attributes:
        views: by buffer name; of ReplayView or what draws and gathers like it.
        ratios: (name, share) of each, in the order in which rows follow one another in a batch.
    """

    views: dict[str, Any]
    ratios: tuple[tuple[str, float], ...]

    @property
    def on_host(self) -> bool:
        """Whether the rows are numpy arrays."""
        return all(view.on_host for view in self.views.values())

    @property
    def num_transitions(self) -> Any:
        """Scalar: real transitions of all buffers."""
        return sum(view.num_transitions for view in self.views.values())

    def sizes(self, batch_size: int) -> dict[str, int]:
        """Rows of each buffer in a batch: shares rounded down, the rest to the largest remainders."""
        exact = {name: batch_size * share for name, share in self.ratios}
        sizes = {name: math.floor(value) for name, value in exact.items()}
        by_remainder = sorted(exact, key=lambda name: sizes[name] - exact[name])
        for name in by_remainder[: batch_size - sum(sizes.values())]:
            sizes[name] += 1
        return sizes

    def sample(self, key: jax.Array, batch_size: int, length: int, n_obs_steps: int = 1) -> SequenceBatch:
        """As `ReplayView.sample`, besides `buffer` [B] int32: which of `ratios` the row is from; `index` is in it."""
        return self._sample(key, (batch_size,), length, n_obs_steps)

    def sample_many(
        self, key: jax.Array, count: int, batch_size: int, length: int, n_obs_steps: int = 1
    ) -> SequenceBatch:
        """K = `count` batches at once: every array is [K, B, ...]."""
        return self._sample(key, (count, batch_size), length, n_obs_steps)

    def _sample(self, key: jax.Array, shape: tuple[int, ...], length: int, n_obs_steps: int) -> SequenceBatch:
        xp = np if self.on_host else jnp
        shared = set.intersection(*(set(view.columns) for view in self.views.values()))
        parts = []
        for number, (name, rows) in enumerate(self.sizes(shape[-1]).items()):
            view, part = self.views[name], (*shape[:-1], rows)
            batch = view.gather(view.draw(jax.random.fold_in(key, number), part), length, n_obs_steps)
            kept = {key: value for key, value in batch.items() if key not in view.columns or key in shared}
            parts.append({**kept, "buffer": xp.full(part, number, xp.int32)})
        return jax.tree.map(lambda *leaves: xp.concatenate(leaves, len(shape) - 1), *parts)


def mix(views: Mapping[str, Any], ratios: Mapping[str, float]) -> Mix:
    """Batches with a fixed share of rows from each buffer (online, demonstrations, interventions).

    Args:
        views: by buffer name; all on the host or all on the device. Columns that one of them lacks are left out of
            batches, observations excepted.
        ratios: share of each, in any unit.

    Raises:
        DatasetError: a ratio without a buffer or the other way round, a ratio that is not positive, buffers that lie in
            different places or differ in observations or actions; names them.
    """
    if set(views) != set(ratios) or not ratios:
        raise DatasetError(f"mix: ratios are given for {sorted(ratios)}, but the buffers are {sorted(views)}")
    for name, ratio in ratios.items():
        if not 0 < ratio < math.inf:
            raise DatasetError(f"mix: the ratio of buffer '{name}' is {ratio}, expected a number above 0")
    first, *others = sorted(views)
    for other in others:
        if views[first].on_host != views[other].on_host:
            raise DatasetError(
                f"mix: buffers '{first}' and '{other}' lie in different places (device and host). Give both the same "
                "placement."
            )
        mine, theirs = _features(views[first]), _features(views[other])
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise DatasetError(
                    f"mix: '{name}' is {mine.get(name, 'missing')} in buffer '{first}' and "
                    f"{theirs.get(name, 'missing')} in buffer '{other}'"
                )
    total = sum(ratios.values())
    return Mix(dict(views), tuple((name, ratio / total) for name, ratio in ratios.items()))


def _features(view: Any) -> dict[str, str]:
    columns = {name: view.columns[name] for name in (*view.observation, "action")}
    return {name: f"{column.dtype}{list(column.shape[2:])}" for name, column in columns.items()}


def _generator(key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).reshape(-1))


def _count_below(ends: Any, number: Any) -> Any:
    """The stream that a transition's number falls into, given the running sum of counts."""
    if isinstance(ends, np.ndarray):
        found = np.searchsorted(ends, number, side="right")
        return np.minimum(found, len(ends) - 1)
    found = jnp.searchsorted(ends, number, side="right", method="compare_all")
    return jnp.minimum(found, len(ends) - 1)


def _choose(mass: Any, u: Any) -> Any:
    """One of the last axis in proportion to its mass, for every u in [0, 1); the other axes broadcast with u's."""
    xp: Any = np if isinstance(mass, np.ndarray) else jnp
    ends = xp.cumsum(mass, -1)
    found = (ends <= u[..., None] * ends[..., -1:]).sum(-1, dtype=xp.int32)
    found = xp.minimum(found, mass.shape[-1] - 1)
    # Rounding can end on an element without mass; the heaviest one stands in, so that it is never drawn.
    every = xp.broadcast_to(mass, (*u.shape, mass.shape[-1]))
    empty = xp.take_along_axis(every, found[..., None], -1)[..., 0] <= 0
    return xp.where(empty, mass.argmax(-1).astype(xp.int32), found)
