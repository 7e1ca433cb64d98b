"""Images on the device: resizing with bars, and random changes in training.

Letters: B batch, H W height and width, C channels.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from rlsvc.spec.pi0 import AugmentSpec


def resize_with_pad(image: Float[Array, "b h w c"], size: tuple[int, int]) -> Float[Array, "b h2 w2 c"]:
    """Bilinear (and smoothed where it shrinks), the shape kept, in the middle of black bars. `image`: in [-1, 1]."""
    b, h, w, c = image.shape
    if (h, w) == size:
        return image
    ratio = max(h / size[0], w / size[1])
    inner = (int(h / ratio), int(w / ratio))
    small = jnp.clip(jax.image.resize(image, (b, *inner, c), "linear"), -1, 1)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    rows, columns = (top, size[0] - inner[0] - top), (left, size[1] - inner[1] - left)
    return jnp.pad(small, ((0, 0), rows, columns, (0, 0)), constant_values=-1.0)


def augment_image(
    image: Float[Array, "b h w c"], spec: AugmentSpec, moves: bool, key: Key[Array, ""]
) -> Float[Array, "b h w c"]:
    """Crop, rotation, brightness, contrast and saturation, each drawn anew for every image in [-1, 1].

    `moves`: whether to crop and rotate; colours change in any case.
    """
    move_key, color_key = jax.random.split(key)
    keys = jax.random.split(move_key, image.shape[0])
    if moves and (spec.crop < 1 or spec.rotate > 0):
        image = jax.vmap(lambda x, k: _move(x, spec, k))(image, keys)
    if spec.brightness or spec.contrast or spec.saturation:
        image = jax.vmap(lambda x, k: _color(x, spec, k))(image, jax.random.split(color_key, image.shape[0]))
    return image


def _move(image: Float[Array, "h w c"], spec: AugmentSpec, key: Key[Array, ""]) -> Float[Array, "h w c"]:
    """A crop of the given share, enlarged to the whole and turned about its centre, in one bilinear look-up."""
    h, w, c = image.shape
    angle_key, top_key, left_key = jax.random.split(key, 3)
    limit = math.radians(spec.rotate)
    angle = jax.random.uniform(angle_key, minval=-limit, maxval=limit)
    top, left = (jax.random.uniform(k) * (1 - spec.crop) * n for k, n in ((top_key, h), (left_key, w)))
    y, x = jnp.meshgrid(jnp.arange(h) - (h - 1) / 2, jnp.arange(w) - (w - 1) / 2, indexing="ij")
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    rows = (y * cos - x * sin) * spec.crop + (h - 1) / 2 * spec.crop + top
    columns = (y * sin + x * cos) * spec.crop + (w - 1) / 2 * spec.crop + left
    at = (rows, columns)
    layers = [
        jax.scipy.ndimage.map_coordinates(image[..., i], at, order=1, mode="constant", cval=-1.0) for i in range(c)
    ]
    return jnp.stack(layers, axis=-1)


def _color(image: Float[Array, "h w c"], spec: AugmentSpec, key: Key[Array, ""]) -> Float[Array, "h w c"]:
    """Brightness, contrast and saturation in this order, by factors in [1 - x, 1 + x]."""
    amounts = (spec.brightness, spec.contrast, spec.saturation)
    bright, contrast, saturation = (
        jax.random.uniform(k, minval=1 - a, maxval=1 + a)
        for k, a in zip(jax.random.split(key, 3), amounts, strict=True)
    )
    x = (image + 1) / 2 * bright
    middle = x.mean()
    x = (x - middle) * contrast + middle
    gray = x.mean(-1, keepdims=True)
    return jnp.clip((x - gray) * saturation + gray, 0, 1) * 2 - 1
