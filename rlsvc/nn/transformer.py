"""Transformer decoder over action tokens that attends to diffusion step and observations (arXiv:2303.04137, IV-A).

Letters: B batch, H horizon, A action dimensions, T observation steps, D embedding, E features of an observation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.nn.layers import LayerNorm, Linear, dropout, mish, sinusoidal
from rlsvc.spec.diffusion import TransformerSpec


class Attention(nnx.Module):
    """Multi-head attention of queries over keys and values from `context`."""

    def __init__(self, d: int, heads: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.out = (Linear(d, d, dtype=dtype, rngs=rngs) for _ in range(4))
        self.heads = heads

    def __call__(
        self, x: Float[Array, "b h d"], context: Float[Array, "b s d"], mask: Bool[Array, "h s"] | None
    ) -> Float[Array, "b h d"]:
        """`mask` is True where a query may look."""

        def split(y: Array) -> Array:
            return y.reshape(*y.shape[:2], self.heads, y.shape[-1] // self.heads)

        y = jax.nn.dot_product_attention(
            split(self.q(x)),
            split(self.k(context)),
            split(self.v(context)),
            mask=None if mask is None else mask[None, None],
        )
        return self.out(y.reshape(x.shape))


class DecoderBlock(nnx.Module):
    """Pre-norm self-attention, cross-attention, feed-forward."""

    def __init__(self, spec: TransformerSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        d = spec.embed_dim
        kw = {"dtype": dtype, "rngs": rngs}
        self.norms = nnx.List([LayerNorm(d) for _ in range(3)])
        self.self_attention = Attention(d, spec.heads, **kw)
        self.cross_attention = Attention(d, spec.heads, **kw)
        self.up, self.down = Linear(d, 4 * d, **kw), Linear(4 * d, d, **kw)
        self.rate = spec.dropout

    def __call__(
        self,
        x: Float[Array, "b h d"],
        memory: Float[Array, "b s d"],
        self_mask: Bool[Array, "h h"] | None,
        cross_mask: Bool[Array, "h s"] | None,
        key: Key[Array, ""] | None,
    ) -> Float[Array, "b h d"]:
        """Dropout on each residual branch when a key is given."""
        keys = (None, None, None) if key is None else jax.random.split(key, 3)
        y = self.norms[0](x)
        x = x + dropout(self.self_attention(y, y, self_mask), self.rate, keys[0])
        x = x + dropout(self.cross_attention(self.norms[1](x), memory, cross_mask), self.rate, keys[1])
        y = self.down(jax.nn.gelu(self.up(self.norms[2](x))))
        return x + dropout(y, self.rate, keys[2])


class ActionTransformer(nnx.Module):
    """Predicts the denoising target of a noisy chunk."""

    def __init__(
        self,
        action_dim: int,
        horizon: int,
        n_obs_steps: int,
        obs_dim: int,
        spec: TransformerSpec,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        d, kw = spec.embed_dim, {"dtype": dtype, "rngs": rngs}
        self.embed_action = Linear(action_dim, d, **kw)
        self.embed_obs = Linear(obs_dim, d, **kw)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (horizon, d)))
        self.memory_position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1 + n_obs_steps, d)))
        self.memory1, self.memory2 = Linear(d, 4 * d, **kw), Linear(4 * d, d, **kw)
        self.blocks = nnx.List([DecoderBlock(spec, **kw) for _ in range(spec.layers)])
        self.norm, self.head = LayerNorm(d), Linear(d, action_dim, **kw)
        self.spec, self.dtype, self.action_dim = spec, dtype, action_dim

    def _masks(self, h: int, s: int) -> tuple[Bool[Array, "h h"], Bool[Array, "h s"]] | tuple[None, None]:
        """What an action token may look at: earlier actions; the diffusion step (memory 0) and earlier observations."""
        if not self.spec.causal:
            return None, None
        step = jnp.arange(h)[:, None]
        return step >= jnp.arange(h)[None], step >= jnp.arange(s)[None] - 1

    def __call__(
        self,
        x: Float[Array, "b h a"],
        t: Int[Array, " b"],
        obs: Float[Array, "b t e"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "b h a"]:
        """Predict the target, float32. `t`: diffusion step from 0; `key`: dropout, None when acting."""
        step = sinusoidal(t.astype(jnp.float32), self.spec.embed_dim)[:, None].astype(self.dtype)
        memory = (
            jnp.concatenate([step, self.embed_obs(obs)], axis=1) + self.memory_position[...].astype(self.dtype)[None]
        )
        memory = self.memory2(mish(self.memory1(memory)))
        y = self.embed_action(x) + self.position[...].astype(self.dtype)[None]
        masks = self._masks(y.shape[1], memory.shape[1])
        for i, block in enumerate(self.blocks):
            y = block(y, memory, *masks, None if key is None else jax.random.fold_in(key, i))
        return self.head(self.norm(y)).astype(jnp.float32)
