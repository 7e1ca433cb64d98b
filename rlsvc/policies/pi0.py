"""pi0 (Black et al., arXiv:2410.24164) and pi0.5 (arXiv:2504.16054): a vision-language model that flows to actions.

A SigLIP tower and a Gemma backbone read images and prompt; a smaller Gemma expert reads noisy actions and looks at the
backbone's keys and values, never the other way round. With noise eps and t ~ Beta(1.5, 1) scaled to (0.001, 1], the
expert learns the velocity of
    x_t = t eps + (1 - t) a,    v = eps - a,    loss = |v(x_t, t, o) - v|^2,
so t = 1 is noise and t = 0 the actions (the other way round than in the paper, as in its published weights). Acting
runs Euler steps from 1 to 0 over the backbone's keys and values, which are computed once.
pi0 gives the expert a token of the state, and mixes the time into every action token; pi0.5 tells the state in the
prompt, and the time to the expert's norms. An insulated pi0.5 (arXiv:2505.23705) stops the flow's gradient at the
backbone's keys and values; the backbone learns to say the same actions in FAST tokens after the prompt, which the
expert does not see.

Departure: padded actions have no loss (published: the last one is learnt again and again); padded dimensions have one,
as published, since sampling integrates them too.

Letters: B batch, C cameras, S tokens of an image, L tokens of a prompt, P tokens of images and prompt, F tokens
of a chunk, H horizon, A action dimensions with padding, W width of the expert.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.windows import Batch
from rlsvc.nn.gemma import Cache, Expert, block_mask, positions_of, transformer
from rlsvc.nn.layers import Linear
from rlsvc.nn.lora import merged_weights
from rlsvc.nn.params import unflatten_params
from rlsvc.policies.api import ACTION_MASK, ACTION_TOKENS, PROMPT_MASK, ActOptions, Carry, Metrics, Params
from rlsvc.policies.vision_language import (
    COMPILER_OPTIONS,
    NARROW,
    VisionLanguageNet,
    check_contract,
    cross_entropy,
    newest,
    state_width,
    vectors,
)
from rlsvc.spec.pi0 import Pi0Spec

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
TILE = 8
"""Rows of a matrix product in bf16 on a GPU, of which XLA makes whole ones."""


def time_features(t: Float[Array, " n"], dim: int) -> Float[Array, "n dim"]:
    """Sines, then cosines, of t, with periods from 0.004 to 4 in geometric steps; float32."""
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** jnp.linspace(0.0, 1.0, dim // 2)
    angle = t[:, None] * (2 * jnp.pi / period)[None]
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


class Seen(NamedTuple):
    """What the expert's tokens see, the same in every Euler step.

    Attributes:
        cache: keys and values of images and prompt.
        state: the token before the actions; None for a pi0.5.
        mask: which of all S keys, their own the last, each of its T tokens sees.
        positions: of its tokens.
    """

    cache: Cache
    state: Float[Array, "b 1 w"] | None
    mask: Bool[Array, "b t s"]
    positions: Int[Array, "b t"]


class Pi0Net(VisionLanguageNet):
    """Vision tower, backbone, expert, and what brings states, actions and time to the expert's width."""

    spec: Pi0Spec

    def __init__(self, spec: Pi0Spec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(spec, contract, dtype=dtype, rngs=rngs)
        self.vectors = vectors(contract)
        self.action_dim = a = action_dim(spec, contract)
        w = spec.expert.width
        pi05 = spec.variant == "pi05"
        self.expert = Expert(spec.expert, adaptive=pi05, lora=spec.lora_expert, dtype=dtype, rngs=rngs)
        # The few numbers of a robot stay float32.
        kw = {"dtype": jnp.float32, "rngs": rngs}
        self.action_in, self.action_out = Linear(a, w, **kw), Linear(w, a, **kw)
        self.state_in = None if pi05 else Linear(a, w, **kw)
        self.time1, self.time2 = Linear(w if pi05 else 2 * w, w, **kw), Linear(w, w, **kw)

    def state_token(self, observation: dict[str, Array]) -> Float[Array, "b 1 w"] | None:
        """The expert's first token; None for a pi0.5."""
        if self.state_in is None:
            return None
        parts = [observation[k].reshape(observation[k].shape[0], -1).astype(jnp.float32) for k in self.vectors]
        return self.state_in(padded(jnp.concatenate(parts, axis=-1), self.action_dim))[:, None]

    def suffix(
        self, state: Float[Array, "b 1 w"] | None, x: Float[Array, "b h a"], t: Float[Array, " b"]
    ) -> tuple[Float[Array, "b s w"], Float[Array, "b w"] | None]:
        """The expert's tokens, and the condition of its norms."""
        actions, time = self.action_in(x), time_features(t, self.spec.expert.width)
        if state is None:
            return actions, jax.nn.silu(self.time2(jax.nn.silu(self.time1(time))))
        both = jnp.concatenate([actions, jnp.broadcast_to(time[:, None], actions.shape)], axis=-1)
        return jnp.concatenate([state, self.time2(jax.nn.silu(self.time1(both)))], axis=1), None

    def starts(self, length: int) -> Bool[Array, " s"]:
        """Where the blocks of so many of the expert's tokens begin: at the state, and at the first action."""
        return jnp.arange(length) <= (self.state_in is not None)

    def seen(self, observation: dict[str, Array], cache: Cache, valid: Bool[Array, "b p"]) -> Seen:
        """Beside the keys and values of images and prompt, of which `valid` are there."""
        state, b = self.state_token(observation), valid.shape[0]
        length = self.spec.horizon + (state is not None)
        # To whole tiles of a matrix product, once, rather than before every product.
        t = length + -length % TILE
        own = jnp.broadcast_to(block_mask(jnp.arange(t)[None] < length, self.starts(t)), (b, t, t))
        before = jnp.broadcast_to(valid[:, None], (b, t, valid.shape[1]))
        positions = valid.sum(1, dtype=jnp.int32)[:, None] + jnp.arange(t)[None]
        return Seen(cache, state, jnp.concatenate([before, own], axis=-1), positions)

    def velocity(
        self, seen: Seen, x: Float[Array, "b h a"], t: Float[Array, " b"], remat: bool = False
    ) -> Float[Array, "b h a"]:
        """v(x, t) given what the actions' tokens see."""
        tokens, condition = self.suffix(seen.state, x, t)
        length = tokens.shape[1]
        (out,), _ = transformer(
            [self.expert],
            [jnp.pad(tokens, ((0, 0), (0, seen.positions.shape[1] - length), (0, 0)))],
            seen.mask,
            seen.positions,
            conditions=[condition],
            cache=seen.cache,
            remat=remat,
            unroll=self._unroll,
        )
        assert out is not None
        return self.action_out(out[:, length - x.shape[1] : length])

    def read(self, observation: dict[str, Array]) -> tuple[Cache, Bool[Array, "b p"]]:
        """Keys and values of images and prompt, and which are there."""
        tokens, valid = self.prefix(observation, None)
        mask = valid[:, None] & valid[:, :, None]
        _, cache = transformer([self.backbone], [tokens], mask, positions_of(valid), unroll=self._unroll)
        return cache, valid


def noisy(
    batch: Batch, noise: Float[Array, "b h a"], t: Float[Array, " b"]
) -> tuple[Float[Array, "b h a"], Float[Array, "b h a"]]:
    """x_t, and the velocity to learn."""
    actions, at = padded(batch["action"], noise.shape[-1]), t[:, None, None]
    return at * noise + (1 - at) * actions, noise - actions


def velocity_error(
    got: Float[Array, "b h a"], wanted: Float[Array, "b h a"], mask: Bool[Array, "b h"]
) -> Float[Array, ""]:
    """Mean squared error over the actions that are not padded."""
    error = ((got - wanted) ** 2).mean(-1)
    return jnp.where(mask, error, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def flow_loss(
    net: Pi0Net,
    batch: Batch,
    noise: Float[Array, "b h a"],
    t: Float[Array, " b"],
    key: Key[Array, ""] | None,
) -> tuple[Float[Array, ""], Metrics]:
    """`velocity_error` given noise and times.

    Args:
        net: with its weights.
        batch: normalised, with the prompt's tokens; without an axis of observation steps.
        noise: standard normal.
        t: in (0, 1].
        key: changes the images; None leaves them as they are.
    """
    observation, (x, wanted) = batch["observation"], noisy(batch, noise, t)
    prefix, valid = net.prefix(observation, key)
    suffix, condition = net.suffix(net.state_token(observation), x, t)
    b, s, _ = suffix.shape
    valid = jnp.concatenate([valid, jnp.ones((b, s), bool)], axis=1)
    starts = jnp.concatenate([jnp.zeros(prefix.shape[1], bool), net.starts(s)])
    (_, out), _ = transformer(
        [net.backbone, net.expert],
        [prefix, suffix],
        block_mask(valid, starts),
        positions_of(valid),
        conditions=[None, condition],
        remat=net.spec.remat,
    )
    assert out is not None
    loss = velocity_error(net.action_out(out[:, -x.shape[1] :]), wanted, batch["mask"])
    return loss, {"loss": loss}


def insulated_loss(
    net: Pi0Net,
    batch: Batch,
    noise: Float[Array, "b h a"],
    t: Float[Array, " b"],
    key: Key[Array, ""] | None,
) -> tuple[Float[Array, ""], Metrics]:
    """Cross-entropy of the chunk's tokens, plus alpha times the flow's loss, which the backbone does not learn from.

    Args:
        net: with its weights.
        batch: as of `flow_loss`, with the chunk's tokens.
        noise: standard normal.
        t: in (0, 1].
        key: changes the images; None leaves them as they are.
    """
    assert net.spec.insulate is not None
    observation, (x, wanted) = batch["observation"], noisy(batch, noise, t)
    prefix, valid = net.prefix(observation, key)
    said, learn = observation[ACTION_TOKENS], observation[ACTION_MASK]
    b, p, f = *valid.shape, said.shape[1]
    there = jnp.concatenate([valid, learn], axis=1)
    (out,), cache = transformer(
        [net.backbone],
        [jnp.concatenate([prefix, net.embed(said)], axis=1)],
        block_mask(there, jnp.arange(p + f) >= p),
        positions_of(there),
        remat=net.spec.remat,
    )
    assert out is not None
    # The first token is said by the last of the prompt, which padding may follow.
    last = p - observation[PROMPT_MASK].shape[1] + observation[PROMPT_MASK].sum(1, dtype=jnp.int32) - 1
    before = jnp.concatenate([out[jnp.arange(b), last][:, None], out[:, p:-1]], axis=1)
    token_loss, accuracy = cross_entropy(net.logits(before), said, learn)
    seen = net.seen(observation, jax.lax.stop_gradient(cache[:, :, :, :p]), valid)
    loss = velocity_error(net.velocity(seen, x, t, net.spec.remat), wanted, batch["mask"])
    total = token_loss + net.spec.insulate.alpha * loss
    return total, {"loss": total, "flow_loss": loss, "token_loss": token_loss, "token_accuracy": accuracy}


def sample(
    net: Pi0Net, observation: dict[str, Array], noise: Float[Array, "b h a"], steps: int
) -> Float[Array, "b h a"]:
    """Euler steps from noise at t = 1 to actions at t = 0, [B, H, A] normalised and padded."""
    seen = net.seen(observation, *net.read(observation))

    def step(x: Array, i: Array) -> tuple[Array, None]:
        t = jnp.full(x.shape[0], 1 - i / steps)
        return x - net.velocity(seen, x, t) / steps, None

    return jax.lax.scan(step, noise, jnp.arange(steps, dtype=jnp.float32))[0]


def sample_from(
    net: Pi0Net,
    observation: dict[str, Array],
    noise: Float[Array, "b h a"],
    steps: int,
    old: Float[Array, "b h a"],
    weight: Float[Array, "b h"],
    max_guidance: float,
) -> Float[Array, "b h a"]:
    """As `sample`, guided towards the chunk `old` where `weight` is above 0 (real-time chunking, arXiv:2506.07339).

    With tau = 1 - t, every step adds to the velocity towards the actions
        min(max_guidance, (1 - tau) / (tau r^2)) (old - a)^T diag(weight) da/dx,    a = x - t v(x, t),
        r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2)                                               (eq. 2 to 4 there).
    """
    seen = net.seen(observation, *net.read(observation))

    def step(x: Array, i: Array) -> tuple[Array, None]:
        t = 1 - i / steps

        def predicted(x: Array) -> tuple[Array, Array]:
            v = net.velocity(seen, x, jnp.full(x.shape[0], t))
            return x - t * v, v

        a, pull, v = jax.vjp(predicted, x, has_aux=True)
        (correction,) = pull((old - a) * weight[..., None])
        # At t = 1 the quotient is infinite, and the bound holds.
        scale = jnp.minimum(max_guidance, ((1 - t) ** 2 + t**2) / jnp.maximum(t * (1 - t), 1e-6))
        return x - (v - scale * correction) / steps, None

    return jax.lax.scan(step, noise, jnp.arange(steps, dtype=jnp.float32))[0]


def soft_mask(horizon: int, executed: int, delay: int) -> Float[np.ndarray, " h"]:
    """How strongly each action of a chunk is held to the old one: 1 while that is executed, then falling to 0.

    `executed`: actions between two chunks, so that the old one has horizon - executed left (eq. 5 there).
    """
    i = np.arange(horizon)
    c = np.clip((horizon - executed - i) / (horizon - executed - delay + 1), 0, 1)
    return np.where(i < delay, 1.0, np.where(i < horizon - executed, c * np.expm1(c) / np.expm1(1), 0.0))


def padded(x: Float[Array, "*b n"], width: int) -> Float[Array, "*b width"]:
    """Zeros after the last axis up to a width."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def action_dim(spec: Pi0Spec, contract: Contract) -> int:
    """A: the specification's, or the wider of the contract's state and action."""
    return spec.action_dim or max(state_width(contract), contract.action.shape[0])


class Pi0Policy:
    """The policy of `rlsvc.policies.api`, static; weights are the nnx state of a Pi0Net."""

    narrow = NARROW
    compiler_options = COMPILER_OPTIONS

    def __init__(self, spec: Pi0Spec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits the specification.

        Raises:
            ContractError: cameras that are not there, a state or action that is too wide or of another kind, no prompt,
                or step counts that differ.
        """
        check_contract(spec, contract)
        if spec.tells_state and not state_width(contract):
            raise ContractError(
                "policy.state_in_prompt: the observation has no numbers to tell; name them in data.observation, or set "
                "policy.state_in_prompt=false"
            )
        width = action_dim(spec, contract)
        for what, got in (("state", state_width(contract)), ("action", contract.action.shape[0])):
            if got > width:
                raise ContractError(f"{what}: {got} numbers do not fit into policy.action_dim = {width}")
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.action_dim = width

    def _net(self, key: Key[Array, ""]) -> Pi0Net:
        return Pi0Net(self.spec, self.contract, dtype=self.dtype, rngs=nnx.Rngs(params=key))

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def net(self, params: Params) -> Pi0Net:
        """The net with these weights."""
        return nnx.merge(self._graph, params)

    @property
    def frozen(self) -> tuple[str, ...]:
        """See `rlsvc.policies.api.AdaptedPolicy`; an adapted backbone's embedding is frozen too, as published."""
        patterns = {
            "lora_backbone": (r"backbone\.(?!.*lora).*", "embedding"),
            "lora_expert": (r"expert\.(?!.*lora).*",),
        }
        return tuple(x for field, found in patterns.items() if getattr(self.spec, field) is not None for x in found)

    @property
    def merged_spec(self) -> Pi0Spec:
        """The specification without adaptations and what training alone needs."""
        return self.spec.replace(lora_backbone=None, lora_expert=None, insulate=None)

    def merged(self, params: Params) -> Params:
        """The weights for `merged_spec`."""
        flat = merged_weights(params, {"backbone": self.spec.lora_backbone, "expert": self.spec.lora_expert})
        acting = Pi0Policy(self.merged_spec, self.contract, self.dtype)
        return unflatten_params(flat, jax.eval_shape(acting.init, jax.random.key(0)))

    def loss(self, params: Params, batch: Batch, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        """`flow_loss`, or `insulated_loss`, with these weights, and noise and times drawn from the key."""
        augment_key, noise_key, time_key = jax.random.split(key, 3)
        b, h, _ = batch["action"].shape
        noise = jax.random.normal(noise_key, (b, h, self.action_dim))
        t = jax.random.beta(time_key, 1.5, 1.0, (b,)) * 0.999 + 0.001
        batch = {**batch, "observation": newest(batch["observation"])}
        loss = flow_loss if self.spec.insulate is None else insulated_loss
        return loss(self.net(params), batch, noise, t, augment_key)

    def initial_carry(self, batch_size: int) -> Carry:
        """Nothing; or, for real-time chunking, the chunk before [B, H, A] and whether there is one [B]."""
        if self.spec.real_time is None:
            return ()
        return jnp.zeros((batch_size, self.spec.horizon, self.action_dim)), jnp.zeros(batch_size)

    def act(
        self,
        params: Params,
        observation: dict[str, Array],
        carry: Carry,
        keys: Key[Array, " b"],
        options: ActOptions,
    ) -> tuple[Float[Array, "b h a"], Carry, dict[str, Array]]:
        """The first n_action_steps actions of a chunk, [B, H, A] normalised, in the contract's own dimensions."""
        steps = self.spec.sample_steps if options.sample_steps is None else options.sample_steps
        if steps < 1:
            raise ContractError(f"sample_steps: got {steps}, expected 1 or more")
        shape = (self.spec.horizon, self.action_dim)
        noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        net, now, real_time = self.net(params), newest(observation), self.spec.real_time
        if real_time is None:
            chunk = sample(net, now, noise, steps)
        else:
            before, there = carry
            executed = self.spec.n_action_steps
            old = jnp.pad(before[:, executed:], ((0, 0), (0, executed), (0, 0)))
            weight = jnp.asarray(soft_mask(self.spec.horizon, executed, real_time.delay), jnp.float32)
            chunk = sample_from(net, now, noise, steps, old, there[:, None] * weight[None], real_time.max_guidance)
            carry = (chunk, jnp.ones_like(there))
        return chunk[:, : self.spec.n_action_steps, : self.contract.action.shape[0]], carry, {}
