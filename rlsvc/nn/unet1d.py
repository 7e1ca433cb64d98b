"""1-D U-Net over an action chunk (Chi et al., arXiv:2303.04137, section III-B), conditioned by FiLM (arXiv:1709.07871).

The conditioning of every block is an affine map of the same vector, so all of them are one matrix product. When
sampling it is done once for all denoising steps, which leaves only the convolutions in the loop.

Letters: B batch, H horizon, A action dimensions, C channels, D width of the condition, F all FiLM parameters.
"""

from __future__ import annotations

from itertools import pairwise

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rlsvc.nn.layers import Conv1d, GroupNorm, Linear, Upsample1d, mish, sinusoidal
from rlsvc.spec.diffusion import UNet1dSpec


class ResidualBlock(nnx.Module):
    """Two convolutions with group norm and Mish; scale and shift after the first."""

    def __init__(self, c_in: int, c_out: int, spec: UNet1dSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.conv1 = Conv1d(c_in, c_out, spec.kernel_size, dtype=dtype, rngs=rngs)
        self.norm1 = GroupNorm(c_out, spec.n_groups)
        self.conv2 = Conv1d(c_out, c_out, spec.kernel_size, dtype=dtype, rngs=rngs)
        self.norm2 = GroupNorm(c_out, spec.n_groups)
        self.skip = Conv1d(c_in, c_out, 1, dtype=dtype, rngs=rngs) if c_in != c_out else None

    def __call__(
        self, x: Float[Array, "b h c_in"], scale: Float[Array, "b 1 c_out"], shift: Float[Array, "b 1 c_out"]
    ) -> Float[Array, "b h c_out"]:
        """Residual path plus (possibly widened) input."""
        y = mish(self.norm1(self.conv1(x))) * scale + shift
        y = mish(self.norm2(self.conv2(y)))
        return y + (x if self.skip is None else self.skip(x))


class UNet1d(nnx.Module):
    """Predicts the denoising target of a noisy chunk."""

    def __init__(self, action_dim: int, cond_dim: int, spec: UNet1dSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        kw = {"dtype": dtype, "rngs": rngs}
        dims = (action_dim, *spec.down_dims)
        pairs = list(pairwise(dims))
        step_dim = spec.step_embed_dim
        self.step1 = Linear(step_dim, 4 * step_dim, **kw)
        self.step2 = Linear(4 * step_dim, step_dim, **kw)
        blocks, widths, downs, ups = [], [], [], []

        def block(c_in: int, c_out: int) -> None:
            blocks.append(ResidualBlock(c_in, c_out, spec, **kw))
            widths.append(c_out)

        for level, (c_in, c_out) in enumerate(pairs):
            block(c_in, c_out)
            block(c_out, c_out)
            if level < len(pairs) - 1:
                downs.append(Conv1d(c_out, c_out, 3, stride=2, **kw))
        for _ in range(2):
            block(dims[-1], dims[-1])
        for c_in, c_out in reversed(pairs[1:]):
            block(2 * c_out, c_in)
            block(c_in, c_in)
            ups.append(Upsample1d(c_in, **kw))
        self.blocks, self.downs, self.ups = nnx.List(blocks), nnx.List(downs), nnx.List(ups)
        self.film_layer = Linear(step_dim + cond_dim, 2 * sum(widths), **kw)
        self.last = Conv1d(dims[1], dims[1], spec.kernel_size, **kw)
        self.last_norm = GroupNorm(dims[1], spec.n_groups)
        self.head = Conv1d(dims[1], action_dim, 1, **kw)
        self.widths, self.step_dim, self.levels = tuple(widths), step_dim, len(pairs)
        self.action_dim = action_dim

    def film(self, t: Int[Array, "*b"], cond: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
        """Scale and shift of every block. `t`: diffusion step, a number from 0; `cond`: what the observation says."""
        step = self.step2(mish(self.step1(sinusoidal(t.astype(jnp.float32), self.step_dim))))
        return self.film_layer(mish(jnp.concatenate([step, cond.astype(step.dtype)], axis=-1)))

    def denoise(self, x: Float[Array, "b h a"], film: Float[Array, "b f"]) -> Float[Array, "b h a"]:
        """Predict the target, float32. `x`: noisy chunk; `film`: of `self.film`, one row each."""
        sections, at = [], 0
        for width in self.widths:
            sections.append((film[:, None, at : at + width], film[:, None, at + width : at + 2 * width]))
            at += 2 * width
        apply = iter(zip(self.blocks, sections, strict=True))

        def two_blocks(x: Array) -> Array:
            for _ in range(2):
                block, (scale, shift) = next(apply)
                x = block(x, scale, shift)
            return x

        skips = []
        for level in range(self.levels):
            x = two_blocks(x)
            if level < self.levels - 1:
                skips.append(x)
                x = self.downs[level](x)
            else:
                skips.append(x)
        x = two_blocks(x)
        for up in self.ups:
            x = up(two_blocks(jnp.concatenate([x, skips.pop()], axis=-1)))
        return self.head(mish(self.last_norm(self.last(x)))).astype(jnp.float32)

    def __call__(
        self, x: Float[Array, "b h a"], t: Int[Array, " b"], cond: Float[Array, "b d"]
    ) -> Float[Array, "b h a"]:
        """`denoise` with `film`, for training."""
        return self.denoise(x, self.film(t, cond))
