"""Value functions (rlsvc/policies/value_*.py, rlsvc/algos/value_function.py) and what imitation makes of them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.optim import EmaSpec, OptimizerSpec, ScheduleSpec
from rlsvc.spec.pi0 import GEMMA_SIZES, SIGLIP_SIZES, AugmentSpec, Gemma, Siglip
from rlsvc.spec.tokenizer import TokenizerSpec
from rlsvc.spec.weights import WeightsSpec


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


ValueHead = Annotated[RegressionHeadSpec | HLGaussHeadSpec, Field(discriminator="name")]


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
    head: ValueHead = HLGaussHeadSpec()
    """What it gives out, and so by which loss it learns."""
    returns: ReturnsSpec = ReturnsSpec()
    """What it estimates; in the bundle, so that advantages are those of the same returns."""

    @property
    def horizon(self) -> int:
        """Actions in a window, which begins `n_obs_steps` - 1 before the present."""
        return self.n_obs_steps - 1 + max(self.n_action_steps, 1)


class ValueVlmSpec(Spec):
    """V(s): a vision-language model that reads images and prompt."""

    name: Literal["value_vlm"] = "value_vlm"
    vision: Siglip = SIGLIP_SIZES["So400m/14"]
    """Vision transformer: a name (So400m/14, L/14, B/16, S/16, Ti/16, dummy) or its sizes."""
    backbone: Gemma = GEMMA_SIZES["gemma_300m"]
    """Transformer over images and text: a name (gemma_2b, gemma_300m, dummy) or its sizes."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width that every image is brought to, its shape kept, with black bars; a multiple of the patch."""
    cameras: tuple[str, ...] | None = None
    """Images of the contract in the order in which they are read; null takes them in the contract's order."""
    tokenizer: TokenizerSpec
    """How the prompt becomes tokens."""
    prompt: str | None = None
    """The prompt where the contract has no text; null for a contract that has one."""
    max_tokens: int = Field(default=200, ge=1)
    """Tokens of a prompt; longer ones are cut."""
    state_in_prompt: bool = False
    """Whether the state is told in the prompt, in 256 steps from -1 to 1, as pi0.5 reads it; false is for a contract
    of images and text alone."""
    n_obs_steps: Literal[1] = 1
    """It sees the newest observation alone."""
    n_action_steps: Literal[0] = 0
    """It judges no actions: V(s)."""
    head: ValueHead = HLGaussHeadSpec()
    """What it gives out, and so by which loss it learns."""
    returns: ReturnsSpec = ReturnsSpec()
    """What it estimates; in the bundle, so that advantages are those of the same returns."""
    augment: AugmentSpec | None = AugmentSpec()
    """Random changes of the images in training; null makes none."""
    remat: bool = True
    """Compute activations anew in the backward pass: less memory, about a third more time."""

    @property
    def horizon(self) -> int:
        """Actions in a window."""
        return 1

    @property
    def prompt_tokens(self) -> int:
        """L, tokens of a prompt."""
        return self.max_tokens

    @property
    def tells_state(self) -> bool:
        """Whether the state is a part of the prompt."""
        return self.state_in_prompt

    @property
    def lora_backbone(self) -> None:
        """No adaptation: all of it is trained."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(side % self.vision.patch for side in self.image_size):
            raise ValueError(
                f"image_size: {list(self.image_size)} is not a multiple of vision.patch = {self.vision.patch}"
            )
        return self


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
    weights: WeightsSpec | None = None
    """Trained weights to begin with; null begins with fresh ones."""
    freeze: tuple[str, ...] = ()
    """Regular expressions of weights that are not trained ("vision.*")."""


class AdvantageSpec(Spec):
    """What imitation makes of the advantage that a value function gives each training step."""

    bundle: str = Field(min_length=1)
    """Of a value function V(s): a folder, or models:/name/version. `data` must name what its returns are made of."""
    mode: Literal["filter", "condition"] = "filter"
    """filter learns from the windows of the steps that are good enough, and from no other; condition from all, with a
    prompt that says which it is (RECAP, arXiv:2511.14759; `policy.advantage_in_prompt`)."""
    quantile: float | None = Field(default=None, gt=0, lt=1)
    """Good enough is better than this share of the training steps of the same task: 0.3 leaves out the worst 30 %."""
    threshold: float | None = None
    """Good enough is an advantage of at least this; one of `quantile` and `threshold` must be given."""
    n_steps: int | None = Field(default=None, ge=1)
    """Rewards of so many steps and then the value of where they lead, in place of the whole return; null takes the
    return, which is not known of steps that `returns.truncated` drops: filter leaves those out, condition tells nothing
    of them."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """With condition: share of the steps whose prompt tells nothing, so that the policy also learns to act unasked."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.quantile is None) == (self.threshold is None):
            raise ValueError(
                f"quantile, threshold: got {'neither' if self.quantile is None else 'both'}, expected one of them"
            )
        return self
