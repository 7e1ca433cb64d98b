"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class OptimizerSpec(Spec):
    """Adam (Kingma and Ba, arXiv:1412.6980) or AdamW (Loshchilov and Hutter, arXiv:1711.05101)."""

    name: Literal["adam", "adamw"] = "adamw"
    """Which of the two."""
    betas: tuple[float, float] = (0.95, 0.999)
    """Decay rates of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=1e-6, ge=0)
    """Decoupled weight decay, AdamW only."""
    grad_clip: float | None = Field(default=None, gt=0)
    """Largest global gradient norm; null does not clip."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Type in which both moments are kept; bf16 takes half the memory, and is rounded at random, so that small changes
    are not lost."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches that one update averages over; must divide the batch size."""


class ScheduleSpec(Spec):
    """Learning rate by update: linear warm-up from 0, then constant or cosine down to `final_fraction`."""

    name: Literal["constant", "cosine"] = "cosine"
    """What follows the warm-up."""
    warmup_steps: int = Field(default=500, ge=0)
    """Updates of the linear warm-up."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the one at the top."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Updates until `final_fraction`; null means the run's total_steps."""


class EmaSpec(Spec):
    """Exponential moving average of the weights: decay = 1 - (1 + step)^-power, between 0 and `max_decay`."""

    power: float = Field(default=0.75, gt=0, le=1)
    """Higher follows the weights more slowly."""
    max_decay: float = Field(default=0.9999, ge=0, lt=1)
    """Largest decay."""
