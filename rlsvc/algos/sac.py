"""Soft actor-critic (Haarnoja et al., arXiv:1812.05905) as RLPD runs it (Ball et al., arXiv:2302.02948).

With z = h(s), E critics Q_i with layer norm, slow copies Q'_i over a slow h', and a random subset M of them,
    y = r + gamma (1 - terminated) (min_{i in M} Q'_i(z', a') - alpha log p(a' | z')),   a' ~ p(. | h(s'))
    L_Q = mean_i (Q_i(z, a) - y)^2                                             (over h and every Q_i)
    L_p = alpha log p(a | z) - mean_i Q_i(z, a),   a ~ p(. | z)                (over p alone)
    L_alpha = -alpha (log p(a | z) + target entropy)                           (over log alpha)
The critics learn in every update, actor and temperature in every `critic_to_actor_ratio`-th. Images are shifted at
random in training (DrQ, arXiv:2004.13649), and the encoder is shared and learns from the critics alone, as in HIL-SERL
(arXiv:2410.21845). RLPD's even mix of demonstrations and rollouts is the phase's buffer.

Departures: Mish instead of ReLU (rlsvc/nn/mlps.py), and layer norm in the actor too. HIL-SERL's discrete critic for a
gripper is left out: a gripper is one more dimension of the Gaussian.

Letters: B batch, E critics, A action dimensions, K updates in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.algos.api import START, Phase, SequenceSource, update_key
from rlsvc.algos.critics import Critics
from rlsvc.core.errors import DatasetError, unknown_name
from rlsvc.data.normalize import Normalizer
from rlsvc.policies.api import Params
from rlsvc.policies.gaussian import GaussianPolicy
from rlsvc.spec.sac import SACSpec

NAMES = ("observation", "action", "reward", "terminated", "mask", "weight")
Transitions = dict[str, Any]
"""observation, next_observation: by name [B, ...]; action [B, A]; reward, terminated [B] float32; weight [B], 0 where
there is no transition."""


@no_type_check  # as a pytree it also holds shapes
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "critics", "target", "log_alpha", "critic_opt", "actor_opt", "alpha_opt", "loss"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SACState:
    """Train state.

    Attributes:
        step: int32 updates done.
        params: of the policy, {"encoder", "actor"}.
        critics: weights of Q.
        target: {"encoder", "critics"}, the slow copies.
        log_alpha: log of the temperature.
        critic_opt, actor_opt, alpha_opt: the three Adams.
        loss: L_p when the actor last learned, for the metrics of updates in which it does not.
    """

    step: Int[Array, ""]
    params: Params
    critics: Params
    target: Params
    log_alpha: Float[Array, ""]
    critic_opt: optax.OptState
    actor_opt: optax.OptState
    alpha_opt: optax.OptState
    loss: Float[Array, ""]


def weighted_mean(x: Float[Array, " b"], weight: Float[Array, " b"]) -> Float[Array, ""]:
    """Mean over the rows that are transitions, each by its importance; 0 when there is none."""
    return jnp.where(weight > 0, x * weight, 0.0).sum() / jnp.maximum((weight > 0).sum(), 1)


def td_target(
    next_q: Float[Array, "m b"],
    next_log_prob: Float[Array, " b"],
    reward: Float[Array, " b"],
    terminated: Float[Array, " b"],
    *,
    discount: float,
    alpha: Float[Array, ""] | float,
) -> Float[Array, " b"]:
    """What the critics are to become, y. `alpha`: 0 leaves the entropy out."""
    return reward + discount * (1 - terminated) * (next_q.min(0) - alpha * next_log_prob)


def critic_loss(q: Float[Array, "e b"], y: Float[Array, " b"], weight: Float[Array, " b"]) -> Float[Array, ""]:
    """L_Q."""
    return weighted_mean(((q - y[None]) ** 2).mean(0), weight)


def actor_loss(
    q: Float[Array, "e b"], log_prob: Float[Array, " b"], alpha: Float[Array, ""] | float, weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """L_p."""
    return weighted_mean(alpha * log_prob - q.mean(0), weight)


def temperature_loss(
    log_alpha: Float[Array, ""], log_prob: Float[Array, " b"], target_entropy: float, weight: Float[Array, " b"]
) -> Float[Array, ""]:
    """L_alpha."""
    return weighted_mean(-jnp.exp(log_alpha) * (log_prob + target_entropy), weight)


def random_subset(key: Key[Array, ""], n: int, m: int) -> Int[Array, " m"]:
    """M different numbers below n."""
    return jax.random.permutation(key, n)[:m].astype(jnp.int32)


class SAC:
    """The algorithm of `rlsvc.algos.api`. `data` gives sequences of one step (rlsvc/data/sequence.py)."""

    hooks: tuple[str, ...] = ("update",)

    def __init__(
        self,
        policy: GaussianPolicy,
        normalizer: Normalizer,
        spec: SACSpec,
        *,
        total_steps: int,
        batch_sharding: NamedSharding | None = None,
    ) -> None:
        """`batch_sharding`: how the rows of a batch lie on the devices of several ranks; None on one device."""
        del total_steps  # the learning rate is constant
        self.policy, self.normalizer, self.spec, self.batch_sharding = policy, normalizer, spec, batch_sharding
        self.target_entropy = -policy.action_dim / 2 if spec.target_entropy is None else spec.target_entropy
        self.optimizer = optax.adam(spec.learning_rate)
        self._critics_graph = nnx.split(nnx.eval_shape(lambda: self._new_critics(jax.random.key(0))))[0]
        self._update = jax.jit(self._updates, static_argnames="num_updates", donate_argnames="state")
        self._update_from_batches = jax.jit(self._updates_from_batches, donate_argnames="state")
        self._validate = jax.jit(self._validation_loss)

    def _new_critics(self, key: Key[Array, ""]) -> Critics:
        policy, spec = self.policy, self.spec
        return Critics(
            policy.width,
            policy.action_dim,
            spec.critic_dims,
            spec.num_critics,
            dtype=policy.dtype,
            rngs=nnx.Rngs(params=key),
        )

    def critics(self, params: Params) -> Critics:
        """Q with these weights."""
        return nnx.merge(self._critics_graph, params)

    def init(self, key: Key[Array, ""]) -> SACState:
        """Fresh weights; the targets start at them."""
        policy_key, critic_key = jax.random.split(key)
        params, critics = self.policy.init(policy_key), nnx.state(self._new_critics(critic_key))
        judges = {"encoder": params["encoder"], "critics": critics}
        log_alpha = jnp.log(jnp.float32(self.spec.initial_temperature))
        return SACState(
            jnp.zeros((), jnp.int32),
            params,
            critics,
            jax.tree.map(jnp.copy, judges),
            log_alpha,
            self.optimizer.init(judges),
            self.optimizer.init(params["actor"]),
            self.optimizer.init(log_alpha),
            jnp.zeros(()),
        )

    def update(
        self,
        hook: str,
        state: SACState,
        data: SequenceSource,
        key: Key[Array, ""],
        num_updates: int,
        phase: Phase = START,
    ) -> tuple[SACState, dict[str, Array]]:
        """K updates in one compiled call; donates `state`; see `rlsvc.algos.api.Algorithm`."""
        del phase
        if hook not in self.hooks:
            raise unknown_name("hook of sac", hook, self.hooks)
        if not data.on_host:
            return self._update(state, data, key, num_updates=num_updates)
        batches = data.sample_many(update_key(key, state.step), num_updates, self.spec.batch_size, 1)
        return self._update_from_batches(state, {name: batches[name] for name in NAMES}, key)

    def acting_params(self, state: SACState) -> Params:
        """Encoder and actor."""
        return state.params

    def validate(self, state: SACState, data: SequenceSource, key: Key[Array, ""]) -> dict[str, Array]:
        """L_Q on one batch, the same one and the same noise every time."""
        return {"loss": self._validate(state, data.sample(key, self.spec.batch_size, 1), key)}

    def update_once(
        self, state: SACState, batch: dict[str, Any], key: Key[Array, ""]
    ) -> tuple[SACState, dict[str, Array]]:
        """One update from a raw batch [B, 1, ...]."""
        _, critic_key, actor_key = jax.random.split(update_key(key, state.step), 3)
        steps = self._prepare(batch)
        judges = {"encoder": state.params["encoder"], "critics": state.critics}
        y, next_log_prob = self._target(state, steps, critic_key)

        def of_critics(judges: Params) -> tuple[Array, Array]:
            q = self._judge(judges, steps, critic_key)
            return critic_loss(q, y, steps["weight"]), q

        (loss, q), grads = jax.value_and_grad(of_critics, has_aux=True)(judges)
        updates, critic_opt = self.optimizer.update(grads, state.critic_opt, judges)
        judges = cast("Params", optax.apply_updates(judges, updates))
        state = replace(
            state,
            step=state.step + 1,
            params={**state.params, "encoder": judges["encoder"]},
            critics=judges["critics"],
            target=jax.tree.map(lambda t, x: t + self.spec.tau * (x - t), state.target, judges),
            critic_opt=critic_opt,
        )
        learns = state.step % self.spec.critic_to_actor_ratio == 0
        state = jax.lax.cond(learns, lambda s: self._improve(s, steps, actor_key), lambda s: s, state)
        metrics = {
            "critic_loss": loss,
            "actor_loss": state.loss,
            "value": weighted_mean(q.mean(0), steps["weight"]),
            "value_spread": weighted_mean(q.std(0), steps["weight"]),
            "entropy": weighted_mean(-next_log_prob, steps["weight"]),
            "temperature": jnp.exp(state.log_alpha),
            "critic_grad_norm": optax.tree.norm(grads),
        }
        return state, metrics

    def _judge(self, judges: Params, steps: Transitions, key: Key[Array, ""]) -> Float[Array, "e b"]:
        z = self.policy.encoder(judges["encoder"])(steps["observation"], jax.random.fold_in(key, 0))
        return self.critics(judges["critics"])(z, steps["action"])

    def _target(
        self, state: SACState, steps: Transitions, key: Key[Array, ""]
    ) -> tuple[Float[Array, " b"], Float[Array, " b"]]:
        """y, and log p(a' | z')."""
        shift_key, action_key, subset_key = (jax.random.fold_in(key, i) for i in (1, 2, 3))
        spec, later = self.spec, steps["next_observation"]
        z = self.policy.encoder(state.params["encoder"])(later, shift_key)
        eps = jax.random.normal(action_key, (z.shape[0], self.policy.action_dim))
        action, log_prob = self.policy.actor(state.params["actor"]).sample(z, eps)
        slow_z = self.policy.encoder(state.target["encoder"])(later, shift_key)
        which = random_subset(subset_key, spec.num_critics, spec.num_target_critics)
        next_q = self.critics(state.target["critics"])(slow_z, action, which)
        alpha = jnp.exp(state.log_alpha) if spec.entropy_backup else 0.0
        y = td_target(next_q, log_prob, steps["reward"], steps["terminated"], discount=spec.discount, alpha=alpha)
        return jax.lax.stop_gradient((y, log_prob))

    def _improve(self, state: SACState, steps: Transitions, key: Key[Array, ""]) -> SACState:
        """One update of actor and temperature."""
        shift_key, action_key = jax.random.split(key)
        encoder, critics = self.policy.encoder(state.params["encoder"]), self.critics(state.critics)
        z, weight = encoder(steps["observation"], shift_key), steps["weight"]
        eps = jax.random.normal(action_key, (z.shape[0], self.policy.action_dim))
        alpha = jnp.exp(state.log_alpha)

        def of_actor(params: Params) -> tuple[Array, Array]:
            action, log_prob = self.policy.actor(params).sample(z, eps)
            return actor_loss(critics(z, action), log_prob, alpha, weight), log_prob

        (loss, log_prob), grads = jax.value_and_grad(of_actor, has_aux=True)(state.params["actor"])
        updates, actor_opt = self.optimizer.update(grads, state.actor_opt, state.params["actor"])
        actor = optax.apply_updates(state.params["actor"], updates)
        grad = jax.grad(temperature_loss)(state.log_alpha, log_prob, self.target_entropy, weight)
        change, alpha_opt = self.optimizer.update(grad, state.alpha_opt, state.log_alpha)
        return replace(
            state,
            params={**state.params, "actor": actor},
            log_alpha=cast("Array", optax.apply_updates(state.log_alpha, change)),
            actor_opt=actor_opt,
            alpha_opt=alpha_opt,
            loss=loss,
        )

    def _prepare(self, batch: dict[str, Any]) -> Transitions:
        """Normalised, without the axis of time.

        Raises:
            DatasetError: the batch lacks something; names it.
        """
        if missing := sorted(set(NAMES) - set(batch)):
            raise DatasetError(f"batch: no '{missing[0]}'; it has: {', '.join(batch)}")
        observation = {name: self.normalizer.normalize(name, x) for name, x in batch["observation"].items()}
        mask: Bool[Array, " b"] = batch["mask"][:, 0]
        return {
            "observation": {name: x[:, 0] for name, x in observation.items()},
            "next_observation": {name: x[:, 1] for name, x in observation.items()},
            "action": self.normalizer.normalize("action", batch["action"][:, 0]),
            "reward": batch["reward"][:, 0],
            "terminated": batch["terminated"][:, 0].astype(jnp.float32),
            "weight": jnp.where(mask, batch["weight"], 0.0),
        }

    def _updates(
        self, state: SACState, data: SequenceSource, key: Key[Array, ""], num_updates: int
    ) -> tuple[SACState, dict[str, Array]]:
        def one(state: SACState, _: None) -> tuple[SACState, dict[str, Array]]:
            draw_key = jax.random.split(update_key(key, state.step), 3)[0]
            batch = data.sample(draw_key, self.spec.batch_size, 1)
            if self.batch_sharding is not None:
                batch = jax.lax.with_sharding_constraint(batch, self.batch_sharding)
            return self.update_once(state, batch, key)

        state, metrics = jax.lax.scan(one, state, None, length=num_updates)
        return state, {name: x.mean() for name, x in metrics.items()}

    def _updates_from_batches(
        self, state: SACState, batches: dict[str, Any], key: Key[Array, ""]
    ) -> tuple[SACState, dict[str, Array]]:
        state, metrics = jax.lax.scan(lambda s, batch: self.update_once(s, batch, key), state, batches)
        return state, {name: x.mean() for name, x in metrics.items()}

    def _validation_loss(self, state: SACState, batch: dict[str, Any], key: Key[Array, ""]) -> Float[Array, ""]:
        steps = self._prepare(batch)
        y, _ = self._target(state, steps, key)
        judges = {"encoder": state.params["encoder"], "critics": state.critics}
        return critic_loss(self._judge(judges, steps, key), y, steps["weight"])
