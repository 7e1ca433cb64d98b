"""Imitation: gradient steps on a policy's own loss over demonstrations.

Each update draws a batch of windows, normalises it, averages the gradient over micro-batches, clips, and steps the
optimizer; an exponential moving average of the weights acts (Diffusion Policy, arXiv:2303.04137, appendix; decay as in
diffusers).

Letters: B batch, K updates in one call, M micro-batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from rlsvc.algos.api import START, Phase, update_key
from rlsvc.algos.optim import ema_decay, ema_update, make_optimizer, make_schedule
from rlsvc.core.errors import SpecError, unknown_name
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Batch, Windows, batches_from_host
from rlsvc.nn.params import leaf_names
from rlsvc.policies.api import AdaptedPolicy, Judge, Params, SupervisedPolicy, normalize_observation
from rlsvc.spec.hiors import HiORSSpec
from rlsvc.spec.imitation import ImitationSpec
from rlsvc.spec.reward_classifier import RewardLearningSpec
from rlsvc.spec.value_function import ValueFunctionSpec


@no_type_check  # as a pytree it also holds shapes, or arrays of the host
@partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "ema", "opt_state"], meta_fields=[])
@dataclass(frozen=True)
class ImitationState:
    """Train state. `step`: int32 updates done; `ema`: averaged weights, None without averaging."""

    step: Int[Array, ""]
    params: Params
    ema: Params | None
    opt_state: optax.OptState


def normalize_batch(batch: Batch, normalizer: Normalizer) -> Batch:
    """The same batch with observation and action normalised, float32."""
    group = batch["group"]
    observation = normalize_observation(batch["observation"], normalizer, group)
    return {**batch, "observation": observation, "action": normalizer.normalize("action", batch["action"], group)}


def trained(names: list[str], freeze: tuple[str, ...], adapted: tuple[str, ...]) -> tuple[bool, ...]:
    """Which weights are trained: those that no pattern freezes and no adaptation replaces.

    Raises:
        SpecError: a pattern that is none or freezes nothing, or nothing is left to train.
    """
    for pattern in freeze:
        try:
            hits = any(re.fullmatch(pattern, name) for name in names)
        except re.error as error:
            raise SpecError(f"algo.freeze: '{pattern}' is not a regular expression ({error})") from error
        if not hits:
            raise SpecError(
                f"algo.freeze: '{pattern}' matches no weight; there are, for instance: {', '.join(names[:5])}"
            )
    kept = tuple(not any(re.fullmatch(pattern, name) for pattern in (*freeze, *adapted)) for name in names)
    if not any(kept):
        raise SpecError("algo.freeze: nothing is left to train")
    return kept


class Imitation:
    """The algorithm of `rlsvc.algos.api`; `rlsvc.algos.value_function` puts another loss into it."""

    hooks: tuple[str, ...] = ("update",)

    def __init__(
        self,
        policy: SupervisedPolicy | Judge,
        normalizer: Normalizer,
        spec: ImitationSpec | HiORSSpec | RewardLearningSpec | ValueFunctionSpec,
        *,
        total_steps: int,
        batch_sharding: NamedSharding | None = None,
    ) -> None:
        """`batch_sharding`: how the rows of a batch lie on the devices of several ranks; None on one device."""
        self.policy, self.normalizer, self.spec, self.batch_sharding = policy, normalizer, spec, batch_sharding
        names = leaf_names(jax.eval_shape(policy.init, jax.random.key(0)))
        self._trained = trained(names, getattr(spec, "freeze", ()), getattr(policy, "frozen", ()))
        self.schedule = make_schedule(spec.schedule, spec.learning_rate, total_steps)
        self.optimizer = make_optimizer(spec.optimizer, self.schedule)
        self._update = jax.jit(self._updates, static_argnames="num_updates", donate_argnames="state")
        self._update_from_batches = jax.jit(self._updates_from_batches, donate_argnames="state")
        self._validate = jax.jit(self._validation_metrics)

    def init(self, key: Key[Array, ""]) -> ImitationState:
        """Fresh weights; the average starts at them."""
        params = self.policy.init(key)
        return self.start_from(params)

    def start_from(self, params: Params) -> ImitationState:
        """The state before the first update of these weights."""
        learnt = self._split(params)[0]
        ema = jax.tree.map(jnp.copy, learnt) if self.spec.ema else None
        return ImitationState(jnp.zeros((), jnp.int32), params, ema, self.optimizer.init(learnt))

    def update(
        self,
        hook: str,
        state: ImitationState,
        data: Windows,
        key: Key[Array, ""],
        num_updates: int,
        phase: Phase = START,
    ) -> tuple[ImitationState, dict[str, Array]]:
        """K updates in one compiled call; donates `state`; see `rlsvc.algos.api.Algorithm`."""
        del phase
        if hook not in self.hooks:
            raise unknown_name(f"hook of {self.spec.name}", hook, self.hooks)
        if not data.on_host:
            return self._update(state, data, key, num_updates=num_updates)
        # The same windows as on the device, gathered here.
        steps = state.step + jnp.arange(num_updates)
        index = np.asarray(jax.vmap(lambda step: self._draw(data, key, step))(steps))
        sharding = self.batch_sharding
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
        return self._update_from_batches(state, batches_from_host(data, index, sharding), key)

    def acting_params(self, state: ImitationState) -> Params:
        """The averaged weights, or the raw ones without averaging, with adaptations merged."""
        params = self._averaged(state)
        return self.policy.merged(params) if isinstance(self.policy, AdaptedPolicy) else params

    def _averaged(self, state: ImitationState) -> Params:
        return state.params if state.ema is None else self._join(state.ema, self._split(state.params)[1])

    def _split(self, params: Params) -> tuple[Params, Params]:
        """Weights that are trained, and those that are not; in each the others are None."""
        leaves, tree = jax.tree.flatten(params)
        parts = [
            [x if keep == which else None for x, keep in zip(leaves, self._trained, strict=True)]
            for which in (True, False)
        ]
        learnt, frozen = (jax.tree.unflatten(tree, part) for part in parts)
        return learnt, frozen

    @staticmethod
    def _join(learnt: Params, frozen: Params) -> Params:
        return jax.tree.map(lambda a, b: b if a is None else a, learnt, frozen, is_leaf=lambda x: x is None)

    def validate(self, state: ImitationState, data: Windows, key: Key[Array, ""]) -> dict[str, Array]:
        """Metrics of the acting weights over up to 1024 windows, the same ones and the same noise every time."""
        return self._validate(self._averaged(state), data, key)

    def loss(self, params: Params, batch: Batch, key: Key[Array, ""]) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The policy's own loss on a batch as `Windows` gives it, and metrics."""
        assert isinstance(self.policy, SupervisedPolicy)
        return self.policy.loss(params, normalize_batch(batch, self.normalizer), key)

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """How much the mean loss of a micro-batch counts: its unpadded actions."""
        return batch["mask"].sum().astype(jnp.float32)

    def _validation_metrics(self, params: Params, data: Windows, key: Key[Array, ""]) -> dict[str, Array]:
        count = min(1024, data.num_windows)
        index = jnp.arange(count) * data.num_windows // count
        loss, metrics = self.loss(params, data.gather(index), key)
        return {**metrics, "loss": loss}

    def _draw(self, data: Windows, key: Key[Array, ""], step: Array) -> Int[Array, " b"]:
        return data.draw(jax.random.split(update_key(key, step))[0], self.spec.batch_size)

    def _updates(
        self, state: ImitationState, data: Windows, key: Key[Array, ""], num_updates: int
    ) -> tuple[ImitationState, dict[str, Array]]:
        def one(state: ImitationState, _: None) -> tuple[ImitationState, dict[str, Array]]:
            index = self._draw(data, key, state.step)
            if self.batch_sharding is not None:
                index = jax.lax.with_sharding_constraint(index, self.batch_sharding)
            return self._one_update(state, data.gather(index), key)

        state, metrics = jax.lax.scan(one, state, None, length=num_updates)
        return state, {name: value.mean() for name, value in metrics.items()}

    def _updates_from_batches(
        self, state: ImitationState, batches: Batch, key: Key[Array, ""]
    ) -> tuple[ImitationState, dict[str, Array]]:
        state, metrics = jax.lax.scan(lambda s, batch: self._one_update(s, batch, key), state, batches)
        return state, {name: value.mean() for name, value in metrics.items()}

    def _one_update(
        self, state: ImitationState, batch: Batch, key: Key[Array, ""]
    ) -> tuple[ImitationState, dict[str, Array]]:
        loss_key = jax.random.split(update_key(key, state.step))[1]
        learnt, frozen = self._split(state.params)
        grads, metrics = self._gradient(learnt, frozen, batch, loss_key)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, learnt)
        learnt = optax.apply_updates(learnt, updates)
        ema = state.ema
        if self.spec.ema is not None:
            ema = ema_update(ema, learnt, ema_decay(self.spec.ema, state.step))
        params = self._join(learnt, frozen)
        metrics = {**metrics, "grad_norm": optax.tree.norm(grads), "learning_rate": self.schedule(state.step)}
        return ImitationState(state.step + 1, params, ema, opt_state), metrics

    def _gradient(
        self, params: Params, frozen: Params, batch: Batch, key: Key[Array, ""]
    ) -> tuple[Params, dict[str, Array]]:
        """Gradient of the mean loss by the trained weights.

        The micro-batches of an accumulated one are weighted by `weight`.
        """

        def loss(params: Params, batch: Batch, key: Array) -> tuple[Array, tuple[dict[str, Array], Array]]:
            value, metrics = self.loss(self._join(params, frozen), batch, key)
            weight = self.weight(batch)
            return value * weight, (metrics, weight)

        gradient = jax.grad(loss, has_aux=True)
        m = self.spec.optimizer.accumulation

        def add(
            total: tuple[Params, Array], inputs: tuple[Batch, Array]
        ) -> tuple[tuple[Params, Array], dict[str, Array]]:
            grads, (metrics, weight) = gradient(params, *inputs)
            return (jax.tree.map(jnp.add, total[0], grads), total[1] + weight), {
                k: v * weight for k, v in metrics.items()
            }

        if m == 1:
            grads, (metrics, weight) = gradient(params, batch, key)
            total, metrics = weight, {k: v * weight for k, v in metrics.items()}
        else:
            zero = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
            # Strided, so that every micro-batch is spread over all ranks.
            parts = jax.tree.map(lambda x: x.reshape(x.shape[0] // m, m, *x.shape[1:]).swapaxes(0, 1), batch)
            (grads, total), metrics = jax.lax.scan(add, zero, (parts, jax.random.split(key, m)))
            metrics = {k: v.sum() for k, v in metrics.items()}
        total = jnp.maximum(total, 1.0)
        return jax.tree.map(lambda g: g / total, grads), {k: v / total for k, v in metrics.items()}
