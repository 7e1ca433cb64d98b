"""Imitation: a policy's own loss on demonstrations (rlsvc/algos/imitation.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec
from rlsvc.spec.optim import EmaSpec, OptimizerSpec, ScheduleSpec
from rlsvc.spec.value_function import AdvantageSpec
from rlsvc.spec.weights import WeightsSpec


class SupervisedSpec(Spec):
    """Gradient steps on a policy's own loss; the defaults are those of Diffusion Policy (arXiv:2303.04137, PushT)."""

    name: str
    """Of the algorithm."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """At the top of the schedule."""
    batch_size: int = Field(default=256, ge=1)
    """Windows in one update, over all ranks together."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Adam or AdamW."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Of the learning rate."""
    ema: EmaSpec | None = EmaSpec()
    """null trains and acts with the raw weights."""
    weights: WeightsSpec | None = None
    """Trained weights to fine-tune; null begins with fresh ones."""
    freeze: tuple[str, ...] = ()
    """Regular expressions of weights that are not trained ("vision.*"); what a low-rank adaptation adapts never is."""


class ImitationSpec(SupervisedSpec):
    """Behaviour cloning."""

    name: Literal["imitation"] = "imitation"
    advantage: AdvantageSpec | None = None
    """By which steps it learns, as a value function judges them; null takes all."""
