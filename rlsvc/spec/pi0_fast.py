"""pi0-FAST (rlsvc/policies/pi0_fast.py). Defaults are the published ones."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.pi0 import GEMMA_SIZES, SIGLIP_SIZES, AugmentSpec, Gemma, LoraSpec, Siglip
from rlsvc.spec.tokenizer import ActionTokenizerSpec, FastFitSpec, TokenizerSpec, check_room


class Pi0FastSpec(Spec):
    """A vision-language model that says its actions, in FAST tokens, one after the other."""

    name: Literal["pi0_fast"] = "pi0_fast"
    vision: Siglip = SIGLIP_SIZES["So400m/14"]
    """Vision transformer: a name (So400m/14, L/14, B/16, S/16, Ti/16, dummy) or its sizes."""
    backbone: Gemma = GEMMA_SIZES["gemma_2b"]
    """Transformer over images, text and actions: a name (gemma_2b, gemma_300m, dummy) or its sizes."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width that every image is brought to, its shape kept, with black bars; a multiple of the patch."""
    cameras: tuple[str, ...] | None = None
    """Images of the contract in the order in which they are read, which matters for published weights; null takes them
    in the contract's order."""
    tokenizer: TokenizerSpec
    """How the prompt becomes tokens. Action tokens lie at the end of its vocabulary."""
    action_tokenizer: ActionTokenizerSpec = ActionTokenizerSpec(fit=FastFitSpec())
    """How a chunk of actions becomes tokens: fit, or path."""
    prompt: str | None = None
    """The prompt where the contract has no text; null for a contract that has one."""
    max_tokens: int = Field(default=250, ge=1)
    """Tokens of prompt, state and actions together; what is longer is cut at its end. As published: 180 for one arm of
    seven joints, 250 for two."""
    max_action_tokens: int = Field(default=256, ge=1)
    """Tokens that are decoded at most; a chunk that has not ended by then is malformed."""
    advantage_in_prompt: bool = False
    """Whether the prompt tells how good the actions are that follow: in training what `algo.advantage` of mode
    condition finds, `Advantage: positive` when acting."""
    n_obs_steps: Literal[1] = 1
    """The policy sees the newest observation alone."""
    horizon: int = Field(default=32, ge=1)
    """Actions of a chunk."""
    n_action_steps: int = Field(default=32, ge=1)
    """Actions of the chunk that are executed before the next query."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the distribution that a token is drawn from; 0 takes the likeliest."""
    decode_positions: Literal["trained", "openpi"] = "trained"
    """Where decoded tokens stand: where training had them or, as openpi's sampler has it, one place further on."""
    hold_action: tuple[float, ...] | None = None
    """What a robot is told, in the contract's units, for a chunk whose tokens are no actions; null tells it nothing:
    the request fails by name, and an episode of an evaluation ends there as a failure. Counted either way."""
    lora_backbone: LoraSpec | None = None
    """Adapts the backbone instead of training it whole; null has no adaptation."""
    augment: AugmentSpec | None = AugmentSpec()
    """Random changes of the images in training; null makes none."""
    remat: bool = True
    """Compute activations anew in the backward pass: less memory, about a third more time."""

    @property
    def prompt_tokens(self) -> int:
        """L, tokens of a sequence."""
        return self.max_tokens

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if any(side % self.vision.patch for side in self.image_size):
            raise ValueError(
                f"image_size: {list(self.image_size)} is not a multiple of vision.patch = {self.vision.patch}"
            )
        if self.n_action_steps > self.horizon:
            raise ValueError(f"n_action_steps: got {self.n_action_steps}, at most horizon = {self.horizon}")
        check_room(self.tokenizer, self.action_tokenizer)
        return self
