"""pi0 and pi0.5 (rlsvc/policies/pi0.py), and the sizes of their transformers. Defaults are the published ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlsvc.core.errors import nearest
from rlsvc.spec.base import Spec
from rlsvc.spec.tokenizer import ActionTokenizerSpec, TokenizerSpec, check_room


class GemmaSpec(Spec):
    """A Gemma transformer (arXiv:2403.08295) with multi-query attention."""

    width: int = Field(ge=2)
    """Of a token."""
    depth: int = Field(ge=1)
    """Layers."""
    mlp_dim: int = Field(ge=1)
    """Hidden width of the gated feed-forward."""
    heads: int = Field(ge=1)
    """Of the queries."""
    kv_heads: int = Field(default=1, ge=1)
    """Of keys and values; divides `heads`."""
    head_dim: int = Field(ge=2)
    """Of a head, even."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads = {self.heads}")
        if self.head_dim % 2 or self.width % 2:
            raise ValueError(f"width and head_dim: got {self.width} and {self.head_dim}, expected even numbers")
        return self


class SiglipSpec(Spec):
    """A SigLIP vision transformer (arXiv:2303.15343), without a pooling head."""

    width: int = Field(ge=1)
    """Of a patch's token."""
    depth: int = Field(ge=1)
    """Layers."""
    mlp_dim: int = Field(ge=1)
    """Hidden width of the feed-forward."""
    heads: int = Field(ge=1)
    """Of the attention; divides `width`."""
    patch: int = Field(ge=1)
    """Height and width of a patch in pixels."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide width = {self.width}")
        return self


GEMMA_SIZES: dict[str, GemmaSpec] = {
    "gemma_2b": GemmaSpec(width=2048, depth=18, mlp_dim=16_384, heads=8, head_dim=256),
    "gemma_300m": GemmaSpec(width=1024, depth=18, mlp_dim=4096, heads=8, head_dim=256),
    "dummy": GemmaSpec(width=64, depth=4, mlp_dim=128, heads=8, head_dim=16),
}
"""Gemma transformers by name. The two experts of a policy share depth, heads and head_dim."""

SIGLIP_SIZES: dict[str, SiglipSpec] = {
    "So400m/14": SiglipSpec(width=1152, depth=27, mlp_dim=4304, heads=16, patch=14),
    "L/14": SiglipSpec(width=1024, depth=24, mlp_dim=4096, heads=16, patch=14),
    "B/16": SiglipSpec(width=768, depth=12, mlp_dim=3072, heads=12, patch=16),
    "S/16": SiglipSpec(width=384, depth=12, mlp_dim=1536, heads=6, patch=16),
    "Ti/16": SiglipSpec(width=192, depth=12, mlp_dim=768, heads=3, patch=16),
    "dummy": SiglipSpec(width=32, depth=2, mlp_dim=128, heads=2, patch=14),
}
"""Vision transformers by name (arXiv:2106.04560, table 2)."""


def _named(table: dict[str, Any], what: str) -> BeforeValidator:
    def resolve(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in table:
            guess = nearest(value, table)
            hint = f"; did you mean '{guess}'?" if guess else ""
            raise ValueError(f"no {what} is called '{value}'{hint} There are: {', '.join(table)}; or give its sizes")
        return table[value]

    return BeforeValidator(resolve)


Gemma = Annotated[GemmaSpec, _named(GEMMA_SIZES, "Gemma transformer")]
Siglip = Annotated[SiglipSpec, _named(SIGLIP_SIZES, "vision transformer")]
"""A size by its name, or written out."""


class LoraSpec(Spec):
    """Low-rank adaptation (arXiv:2106.09685) of the products of a transformer's layers."""

    rank: int = Field(default=16, ge=1)
    """Of the update of each matrix."""
    alpha: float = Field(default=16.0, gt=0)
    """The update is scaled by alpha / rank."""
    targets: tuple[Literal["attention", "feed_forward"], ...] = ("attention", "feed_forward")
    """Which matrices of each layer are adapted."""


class AugmentSpec(Spec):
    """Random changes of the images in training, one draw an image."""

    crop: float = Field(default=0.95, gt=0, le=1)
    """Share of height and width that a random crop keeps, which is then resized to the whole; not of wrist cameras."""
    rotate: float = Field(default=5.0, ge=0)
    """Largest rotation in degrees, either way; not of wrist cameras."""
    brightness: float = Field(default=0.3, ge=0, le=1)
    """Largest change of the brightness, as a factor."""
    contrast: float = Field(default=0.4, ge=0, le=1)
    """Likewise."""
    saturation: float = Field(default=0.5, ge=0, le=1)
    """Likewise."""
    wrist: str = "wrist"
    """Cameras with this in their name are not cropped or rotated, since they move with the hand."""


class RealTimeSpec(Spec):
    """Real-time chunking (arXiv:2506.07339): a new chunk is drawn so that it goes on from the one under way."""

    delay: int = Field(default=0, ge=0)
    """Actions that are executed while the new chunk is computed, so that it begins with them."""
    max_guidance: float = Field(default=5.0, gt=0)
    """Largest weight of the correction towards the old chunk."""


class InsulateSpec(Spec):
    """Knowledge insulation (arXiv:2505.23705), in training: the backbone learns from FAST tokens, not from the flow."""

    action_tokenizer: ActionTokenizerSpec
    """How a chunk of actions becomes tokens: fit, or path. A bundle keeps it, for a later run's `path`."""
    max_action_tokens: int = Field(default=256, ge=1)
    """Tokens of a chunk that are learnt at most; the rest is cut."""
    alpha: float = Field(default=1.0, gt=0)
    """Weight of the flow's loss beside that of the tokens. Insulated losses do not share weights, so that 1 does."""


class Pi0Spec(Spec):
    """Flow matching over a chunk of actions by a vision-language model with an action expert."""

    name: Literal["pi0"] = "pi0"
    variant: Literal["pi0", "pi05"] = "pi0"
    """pi0 gives the expert a token of the state and mixes time into the actions; pi05 tells the state in the prompt and
    the time to the expert's norms."""
    vision: Siglip = SIGLIP_SIZES["So400m/14"]
    """Vision transformer: a name (So400m/14, L/14, B/16, S/16, Ti/16, dummy) or its sizes."""
    backbone: Gemma = GEMMA_SIZES["gemma_2b"]
    """Transformer over images and text: a name (gemma_2b, gemma_300m, dummy) or its sizes."""
    expert: Gemma = GEMMA_SIZES["gemma_300m"]
    """Transformer over state and actions; shares the backbone's depth, heads and head_dim."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width that every image is brought to, its shape kept, with black bars; a multiple of the patch."""
    cameras: tuple[str, ...] | None = None
    """Images of the contract in the order in which they are read, which matters for published weights (base, left
    wrist, right wrist); null takes them in the contract's order."""
    tokenizer: TokenizerSpec
    """How the prompt becomes tokens."""
    prompt: str | None = None
    """The prompt where the contract has no text; null for a contract that has one."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a prompt; longer ones are cut. null is 48 for pi0 and 200 for pi05, as published."""
    state_in_prompt: bool | None = None
    """Whether the state is told in the prompt, in 256 steps from -1 to 1; null is so for pi05 and not for pi0."""
    advantage_in_prompt: bool = False
    """Whether the prompt tells how good the actions are that follow: in training what `algo.advantage` of mode
    condition finds, `Advantage: positive` when acting."""
    n_obs_steps: Literal[1] = 1
    """The policy sees the newest observation alone."""
    horizon: int = Field(default=50, ge=1)
    """Actions that are sampled together."""
    n_action_steps: int = Field(default=50, ge=1)
    """Actions of the horizon that are executed before the next query."""
    action_dim: int | None = Field(default=32, ge=1)
    """Width that states and actions are padded to with zeros, so that weights fit several robots; null takes the
    contract's own widths."""
    sample_steps: int = Field(default=10, ge=1)
    """Euler steps from noise to actions."""
    real_time: RealTimeSpec | None = None
    """Draws each chunk so that it goes on from the one before it; null draws it from the observation alone."""
    insulate: InsulateSpec | None = None
    """Keeps the flow's gradient from the backbone, which learns from FAST tokens instead; of pi05. null lets the flow
    teach all."""
    lora_backbone: LoraSpec | None = None
    """Adapts the backbone instead of training it whole; null has no adaptation."""
    lora_expert: LoraSpec | None = None
    """Likewise for the expert."""
    augment: AugmentSpec | None = AugmentSpec()
    """Random changes of the images in training; null makes none."""
    remat: bool = True
    """Compute activations anew in the backward pass: less memory, about a third more time."""

    @property
    def prompt_tokens(self) -> int:
        """L, tokens of a prompt."""
        return self.max_tokens or (200 if self.variant == "pi05" else 48)

    @property
    def tells_state(self) -> bool:
        """Whether the state is a part of the prompt."""
        return self.variant == "pi05" if self.state_in_prompt is None else self.state_in_prompt

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field in ("depth", "heads", "kv_heads", "head_dim"):
            ours, theirs = getattr(self.backbone, field), getattr(self.expert, field)
            if ours != theirs:
                raise ValueError(f"expert.{field}: got {theirs}, the backbone has {ours}; they share their attention")
        if any(side % self.vision.patch for side in self.image_size):
            raise ValueError(
                f"image_size: {list(self.image_size)} is not a multiple of vision.patch = {self.vision.patch}"
            )
        if self.n_action_steps > self.horizon:
            raise ValueError(f"n_action_steps: got {self.n_action_steps}, at most horizon = {self.horizon}")
        if self.real_time is not None and self.real_time.delay + self.n_action_steps >= self.horizon:
            raise ValueError(
                f"real_time: delay + n_action_steps = {self.real_time.delay + self.n_action_steps} leaves nothing of a "
                f"chunk of horizon = {self.horizon} to go on from"
            )
        if self.variant == "pi0" and self.state_in_prompt:
            raise ValueError("state_in_prompt: pi0 has a token for the state; use variant=pi05")
        if self.insulate is not None:
            if self.variant == "pi0":
                raise ValueError("insulate: pi0 is trained as a whole; use variant=pi05")
            check_room(self.tokenizer, self.insulate.action_tokenizer)
        return self
