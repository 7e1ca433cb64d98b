"""PaliGemma (arXiv:2407.07726), which all of the PI0 family begin with: images and text become tokens.

A SigLIP tower reads images, an embedding reads text, and a Gemma backbone reads both.

Letters: B batch, C cameras, S tokens of an image, L tokens of text, P tokens of images and text, V vocabulary,
W width of the backbone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.nn.gemma import Expert
from rlsvc.nn.images import augment_image, resize_with_pad
from rlsvc.nn.siglip import Siglip
from rlsvc.policies.api import PROMPT_MASK, PROMPT_TOKENS
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.value_function import ValueVlmSpec

VisionLanguageSpec = Pi0Spec | Pi0FastSpec | ValueVlmSpec

CAMERA_MASK = "_mask"
"""A bool of the contract with a camera's name and this says whether that camera's image is there."""


COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""For acting: cuBLAS reads a layer out of stacked weights in place, Triton has it copied first."""
NARROW = r"(backbone|expert|vision)\.layers\.(qkv|out|gate_up|up|down)|embedding|vision\.head"
"""Weights that acting reads in the compute dtype alone: those of the products."""


class VisionLanguageNet(nnx.Module):
    """Vision tower, embedding and backbone."""

    def __init__(self, spec: VisionLanguageSpec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec, self.dtype = spec, dtype
        self.cameras = cameras(spec, contract)
        self.vision = Siglip(spec.vision, spec.image_size, spec.backbone.width, dtype=dtype, rngs=rngs)
        scale = spec.backbone.width**-0.5
        self.embedding = nnx.Param(
            jax.random.normal(rngs.params(), (spec.tokenizer.vocab_size, spec.backbone.width)) * scale
        )
        self.backbone = Expert(spec.backbone, lora=spec.lora_backbone, dtype=dtype, rngs=rngs)

    def embed(self, tokens: Int[Array, "b l"]) -> Float[Array, "b l w"]:
        """Text."""
        return self.embedding[...][tokens].astype(self.dtype) * jnp.asarray(self.spec.backbone.width**0.5, self.dtype)

    def logits(self, x: Float[Array, "b l w"]) -> Float[Array, "b l v"]:
        """Of the token after each, float32, by the embedding."""
        table = self.embedding[...].astype(self.dtype)
        return jnp.einsum("blw,vw->blv", x, table, preferred_element_type=jnp.float32)

    def prefix(
        self, observation: dict[str, Array], key: Key[Array, ""] | None
    ) -> tuple[Float[Array, "b p w"], Bool[Array, "b p"]]:
        """Tokens of images and text, and which of them are there. `key`: changes the images, in training."""
        b = observation[PROMPT_TOKENS].shape[0]
        images = []
        for i, name in enumerate(self.cameras):
            image = resize_with_pad(observation[name], self.spec.image_size)
            if key is not None and self.spec.augment is not None:
                moves = self.spec.augment.wrist not in name
                image = augment_image(image, self.spec.augment, moves, jax.random.fold_in(key, i))
            images.append(image)
        tokens, valid = [], []
        if images:
            # All cameras in one call of the tower, those of a row beside each other: rows may lie on several devices.
            joined = jnp.stack(images, axis=1).reshape(-1, *images[0].shape[1:])
            out = self.vision(joined, remat=self.spec.remat and key is not None, unroll=self._unroll)
            tokens.append(out.reshape(b, -1, out.shape[-1]))
            there = jnp.stack([self._there(observation, name, b) for name in self.cameras], axis=1)
            valid.append(jnp.repeat(there, out.shape[1], axis=1))
        tokens.append(self.embed(observation[PROMPT_TOKENS]))
        valid.append(observation[PROMPT_MASK])
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(valid, axis=1)

    @staticmethod
    def _there(observation: dict[str, Array], camera: str, b: int) -> Bool[Array, " b"]:
        mask = observation.get(camera + CAMERA_MASK)
        return jnp.ones(b, bool) if mask is None else mask.reshape(b) > 0.5

    @property
    def _unroll(self) -> int:
        """Layers in one, of the tower and of whatever acts: all on a GPU, where a loop's own kernels take time."""
        spec = self.spec
        return max(spec.backbone.depth, spec.vision.depth) if jax.default_backend() == "gpu" else 1


def cross_entropy(
    logits: Float[Array, "b l v"], wanted: Int[Array, "b l"], learn: Bool[Array, "b l"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross-entropy, and share of likeliest tokens that are right: means over a row's tokens to learn, then rows."""
    count = jnp.maximum(learn.sum(1), 1)

    def mean(value: Float[Array, "b l"]) -> Float[Array, ""]:
        return (jnp.where(learn, value, 0.0).sum(1) / count).mean()

    loss = mean(optax.softmax_cross_entropy_with_integer_labels(logits, wanted))
    return loss, mean((logits.argmax(-1) == wanted).astype(jnp.float32))


def cameras(spec: VisionLanguageSpec, contract: Contract) -> tuple[str, ...]:
    """Names of the images in the order in which they are read."""
    return spec.cameras or tuple(key for key, feature in contract.observation.items() if feature.is_image)


def vectors(contract: Contract) -> tuple[str, ...]:
    """Names of the features that are the state, in alphabetical order."""
    images = {key for key, feature in contract.observation.items() if feature.is_image}
    return tuple(
        sorted(
            key
            for key, feature in contract.observation.items()
            if key not in images and feature.dtype != TEXT and key.removesuffix(CAMERA_MASK) not in images
        )
    )


def state_width(contract: Contract) -> int:
    """Numbers of the state."""
    return sum(int(np.prod(contract.observation[key].shape)) for key in vectors(contract))


def check_contract(spec: VisionLanguageSpec, contract: Contract) -> None:
    """Refuse a contract that a policy, or value function, of this family cannot be for.

    Raises:
        ContractError: cameras that are not there, an action of another kind, no prompt, or step counts that differ.
    """
    images = [key for key, feature in contract.observation.items() if feature.is_image]
    for name in spec.cameras or ():
        if name not in images:
            raise ContractError(
                f"policy.cameras names '{name}', which is no image of the contract; it has: {', '.join(images)}"
            )
    if spec.cameras is not None and len(spec.cameras) != len(images):
        left = next(name for name in images if name not in spec.cameras)
        raise ContractError(
            f"policy.cameras has {len(spec.cameras)} cameras, the contract {len(images)}: '{left}' is not named; "
            "name it, or leave it out of data.observation"
        )
    for name in images:
        if contract.observation[name].shape[-1] != 3:
            raise ContractError(
                f"observation '{name}': got {contract.observation[name].shape[-1]} channels, expected 3"
            )
    texts = [key for key, feature in contract.observation.items() if feature.dtype == TEXT]
    if len(texts) != (spec.prompt is None):
        raise ContractError(
            f"{spec.name} needs one prompt: the contract has {len(texts)} texts "
            f"({', '.join(texts) or 'none'}) and policy.prompt is {'not ' if spec.prompt is None else ''}set; add task "
            "to data.observation or set policy.prompt, not both"
        )
    if spec.n_action_steps and (len(contract.action.shape) != 1 or not contract.action.dtype.startswith("float")):
        raise ContractError(
            f"action: got {contract.action.dtype} of shape {contract.action.shape}; the {spec.name} policy gives one "
            "vector of floats"
        )
    if (contract.n_obs_steps, contract.action_horizon) != (spec.n_obs_steps, spec.n_action_steps):
        raise ContractError(
            f"contract has n_obs_steps = {contract.n_obs_steps}, action_horizon = {contract.action_horizon}; "
            f"the policy has n_obs_steps = {spec.n_obs_steps}, n_action_steps = {spec.n_action_steps}"
        )


def newest(observation: dict[str, Array]) -> dict[str, Array]:
    """The last of the observation steps, without their axis."""
    return {key: x[:, -1] for key, x in observation.items()}
