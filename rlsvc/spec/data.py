"""Demonstrations: which datasets, how they are mixed, split and normalised (rlsvc/data)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.robot import Keys

NormalizationMode = Literal["mean_std", "min_max", "quantile", "openpi_quantile", "identity"]


class DatasetSpec(Spec):
    """One dataset of a mixture."""

    path: str
    """A folder (LeRobot v2.1 or v3.0, a zarr replay buffer), or an .npz file."""
    format: Literal["auto", "lerobot", "zarr", "npz"] = "auto"
    """auto looks at what lies there."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the training windows, relative to the other datasets'."""
    tasks: tuple[str, ...] | None = None
    """Only episodes of these tasks; null takes all."""
    episodes: tuple[int, ...] | None = None
    """Only these episodes; null takes all."""
    group: str = "default"
    """Datasets of one group share a normaliser."""
    success: bool | None = None
    """Whether all of its episodes succeeded (demonstrations mostly did); null asks the column `data.success`."""
    keys: Keys = Field(default_factory=dict)
    """By the run's feature name what this dataset calls it, where that differs (`{observation.state: state}`); vectors
    in a list are joined (`{observation.state: [joint_position, gripper_position]}`)."""


class DataSpec(Spec):
    """The mixture, its splits by episode, and its normalisation."""

    datasets: tuple[DatasetSpec, ...] = Field(min_length=1)
    """One or more; all must have the features below, of the same shape and rate."""
    observation: tuple[str, ...] = Field(min_length=1)
    """Feature names that the policy sees, LeRobot's (`observation.state`, `observation.image`, `task`)."""
    action: str = "action"
    """Feature name that the policy learns to give."""
    reward: str | None = None
    """Feature name of the reward, for algorithms that learn from it; null takes 0 everywhere."""
    terminated: str | None = None
    """Feature name of a flag that is true at a step that ended its episode for good; null takes every end for a cut
    (for returns, where it is known which episodes succeeded, for the outcome)."""
    success: str | None = None
    """Feature name of a flag whose value at the last step of an episode says whether it succeeded; for returns."""
    validation_fraction: float = Field(default=0.02, ge=0, lt=1)
    """Share of the episodes whose loss is logged and never trained on."""
    heldout_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the episodes that neither training nor validation sees."""
    split_seed: int = 42
    """Of the shuffle of episodes before they are split."""
    max_train_episodes: int | None = Field(default=None, ge=1)
    """At most so many training episodes of each dataset; null takes all."""
    normalization: dict[str, NormalizationMode] = Field(default_factory=dict)
    """By feature name; a feature that is not named takes min_max (images: 0..255 to -1..1). `return` is the target of a
    value function."""
    norm_stats: str | None = None
    """openpi's norm_stats.json, or its folder: its statistics take the place of the data's, in every group. The modes
    are then mean_std, as pi0 has it, or openpi_quantile, as pi0.5 and pi0-FAST. null computes them from the data."""
    placement: Literal["auto", "device", "host"] = "auto"
    """Where windows are cut: device keeps the whole dataset in accelerator memory; auto does so when it fits."""

    @model_validator(mode="after")
    def _fractions(self) -> Self:
        if self.validation_fraction + self.heldout_fraction >= 1:
            raise ValueError("validation_fraction + heldout_fraction: must leave episodes to train on")
        return self
