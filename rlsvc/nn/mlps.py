"""Perceptrons side by side: an ensemble as one matrix product a layer, with layer norm and Mish (arXiv:2310.16828).

Letters: E nets, N rows, D features, H W height and width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.nn.layers import dropout, mish


def padded(width: int, multiple: int) -> int:
    """The next multiple, which matrix units want; what is added is zeros."""
    return -(-width // multiple) * multiple


def simnorm(x: Float[Array, "*n d"], group: int) -> Float[Array, "*n d"]:
    """Softmax over groups of the last axis (arXiv:2204.00616)."""
    return jax.nn.softmax(x.reshape(*x.shape[:-1], x.shape[-1] // group, group), axis=-1).reshape(x.shape)


def _normed(
    y: Float[Array, "e n o"], affine: Float[Array, "e 3 o"], gain: Float[Array, "e n o"] | None, group: int | None
) -> Float[Array, "e n o"]:
    """Bias, layer norm, and Mish or SimNorm: what follows a matrix product, float32.

    Written for few kernels on a GPU, one forwards and four backwards: the features are held to be contiguous, or XLA
    may sum over them in passes of their own; backwards everything but the input is computed again; and the three sums
    over rows are one.

    Args:
        y: the product.
        affine: rows bias, scale and offset.
        gain: what the biased product is multiplied with (dropout); None for 1.
        group: of SimNorm; None for Mish.
    """
    normal, _ = _standardized(with_layout_constraint(y, Layout((0, 1, 2))), affine, gain)
    return _activated(normal * affine[:, 1:2] + affine[:, 2:3], group)


def _standardized(y: Array, affine: Array, gain: Array | None) -> tuple[Array, Array]:
    """Zero mean and unit variance over the last axis, and the factor that made it so."""
    x = y.astype(jnp.float32) + affine[:, :1]
    x = x if gain is None else x * gain
    x = x - x.mean(-1, keepdims=True)
    factor = jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * factor, factor


def _activated(u: Array, group: int | None) -> Array:
    return simnorm(u, group) if group else mish(u)


def _normed_forward(y: Array, affine: Array, gain: Array | None, group: int | None) -> tuple[Array, tuple[Any, ...]]:
    y = with_layout_constraint(y, Layout((0, 1, 2)))
    return _normed(y, affine, gain, group), (y, affine, gain)


def _normed_backward(group: int | None, saved: tuple[Any, ...], g: Array) -> tuple[Array, Array, Array | None]:
    y, affine, gain = saved
    # A barrier, or XLA would keep parts of the forward pass instead, in kernels of their own.
    normal, factor = _standardized(jax.lax.optimization_barrier(y), affine, gain)
    u = normal * affine[:, 1:2] + affine[:, 2:3]
    if group:
        z = simnorm(u, group).reshape(*u.shape[:-1], u.shape[-1] // group, group)
        g = g.astype(jnp.float32).reshape(z.shape)
        gu = (z * (g - (z * g).sum(-1, keepdims=True))).reshape(u.shape)
    else:
        t = jnp.tanh(jax.nn.softplus(u))
        gu = g * (t + u * jax.nn.sigmoid(u) * (1 - t * t))
    gx = gu * affine[:, 1:2]
    dy = factor * (gx - gx.mean(-1, keepdims=True) - normal * (gx * normal).mean(-1, keepdims=True))
    dy = dy if gain is None else dy * gain
    sums = jnp.concatenate([dy, gu * normal, gu], axis=-1).sum(1)
    return dy.astype(y.dtype), sums.reshape(affine.shape), None if gain is None else jnp.zeros_like(gain)


normed = jax.custom_vjp(_normed, nondiff_argnums=(3,))
normed.defvjp(_normed_forward, _normed_backward)


class Layer(NamedTuple):
    """One layer of E nets.

    Attributes:
        kernel: [d, E, o] in a first layer, [E, d, o] in the others.
        affine: [E, 3, o] bias, scale and offset; [E, 1, o] the bias alone in a layer without norm.
    """

    kernel: Array
    affine: Array

    def product(self, x: Float[Array, "*e n d"], dtype: DTypeLike) -> Float[Array, "e n o"]:
        """The matrix product alone. `x`: [n, d], shared by the nets, goes into a first layer."""
        x, kernel = x.astype(dtype), self.kernel.astype(dtype)
        # Not einsum, which swaps the operands: then the norm's axis is not the contiguous one.
        if x.ndim == 2:
            return jax.lax.dot_general(x, kernel, (((1,), (0,)), ((), ()))).swapaxes(0, 1)
        return x @ kernel


def hidden(
    layers: Sequence[Layer],
    x: Float[Array, "n d"],
    dtype: DTypeLike,
    drop: tuple[float, Bool[Array, " e"], Key[Array, ""]] | None = None,
) -> Float[Array, "e n o"]:
    """Layers with norm and Mish. `drop`: rate, which nets and key of a dropout in the first layer, before its norm."""
    x = jnp.pad(x, ((0, 0), (0, layers[0].kernel.shape[0] - x.shape[1])))
    for i, layer in enumerate(layers):
        y, gain = layer.product(x, dtype), None
        if drop is not None and i == 0:
            rate, which, key = drop
            gain = jnp.where(which[:, None, None], dropout(jnp.ones(y.shape), rate, key), 1.0)
        x = normed(y, layer.affine, gain, None).astype(dtype)
    return x


class Mlps(nnx.Module):
    """E perceptrons of one shape on the same input: `hidden`, then an affine layer, or one with norm and SimNorm."""

    def __init__(
        self,
        d_in: int,
        widths: Sequence[int],
        d_out: int,
        *,
        nets: int = 1,
        latent: bool = False,
        simnorm_dim: int | None = None,
        zero_last: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """`latent`: the last layer is normalised too, by SimNorm with `simnorm_dim`; `zero_last`: its kernel is 0."""
        ins, outs = [padded(d_in, 32), *widths], [*widths, d_out if latent else padded(d_out, 8)]
        kernels, affines, last = [], [], len(widths)
        for i, (m, n) in enumerate(zip(ins, outs, strict=True)):
            real = (d_in if i == 0 else m, d_out if i == last else n)
            kernel = (0.0 if zero_last and i == last else 0.02) * jax.random.normal(rngs.params(), (nets, *real))
            kernel = jnp.pad(kernel, ((0, 0), (0, m - real[0]), (0, n - real[1])))
            kernels.append(kernel if i else kernel.swapaxes(0, 1))
            start = jnp.array([0.0, 1.0, 0.0] if latent or i < last else [0.0])
            affines.append(jnp.broadcast_to(start[None, :, None], (nets, len(start), n)))
        self.kernels = nnx.List([nnx.Param(kernel) for kernel in kernels])
        self.affines = nnx.List([nnx.Param(affine) for affine in affines])
        self.d_out, self.latent, self.simnorm_dim, self.dtype = d_out, latent, simnorm_dim, dtype

    def layers(self, which: slice | Int[Array, " e"] = slice(None)) -> list[Layer]:
        """Weights of all nets, or of these."""
        first, *others = (kernel[...] for kernel in self.kernels)
        kernels = [first[:, which], *(kernel[which] for kernel in others)]
        return [Layer(kernel, affine[...][which]) for kernel, affine in zip(kernels, self.affines, strict=True)]

    def output(self, layer: Layer, x: Float[Array, "e n d"]) -> Float[Array, "e n o"]:
        """The last layer, float32."""
        y = layer.product(x, self.dtype)
        if self.latent:
            return normed(y, layer.affine, None, self.simnorm_dim)
        return (y.astype(jnp.float32) + layer.affine)[..., : self.d_out]

    def __call__(
        self,
        x: Float[Array, "n d"],
        which: slice | Int[Array, " e"] = slice(None),
        drop: tuple[float, Bool[Array, " e"], Key[Array, ""]] | None = None,
    ) -> Float[Array, "e n o"]:
        """Outputs of all nets, or of these, float32."""
        *layers, last = self.layers(which)
        return self.output(last, hidden(layers, x, self.dtype, drop))


class ConvEncoder(nnx.Module):
    """Four convolutions over an image in [-1, 1], flattened."""

    def __init__(self, channels_in: int, channels: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        shapes = ((channels_in, 7, 2), (channels, 5, 2), (channels, 3, 2), (channels, 3, 1))
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.convs = nnx.List(
            [
                nnx.Conv(c, channels, (k, k), s, padding="VALID", kernel_init=uniform, dtype=dtype, rngs=rngs)
                for c, k, s in shapes
            ]
        )

    def __call__(self, image: Float[Array, "n h w c"]) -> Float[Array, "n f"]:
        """ReLU between the layers."""
        x = image * 0.5
        for i, conv in enumerate(self.convs):
            x = conv(jax.nn.relu(x) if i else x)
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])
