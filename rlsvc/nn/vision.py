"""Image encoder: ResNet-18 (arXiv:1512.03385) with group norm and spatial softmax (arXiv:1504.00702).

Letters: B batch, H W height and width, C channels, K keypoints.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError
from rlsvc.nn.layers import GroupNorm, Linear
from rlsvc.spec.diffusion import VisionSpec

SMALLEST = 33
"""Pixels a side from which the encoder's last map has two places a side; of one place keypoints say nothing."""


def check_images(spec: VisionSpec, contract: Contract) -> None:
    """Refuse images that `ImageEncoder` cannot see anything in.

    Raises:
        ContractError: an image smaller than the crop, or too small for the encoder; names it.
    """
    for key, feature in contract.observation.items():
        if not feature.is_image:
            continue
        size, crop = feature.shape[:2], spec.crop
        if crop and (size[0] < crop[0] or size[1] < crop[1]):
            raise ContractError(
                f"observation '{key}' is {size[0]}x{size[1]}, smaller than policy.vision.crop = {list(crop)}"
            )
        seen = crop or size
        if min(seen) < SMALLEST:
            larger = "larger images, or a larger policy.vision.crop" if crop else "larger images"
            raise ContractError(
                f"observation '{key}': the encoder gets {seen[0]}x{seen[1]} pixels, which it halves five times; "
                f"expected {SMALLEST} or more a side: {larger}"
            )


class ResNetBlock(nnx.Module):
    """Two 3x3 convolutions with group norm; the second's input skips over both."""

    def __init__(self, c_in: int, c_out: int, stride: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        kw = {"use_bias": False, "dtype": dtype, "rngs": rngs}
        self.conv1 = nnx.Conv(c_in, c_out, (3, 3), stride, padding=1, **kw)
        self.norm1 = GroupNorm(c_out, max(c_out // 16, 1))
        self.conv2 = nnx.Conv(c_out, c_out, (3, 3), padding=1, **kw)
        self.norm2 = GroupNorm(c_out, max(c_out // 16, 1))
        self.skip = nnx.Conv(c_in, c_out, (1, 1), stride, padding=0, **kw) if stride > 1 or c_in != c_out else None
        self.skip_norm = GroupNorm(c_out, max(c_out // 16, 1)) if self.skip is not None else None

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        """ReLU after the sum."""
        y = self.norm2(self.conv2(jax.nn.relu(self.norm1(self.conv1(x)))))
        if self.skip is not None and self.skip_norm is not None:
            x = self.skip_norm(self.skip(x))
        return jax.nn.relu(x + y)


def spatial_softmax(x: Float[Array, "b h w k"]) -> Float[Array, "b 2*k"]:
    """Expected position of each channel's activation, (x, y) in [-1, 1], float32."""
    b, h, w, k = x.shape
    weight = jax.nn.softmax(x.astype(jnp.float32).reshape(b, h * w, k), axis=1)
    ys, xs = jnp.meshgrid(jnp.linspace(-1, 1, h), jnp.linspace(-1, 1, w), indexing="ij")
    grid = jnp.stack([xs.reshape(h * w), ys.reshape(h * w)])
    return jnp.einsum("bnk,gn->bkg", weight, grid).reshape(b, 2 * k)


class ImageEncoder(nnx.Module):
    """One camera's image to 2 K features."""

    def __init__(self, channels: int, spec: VisionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        w = spec.width
        self.stem = nnx.Conv(channels, w, (7, 7), 2, padding=3, use_bias=False, dtype=dtype, rngs=rngs)
        self.stem_norm = GroupNorm(w, max(w // 16, 1))
        blocks, c_in = [], w
        for stage in range(4):
            for i in range(2):
                blocks.append(ResNetBlock(c_in, w * 2**stage, 2 if stage and not i else 1, dtype=dtype, rngs=rngs))
                c_in = w * 2**stage
        self.blocks = nnx.List(blocks)
        self.to_keypoints = nnx.Conv(c_in, spec.keypoints, (1, 1), dtype=dtype, rngs=rngs)
        self.out = Linear(2 * spec.keypoints, 2 * spec.keypoints, dtype=dtype, rngs=rngs)

    def __call__(self, image: Float[Array, "b h w c"]) -> Float[Array, "b f"]:
        """`image`: in [-1, 1]."""
        x = jax.nn.relu(self.stem_norm(self.stem(image)))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # pyright: ignore[reportArgumentType]
        for block in self.blocks:
            x = block(x)
        return self.out(spatial_softmax(self.to_keypoints(x)))


def augment_window(
    image: Float[Array, "b t h w c"], spec: VisionSpec, key: Key[Array, ""] | None
) -> Float[Array, "b t h2 w2 c"]:
    """Random shift, crop and colour of images in [-1, 1], one draw a window; without a key the centre crop alone."""
    b, _, h, w, _ = image.shape
    crop = spec.crop or (h, w)
    room = (h - crop[0], w - crop[1])
    if key is None:
        top, left = room[0] // 2, room[1] // 2
        return image[:, :, top : top + crop[0], left : left + crop[1]]
    place_key, color_key = jax.random.split(key)
    pad = spec.shift
    if pad:
        image = jnp.pad(image, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")
    limits = jnp.asarray([room[0] + 2 * pad + 1, room[1] + 2 * pad + 1])
    corner = jax.random.randint(place_key, (b, 2), 0, jnp.broadcast_to(limits, (b, 2)))
    cut = jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (0, at[0], at[1], 0), (x.shape[0], *crop, x.shape[-1])))
    return _color(cut(image, corner), spec, color_key)


def _color(image: Float[Array, "b t h w c"], spec: VisionSpec, key: Key[Array, ""]) -> Float[Array, "b t h w c"]:
    """Brightness, contrast and saturation, in this order, each by a factor in [1 - x, 1 + x] drawn for each window."""
    if not (spec.brightness or spec.contrast or spec.saturation):
        return image
    shape = (image.shape[0], 1, 1, 1, 1)
    keys = jax.random.split(key, 3)
    amounts = (spec.brightness, spec.contrast, spec.saturation)
    bright, contrast, saturation = (
        jax.random.uniform(k, shape, minval=1 - a, maxval=1 + a) for k, a in zip(keys, amounts, strict=True)
    )
    x = (image + 1) / 2 * bright
    gray = x.mean(-1, keepdims=True)
    x = (x - gray.mean((2, 3), keepdims=True)) * contrast + gray.mean((2, 3), keepdims=True)
    gray = x.mean(-1, keepdims=True)
    return jnp.clip((x - gray) * saturation + gray, 0, 1) * 2 - 1
