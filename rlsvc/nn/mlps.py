"""Perceptrons side by side: an ensemble as one matrix product a layer, with layer norm and Mish (arXiv:2310.16828).

Letters: E nets, N rows, D features, H W height and width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.nn.layers import dropout, mish


def padded(width: int) -> int:
    """The next multiple of 8, which matrix units want; what is added is zeros."""
    return -(-width // 8) * 8


def simnorm(x: Float[Array, "*n d"], group: int) -> Float[Array, "*n d"]:
    """Softmax over groups of the last axis (arXiv:2204.00616)."""
    return jax.nn.softmax(x.reshape(*x.shape[:-1], x.shape[-1] // group, group), axis=-1).reshape(x.shape)


class Layer(NamedTuple):
    """One layer of E nets.

    Attributes:
        kernel: [d, E, o] in a first layer, [E, d, o] in the others.
        bias: [E, 1, o].
        scale: of the norm, [E, 1, o]; None in a layer without.
        offset: likewise.
    """

    kernel: Array
    bias: Array
    scale: Array | None
    offset: Array | None

    def __call__(self, x: Float[Array, "*e n d"], dtype: DTypeLike) -> Float[Array, "e n o"]:
        """Before the norm. `x`: [n, d], shared by the nets, goes into a first layer."""
        product = "ni,ieo->eno" if x.ndim == 2 else "eni,eio->eno"
        return jnp.einsum(product, x.astype(dtype), self.kernel.astype(dtype)) + self.bias.astype(dtype)

    def norm(self, x: Float[Array, "e n o"]) -> Float[Array, "e n o"]:
        """Layer norm over the last axis in one pass, float32."""
        assert self.scale is not None
        assert self.offset is not None
        x = x.astype(jnp.float32)
        mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0.0) + 1e-5) * self.scale
        return (x - mean) * scale + self.offset


def hidden(
    layers: Sequence[Layer],
    x: Float[Array, "n d"],
    dtype: DTypeLike,
    drop: tuple[float, Bool[Array, " e"], Key[Array, ""]] | None = None,
) -> Float[Array, "e n o"]:
    """Layers with norm and Mish. `drop`: rate, which nets and key of a dropout in the first layer, before its norm."""
    x = jnp.pad(x, ((0, 0), (0, layers[0].kernel.shape[0] - x.shape[1])))
    for layer in layers:
        y = layer(x, dtype)
        if drop is not None and x.ndim == 2:
            rate, which, key = drop
            y = jnp.where(which[:, None, None], dropout(y, rate, key), y)
        x = mish(layer.norm(y)).astype(dtype)
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
        normed = [*widths, d_out] if latent else list(widths)
        ins, outs = [padded(d_in), *widths], [*widths, d_out if latent else padded(d_out)]
        kernels = []
        for i, (m, n) in enumerate(zip(ins, outs, strict=True)):
            real = (d_in if i == 0 else m, d_out if i == len(widths) else n)
            std = 0.0 if zero_last and i == len(widths) else 0.02
            kernel = std * jax.random.normal(rngs.params(), (nets, *real))
            kernel = jnp.pad(kernel, ((0, 0), (0, m - real[0]), (0, n - real[1])))
            kernels.append(kernel if i else kernel.swapaxes(0, 1))
        self.kernels = nnx.List([nnx.Param(kernel) for kernel in kernels])
        self.biases = nnx.List([nnx.Param(jnp.zeros((nets, 1, n))) for n in outs])
        self.scales = nnx.List([nnx.Param(jnp.ones((nets, 1, n))) for n in normed])
        self.offsets = nnx.List([nnx.Param(jnp.zeros((nets, 1, n))) for n in normed])
        self.d_out, self.latent, self.simnorm_dim, self.dtype = d_out, latent, simnorm_dim, dtype

    def layers(self, which: slice | Int[Array, " e"] = slice(None)) -> list[Layer]:
        """Weights of all nets, or of these."""
        normed = len(self.scales)
        return [
            Layer(
                self.kernels[i][...][which] if i else self.kernels[i][...][:, which],
                self.biases[i][...][which],
                self.scales[i][...][which] if i < normed else None,
                self.offsets[i][...][which] if i < normed else None,
            )
            for i in range(len(self.kernels))
        ]

    def output(self, layer: Layer, x: Float[Array, "e n d"]) -> Float[Array, "e n o"]:
        """The last layer, float32."""
        y = layer(x, self.dtype)[..., : self.d_out].astype(jnp.float32)
        if not self.latent:
            return y
        y = layer.norm(y)
        return simnorm(y, self.simnorm_dim) if self.simnorm_dim else mish(y)

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
