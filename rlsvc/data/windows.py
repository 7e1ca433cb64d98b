"""Windows of T observations and H actions around every step of every episode, padded at the ends with a mask.

The window of step t holds the observations t-T+1 .. t and the actions t-T+1 .. t-T+H of the same episode (the alignment
of Diffusion Policy). Outside the episode the nearest row stands in, and for actions the mask says so. Drawing is a pure
function of (key, step): it does not depend on ranks, placement or what was drawn before, so resuming needs no cursor.

Letters: N steps of all episodes, W windows, D datasets, B batch, T observation steps, H horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlsvc.core.types import EpisodeTable
from rlsvc.data.transforms import relative
from rlsvc.spec.robot import DeltaSpec

Batch = dict[str, Any]
"""observation: by name [B, T, ...]; action: [B, H, A] float32; mask: [B, H] bool, False where padded; group: [B]; and
what the windows are asked for besides, by name [B, ...], as of step t."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["columns", "anchor", "start", "end", "group", "offset", "weight"],
    meta_fields=["observation", "action", "n_obs_steps", "horizon", "extra", "delta"],
)
@dataclass(frozen=True)
class Windows:
    """Columns of one or more datasets and the windows over them; a pytree, so that it can lie on a device.

    Attributes:
        columns: by feature name [N, ...].
        anchor, start, end: [W] int32; the step t, and the inclusive start and exclusive end of its episode.
        group: [W] int32 normaliser group.
        offset: [D + 1] int32; windows of dataset d are offset[d] .. offset[d + 1].
        weight: [D] float32 share of each dataset, sums to 1.
        observation: feature names that the policy sees.
        action: name of the action feature.
        n_obs_steps: T.
        horizon: H.
        extra: columns that a batch has besides, as of step t.
        delta: which actions are given relative to the newest state of their window; None gives all as they are.
    """

    columns: dict[str, Any]
    anchor: Any
    start: Any
    end: Any
    group: Any
    offset: Any
    weight: Any
    observation: tuple[str, ...]
    action: str
    n_obs_steps: int
    horizon: int
    extra: tuple[str, ...] = ()
    delta: DeltaSpec | None = None

    @property
    def num_windows(self) -> int:
        """W."""
        return self.anchor.shape[0]

    @property
    def on_host(self) -> bool:
        """Whether the columns are numpy arrays."""
        return isinstance(self.anchor, np.ndarray)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())

    @classmethod
    def build(
        cls,
        tables: list[EpisodeTable],
        *,
        weights: list[float],
        groups: list[int],
        observation: tuple[str, ...],
        action: str,
        n_obs_steps: int,
        horizon: int,
        extra: tuple[str, ...] = (),
        delta: DeltaSpec | None = None,
    ) -> Windows:
        """Windows over tables of one schema, in host memory (numpy)."""
        base, parts, offset = 0, [], [0]
        for table, group in zip(tables, groups, strict=True):
            starts, ends = table.episode_starts + base, table.episode_ends + base
            lengths = ends - starts
            anchor = np.arange(base, base + table.num_steps)
            parts.append((anchor, np.repeat(starts, lengths), np.repeat(ends, lengths), np.full(len(anchor), group)))
            base += table.num_steps
            offset.append(base)
        anchor, start, end, group = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
        columns = {key: _join([table.columns[key] for table in tables]) for key in (*observation, action, *extra)}
        columns[action] = columns[action].astype(np.float32)
        share = np.asarray(weights, np.float32)
        return cls(
            columns,
            anchor,
            start,
            end,
            group,
            np.asarray(offset, np.int32),
            share / share.sum(),
            observation,
            action,
            n_obs_steps,
            horizon,
            extra,
            delta,
        )

    def select(self, keep: np.ndarray) -> Windows:
        """These windows alone, in host memory; every dataset keeps its share, and every window what lies around it.

        Args:
            keep: [W] bool, True for at least one window of every dataset.
        """
        sizes = [int(keep[first:end].sum()) for first, end in pairwise(self.offset)]
        assert all(sizes), "windows cannot be drawn from a dataset that has none"
        rows = {name: getattr(self, name)[keep] for name in ("anchor", "start", "end", "group")}
        return replace(self, **rows, offset=np.cumsum([0, *sizes]).astype(np.int32))

    def draw(self, key: jax.Array, batch_size: int) -> jax.Array:
        """[B] int32 window indices: a dataset by weight, then one of its windows uniformly, with replacement."""
        which_key, window_key = jax.random.split(key)
        offset, edges = jnp.asarray(self.offset), jnp.cumsum(jnp.asarray(self.weight))
        which = jnp.searchsorted(edges[:-1], jax.random.uniform(which_key, (batch_size,)), side="right")
        first, size = offset[which], offset[which + 1] - offset[which]
        return first + jax.random.randint(window_key, (batch_size,), 0, size)

    def gather(self, index: Any) -> Batch:
        """The batch of windows `index`, [B] or [K, B] integers; works on numpy and, inside jit, on JAX arrays."""
        xp = np if self.on_host else jnp
        anchor, start, end = (x[index][..., None] for x in (self.anchor, self.start, self.end))
        first = 1 - self.n_obs_steps
        lead = (1,) * (anchor.ndim - 1)
        steps = anchor + xp.arange(first, first + self.horizon).reshape(*lead, self.horizon)
        rows = xp.clip(anchor + xp.arange(first, 1).reshape(*lead, self.n_obs_steps), start, end - 1)
        observation = {key: self.columns[key][rows] for key in self.observation}
        return {
            "observation": observation,
            "action": relative(self.columns[self.action][xp.clip(steps, start, end - 1)], observation, self.delta),
            "mask": (steps >= start) & (steps < end),
            "group": self.group[index],
            **{key: self.columns[key][self.anchor[index]] for key in self.extra},
        }


def batches_from_host(data: Windows, index: np.ndarray, sharding: jax.sharding.Sharding | None) -> Batch:
    """Batches of windows that lie in host memory, put on the device: every array gets the leading axes of `index`.

    Args:
        data: in host memory.
        index: [K, B] window numbers.
        sharding: of [K, B, ...] arrays over several ranks; each process gathers its own rows alone. None for one
            device.
    """
    if sharding is None:
        return jax.device_put(data.gather(index))
    rows = {}

    def part(at: Any) -> Batch:
        key = str(at[:2])
        if key not in rows:
            rows[key] = data.gather(index[at[:2]])
        return rows[key]

    example = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, data.gather(index[:1, :1])))
    leaves, tree = jax.tree.flatten(example)
    arrays = [
        jax.make_array_from_callback(
            (*index.shape, *leaf.shape[2:]), sharding, lambda at, i=i: jax.tree.leaves(part(at))[i]
        )
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, arrays)


def _join(columns: list[np.ndarray]) -> np.ndarray:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
