"""TD-MPC2 (Hansen et al., arXiv:2310.16828): world model, values and policy prior from sequences of H steps.

From z_0 = h(s_0) the dynamics roll on, z_{t+1} = d(z_t, a_t), and with m_t whether step t lies in the episode
    L = sum_t rho^t m_t / H (20 |z_{t+1} - sg h(s_{t+1})|^2 / L + 0.1 ce(R, r_t) + 0.1 mean_i ce(Q_i, y_t))      (eq. 3)
    y_t = r_t + gamma (1 - terminated_t) min(Q'_i, Q'_j)(h(s_{t+1}), p(h(s_{t+1}))),   i != j drawn anew,    (eq. 4)
where Q' follow Q slowly. The prior then follows the new Q on the same z_t:
    L_p = -sum_t rho^t m_t / (H + 1) (mean(Q_i, Q_j)(z_t, p(z_t)) / S + 1e-4 A H_p(z_t)),                       (eq. 5)
with S the running range of values from the 5th to the 95th percentile and H_p the entropy of p's Gaussian.
TD-M(PC)^2 (arXiv:2502.03550, eq. 9) adds the log likelihood of p's action under the planner that acted at z_t.

Departure: sequences that reach over an episode's end are used as far as they go, rather than never drawn.

Letters: B batch, T time, H horizon, N = T B rows, A action dimensions, L latent, K updates in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.algos.api import START, Phase, SequenceSource, update_key
from rlsvc.core.errors import DatasetError, unknown_name
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.distributions import gaussian_log_prob, symlog, tanh_log_det
from rlsvc.policies.api import Params
from rlsvc.policies.tdmpc2 import TASK_INDEX, Prior, Task, TDMPC2Policy, WorldModel, random_pair
from rlsvc.spec.tdmpc2 import TDMPC2Spec

ENCODERS = ("encoder", "convs")
"""Parts of the world model that learn at the encoder's rate."""
NAMES = ("observation", "action", "reward", "terminated", "mask", "weight", "index")
BEHAVIOUR = ("behaviour_mean", "behaviour_log_std")
ROWS = ("index", "priority")
"""Metrics of single rows of the batch."""
Sequences = dict[str, Any]
"""observation: by name [T + 1, B, ...]; action [T, B, A]; reward, terminated, mask [T, B]; weight [B]."""


@no_type_check  # as a pytree it also holds shapes, or arrays of the host
@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "target", "opt_state", "prior_opt_state", "scale"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TDMPC2State:
    """Train state. `step`: int32 updates done; `target`: weights of Q' (and, unused, of R); `scale`: S."""

    step: Int[Array, ""]
    params: Params
    target: Params
    opt_state: optax.OptState
    prior_opt_state: optax.OptState
    scale: Float[Array, ""]


def masked_mean(x: Float[Array, "t b"], mask: Bool[Array, "t b"], weight: Float[Array, " b"]) -> Float[Array, " t"]:
    """Weighted mean over the rows of each step that lie in their episode."""
    return jnp.where(mask, x * weight[None], 0.0).sum(1) / jnp.maximum(mask.sum(1), 1)


def percentile(x: Float[Array, " n"], mask: Bool[Array, " n"], q: float) -> Float[Array, ""]:
    """Percentile of the masked numbers, linear between two of them, without sorting."""
    place = jnp.arange(x.shape[0])
    before = (x[None] < x[:, None]) | ((x[None] == x[:, None]) & (place[None] < place[:, None]))
    rank = (before & mask[None]).sum(1)
    at = jnp.maximum(mask.sum() - 1, 0) * (q / 100)
    return jnp.where(mask, jax.nn.relu(1 - jnp.abs(rank - at)) * x, 0.0).sum()


def td_target(
    target: WorldModel,
    prior: Prior,
    next_z: Float[Array, "n l"],
    reward: Float[Array, " n"],
    terminated: Float[Array, " n"],
    task: Task,
    key: Key[Array, ""],
) -> Float[Array, " n"]:
    """What the values are to become, y of eq. 4; `target` holds Q'."""
    action_key, pair_key = jax.random.split(key)
    action = prior.sample(next_z, jax.random.normal(action_key, (next_z.shape[0], prior.action_dim)), task)
    value = target.q(next_z, action, task, random_pair(pair_key, target.num_q)).min(0)
    return reward + task.discount * (1 - terminated) * value


def model_loss(
    model: WorldModel, target: WorldModel, prior: Prior, batch: Sequences, key: Key[Array, ""], spec: TDMPC2Spec
) -> tuple[Float[Array, ""], tuple[dict[str, Array], Float[Array, "t b l"]]]:
    """L of eq. 3; besides, metrics, and the latent states z_0 .. z_H that were rolled out."""
    augment_key, target_key, drop_key = jax.random.split(key, 3)
    action, mask, weight = batch["action"], batch["mask"], batch["weight"]
    h, b = mask.shape

    def steps(x: Array) -> Array:
        return x.reshape(x.shape[0] // b, b, *x.shape[1:])

    task, tasks = batch_tasks(model, batch["observation"], b)
    encoded = model.encode(flat(batch["observation"]), tasks, augment_key)
    next_z, later = jax.lax.stop_gradient(encoded[b:]), Task(*(x[b:] for x in tasks))
    reward, terminated = flat((batch["reward"], batch["terminated"].astype(jnp.float32)))
    y = jax.lax.stop_gradient(td_target(target, prior, next_z, reward, terminated, later, target_key))
    states = [encoded[:b]]
    for t in range(h):
        states.append(model.next(states[t], action[t], task))
    zs = jnp.concatenate(states)
    logits = model.reward_and_q(zs[: h * b], flat(action), later, drop_key)
    reward_error = model.two_hot.loss(logits[0], reward)
    value_error = jax.vmap(model.two_hot.loss, (0, None))(logits[1:], y).mean(0)
    consistency_error = ((zs[b:] - next_z) ** 2).mean(-1)
    rho = spec.rho ** jnp.arange(h)
    terms = {
        name: (rho * masked_mean(steps(error), mask, weight)).mean()
        for name, error in (
            ("consistency_loss", consistency_error),
            ("reward_loss", reward_error),
            ("value_loss", value_error),
        )
    }
    loss = spec.consistency_coef * terms["consistency_loss"]
    loss = loss + spec.reward_coef * terms["reward_loss"] + spec.value_coef * terms["value_loss"]
    if model.ending is not None:
        error = optax.sigmoid_binary_cross_entropy(model.termination(zs[b:], later), terminated)
        terms["termination_loss"] = masked_mean(steps(error), mask, weight).mean()
        loss = loss + spec.termination_coef * terms["termination_loss"]
    metrics = {**terms, "total_loss": loss}
    if spec.prioritized:
        value = jax.lax.stop_gradient(model.two_hot.mean(logits[1:]).mean(0))
        error = jnp.abs(symlog(value) - symlog(y))
        metrics["priority"] = jnp.where(mask, steps(error), 0.0).sum(0) / jnp.maximum(mask.sum(0), 1)
    return loss, (metrics, steps(zs))


def prior_loss(
    prior: Prior,
    model: WorldModel,
    zs: Float[Array, "t b l"],
    batch: Sequences,
    scale: Float[Array, ""],
    key: Key[Array, ""],
    spec: TDMPC2Spec,
) -> tuple[Float[Array, ""], tuple[dict[str, Array], Float[Array, ""]]]:
    """L_p of eq. 5; besides, metrics, and the new scale S."""
    action_key, pair_key, drop_key = jax.random.split(key, 3)
    t, b, _ = zs.shape
    # z_t exists where the step before it lies in the episode.
    mask = jnp.concatenate([jnp.ones((1, b), bool), batch["mask"]])
    even = jnp.ones(b)
    _, tasks = batch_tasks(model, batch["observation"], b)
    z = flat(zs)
    mean, log_std = prior(z, tasks)
    eps = jax.random.normal(action_key, mean.shape) * tasks.mask
    action = jnp.tanh(mean + jnp.exp(log_std) * eps)
    q = model.q(z, action, tasks, random_pair(pair_key, model.num_q), drop_key).mean(0).reshape(t, b)
    first = jax.lax.stop_gradient(q[0])
    spread = percentile(first, mask[0], 95.0) - percentile(first, mask[0], 5.0)
    scale = scale + spec.scale_tau * (jnp.maximum(spread, 1.0) - scale)
    log_prob = gaussian_log_prob(eps, log_std)
    scaled_entropy = (-log_prob * tasks.mask.sum(-1)).reshape(t, b)
    gain = q / scale + spec.entropy_coef * scaled_entropy
    rho = spec.rho ** jnp.arange(t)
    loss = -(rho * masked_mean(gain, mask, even)).mean()
    entropy = (tanh_log_det(action) - log_prob).reshape(t, b)
    metrics = {"prior_loss": loss, "prior_entropy": masked_mean(entropy, mask, even).mean(), "scale": scale}
    if spec.behaviour_coef:
        likelihood = behaviour_log_prob(action.reshape(t, b, action.shape[-1])[:-1], batch, tasks.mask[:b]) / scale
        behaviour_loss = -(rho[:-1] * masked_mean(likelihood, batch["mask"], even)).mean()
        metrics["behaviour_loss"] = behaviour_loss
        loss = loss + spec.behaviour_coef * jnp.where(scale > spec.behaviour_threshold, behaviour_loss, 0.0)
    return loss, (metrics, scale)


def behaviour_log_prob(
    action: Float[Array, "t b a"], batch: Sequences, action_mask: Float[Array, "b a"]
) -> Float[Array, "t b"]:
    """Log likelihood of actions under the Gaussian that acted when the batch was collected."""
    log_std = batch["behaviour_log_std"]
    eps = (action - batch["behaviour_mean"]) * jnp.exp(-log_std)
    return gaussian_log_prob(eps * action_mask[None], log_std * action_mask[None])


def flat(tree: Any) -> Any:
    """[T, B, ...] to [T B, ...], every leaf."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def batch_tasks(model: WorldModel, observation: dict[str, Array], b: int) -> tuple[Task, Task]:
    """The tasks of the B sequences, and of all their (H + 1) B observations."""
    index = observation[TASK_INDEX].astype(jnp.int32) if TASK_INDEX in observation else None
    task = model.task(None if index is None else index[0], b)
    repeats = next(iter(observation.values())).shape[0]
    return task, Task(*(jnp.tile(x, (repeats,) + (1,) * (x.ndim - 1)) for x in task))


class TDMPC2:
    """The algorithm of `rlsvc.algos.api`. `data` gives sequences (rlsvc/data/replay.py)."""

    hooks: tuple[str, ...] = ("update",)

    def __init__(
        self,
        policy: TDMPC2Policy,
        normalizer: Normalizer,
        spec: TDMPC2Spec,
        *,
        total_steps: int,
        batch_sharding: NamedSharding | None = None,
    ) -> None:
        """`batch_sharding`: how the rows of a batch lie on the devices of several ranks; None on one device."""
        del total_steps  # the learning rate is constant
        self.policy, self.normalizer, self.spec, self.batch_sharding = policy, normalizer, spec, batch_sharding
        self.optimizer = optax.chain(optax.clip_by_global_norm(spec.grad_clip), optax.scale_by_adam())
        self.prior_optimizer = optax.chain(
            optax.clip_by_global_norm(spec.grad_clip), optax.adam(spec.learning_rate, eps=spec.prior_eps)
        )
        self._names = NAMES + (BEHAVIOUR if spec.behaviour_coef else ())
        self._update = jax.jit(self._updates, static_argnames="num_updates", donate_argnames="state")
        self._update_from_batches = jax.jit(self._updates_from_batches, donate_argnames="state")
        self._validate = jax.jit(self._validation_loss)

    def init(self, key: Key[Array, ""]) -> TDMPC2State:
        """Fresh weights; the target starts at them."""
        params = self.policy.init(key)
        return TDMPC2State(
            jnp.zeros((), jnp.int32),
            params,
            jax.tree.map(jnp.copy, params["model"]["heads"]),
            self.optimizer.init(params["model"]),
            self.prior_optimizer.init(params["prior"]),
            jnp.ones(()),
        )

    def update(
        self,
        hook: str,
        state: TDMPC2State,
        data: SequenceSource,
        key: Key[Array, ""],
        num_updates: int,
        phase: Phase = START,
    ) -> tuple[TDMPC2State, dict[str, Array]]:
        """K updates in one compiled call; donates `state`; see `rlsvc.algos.api.Algorithm`.

        With `prioritized` the metrics hold `index` and `priority` [K, B] besides.
        """
        del phase
        if hook not in self.hooks:
            raise unknown_name("hook of tdmpc2", hook, self.hooks)
        if not data.on_host:
            return self._update(state, data, key, num_updates=num_updates)
        draw_key = update_key(key, state.step)
        batches = data.sample_many(draw_key, num_updates, self.spec.batch_size, self.policy.spec.horizon)
        return self._update_from_batches(state, {name: batches[name] for name in self._names}, key)

    def acting_params(self, state: TDMPC2State) -> Params:
        """World model and prior."""
        return state.params

    def validate(self, state: TDMPC2State, data: SequenceSource, key: Key[Array, ""]) -> dict[str, Array]:
        """L on one batch, the same one and the same noise every time."""
        batch = data.sample(key, self.spec.batch_size, self.policy.spec.horizon)
        return {"loss": self._validate(state, batch, key)}

    def update_once(
        self, state: TDMPC2State, batch: dict[str, Any], key: Key[Array, ""]
    ) -> tuple[TDMPC2State, dict[str, Array]]:
        """One update from a raw batch [B, T, ...]; pure, so that it can be mapped over a leading axis of seeds."""
        policy, spec = self.policy, self.spec
        _, model_key, prior_key = jax.random.split(update_key(key, state.step), 3)
        sequences, old, old_prior = self._prepare(batch), state.params["model"], state.params["prior"]
        target = policy.model(nnx.State({**old, "heads": state.target}))

        def of_model(params: Params) -> tuple[Array, Any]:
            return model_loss(policy.model(params), target, policy.prior(old_prior), sequences, model_key, spec)

        grads, (metrics, zs) = jax.grad(of_model, has_aux=True)(old)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, old)
        model = self._step(old, updates)

        def of_prior(params: Params) -> tuple[Array, Any]:
            return prior_loss(policy.prior(params), policy.model(model), zs, sequences, state.scale, prior_key, spec)

        prior_grads, (prior_metrics, scale) = jax.grad(of_prior, has_aux=True)(old_prior)
        updates, prior_opt_state = self.prior_optimizer.update(prior_grads, state.prior_opt_state, old_prior)
        prior = optax.apply_updates(old_prior, updates)
        slow = jax.tree.map(lambda t, q: t + spec.tau * (q - t), state.target, model["heads"])
        metrics |= {
            **prior_metrics,
            "grad_norm": optax.tree.norm(grads),
            "prior_grad_norm": optax.tree.norm(prior_grads),
        }
        if spec.prioritized:
            metrics["index"] = batch["index"]
        params = {"model": model, "prior": prior}
        return TDMPC2State(state.step + 1, params, slow, opt_state, prior_opt_state, scale), metrics

    def _step(self, params: Params, updates: Params) -> Params:
        """Adam's direction times the learning rate of each part; task embeddings stay within the unit ball."""

        def move(path: tuple[Any, ...], p: Array, update: Array) -> Array:
            part = path[0].key
            rate = self.spec.learning_rate * (self.spec.encoder_lr_scale if part in ENCODERS else 1.0)
            p = p - rate * update
            if part == "task_embedding":
                p = p / jnp.maximum(jnp.linalg.norm(p, axis=-1, keepdims=True), 1.0)
            return p

        return jax.tree_util.tree_map_with_path(move, params, updates)

    def _prepare(self, batch: dict[str, Any]) -> Sequences:
        """Normalised, time first.

        Raises:
            DatasetError: the batch lacks something; names it.
        """
        if missing := sorted(set(self._names) - set(batch)):
            why = ", which algo.behaviour_coef > 0 needs: the policy that collects hands it out" * (
                missing[0] in BEHAVIOUR
            )
            raise DatasetError(f"batch: no '{missing[0]}'{why}; it has: {', '.join(batch)}")
        observation = {
            name: x if name == TASK_INDEX else self.normalizer.normalize(name, x)
            for name, x in batch["observation"].items()
        }
        action = self.normalizer.normalize("action", batch["action"])
        steps = {**{name: batch[name] for name in self._names}, "observation": observation, "action": action}
        weight = steps.pop("weight")
        del steps["index"]
        return {**jax.tree.map(lambda x: x.swapaxes(0, 1), steps), "weight": weight}

    def _updates(
        self, state: TDMPC2State, data: SequenceSource, key: Key[Array, ""], num_updates: int
    ) -> tuple[TDMPC2State, dict[str, Array]]:
        def one(state: TDMPC2State, _: None) -> tuple[TDMPC2State, dict[str, Array]]:
            draw_key = jax.random.split(update_key(key, state.step), 3)[0]
            batch = data.sample(draw_key, self.spec.batch_size, self.policy.spec.horizon)
            if self.batch_sharding is not None:
                batch = jax.lax.with_sharding_constraint(batch, self.batch_sharding)
            return self.update_once(state, batch, key)

        return averaged(one, state, None, num_updates)

    def _updates_from_batches(
        self, state: TDMPC2State, batches: dict[str, Any], key: Key[Array, ""]
    ) -> tuple[TDMPC2State, dict[str, Array]]:
        return averaged(lambda s, batch: self.update_once(s, batch, key), state, batches, batches["reward"].shape[0])

    def _validation_loss(self, state: TDMPC2State, batch: dict[str, Any], key: Key[Array, ""]) -> Float[Array, ""]:
        policy, params = self.policy, state.params
        target = policy.model(nnx.State({**params["model"], "heads": state.target}))
        model, prior = policy.model(params["model"]), policy.prior(params["prior"])
        return model_loss(model, target, prior, self._prepare(batch), key, self.spec)[0]


def averaged(
    update: Callable[[TDMPC2State, Any], tuple[TDMPC2State, dict[str, Array]]],
    state: TDMPC2State,
    xs: Any,
    num_updates: int,
) -> tuple[TDMPC2State, dict[str, Array]]:
    """K updates: means of all metrics but those of single rows. Numbers travel as one vector, which is quicker."""
    names: list[str] = []

    def one(state: TDMPC2State, x: Any) -> tuple[TDMPC2State, tuple[Array, dict[str, Array]]]:
        state, metrics = update(state, x)
        rows = {name: metrics.pop(name) for name in ROWS if name in metrics}
        names[:] = metrics
        return state, (jnp.stack(list(metrics.values())), rows)

    state, (numbers, rows) = jax.lax.scan(one, state, xs, length=num_updates)
    return state, {**dict(zip(names, numbers.mean(0), strict=True)), **rows}
