"""Gemma transformers that share their attention: a backbone over images and text, and a smaller expert over actions.

Each expert has weights of its own (Gemma, arXiv:2403.08295: RMS norm, rotary positions, multi-query attention, gated
feed-forward); in every layer the tokens of all experts attend to each other as the mask says (pi0, arXiv:2410.24164,
section IV). Layers are stacked, so that one scan compiles one layer. An adaptive expert takes scale, shift and gate of
each norm from a condition (pi0.5, arXiv:2504.16054).

Letters: B batch, T tokens of one expert, Q queries of all experts, S keys (cached ones first), W width, D layers,
N heads, K heads of keys and values, H head dimension, M hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from rlsvc.nn.layers import along_last
from rlsvc.nn.lora import lora_params, product
from rlsvc.nn.sharding import matrix, rows
from rlsvc.spec.pi0 import GemmaSpec, LoraSpec

EPS = 1e-6


type Cache = Float[Array, "d 2 b _s k h"]
"""Keys, then values, of tokens that were seen before, of every layer."""


class Expert(nnx.Module):
    """The weights of one expert, [D, ...] for its layers.

    Matrices that read the same input are one: `qkv` [D, W, (N + 2 K) H] gives queries, keys and values, `gate_up`
    [D, W, 2 M] the gate and what it gates.
    """

    def __init__(
        self, size: GemmaSpec, *, adaptive: bool = False, lora: LoraSpec | None = None, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        d, w, n, k, h, m = size.depth, size.width, size.heads, size.kv_heads, size.head_dim, size.mlp_dim
        self.size, self.adaptive, self.lora, self.dtype = size, adaptive, lora, dtype
        shapes = {"qkv": (w, (n + 2 * k) * h), "out": (n * h, w), "gate_up": (w, 2 * m), "down": (m, w)}
        layers = {
            name: nnx.Param(jax.random.normal(rngs.params(), (d, *shape)) / math.sqrt(shape[0]))
            for name, shape in shapes.items()
        }
        if lora is not None:
            adapted = {"attention": ("qkv", "out"), "feed_forward": ("gate_up", "down")}
            for name in (name for target in lora.targets for name in adapted[target]):
                layers |= lora_params(name, d, *shapes[name], lora, rngs)
        for norm in ("attention_norm", "feed_forward_norm"):
            # Of zeros: the norm's scale is 1 + this, and an adaptive layer begins as the identity (gate 0).
            width = 3 * w if adaptive else w
            if adaptive:
                layers[f"{norm}_kernel"] = nnx.Param(jnp.zeros((d, w, width)))
            layers[norm] = nnx.Param(jnp.zeros((d, width)))
        self.layers = nnx.Dict(layers)
        self.norm = nnx.Param(jnp.zeros((3 * w if adaptive else w,)))
        self.norm_kernel = nnx.Param(jnp.zeros((w, 3 * w))) if adaptive else None

    def final(self, x: Float[Array, "b t w"], condition: Float[Array, "b w"] | None) -> Float[Array, "b t w"]:
        """The norm after the last layer."""
        kernel = None if self.norm_kernel is None else self.norm_kernel[...].astype(x.dtype)
        return rms_norm(x, self.norm[...], kernel, condition)[0]


def rms_norm(
    x: Float[Array, "b t w"],
    weight: Float[Array, " o"],
    kernel: Float[Array, "w o"] | None,
    condition: Float[Array, "b w"] | None,
) -> tuple[Float[Array, "b t w"], Float[Array, "b 1 w"] | None]:
    """X / rms(x) * (1 + scale), in float32; with a condition also shifted, and the gate of the residual beside it.

    Args:
        x: tokens.
        weight: scale [W]; or, with a kernel, the bias [3 W] of (scale, shift, gate).
        kernel: of the map from the condition, [W, 3 W].
        condition: one a row.
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPS)
    if kernel is None:
        return (normal * (1 + along_last(weight, x))).astype(x.dtype), None
    assert condition is not None
    modulation = condition.astype(x.dtype) @ kernel + along_last(weight.astype(x.dtype), condition)
    scale, shift, gate = jnp.split(modulation[:, None], 3, axis=-1)
    return (normal * (1 + scale) + shift).astype(x.dtype), gate


def rope(x: Float[Array, "b t n h"], positions: Int[Array, "b t"]) -> Float[Array, "b t n h"]:
    """Rotary positions (arXiv:2104.09864) over the halves of a head, wavelengths from 2 pi to 2 pi 10^4."""
    half = x.shape[-1] // 2
    timescale = 10_000.0 ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = (positions[..., None].astype(jnp.float32) / timescale[None, None])[:, :, None]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def block_mask(valid: Bool[Array, "b t"], starts: Bool[Array, " t"] | Bool[Array, "b t"]) -> Bool[Array, "b t t"]:
    """Who looks at whom: a token at all valid ones of its own block and of the blocks before it.

    Args:
        valid: False for padding, which nobody looks at.
        starts: True where a block begins, the same for all rows or each row's own. All True is causal attention, all
            False bidirectional.
    """
    block = jnp.cumsum(jnp.atleast_2d(starts).astype(jnp.int32), axis=1)
    return (block[:, None, :] <= block[:, :, None]) & valid[:, None, :] & valid[:, :, None]


def positions_of(valid: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Number of each token among the valid ones."""
    return jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1


def attention(
    q: Float[Array, "b q n h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k h"],
    mask: Bool[Array, "b q s"],
) -> Float[Array, "b q n*h"]:
    """Grouped-query attention, its queries scaled already; logits and softmax in float32.

    A token's heads of a group are rows beside each other of one product, so that with one group nothing is transposed.
    """
    b, t, n, h = q.shape
    s, groups = k.shape[1:3]
    q = q.reshape(b, t, groups, n // groups, h).swapaxes(1, 2).reshape(b, groups, -1, h)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    batch = ((0, 1), (0, 1))
    logits = jax.lax.dot_general(q, k, (((3,), (3,)), batch), preferred_element_type=jnp.float32)
    logits = logits.reshape(b, groups, t, n // groups, s)
    logits = jnp.where(mask[:, None, :, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype).reshape(b, groups, -1, s)
    mixed = jax.lax.dot_general(weights, v, (((3,), (2,)), batch))
    return mixed.reshape(b, groups, t, -1, h).swapaxes(1, 2).reshape(b, t, n * h)


def _beside(q: Float[Array, "1 q n h"], seen: Float[Array, "2 1 s k h"]) -> tuple[Array, Array]:
    """Both as they are, but parts of one array, which one kernel of a GPU turns and fills; products read the parts."""
    h = q.shape[-1]
    joined = jax.lax.optimization_barrier(jnp.concatenate([q.reshape(-1, h), seen.reshape(-1, h)]))
    end = q.size // h
    return joined[:end].reshape(q.shape), joined[end:].reshape(seen.shape)


def transformer(
    experts: Sequence[Expert],
    tokens: Sequence[Float[Array, "b _t _w"] | None],
    mask: Bool[Array, "b q s"],
    positions: Int[Array, "b q"],
    *,
    conditions: Sequence[Float[Array, "b _w"] | None] = (),
    cache: Cache | None = None,
    remat: bool = False,
    unroll: int = 1,
) -> tuple[list[Float[Array, "b _t _w"] | None], Cache]:
    """All layers of the experts that have tokens.

    Args:
        experts: of the same depth, heads and head dimension.
        tokens: of each expert, in the order of the sequence; None for an expert that takes no part.
        mask: which keys each query sees; the cached keys come first.
        positions: of the queries' tokens.
        conditions: of adaptive experts; empty when there is none.
        cache: keys and values of tokens before these.
        remat: compute activations anew in the backward pass, rather than keep them.
        unroll: layers that are compiled into one.

    Returns:
        The tokens after the last norm, None where there were none; keys and values of the cache and these tokens.
    """
    conditions = conditions or [None] * len(experts)
    parts = [(e, t, c) for e, t, c in zip(experts, tokens, conditions, strict=True) if t is not None]
    size = parts[0][0].size
    n, k, h = size.heads, size.kv_heads, size.head_dim
    assert all((e.size.depth, e.size.heads, e.size.kv_heads, e.size.head_dim) == (size.depth, n, k, h) for e in experts)
    lengths = [t.shape[1] for _, t, _ in parts]
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]

    def layer(
        xs: list[Array], inputs: tuple[list[dict[str, Array]], Float[Array, "2 b _s k h"] | None]
    ) -> tuple[list[Array], Float[Array, "2 b s k h"]]:
        weights, past = inputs
        normal = [_norm(e, w, "attention_norm", x, c) for (e, _, c), w, x in zip(parts, weights, xs, strict=True)]
        joined = [
            product(y, w, "qkv", e.dtype, e.lora).reshape(*y.shape[:2], n + 2 * k, h)
            for (e, _, _), w, (y, _) in zip(parts, weights, normal, strict=True)
        ]
        qkv = jnp.concatenate(joined, axis=1)
        q, keys, values = qkv[:, :, :n], qkv[:, :, n : n + k], qkv[:, :, n + k :]
        q, seen = rope(q, positions) * h**-0.5, jnp.stack([rope(keys, positions), values])
        if past is not None:
            seen = jnp.concatenate([past.astype(seen.dtype), seen], axis=2)
            if len(q) == 1:  # the parts of several rows would not lie in one piece
                q, seen = _beside(q, seen)
        mixed = attention(q, seen[0], seen[1], mask)
        out = []
        for i, ((e, _, c), w, x, (_, gate)) in enumerate(zip(parts, weights, xs, normal, strict=True)):
            own = mixed[:, ends[i] - lengths[i] : ends[i]]
            x = _add(x, product(own, w, "out", e.dtype, e.lora), gate)
            y, gate = _norm(e, w, "feed_forward_norm", x, c)
            gated, up = jnp.split(product(y, w, "gate_up", e.dtype, e.lora), 2, axis=-1)
            x = _add(x, product(jax.nn.gelu(gated) * up, w, "down", e.dtype, e.lora), gate)
            out.append(x)
        return out, seen

    stacks = [{name: value[...] for name, value in e.layers.items()} for e, _, _ in parts]
    step = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    start = [rows(t.astype(e.dtype)) for e, t, _ in parts]
    xs, seen = jax.lax.scan(step, start, (stacks, cache), unroll=unroll)
    done = iter([e.final(x, c) for (e, _, c), x in zip(parts, xs, strict=True)])
    return [None if t is None else next(done) for t in tokens], seen


def _norm(
    expert: Expert, layer: Mapping[str, Any], name: str, x: Float[Array, "b t w"], condition: Array | None
) -> tuple[Array, Array | None]:
    if not expert.adaptive:
        return rms_norm(x, layer[name], None, None)
    kernel = f"{name}_kernel"
    return rms_norm(x, layer[name], matrix(layer[kernel], kernel, x.dtype), condition)


def _add(x: Array, y: Array, gate: Array | None) -> Array:
    return x + (y if gate is None else y * gate)
