"""Optimizer, schedule and weight averaging from their specifications, over optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

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
    return step if spec.grad_clip is None else optax.chain(optax.clip_by_global_norm(spec.grad_clip), step)


def ema_decay(spec: EmaSpec, step: Int[Array, ""]) -> Float[Array, ""]:
    """Decay after `step` updates: 1 - (1 + step)^-power, at most max_decay (0 on the first)."""
    return jnp.clip(1 - (1 + step) ** -spec.power, 0.0, spec.max_decay)


def ema_update(ema: Params, params: Params, decay: Float[Array, ""]) -> Params:
    """Leaf by leaf decay * ema + (1 - decay) * params."""
    return jax.tree.map(lambda e, p: e + (1 - decay) * (p - e), ema, params)
