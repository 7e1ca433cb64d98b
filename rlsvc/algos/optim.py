"""Optimizer, schedule and weight averaging from their specifications, over optax."""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from rlsvc.policies.api import Params
from rlsvc.spec.optim import EmaSpec, OptimizerSpec, ScheduleSpec


def make_schedule(spec: ScheduleSpec, learning_rate: float, total_steps: int) -> optax.Schedule:
    """Learning rate by update number."""
    decay_steps = spec.decay_steps or total_steps
    warmup = min(spec.warmup_steps, max(decay_steps - 1, 0))
    if spec.name == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, max(decay_steps - warmup, 1), spec.final_fraction)
    else:
        after = optax.constant_schedule(learning_rate)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, learning_rate, warmup), after], [warmup])


def make_optimizer(spec: OptimizerSpec, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping, then Adam or AdamW."""
    b1, b2 = spec.betas
    if spec.name == "adam":
        step = optax.adam(schedule, b1, b2, spec.eps)
    else:
        step = optax.adamw(schedule, b1, b2, spec.eps, weight_decay=spec.weight_decay)
    if spec.moments == "bf16":
        step = with_bf16_state(step)
    return step if spec.grad_clip is None else optax.chain(optax.clip_by_global_norm(spec.grad_clip), step)


def with_bf16_state(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer that keeps its float32 state in bfloat16, and computes in float32.

    Rounding is stochastic: a second moment of decay 0.999 changes by less than half of bfloat16's step and would stand
    still if it were rounded to the nearest.
    """

    def narrow(state: optax.OptState, key: Key[Array, ""]) -> optax.OptState:
        leaves, tree = jax.tree.flatten(state)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(
            tree,
            [stochastic_bf16(x, k) if x.dtype == jnp.float32 else x for x, k in zip(leaves, keys, strict=True)],
        )

    def init(params: Params) -> optax.OptState:
        state = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, inner.init(params))
        return jnp.zeros((), jnp.int32), state

    def update(updates: Params, state: optax.OptState, params: Params | None = None) -> tuple[Params, optax.OptState]:
        count, narrow_state = cast("tuple[Array, optax.OptState]", state)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, narrow_state)
        updates, wide = inner.update(updates, wide, params)
        return updates, (count + 1, narrow(wide, jax.random.fold_in(jax.random.key(0), count)))

    return optax.GradientTransformation(init, update)


def stochastic_bf16(x: Float[Array, "*n"], key: Key[Array, ""]) -> Array:
    """Rounded to bfloat16, up with a probability that makes the mean right."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint32) & 0xFFFF
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def ema_decay(spec: EmaSpec, step: Int[Array, ""]) -> Float[Array, ""]:
    """Decay after `step` updates: 1 - (1 + step)^-power, at most max_decay (0 on the first)."""
    return jnp.clip(1 - (1 + step) ** -spec.power, 0.0, spec.max_decay)


def ema_update(ema: Params, params: Params, decay: Float[Array, ""]) -> Params:
    """Leaf by leaf decay * ema + (1 - decay) * params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
