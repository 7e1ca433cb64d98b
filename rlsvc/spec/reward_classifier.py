"""A reward classifier (rlsvc/policies/reward_classifier.py): what it sees, what it learns from, how it is asked."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rlsvc.spec.base import Spec
from rlsvc.spec.diffusion import VisionSpec
from rlsvc.spec.imitation import SupervisedSpec


class RewardClassifierSpec(Spec):
    """Images, and vectors if there are any, to the probability of success, or of each stage of progress."""

    name: Literal["reward_classifier"] = "reward_classifier"
    classes: int = Field(default=2, ge=2)
    """2 says whether the task is done. More are stages of progress, the last of which is done."""
    vision: VisionSpec = VisionSpec()
    """Encoder of every image."""
    hidden: tuple[PositiveInt, ...] = Field(default=(256,), min_length=1)
    """Widths of the layers after it."""
    n_obs_steps: Literal[1] = 1
    """It sees the newest observation alone."""
    n_action_steps: Literal[0] = 0
    """It judges no actions."""

    @property
    def horizon(self) -> int:
        """Actions in a window."""
        return 1


class RewardLearningSpec(SupervisedSpec):
    """A reward classifier from labelled episodes, calibrated on those held back (`data.validation_fraction`)."""

    name: Literal["reward_classifier"] = "reward_classifier"
    label: str | None = None
    """Column with the class of each step, a whole number; below 0 the step is left out. null makes the labels from
    which episodes succeeded (`data.success`, or `success` of the dataset), as the two keys below say."""
    success_steps: int = Field(default=5, ge=1)
    """Steps at the end of an episode that succeeded in which the task is done. With more than 2 classes the stages are
    instead equal parts of the episodes that succeeded, and the others are left out."""
    margin_steps: int = Field(default=5, ge=0)
    """Steps before those that are left out, since people would not agree on them."""
    threshold: float = Field(default=0.9, gt=0, lt=1)
    """Calibrated probability from which the task counts as done; at it the precision is reported."""


class RewardSourceSpec(Spec):
    """A reward classifier that says in rollouts what is rewarded, in the place of the environment."""

    classifier: str = Field(min_length=1)
    """Of a reward classifier: a folder, or models:/name/version."""
    threshold: float | None = Field(default=None, gt=0, lt=1)
    """Probability from which the task counts as done; null takes the one that the bundle was calibrated at."""
    consecutive: int = Field(default=1, ge=1)
    """Observations in a row that have to say so."""
