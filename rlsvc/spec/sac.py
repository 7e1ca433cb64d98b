"""Soft actor-critic: the Gaussian policy (rlsvc/policies/gaussian.py), and how it learns (rlsvc/algos/sac.py).

Defaults are those of RLPD (arXiv:2302.02948) where nothing else is said.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import OneStepPolicySpec, Spec

Width = Annotated[int, Field(ge=1)]


class GaussianPolicySpec(OneStepPolicySpec):
    """A Gaussian that a tanh squashes, over vectors and images."""

    name: Literal["gaussian"] = "gaussian"
    hidden_dims: tuple[Width, ...] = Field(default=(256, 256), min_length=1)
    """Widths of the actor's layers."""
    log_std_range: tuple[float, float] = (-5.0, 2.0)
    """Smallest and largest log standard deviation, before tanh."""
    channels: int = Field(default=32, ge=1)
    """Of the image encoder's four convolutions."""
    image_dim: int = Field(default=256, ge=1)
    """Numbers that each image is encoded to."""
    shift: int = Field(default=4, ge=0)
    """Largest random shift of images in training, px (arXiv:2004.13649)."""

    @property
    def horizon(self) -> int:
        """Steps of a sequence that an update learns from."""
        return 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.log_std_range
        if low >= high:
            raise ValueError(f"log_std_range: got {low:g} and {high:g}, expected the smaller one first")
        return self


class SACSpec(Spec):
    """Soft actor-critic with an ensemble of critics.

    Demonstrations come in by the phase: RLPD takes half of each batch from them, `buffer: {replay: 0.5, demonstrations:
    0.5}`, and makes N updates a step, `hooks: {collect: 1, update: N}`.
    """

    name: Literal["sac"] = "sac"
    learning_rate: float = Field(default=3e-4, gt=0)
    """Of Adam, for encoder and critics, for the actor and for the temperature."""
    batch_size: int = Field(default=256, ge=1)
    """Transitions in one update, over all ranks together."""
    discount: float = Field(default=0.99, gt=0, lt=1)
    """Of a reward that comes a step later."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """Step of the target critics towards the critics, in each update."""
    num_critics: int = Field(default=10, ge=1)
    """Critics in the ensemble."""
    num_target_critics: int = Field(default=2, ge=1)
    """How many of them, drawn anew in each update, the smallest value is taken of for the targets."""
    critic_dims: tuple[Width, ...] = Field(default=(256, 256), min_length=1)
    """Widths of the critics' layers, each with layer norm."""
    critic_to_actor_ratio: int = Field(default=1, ge=1)
    """Updates of the critics for each one of actor and temperature. With N updates a step, RLPD takes N."""
    entropy_backup: bool = True
    """Count the entropy of later actions into the targets, as soft Q-learning does; RLPD leaves it out in some domains
    (table 3 of the paper), and so do sparse rewards of robots."""
    initial_temperature: float = Field(default=1.0, gt=0)
    """Weight of the entropy at the start."""
    target_entropy: float | None = None
    """Nats that the temperature is to bring the entropy to; null is -A / 2 for A action dimensions."""

    @model_validator(mode="after")
    def _subset(self) -> Self:
        if self.num_target_critics > self.num_critics:
            raise ValueError(
                f"num_target_critics: got {self.num_target_critics}, at most num_critics = {self.num_critics}"
            )
        return self
