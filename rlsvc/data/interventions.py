"""Demonstrations together with what people did in rollouts: one buffer of what people did, for RLPD and HIL-SERL.

Where rollouts are of a robot, each row says by `intervention` whether a person acted. Those rows count as
demonstrations too, besides lying in the replay: every transition of either, demonstrated or intervened, is drawn
equally often. They are not copied: the replay's rows are drawn by a mass that is 0 where nobody intervened.

Letters: B batch, L steps, S streams, C rows of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlsvc.core.types import INTERVENTION
from rlsvc.data.sequence import ReplayView, SequenceBatch


@partial(jax.tree_util.register_dataclass, data_fields=["demonstrations", "rollouts"], meta_fields=[])
@dataclass(frozen=True)
class PeoplesView:
    """A view as `ReplayView`, of demonstrations and of the rollouts' rows in which a person acted.

    A sequence that begins with an intervention goes on with whatever came after it.
    """

    demonstrations: ReplayView
    rollouts: ReplayView

    @property
    def on_host(self) -> bool:
        """Whether the rows are numpy arrays."""
        return self.demonstrations.on_host and self.rollouts.on_host

    @property
    def observation(self) -> tuple[str, ...]:
        """Names of the columns that the policy sees."""
        return self.demonstrations.observation

    @property
    def columns(self) -> dict[str, Any]:
        """The demonstrations' columns that rollouts have too: those of its batches."""
        return {name: x for name, x in self.demonstrations.columns.items() if name in self.rollouts.columns}

    @property
    def num_interventions(self) -> Any:
        """Scalar: real transitions of the rollouts in which a person acted."""
        return (self.rollouts.columns[INTERVENTION] & self.rollouts.real).sum()

    @property
    def num_transitions(self) -> Any:
        """Scalar: transitions that can be drawn."""
        return self.demonstrations.num_transitions + self.num_interventions

    def sample(self, key: jax.Array, batch_size: int, length: int, n_obs_steps: int = 1) -> SequenceBatch:
        """As `ReplayView.sample`; `index` is -1 - the rollouts' for an intervention."""
        return self.gather(self.draw(key, (batch_size,)), length, n_obs_steps)

    def sample_many(
        self, key: jax.Array, count: int, batch_size: int, length: int, n_obs_steps: int = 1
    ) -> SequenceBatch:
        """K = `count` batches at once: every array is [K, B, ...]."""
        return self.gather(self.draw(key, (count, batch_size)), length, n_obs_steps)

    def draw(self, key: jax.Array, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Whether each row is an intervention, and its index among the demonstrations and among the rollouts."""
        xp = np if self.on_host else jnp
        which_key, mine_key, theirs_key = jax.random.split(key, 3)
        share = self.num_interventions / xp.maximum(self.num_transitions, 1)
        mass = (self.rollouts.columns[INTERVENTION] & self.rollouts.real).astype(np.float32)
        intervened = replace(self.rollouts, mass=mass, beta=0.0)
        u = jax.random.uniform(which_key, shape)
        which = np.asarray(u) < share if self.on_host else u < share
        return which, self.demonstrations.draw(mine_key, shape), intervened.draw(theirs_key, shape)

    def gather(self, drawn: tuple[Any, Any, Any], length: int, n_obs_steps: int = 1) -> SequenceBatch:
        """The sequences that `draw` names."""
        xp = np if self.on_host else jnp
        which, mine, theirs = drawn
        demonstrated = self.demonstrations.gather(mine, length, n_obs_steps)
        intervened = replace(self.rollouts, mass=None).gather(theirs, length, n_obs_steps)
        intervened["index"] = -1 - intervened["index"]
        kept = {name: x for name, x in demonstrated.items() if name in intervened}

        def choose(a: Any, b: Any) -> Any:
            return xp.where(which.reshape(which.shape + (1,) * (a.ndim - which.ndim)), b, a)

        return jax.tree.map(choose, kept, {name: intervened[name] for name in kept})
