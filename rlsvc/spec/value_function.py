"""Value functions (rlsvc/policies/value_mlp.py, rlsvc/algos/value_function.py) and what imitation makes of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.optim import EmaSpec, OptimizerSpec, ScheduleSpec


class RegressionHeadSpec(Spec):
    """One number, learned by its squared error."""

    name: Literal["regression"] = "regression"


class HLGaussHeadSpec(Spec):
    """A histogram of the return, learned by cross-entropy with a Gaussian around it (arXiv:2403.03950)."""

    name: Literal["hl_gauss"] = "hl_gauss"
    bins: int = Field(default=101, ge=2)
    """Of one width, over the support."""
    support: tuple[float, float] = (-1.1, 1.1)
    """Smallest and largest value, in normalised returns: under `data.normalization.return`, min_max if nothing else is
    said, those of the training steps lie in [-1, 1]. Returns beyond it are learned as its ends, and counted as
    `out_of_support`. Near an end the mean is drawn inwards, hence the room."""
    sigma_ratio: float = Field(default=0.75, gt=0)
    """Standard deviation of the Gaussian, in widths of a bin."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if not self.support[0] < self.support[1]:
            raise ValueError(f"support: got {list(self.support)}, expected the smaller end first")
        return self


class ReturnsSpec(Spec):
    """Monte-Carlo returns of recorded episodes, computed when they are loaded: G_t = r_t + discount * G_(t+1)."""

    discount: float = Field(default=0.99, ge=0, le=1)
    """Of one step."""
    success_bonus: float = 0.0
    """Added to the reward of the last step of an episode that succeeded (`data.success`)."""
    truncated: Literal["drop", "keep"] = "drop"
    """What becomes of episodes that were cut, whose returns lack what would have followed: drop leaves their steps out,
    keep takes the cut for the end, which makes late returns too small."""
    tolerance: float = Field(default=0.0, ge=0, lt=1)
    """With drop: steps of a cut episode stay where what is missing weighs at most this: discount ^ (steps to the
    cut)."""


class ValueMlpSpec(Spec):
    """V(s) or Q(s, a): a perceptron on observations that are vectors."""

    name: Literal["value_mlp"] = "value_mlp"
    n_obs_steps: int = Field(default=1, ge=1)
    """Observations in a row that it sees, the newest included."""
    n_action_steps: int = Field(default=0, ge=0)
    """Actions from the present on that it judges: 0 is V(s), 1 is Q(s, a), more is Q of a chunk."""
    hidden: tuple[PositiveInt, ...] = Field(default=(256, 256), min_length=1)
    """Widths of the hidden layers, with layer norm and Mish."""
    head: Annotated[RegressionHeadSpec | HLGaussHeadSpec, Field(discriminator="name")] = HLGaussHeadSpec()
    """What it gives out, and so by which loss it learns."""
    returns: ReturnsSpec = ReturnsSpec()
    """What it estimates; in the bundle, so that advantages are those of the same returns."""

    @property
    def horizon(self) -> int:
        """Actions in a window, which begins `n_obs_steps` - 1 before the present."""
        return self.n_obs_steps - 1 + max(self.n_action_steps, 1)


class ValueFunctionSpec(Spec):
    """A value function from the returns of recorded episodes."""

    name: Literal["value_function"] = "value_function"
    learning_rate: float = Field(default=3e-4, gt=0)
    """At the top of the schedule."""
    batch_size: int = Field(default=256, ge=1)
    """Steps in one update, over all ranks together."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Adam or AdamW."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Of the learning rate."""
    ema: EmaSpec | None = EmaSpec()
    """null trains and evaluates the raw weights."""


class AdvantageSpec(Spec):
    """Which steps imitation learns from, by the advantage that a value function gives them."""

    bundle: str = Field(min_length=1)
    """Of a value function V(s): a folder, or models:/name/version. `data` must name what its returns are made of."""
    mode: Literal["filter"] = "filter"
    """filter learns from the windows of the steps that are good enough, and from no other."""
    quantile: float | None = Field(default=None, gt=0, lt=1)
    """Good enough is better than this share of the training steps of the same task: 0.3 leaves out the worst 30 %."""
    threshold: float | None = None
    """Good enough is an advantage of at least this; one of `quantile` and `threshold` must be given."""
    n_steps: int | None = Field(default=None, ge=1)
    """Rewards of so many steps and then the value of where they lead, in place of the whole return; null takes the
    return, which is not known of steps that `returns.truncated` drops: those are left out."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.quantile is None) == (self.threshold is None):
            raise ValueError(
                f"quantile, threshold: got {'neither' if self.quantile is None else 'both'}, expected one of them"
            )
        return self
