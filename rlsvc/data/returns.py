"""n-step returns: sequences of L steps turned into transitions that look n steps ahead.

Letters: B batch, L steps of a sequence, T observation steps, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from rlsvc.core.errors import SpecError
from rlsvc.data.sequence import SequenceBatch


def n_step(batch: SequenceBatch, discount: float, n: int) -> dict[str, Any]:
    """The first step of every sequence, with the return of the n steps from it.

    reward = sum of discount^i r_i over the m <= n steps up to the end of the episode (or of what is stored), and a
    value target is reward + discount * V(next_observation), with the `discount` returned here: discount^m, or 0 where
    the m-th step terminated. A truncated episode is bootstrapped from its final observation, a terminated one is not.

    Args:
        batch: as `ReplayView.sample` gives it, [B, ...] or [K, B, ...], numpy or JAX arrays.
        discount: of one step, in [0, 1].
        n: steps to look ahead, at most L.

    Returns:
        observation and next_observation: by name [B, T, ...]; action: [B, A]; reward, discount: [B] float32;
        steps: [B] int32, m; weight, index, and every other column by name, as of the first step.

    Raises:
        SpecError: sequences shorter than n.
    """
    mask = batch["mask"]
    length, lead = mask.shape[-1], mask.ndim - 1
    if not 1 <= n <= length:
        raise SpecError(f"n_step: {n} steps do not fit into sequences of {length}; sample a length of {n} or more")
    xp: Any = np if isinstance(mask, np.ndarray) else jnp
    terminated = batch["terminated"][..., :n]
    # A step counts as long as no step before it terminated.
    before = xp.concatenate([xp.zeros_like(terminated[..., :1]), terminated[..., :-1]], -1)
    counts = mask[..., :n] & (xp.cumsum(before, -1) == 0)
    steps = counts.sum(-1, dtype=xp.int32)
    powers = (xp.float32(discount) ** xp.arange(n, dtype=xp.float32)).reshape(*(1,) * lead, n)
    bootstraps = ~(terminated & counts).any(-1)

    def window(rows: Any) -> Any:
        """T rows from the m-th on: those that end with the observation after the last step."""
        width = rows.shape[lead] - length
        at = steps[..., None] + xp.arange(width).reshape(*(1,) * lead, width)
        return xp.take_along_axis(rows, at.reshape(*at.shape, *(1,) * (rows.ndim - lead - 1)), lead)

    whole = ("weight", "index", "buffer")
    first = {
        name: value if name in whole else value[(slice(None),) * lead + (0,)]
        for name, value in batch.items()
        if name not in ("observation", "mask", "reward", "terminated")
    }
    observation = batch["observation"]
    return {
        **first,
        "observation": {
            name: rows[(slice(None),) * lead + (slice(0, rows.shape[lead] - length),)]
            for name, rows in observation.items()
        },
        "next_observation": {name: window(rows) for name, rows in observation.items()},
        "reward": (batch["reward"][..., :n] * powers * counts).sum(-1, dtype=xp.float32),
        "discount": xp.where(bootstraps, xp.float32(discount) ** steps, 0).astype(xp.float32),
        "steps": steps,
    }
