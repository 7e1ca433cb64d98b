"""A scripted stand-in for the person who watches a robot (rlsvc/envs/stand_in.py), for simulators alone."""

from __future__ import annotations

from pydantic import Field

from rlsvc.spec.base import Spec


class StandInSpec(Spec):
    """When a script takes over from the policy, and when it hands back. It is no person, and shows nothing of people.

    The environment brings the script: `expert(rng, noise)`, and `progress()`, which rises towards success.
    """

    patience: int = Field(default=15, ge=1)
    """Steps without progress after which it takes over."""
    min_progress: float = Field(default=0.01, ge=0)
    """By how much the best progress of the episode has to rise within them, in the environment's unit."""
    control_steps: int = Field(default=10, ge=1)
    """Steps for which it acts before it hands back."""
    noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the noise on its actions, as a share of their range."""
