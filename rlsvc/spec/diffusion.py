"""Diffusion policy (rlsvc/policies/diffusion.py). Defaults are the paper's for PushT (arXiv:2303.04137)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec


class UNet1dSpec(Spec):
    """1-D convolutional U-Net over the action horizon, conditioned by FiLM."""

    name: Literal["unet1d"] = "unet1d"
    down_dims: tuple[int, ...] = Field(default=(256, 512, 1024), min_length=1)
    """Channels of each level; each but the last halves the horizon."""
    kernel_size: int = Field(default=5, ge=1)
    """Of the convolutions, odd."""
    n_groups: int = Field(default=8, ge=1)
    """Of the group norms; must divide every one of down_dims."""
    step_embed_dim: int = Field(default=256, ge=2)
    """Width of the embedding of the diffusion step."""

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        for dim in self.down_dims:
            if dim % self.n_groups:
                raise ValueError(f"down_dims: {dim} is not a multiple of n_groups = {self.n_groups}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size: got {self.kernel_size}, expected an odd number")
        if self.step_embed_dim % 2:
            raise ValueError(f"step_embed_dim: got {self.step_embed_dim}, expected an even number")
        return self


class TransformerSpec(Spec):
    """Transformer decoder over action tokens that attends to observation tokens (section IV-A of the paper)."""

    name: Literal["transformer"] = "transformer"
    layers: int = Field(default=8, ge=1)
    """Decoder blocks."""
    heads: int = Field(default=4, ge=1)
    """Of the attention."""
    embed_dim: int = Field(default=256, ge=2)
    """Width of a token."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """In training, of attention and feed-forward outputs."""
    causal: bool = True
    """Whether an action token sees only itself and those before it."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.embed_dim % self.heads or self.embed_dim % 2:
            raise ValueError(f"embed_dim: {self.embed_dim} is not an even multiple of heads = {self.heads}")
        return self


class VisionSpec(Spec):
    """Image encoder: ResNet-18 with group norm and spatial softmax, trained from scratch, one for each camera."""

    crop: tuple[int, int] | None = (84, 84)
    """Height and width of the crop: random in training, centred otherwise."""
    keypoints: int = Field(default=32, ge=1)
    """Spatial-softmax points; the encoder gives 2 features for each."""
    width: int = Field(default=64, ge=8)
    """Channels of the first stage; 64 is ResNet-18."""
    brightness: float = Field(default=0.0, ge=0, le=1)
    """Strength of the random change in training; 0 does not change it."""
    contrast: float = Field(default=0.0, ge=0, le=1)
    """Likewise."""
    saturation: float = Field(default=0.0, ge=0, le=1)
    """Likewise."""
    shift: int = Field(default=0, ge=0)
    """Largest random shift in pixels, edges repeated (DrQ-v2)."""


class DiffusionSpec(Spec):
    """Denoising diffusion over a chunk of actions."""

    name: Literal["diffusion"] = "diffusion"
    n_obs_steps: int = Field(default=2, ge=1)
    """Observations in a row that the policy sees, the newest included."""
    horizon: int = Field(default=16, ge=1)
    """Actions that are denoised together."""
    n_action_steps: int = Field(default=8, ge=1)
    """Actions of the horizon that are executed before the next query."""
    backbone: Annotated[UNet1dSpec | TransformerSpec, Field(discriminator="name")] = UNet1dSpec()
    """The net that denoises."""
    vision: VisionSpec = VisionSpec()
    """Encoder of every image among the observations; without images not used."""
    target: Literal["epsilon", "v"] = "epsilon"
    """What the net predicts: the noise, or v (arXiv:2202.00512)."""
    train_steps: int = Field(default=100, ge=1)
    """Diffusion steps of the training process (squared-cosine schedule, arXiv:2102.09672)."""
    sample_steps: int = Field(default=10, ge=1)
    """Denoising steps when acting."""
    sampler: Literal["ddim", "ddpm"] = "ddim"
    """ddpm samples with all train_steps and ignores sample_steps."""
    clip_sample: float = Field(default=1.0, gt=0)
    """Denoised actions are clipped to +- this, in normalised units."""
    condition_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of training windows whose observation is replaced by a learned null, for classifier-free guidance."""
    guidance_scale: float = Field(default=1.0, ge=0)
    """1 is plain conditional sampling; other values need condition_dropout > 0."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.n_action_steps > self.horizon - self.n_obs_steps + 1:
            raise ValueError(
                f"n_action_steps: got {self.n_action_steps}, at most horizon - n_obs_steps + 1 = "
                f"{self.horizon - self.n_obs_steps + 1}"
            )
        if self.sample_steps > self.train_steps:
            raise ValueError(f"sample_steps: got {self.sample_steps}, at most train_steps = {self.train_steps}")
        if self.guidance_scale != 1.0 and self.condition_dropout == 0.0:
            raise ValueError(
                "guidance_scale: other than 1 needs condition_dropout > 0, or there is no unconditional model"
            )
        if isinstance(self.backbone, UNet1dSpec):
            factor = 2 ** (len(self.backbone.down_dims) - 1)
            if self.horizon % factor:
                raise ValueError(
                    f"horizon: got {self.horizon}, the U-Net halves it {len(self.backbone.down_dims) - 1} times, "
                    f"so it must be a multiple of {factor}"
                )
        return self
