"""Small layers that several nets share.

Letters: B batch, T time, C channels, K kernel width, D width of an embedding.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key


def mish(x: Array) -> Array:
    """Mish: x tanh(softplus(x)) (Misra, arXiv:1908.08681)."""
    return x * jnp.tanh(jax.nn.softplus(x))


def along_last(v: Float[Array, " c"], x: Array) -> Array:
    """A vector over the last axis of x, with x's number of axes, so that no broadcasting happens unseen."""
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def sinusoidal(t: Float[Array, "*n"], dim: int) -> Float[Array, "*n dim"]:
    """Sine and cosine features of a position, wavelengths from 2 pi to 2 pi 10^4 (Vaswani et al., arXiv:1706.03762)."""
    half = dim // 2
    frequencies = jnp.exp(-math.log(10_000.0) * jnp.arange(half) / max(half - 1, 1))
    angle = t[..., None] * frequencies.reshape((1,) * t.ndim + (half,))
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def dropout(x: Array, rate: float, key: Key[Array, ""] | None) -> Array:
    """Zero a share `rate` of the elements and scale the rest up; nothing without a key (when acting)."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


class Linear(nnx.Module):
    """Affine map with PyTorch's default initialisation, which the published hyperparameters were tuned with."""

    def __init__(self, d_in: int, d_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs, bias: bool = True) -> None:
        bound = 1 / math.sqrt(d_in)
        self.kernel = nnx.Param(_uniform(rngs.params(), (d_in, d_out), bound))
        self.bias = nnx.Param(_uniform(rngs.params(), (d_out,), bound)) if bias else None
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*b d_in"]) -> Float[Array, "*b d_out"]:
        """Apply in the compute dtype."""
        y = x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)
        return y if self.bias is None else y + along_last(self.bias[...].astype(self.dtype), y)


class Conv1d(nnx.Module):
    """1-D convolution over time, "same" padding, as one matrix product over K shifted copies.

    At the widths and horizons of an action U-Net a matrix product is faster than the convolution libraries.
    """

    def __init__(self, c_in: int, c_out: int, k: int, *, stride: int = 1, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        bound = 1 / math.sqrt(c_in * k)
        self.kernel = nnx.Param(_uniform(rngs.params(), (k, c_in, c_out), bound))
        self.bias = nnx.Param(_uniform(rngs.params(), (c_out,), bound))
        self.stride, self.dtype = stride, dtype

    def __call__(self, x: Float[Array, "b t c_in"]) -> Float[Array, "b t_out c_out"]:
        """`t_out` is t / stride."""
        k, c_in, c_out = self.kernel.shape
        x = x.astype(self.dtype)
        kernel = self.kernel[...].astype(self.dtype)
        if k > 1:
            t = x.shape[1]
            padded = jnp.pad(x, ((0, 0), (k // 2, k // 2), (0, 0)))
            x = jnp.concatenate([padded[:, i : i + t : self.stride] for i in range(k)], axis=-1)
        return x @ kernel.reshape(k * c_in, c_out) + along_last(self.bias[...].astype(self.dtype), x)


class Upsample1d(nnx.Module):
    """Transposed convolution, kernel 4, stride 2, padding 1: doubles the time axis."""

    def __init__(self, c: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        bound = 1 / math.sqrt(c * 4)
        self.kernel = nnx.Param(_uniform(rngs.params(), (4, c, c), bound))
        self.bias = nnx.Param(_uniform(rngs.params(), (c,), bound))
        self.dtype = dtype

    def __call__(self, x: Float[Array, "b t c"]) -> Float[Array, "b 2*t c"]:
        """Even outputs mix x[i-1], x[i]; odd ones x[i], x[i+1]."""
        x = x.astype(self.dtype)
        b, t, c = x.shape
        kernel = self.kernel[...].astype(self.dtype)
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        after = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
        even = x @ kernel[1] + before @ kernel[3]
        odd = x @ kernel[2] + after @ kernel[0]
        return jnp.stack([even, odd], axis=2).reshape(b, 2 * t, c) + along_last(self.bias[...].astype(self.dtype), x)


class GroupNorm(nnx.Module):
    """Group normalisation over all axes but the first (Wu and He, arXiv:1803.08494); statistics in float32."""

    def __init__(self, c: int, groups: int) -> None:
        self.scale = nnx.Param(jnp.ones((c,)))
        self.bias = nnx.Param(jnp.zeros((c,)))
        self.groups = groups

    def __call__(self, x: Float[Array, "b *t c"]) -> Float[Array, "b *t c"]:
        """Normalise in float32, return x's dtype."""
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        axes = (*range(1, grouped.ndim - 2), grouped.ndim - 1)
        mean = grouped.mean(axes, keepdims=True)
        variance = jnp.maximum((grouped * grouped).mean(axes, keepdims=True) - mean * mean, 0.0)
        normal = ((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return (normal * along_last(self.scale[...], x) + along_last(self.bias[...], x)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis; statistics in float32."""

    def __init__(self, d: int) -> None:
        self.scale = nnx.Param(jnp.ones((d,)))
        self.bias = nnx.Param(jnp.zeros((d,)))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Normalise in float32, return x's dtype."""
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True)
        variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
        normal = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
        return (normal * along_last(self.scale[...], x) + along_last(self.bias[...], x)).astype(x.dtype)


def _uniform(key: Key[Array, ""], shape: tuple[int, ...], bound: float) -> Float[Array, " ..."]:
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
