"""TD-MPC2 (Hansen et al., arXiv:2310.16828): plans in the latent space of a world model without a decoder.

    z = h(s)   z' = d(z, a)   r = R(z, a)   q = Q_i(z, a), i = 1 .. Q   a ~ p(z)               (eq. 1)
Nets are perceptrons with layer norm and Mish; latent states are groups of V numbers that sum to 1 (SimNorm).
Acting is MPPI (arXiv:1509.01149): `iterations` times, N action sequences of length H, P of them rolled out by the
prior p and the others drawn from a Gaussian, are valued by
    sum_{t < H} gamma^t R(z_t, a_t) + gamma^H mean(Q_i, Q_j)(z_H, p(z_H)),   i != j drawn anew in each iteration,
and the Gaussian is fitted to the best of them, weighted by exp(temperature * value). Its mean, moved by one step, is
where the next call starts: the carry, zeros at the start of an episode.

For speed the nets that see the same input are one stack of kernels, and the elites are a mask by rank, so that neither
sorting nor gathering is needed.

Letters: B batch, N sequences or rows, H horizon, A action dimensions, L latent, E nets side by side, K bins, D task
embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.nn.distributions import TwoHot, bounded_log_std
from rlsvc.nn.mlps import ConvEncoder, Layer, Mlps, normed, simnorm
from rlsvc.nn.vision import augment_window
from rlsvc.policies.api import PRECISIONS, ActOptions, Params
from rlsvc.spec.diffusion import VisionSpec
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec

TASK_INDEX = "task_index"
"""The observation that says which of several tasks a row is of."""


class Task(NamedTuple):
    """Which task each row is of: embedding [N, D] (D = 0 for a single task), action mask [N, A], discount [N]."""

    embedding: Array
    mask: Array
    discount: Array


class WorldModel(nnx.Module):
    """h, d, R, Q and, where episodes terminate, the termination's net."""

    def __init__(self, spec: TDMPC2PolicySpec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        w, features = spec.widths, contract.observation
        self.spec, self.dtype = spec, dtype
        self.vectors = tuple(sorted(k for k, f in features.items() if not f.is_image and k != TASK_INDEX))
        self.images = tuple(sorted(k for k, f in features.items() if f.is_image))
        self.action_dim, self.num_q = contract.action.shape[0], w.num_q
        self.two_hot = TwoHot(spec.bins, *spec.symlog_range)
        d = spec.task_dim if spec.tasks else 0
        kw = {"dtype": dtype, "rngs": rngs}
        self.task_embedding = (
            nnx.Param(jax.random.uniform(rngs.params(), (len(spec.tasks), d), minval=-0.02, maxval=0.02)) if d else None
        )
        self.convs = nnx.List([ConvEncoder(features[k].shape[-1], spec.channels, **kw) for k in self.images])
        width = sum(int(np.prod(features[k].shape)) for k in self.vectors)
        sizes = [
            jax.eval_shape(conv, jax.ShapeDtypeStruct((1, *features[k].shape), jnp.float32)).shape[-1]
            for k, conv in zip(self.images, self.convs, strict=True)
        ]
        latent = {"latent": True, "simnorm_dim": spec.simnorm_dim, **kw}
        # An image alone whose features are as wide as the latent state is encoded by the convolutions, as published.
        plain = not self.vectors and sizes == [w.latent_dim]
        layers = [w.encoder_dim] * max(w.encoder_layers - 1, 1)
        self.encoder = None if plain else Mlps(width + sum(sizes) + d, layers, w.latent_dim, **latent)
        self.dynamics = Mlps(w.latent_dim + self.action_dim + d, [w.hidden_dim] * 2, w.latent_dim, **latent)
        self.heads = Mlps(
            w.latent_dim + self.action_dim + d,
            [w.hidden_dim] * 2,
            self.two_hot.width,
            nets=1 + w.num_q,
            zero_last=True,
            **kw,
        )
        """The reward's net, then the value functions'."""
        self.ending = Mlps(w.latent_dim + d, [w.hidden_dim] * 2, 1, **kw) if spec.episodic else None

    def task(self, index: Int[Array, " n"] | None, rows: int) -> Task:
        """What the nets are told of the task of each row; None for a single one."""
        tasks, discounts = self.spec.tasks, np.asarray(self.spec.discounts, np.float32)
        if self.task_embedding is None or index is None:
            ones = jnp.ones((rows, self.action_dim))
            return Task(jnp.zeros((rows, 0)), ones, jnp.full((rows,), discounts[0]))
        masks = np.asarray([np.arange(self.action_dim) < task.action_dim for task in tasks], np.float32)
        return Task(self.task_embedding[...][index], jnp.asarray(masks)[index], jnp.asarray(discounts)[index])

    def encode(
        self, observation: dict[str, Array], task: Task, key: Key[Array, ""] | None = None
    ) -> Float[Array, "n l"]:
        """Latent states, h. `key`: shifts images at random, in training."""
        parts = [observation[k].reshape(observation[k].shape[0], -1).astype(jnp.float32) for k in self.vectors]
        for i, (name, conv) in enumerate(zip(self.images, self.convs, strict=True)):
            shift = VisionSpec(crop=None, shift=self.spec.shift)
            image = augment_window(
                observation[name][:, None].astype(self.dtype),
                shift,
                None if key is None else jax.random.fold_in(key, i),
            )
            parts.append(conv(image[:, 0]).astype(jnp.float32))
        if self.encoder is None:
            z = parts[0]
            return simnorm(z, self.spec.simnorm_dim) if self.spec.simnorm_dim else z
        return self.encoder(jnp.concatenate([*parts, task.embedding], -1))[0]

    def next(self, z: Float[Array, "n l"], a: Float[Array, "n a"], task: Task) -> Float[Array, "n l"]:
        """Latent states one step later, d."""
        return self.dynamics(jnp.concatenate([z, a, task.embedding], -1))[0]

    def reward_and_q(
        self, z: Float[Array, "n l"], a: Float[Array, "n a"], task: Task, key: Key[Array, ""] | None
    ) -> Float[Array, "e n k"]:
        """Logits of R, then of every Q. `key`: dropout of the Q, in training."""
        is_q = jnp.arange(1 + self.num_q) > 0
        drop = None if key is None else (self.spec.dropout, is_q, key)
        return self.heads(jnp.concatenate([z, a, task.embedding], -1), drop=drop)

    def q(
        self,
        z: Float[Array, "n l"],
        a: Float[Array, "n a"],
        task: Task,
        pair: Int[Array, " 2"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "2 n"]:
        """Two of the Q. `key`: dropout, in training."""
        drop = None if key is None else (self.spec.dropout, jnp.ones(2, bool), key)
        return self.two_hot.mean(self.heads(jnp.concatenate([z, a, task.embedding], -1), 1 + pair, drop))

    def termination(self, z: Float[Array, "n l"], task: Task) -> Float[Array, " n"]:
        """Logit of the probability that the episode has terminated in z; minus infinity where episodes never do."""
        if self.ending is None:
            return jnp.full((z.shape[0],), -jnp.inf)
        return self.ending(jnp.concatenate([z, task.embedding], -1))[0, :, 0]


class Prior(nnx.Module):
    """p: the mean and log standard deviation of a Gaussian that a tanh squashes."""

    def __init__(self, spec: TDMPC2PolicySpec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        w, self.action_dim = spec.widths, contract.action.shape[0]
        d_in = w.latent_dim + (spec.task_dim if spec.tasks else 0)
        self.net = Mlps(d_in, [w.hidden_dim] * 2, 2 * self.action_dim, dtype=dtype, rngs=rngs)
        self.log_std_range = spec.log_std_range

    def __call__(self, z: Float[Array, "n l"], task: Task) -> tuple[Float[Array, "n a"], Float[Array, "n a"]]:
        """Before tanh; both are 0 in the action dimensions that the task does not use."""
        mean, log_std = jnp.split(self.net(jnp.concatenate([z, task.embedding], -1))[0], 2, axis=-1)
        return mean * task.mask, bounded_log_std(log_std, *self.log_std_range) * task.mask

    def sample(self, z: Float[Array, "n l"], eps: Float[Array, "n a"], task: Task) -> Float[Array, "n a"]:
        """Actions from standard normal noise."""
        mean, log_std = self(z, task)
        return jnp.tanh(mean + jnp.exp(log_std) * eps * task.mask)


def random_pair(key: Key[Array, ""], n: int) -> Int[Array, " 2"]:
    """Two different numbers below n, every pair as likely as any other."""
    i, step = jax.random.bits(key, (2,)) % jnp.array([n, n - 1], jnp.uint32)
    return jnp.stack([i, (i + 1 + step) % n]).astype(jnp.int32)


def ranks(x: Float[Array, " n"]) -> Int[Array, " n"]:
    """Place of each number in descending order, from 0; equal ones in their own order."""
    place = jnp.arange(x.shape[0])
    before = (x[None] > x[:, None]) | ((x[None] == x[:, None]) & (place[None] < place[:, None]))
    return before.sum(1)


class Plan(NamedTuple):
    """Where an iteration of the planner stands: its Gaussian, and the first actions and weights it was fitted to."""

    mean: Float[Array, "h a"]
    std: Float[Array, "h a"]
    weight: Float[Array, " n"]
    first: Float[Array, "n a"]


def repeated(task: Task, n: int) -> Task:
    """The task of one row for n rows."""
    return Task(*(jnp.broadcast_to(x[None], (n, *x.shape)) for x in task))


def _key(part: Any) -> Any:
    return getattr(part, "key", None)


class TDMPC2Policy:
    """The policy: static. Its weights are {"model", "prior"}.

    Attributes:
        unroll: iterations of the planner that are compiled into one; None is 2 on a GPU, where the host can prepare the
            next ones while these run, and 1 elsewhere, where it only takes longer to compile.
    """

    unroll: int | None = None
    narrow = ""
    compiler_options: ClassVar = {}

    def __init__(self, spec: TDMPC2PolicySpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the nets can be built for this contract.

        Raises:
            ContractError: an observation or action that this policy cannot take; names it.
        """
        for key, feature in contract.observation.items():
            if feature.dtype == TEXT:
                raise ContractError(f"observation '{key}' is a text; the tdmpc2 policy takes vectors and images")
        if len(contract.action.shape) != 1 or not contract.action.dtype.startswith("float"):
            raise ContractError(
                f"action: got {contract.action.dtype} of shape {contract.action.shape}; the tdmpc2 policy plans over "
                "one vector of floats"
            )
        if (contract.n_obs_steps, contract.action_horizon) != (1, 1):
            raise ContractError(
                f"contract has n_obs_steps = {contract.n_obs_steps}, action_horizon = {contract.action_horizon}; "
                "the tdmpc2 policy sees one observation and gives one action (stack frames in the environment)"
            )
        if bool(spec.tasks) != (TASK_INDEX in contract.observation):
            raise ContractError(
                f"observation '{TASK_INDEX}': {'missing' if spec.tasks else 'given'}, but the policy has "
                f"{len(spec.tasks)} tasks"
            )
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.action_dim = contract.action.shape[0]
        self.iterations = spec.iterations or (8 if self.action_dim >= 20 else 6)

    def _nets(self, key: Key[Array, ""], dtype: DTypeLike) -> tuple[WorldModel, Prior]:
        model_key, prior_key = jax.random.split(key)
        return (
            WorldModel(self.spec, self.contract, dtype=dtype, rngs=nnx.Rngs(params=model_key)),
            Prior(self.spec, self.contract, dtype=dtype, rngs=nnx.Rngs(params=prior_key)),
        )

    @cached_property
    def _graphs(self) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        return self._graphs_of(self.dtype)

    @cached_property
    def _plan_graphs(self) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        return self._graphs_of(self.plan_dtype)

    def _graphs_of(self, dtype: DTypeLike) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        model, prior = nnx.eval_shape(lambda: self._nets(jax.random.key(0), dtype))
        return nnx.split(model)[0], nnx.split(prior)[0]

    @property
    def plan_dtype(self) -> DTypeLike:
        """Of the matrix products of acting, by planner or prior."""
        if self.spec.plan_precision is not None:
            return PRECISIONS[self.spec.plan_precision]
        return jnp.bfloat16 if jax.default_backend() == "gpu" else self.dtype

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        model, prior = self._nets(key, self.dtype)
        return {"model": nnx.state(model), "prior": nnx.state(prior)}

    def model(self, params: Params) -> WorldModel:
        """The nets with the weights `params["model"]`."""
        return nnx.merge(self._graphs[0], params)

    def prior(self, params: Params) -> Prior:
        """The prior with the weights `params["prior"]`."""
        return nnx.merge(self._graphs[1], params)

    def initial_carry(self, batch_size: int) -> Float[Array, "b h a"]:
        """Where the planner starts: zeros, at the start of an episode."""
        return jnp.zeros((batch_size, self.spec.horizon, self.action_dim))

    def act(
        self,
        params: Params,
        observation: dict[str, Array],
        carry: Float[Array, "b h a"],
        keys: Key[Array, " b"],
        options: ActOptions,
    ) -> tuple[Float[Array, "b 1 a"], Float[Array, "b h a"], dict[str, Array]]:
        """One action in [-1, 1] for each row.

        Extras: `behaviour_mean` and `behaviour_log_std` [B, A] of the Gaussian that an exploring action is drawn from
        (before tanh when the prior acts).
        """
        # Once, rather than in every iteration; what is added up or normalised stays float32.
        dtype = self.plan_dtype
        cast = jax.tree_util.tree_map_with_path(
            lambda path, x: x.astype(dtype) if "kernels" in map(_key, path) else x, params
        )
        graphs = self._plan_graphs
        model, prior = nnx.merge(graphs[0], cast["model"]), nnx.merge(graphs[1], cast["prior"])
        now = {name: x[:, -1] for name, x in observation.items()}
        task = model.task(now[TASK_INDEX].astype(jnp.int32) if TASK_INDEX in now else None, keys.shape[0])
        z = model.encode(now, task)
        if self.spec.plan:
            row = partial(self._plan, model, prior, explore=options.explore)
            action, carry, mean, log_std = jax.vmap(row)(z, task, carry, keys)
        else:
            mean, log_std = prior(z, task)
            eps = jax.vmap(lambda key: jax.random.normal(key, (self.action_dim,)))(keys) * task.mask
            action = jnp.tanh(mean + jnp.exp(log_std) * eps if options.explore else mean)
        return action[:, None], carry, {"behaviour_mean": mean, "behaviour_log_std": log_std}

    def _plan(
        self,
        model: WorldModel,
        prior: Prior,
        z: Float[Array, " l"],
        task: Task,
        previous: Float[Array, "h a"],
        key: Key[Array, ""],
        *,
        explore: bool,
    ) -> tuple[Float[Array, " a"], Float[Array, "h a"], Float[Array, " a"], Float[Array, " a"]]:
        """Action, mean of the whole plan, the drawn elite's first action and its log std, for one observation."""
        spec, a = self.spec, self.action_dim
        h, n, p = spec.horizon, spec.samples, spec.policy_samples
        proposal_key, noise_key, value_key, pair_key, choice_key, explore_key = jax.random.split(key, 6)
        mask = task.mask[None]
        proposals = self._proposals(model, prior, z, task, proposal_key)
        value = self._value_function(model, prior, z, task)

        def iterate(plan: Plan, draws: tuple[Array, Array, Array]) -> tuple[Plan, None]:
            noise, value_noise, pair = draws
            drawn = jnp.clip(plan.mean[:, None] + plan.std[:, None] * noise, -1, 1) * mask[None]
            actions = jnp.concatenate([proposals, drawn], axis=1)
            values = jnp.nan_to_num(value(actions, value_noise, pair))
            weight = jnp.where(ranks(values) < spec.elites, jnp.exp(spec.temperature * (values - values.max())), 0.0)
            weight = weight / weight.sum()
            mean = (weight[None, :, None] * actions).sum(1)
            variance = jnp.maximum((weight[None, :, None] * actions**2).sum(1) - mean**2, 0.0)
            std = jnp.clip(jnp.sqrt(variance), spec.min_std, spec.max_std) * mask
            return Plan(mean, std, weight, actions[0]), None

        start = jnp.concatenate([previous[1:], jnp.zeros((1, a))])
        plan = Plan(start, jnp.full((h, a), spec.max_std), jnp.zeros(n), jnp.zeros((n, a)))
        draws = (
            jax.random.normal(noise_key, (self.iterations, h, n - p, a)),
            jax.random.normal(value_key, (self.iterations, n, a)),
            jax.vmap(lambda k: random_pair(k, spec.widths.num_q))(jax.random.split(pair_key, self.iterations)),
        )
        unroll = self.unroll or (2 if jax.default_backend() == "gpu" else 1)
        plan, _ = jax.lax.scan(iterate, plan, draws, unroll=unroll)
        std = plan.std[0]
        elite = plan.first[jax.random.categorical(choice_key, jnp.log(plan.weight))]
        if explore:
            action = jnp.clip(elite + std * jax.random.normal(explore_key, (a,)), -1, 1)
        else:
            action = elite if spec.evaluation == "elite" else plan.mean[0]
        return action, plan.mean, elite, jnp.log(jnp.where(task.mask > 0, std, 1.0))

    def _proposals(
        self, model: WorldModel, prior: Prior, z: Float[Array, " l"], task: Task, key: Key[Array, ""]
    ) -> Float[Array, "h p a"]:
        """Action sequences that the prior rolls out."""
        h, p = self.spec.horizon, self.spec.policy_samples
        eps, rows, actions = jax.random.normal(key, (h, p, self.action_dim)), repeated(task, p), []
        if not p:
            return eps
        states = jnp.broadcast_to(z[None], (p, z.shape[0]))
        for t in range(h):
            actions.append(prior.sample(states, eps[t], rows))
            if t < h - 1:
                states = model.next(states, actions[t], rows)
        return jnp.stack(actions)

    def _value_function(
        self, model: WorldModel, prior: Prior, z: Float[Array, " l"], task: Task
    ) -> Callable[[Float[Array, "h n a"], Float[Array, "n a"], Int[Array, " 2"]], Float[Array, " n"]]:
        """The value of action sequences from z on, given the prior's noise and the pair of value functions."""
        h, n, a, dtype = self.spec.horizon, self.spec.samples, self.action_dim, self.plan_dtype
        width, d = z.shape[0], task.embedding.shape[0]
        rows = repeated(task, n)
        *dynamics, to_latent = model.dynamics.layers()
        *reward, to_reward = model.heads.layers(slice(0, 1))
        # Dynamics and reward see the same input, so their hidden layers are one stack; and their first layer is one
        # product for z, which at the first step is the same in every sequence, and one for the actions of all steps.
        first, second = (
            Layer(jnp.concatenate([d.kernel, r.kernel], axis), jnp.concatenate([d.affine, r.affine]))
            for axis, d, r in zip((1, 0), dynamics, reward, strict=True)
        )
        of_state = first._replace(kernel=first.kernel[:width])
        of_rest = first._replace(kernel=first.kernel[width : width + a + d])
        start = of_state.product(z[None], dtype)

        def value(actions: Array, eps: Array, pair: Array) -> Array:
            rest = jnp.concatenate([actions, jnp.broadcast_to(task.embedding[None, None], (h, n, d))], -1)
            rest = of_rest.product(rest.reshape(h * n, a + d), dtype).reshape(2, h, n, of_rest.kernel.shape[-1])
            of_z, features = start, []
            discount, alive, weights = jnp.ones(()), jnp.ones(n), []
            for t in range(h):
                x = normed(rest[:, t] + of_z, first.affine, None, None)
                x = normed(second.product(x, dtype), second.affine, None, None)
                features.append(x[1])
                states = model.dynamics.output(to_latent, x[:1])[0]
                weights.append(discount * alive)
                discount = discount * task.discount
                if self.spec.episodic:
                    alive = alive * (model.termination(states, rows) <= 0)
                if t < h - 1:
                    of_z = of_state.product(states, dtype)
            logits = model.heads.output(to_reward, jnp.concatenate(features)[None])[0]
            rewards = model.two_hot.mean(logits).reshape(h, n)
            q = model.q(states, prior.sample(states, eps, rows), rows, pair).mean(0)
            return (jnp.stack(weights) * rewards).sum(0) + discount * alive * q

        return value
