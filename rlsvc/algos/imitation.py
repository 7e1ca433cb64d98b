"""Imitation: gradient steps on a policy's own loss over demonstrations.

Each update draws a batch of windows, normalises it, averages the gradient over micro-batches, clips, and steps the optimizer;
an exponential moving average of the weights acts (Diffusion Policy, arXiv:2303.04137, appendix; decay as in diffusers).

Letters: B batch, K updates in one call, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from rlsvc.algos.api import update_key
from rlsvc.algos.optim import ema_decay, ema_update, make_optimizer, make_schedule
from rlsvc.core.errors import unknown_name
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Batch, Windows
from rlsvc.policies.api import Params, Policy
from rlsvc.spec.imitation import ImitationSpec


@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "ema", "opt_state"], meta_fields=[])
@dataclass(frozen=True)
class ImitationState:
    """Train state. `step`: int32 updates done; `ema`: averaged weights, None without averaging."""

    step: Int[Array, ""]
    params: Params
    ema: Params | None
    opt_state: optax.OptState


def normalize_batch(batch: Batch, normalizer: Normalizer, action: str = "action") -> Batch:
    """The same batch with observation and action normalised, float32."""
    group = batch["group"]
    observation = {k: normalizer.normalize(k, x, group) for k, x in batch["observation"].items()}
    return {**batch, "observation": observation, "action": normalizer.normalize(action, batch["action"], group)}


class Imitation:
    """The algorithm of `rlsvc.algos.api`."""

    hooks = ("update",)

    def __init__(
        self,
        policy: Policy,
        normalizer: Normalizer,
        spec: ImitationSpec,
        *,
        total_steps: int,
        batch_sharding: NamedSharding | None = None,
    ) -> None:
        """`batch_sharding`: how the rows of a batch lie on the devices of several ranks; None on one device."""
        self.policy, self.normalizer, self.spec, self.batch_sharding = policy, normalizer, spec, batch_sharding
        self.schedule = make_schedule(spec.schedule, spec.learning_rate, total_steps)
        self.optimizer = make_optimizer(spec.optimizer, self.schedule)
        self._update = jax.jit(self._updates, static_argnames="num_updates", donate_argnames="state")
        self._validate = jax.jit(self._validation_loss)

    def init(self, key: Key[Array, ""]) -> ImitationState:
        """Fresh weights; the average starts at them."""
        params = self.policy.init(key)
        ema = jax.tree.map(jnp.copy, params) if self.spec.ema else None
        return ImitationState(jnp.zeros((), jnp.int32), params, ema, self.optimizer.init(params))

    def update(
        self, hook: str, state: ImitationState, data: Windows, key: Key[Array, ""], num_updates: int
    ) -> tuple[ImitationState, dict[str, Array]]:
        """K updates in one compiled call; donates `state`; see `rlsvc.algos.api.Algorithm`."""
        if hook not in self.hooks:
            raise unknown_name("hook of imitation", hook, self.hooks)
        return self._update(state, data, key, num_updates=num_updates)

    def acting_params(self, state: ImitationState) -> Params:
        """The averaged weights, or the raw ones without averaging."""
        return state.params if state.ema is None else state.ema

    def validate(self, state: ImitationState, data: Windows, key: Key[Array, ""]) -> Float[Array, ""]:
        """Loss of the acting weights over up to 1024 windows, the same ones and the same noise every time."""
        return self._validate(self.acting_params(state), data, key)

    def _validation_loss(self, params: Params, data: Windows, key: Key[Array, ""]) -> Float[Array, ""]:
        count = min(1024, data.num_windows)
        index = jnp.arange(count) * data.num_windows // count
        return self.policy.loss(params, normalize_batch(data.gather(index), self.normalizer, data.action), key)[0]

    def _updates(
        self, state: ImitationState, data: Windows, key: Key[Array, ""], num_updates: int
    ) -> tuple[ImitationState, dict[str, Array]]:
        def one(state: ImitationState, _: None) -> tuple[ImitationState, dict[str, Array]]:
            return self._one_update(state, data, update_key(key, state.step))

        state, metrics = jax.lax.scan(one, state, None, length=num_updates)
        return state, {name: value.mean() for name, value in metrics.items()}

    def _one_update(
        self, state: ImitationState, data: Windows, key: Key[Array, ""]
    ) -> tuple[ImitationState, dict[str, Array]]:
        draw_key, loss_key = jax.random.split(key)
        index = data.draw(draw_key, self.spec.batch_size)
        if self.batch_sharding is not None:
            index = jax.lax.with_sharding_constraint(index, self.batch_sharding)
        grads, metrics = self._gradient(state.params, data, index, loss_key)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        ema = state.ema
        if self.spec.ema is not None:
            ema = ema_update(ema, params, ema_decay(self.spec.ema, state.step))
        metrics = {**metrics, "grad_norm": optax.global_norm(grads), "learning_rate": self.schedule(state.step)}
        return ImitationState(step, params, ema, opt_state), metrics

    def _gradient(
        self, params: Params, data: Windows, index: Int[Array, "b"], key: Key[Array, ""]
    ) -> tuple[Params, dict[str, Array]]:
        """Gradient of the mean loss; the micro-batches of an accumulated one are weighted by their unpadded actions."""

        def loss(params: Params, index: Array, key: Array) -> tuple[Array, tuple[dict[str, Array], Array]]:
            batch = normalize_batch(data.gather(index), self.normalizer, data.action)
            value, metrics = self.policy.loss(params, batch, key)
            weight = batch["mask"].sum().astype(jnp.float32)
            return value * weight, (metrics, weight)

        gradient = jax.grad(loss, has_aux=True)
        m = self.spec.optimizer.accumulation
        parts = index.reshape(m, index.shape[0] // m)

        def add(total: tuple[Params, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Params, Array], dict[str, Array]]:
            grads, (metrics, weight) = gradient(params, *inputs)
            return (jax.tree.map(jnp.add, total[0], grads), total[1] + weight), {k: v * weight for k, v in metrics.items()}

        if m == 1:
            grads, (metrics, weight) = gradient(params, index, key)
            total, metrics = weight, {k: v * weight for k, v in metrics.items()}
        else:
            zero = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
            (grads, total), metrics = jax.lax.scan(add, zero, (parts, jax.random.split(key, m)))
            metrics = {k: v.sum() for k, v in metrics.items()}
        total = jnp.maximum(total, 1.0)
        return jax.tree.map(lambda g: g / total, grads), {k: v / total for k, v in metrics.items()}
