"""TD-MPC2: the world model and its planner (rlsvc/policies/tdmpc2.py), and how they learn (rlsvc/algos/tdmpc2.py).

Defaults are those of the paper (arXiv:2310.16828).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import OneStepPolicySpec, Spec


class Widths(NamedTuple):
    """Sizes of the nets."""

    encoder_dim: int
    encoder_layers: int
    hidden_dim: int
    latent_dim: int
    num_q: int


SIZES = {
    "1M": Widths(256, 2, 384, 128, 2),
    "5M": Widths(256, 2, 512, 512, 5),
    "19M": Widths(1024, 3, 1024, 768, 5),
    "48M": Widths(1792, 4, 1792, 768, 5),
    "317M": Widths(4096, 5, 4096, 1376, 8),
}
"""The published sizes, by the millions of their parameters."""


class TaskSpec(Spec):
    """One task among several that a single agent learns."""

    name: str
    """For people; the observation `task_index` says which task it is by its place in the list."""
    action_dim: int = Field(ge=1)
    """Leading action dimensions that this task uses; the others are held at 0."""
    episode_length: int = Field(default=500, ge=1)
    """Environment steps in an episode, action repeat counted in."""


class TDMPC2PolicySpec(OneStepPolicySpec):
    """World model, policy prior and planner: all that acting needs."""

    name: Literal["tdmpc2"] = "tdmpc2"
    size: Literal["1M", "5M", "19M", "48M", "317M"] = "5M"
    """A published size; the five fields below replace parts of it."""
    encoder_dim: int | None = Field(default=None, ge=1)
    """Hidden width of the state encoder; null takes the size's."""
    encoder_layers: int | None = Field(default=None, ge=1)
    """Layers of the state encoder; null takes the size's."""
    hidden_dim: int | None = Field(default=None, ge=1)
    """Hidden width of dynamics, reward, values and prior; null takes the size's."""
    latent_dim: int | None = Field(default=None, ge=1)
    """Width of the latent state; null takes the size's."""
    num_q: int | None = Field(default=None, ge=2)
    """Value functions in the ensemble; null takes the size's."""
    simnorm_dim: int | None = Field(default=8, ge=2)
    """Group size of the simplicial normalisation of latent states; null leaves them free, as TD-MPC does."""
    dropout: float = Field(default=0.01, ge=0, lt=1)
    """In training, in the first layer of the value functions."""
    bins: int = Field(default=101, ge=0)
    """Of the reward and value heads; 0 makes them scalars with a squared error, as in TD-MPC."""
    symlog_range: tuple[float, float] = (-10.0, 10.0)
    """Smallest and largest bin, in symlog space."""
    log_std_range: tuple[float, float] = (-10.0, 2.0)
    """Of the policy prior's Gaussian, before tanh."""
    channels: int = Field(default=32, ge=1)
    """Of the image encoder's convolutions."""
    shift: int = Field(default=3, ge=0)
    """Largest random shift of images in training, in pixels."""
    episodic: bool = False
    """Learns when episodes terminate and plans with it; needed where they do."""
    tasks: tuple[TaskSpec, ...] = ()
    """Several tasks in one agent; empty for a single one."""
    task_dim: int = Field(default=96, ge=1)
    """Width of a task's embedding."""
    episode_length: int = Field(default=500, ge=1)
    """Environment steps in an episode, action repeat counted in; sets the discount of a single task."""
    discount: float | None = Field(default=None, gt=0, lt=1)
    """null follows from the episode's length: 1 - 5 / length, between 0.95 and 0.995."""
    plan: bool = True
    """Acts by planning; false acts with the policy prior alone."""
    horizon: int = Field(default=3, ge=1)
    """Steps that the planner looks ahead and that an update unrolls."""
    iterations: int | None = Field(default=None, ge=1)
    """Of the planner; null means 6, or 8 with 20 action dimensions or more."""
    samples: int = Field(default=512, ge=1)
    """Action sequences in each iteration."""
    policy_samples: int = Field(default=24, ge=0)
    """How many of them the policy prior proposes."""
    elites: int = Field(default=64, ge=1)
    """Best sequences that the next iteration is fitted to."""
    temperature: float = Field(default=0.5, gt=0)
    """Factor on the values in the elites' weights."""
    min_std: float = Field(default=0.05, gt=0)
    """Of the planner's Gaussian."""
    max_std: float = Field(default=2.0, gt=0)
    """Of the planner's Gaussian, and where it starts."""
    evaluation: Literal["elite", "mean"] = "elite"
    """Without exploration: an elite drawn by its weight, as the authors' program does, or the planner's mean."""
    plan_precision: Literal["fp32", "bf16"] | None = None
    """Of the matrix products of acting; null is bf16 on a GPU and the run's precision elsewhere. Weights, norms and
    values stay float32, and so does learning unless the run's precision says otherwise."""

    @property
    def widths(self) -> Widths:
        """The size with its replacements."""
        size = SIZES[self.size]
        given = {name: getattr(self, name) for name in Widths._fields}
        return size._replace(**{name: value for name, value in given.items() if value is not None})

    @property
    def discounts(self) -> tuple[float, ...]:
        """One a task."""
        lengths = [task.episode_length for task in self.tasks] or [self.episode_length]
        return tuple(self.discount or min(max(1 - 5 / length, 0.95), 0.995) for length in lengths)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        latent = self.widths.latent_dim
        if self.simnorm_dim and latent % self.simnorm_dim:
            raise ValueError(f"latent_dim: {latent} is not a multiple of simnorm_dim = {self.simnorm_dim}")
        if self.bins == 1:
            raise ValueError("bins: got 1, expected 2 or more, or 0 for a scalar head")
        for name, low, high in (
            ("symlog_range", *self.symlog_range),
            ("log_std_range", *self.log_std_range),
            ("min_std and max_std", self.min_std, self.max_std),
        ):
            if low >= high:
                raise ValueError(f"{name}: got {low:g} and {high:g}, expected the smaller one first")
        if self.elites > self.samples:
            raise ValueError(f"elites: got {self.elites}, at most samples = {self.samples}")
        if self.policy_samples > self.samples:
            raise ValueError(f"policy_samples: got {self.policy_samples}, at most samples = {self.samples}")
        return self


class TDMPC2Spec(Spec):
    """Joint learning of world model, values and policy prior from sequences."""

    name: Literal["tdmpc2"] = "tdmpc2"
    learning_rate: float = Field(default=3e-4, gt=0)
    """Of Adam, for the world model and for the prior."""
    encoder_lr_scale: float = Field(default=0.3, gt=0)
    """Factor on the learning rate of the encoder."""
    prior_eps: float = Field(default=1e-5, gt=0)
    """Added to the denominator of the prior's Adam."""
    batch_size: int = Field(default=256, ge=1)
    """Sequences in one update, over all ranks together."""
    grad_clip: float = Field(default=20.0, gt=0)
    """Largest global gradient norm, of the world model and of the prior."""
    rho: float = Field(default=0.5, gt=0, le=1)
    """Weight of a step relative to the one before it."""
    consistency_coef: float = Field(default=20.0, ge=0)
    """Weight of the latent dynamics' loss."""
    reward_coef: float = Field(default=0.1, ge=0)
    """Weight of the reward's loss."""
    value_coef: float = Field(default=0.1, ge=0)
    """Weight of the value functions' loss."""
    termination_coef: float = Field(default=1.0, ge=0)
    """Weight of the termination's loss, where the policy is episodic."""
    entropy_coef: float = Field(default=1e-4, ge=0)
    """Weight of the prior's entropy."""
    behaviour_coef: float = Field(default=0.0, ge=0)
    """Weight of the log likelihood of the prior's actions under the planner that acted (TD-M(PC)^2, arXiv:2502.03550;
    its authors take A^2 / 61 for A action dimensions); needs behaviour_mean and behaviour_log_std with each step."""
    behaviour_threshold: float = Field(default=2.0, ge=0)
    """The likelihood counts only once the running scale of values exceeds this."""
    tau: float = Field(default=0.01, gt=0, le=1)
    """Step of the target value functions towards the value functions, in each update."""
    scale_tau: float = Field(default=0.01, gt=0, le=1)
    """Likewise of the running scale of values."""
    prioritized: bool = False
    """Hands back priorities (errors of the values in symlog space) for a prioritised replay."""
