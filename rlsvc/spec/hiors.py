"""Hi-ORS (rlsvc/algos/hiors.py): which rollouts are learned from, and what of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec
from rlsvc.spec.imitation import SupervisedSpec


class NoOpSpec(Spec):
    """Steps in which nothing moves, which are dropped."""

    of: str = "observation.state"
    """The vector that says so: of an observation, its change in the step; `action`, the size of the action itself, for
    actions that are velocities or displacements."""
    threshold: float = Field(default=1e-3, ge=0)
    """The largest such number that counts as nothing, in the vector's unit."""


class HiORSSpec(SupervisedSpec):
    """Rejection sampling of whole episodes, and the policy's own loss on what was accepted (arXiv:2510.26406)."""

    name: Literal["hiors"] = "hiors"
    reward_above: float = 0.5
    """An episode is accepted if the reward of its last step is above this ..."""
    min_length: int = Field(default=4, ge=1)
    """... and it has so many steps; shorter successes are mostly mistakes of the reward."""
    no_op: NoOpSpec | None = None
    """Steps of accepted episodes that are dropped; null drops none."""
    targets: Literal["action", "commanded", "state"] = "action"
    """What the policy learns to ask for on accepted steps: the action that was executed, the one that was asked for
    before a guard changed it, or the state that was measured a step later (of a robot that is commanded by absolute
    positions, of the same joints as its state). Demonstrations keep their own actions."""
    state: str = "observation.state"
    """Feature that `targets: state` measures."""
    min_accepted: int = Field(default=1, ge=1)
    """Accepted episodes up to which batches come from the demonstrations alone, whatever shares the phase names."""
