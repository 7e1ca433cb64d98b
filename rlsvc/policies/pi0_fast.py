"""pi0-FAST (Pertsch et al. 2025, arXiv:2501.09747): a vision-language model that says its actions as text.

A SigLIP tower and a Gemma backbone read images, prompt and state, which see each other; the actions follow as FAST
tokens (rlsvc/data/fast_tokenizer.py), each of which sees what came before it. The loss is the cross-entropy of each
action token given all before it, and acting decodes token after token over the keys and values of what was read. The
host turns tokens into actions (rlsvc/policies/prompt_fast.py), which may fail: it then says why, and gives none.

As published, what a window lacks at the end of its episode is learnt as the last action again and again, since a token
is of the whole chunk; and a row's loss is the mean over its own tokens, however many.

Departures from openpi's sampler: tokens stand where training had them (`decode_positions`); a prompt is not shifted to
the right, where openpi lost its place when a camera was not there (its robots send a black image instead); and decoding
stops once every row has ended, also where they do not end together.

Letters: B batch, L tokens of a sequence, P tokens of images and sequence, W width, V vocabulary, N decoded tokens at
most, S keys in the cache.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.windows import Batch
from rlsvc.nn.gemma import Cache, block_mask, transformer
from rlsvc.nn.lora import merged_weights
from rlsvc.nn.params import unflatten_params
from rlsvc.policies.api import (
    PROMPT_AR_MASK,
    PROMPT_LOSS_MASK,
    PROMPT_MASK,
    PROMPT_TOKENS,
    ActOptions,
    Metrics,
    Params,
)
from rlsvc.policies.vision_language import (
    COMPILER_OPTIONS,
    NARROW,
    VisionLanguageNet,
    check_contract,
    cross_entropy,
    newest,
)
from rlsvc.spec.pi0_fast import Pi0FastSpec

PAD, END = 0, 1
"""Ids of padding and of the end of a sequence, in PaliGemma's vocabulary and in the byte tokenizer's."""


class Pi0FastNet(VisionLanguageNet):
    """Vision tower, embedding, and a backbone that also says what comes next."""

    spec: Pi0FastSpec

    def predict(self, observation: dict[str, Array], key: Key[Array, ""] | None) -> Float[Array, "b l-1 v"]:
        """Logits of every token of a sequence but the first, given those before it. `key`: changes the images."""
        x, valid = self.prefix(observation, key)
        b, p, _ = x.shape
        length = observation[PROMPT_TOKENS].shape[1]
        starts = jnp.pad(observation[PROMPT_AR_MASK], ((0, 0), (p - length, 0)))
        # The last token predicts nothing.
        (out,), _ = transformer(
            [self.backbone],
            [x[:, :-1]],
            block_mask(valid, starts)[:, :-1, :-1],
            jnp.broadcast_to(jnp.arange(p - 1)[None], (b, p - 1)),
            remat=self.spec.remat,
            unroll=self._unroll,
        )
        assert out is not None
        return self.logits(out[:, 1 - length :])

    def read(
        self, observation: dict[str, Array]
    ) -> tuple[Cache, Bool[Array, "b p"], Float[Array, "b v"], Int[Array, " b"]]:
        """Keys and values of images and prompt, which are there, the first token's logits, and its position."""
        tokens, valid = self.prefix(observation, None)
        b, p, _ = tokens.shape
        prompt = observation[PROMPT_MASK]
        last = p - prompt.shape[1] + prompt.sum(1, dtype=jnp.int32) - 1
        first = last + 1 if self.spec.decode_positions == "trained" else last + 2
        positions = jnp.broadcast_to(jnp.arange(p)[None], (b, p))
        mask = valid[:, None] & valid[:, :, None]
        (out,), cache = transformer([self.backbone], [tokens], mask, positions, unroll=self._unroll)
        assert out is not None
        return cache, valid, self.logits(out[jnp.arange(b), last][:, None])[:, 0], first

    def step(
        self, token: Int[Array, " b"], position: Int[Array, " b"], cache: Cache, seen: Bool[Array, "b s"]
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Logits of the token after this one, and its own keys and values. `seen`: which of the cache are there."""
        mask = jnp.pad(seen, ((0, 0), (0, 1)), constant_values=True)[:, None]
        (out,), grown = transformer(
            [self.backbone],
            [self.embed(token[:, None])],
            mask,
            position[:, None],
            cache=cache,
            unroll=self._unroll,
        )
        assert out is not None
        return self.logits(out)[:, 0], grown[:, :, :, -1:]


def token_loss(net: Pi0FastNet, batch: Batch, key: Key[Array, ""] | None) -> tuple[Float[Array, ""], Metrics]:
    """`cross_entropy` of the tokens to learn.

    Args:
        net: with its weights.
        batch: normalised, with the sequence's tokens and masks; without an axis of observation steps.
        key: changes the images; None leaves them as they are.
    """
    observation = batch["observation"]
    wanted, learn = observation[PROMPT_TOKENS][:, 1:], observation[PROMPT_LOSS_MASK][:, 1:]
    loss, accuracy = cross_entropy(net.predict(observation, key), wanted, learn)
    return loss, {"loss": loss, "token_accuracy": accuracy}


class Decoding(NamedTuple):
    """Where decoding is. `logits` [B, V] of token number `count`; `tokens` [B, N] so far; `ended` [B]."""

    count: Int[Array, ""]
    logits: Float[Array, "b v"]
    tokens: Int[Array, "b n"]
    ended: Bool[Array, " b"]
    cache: Cache


def decode(
    net: Pi0FastNet, observation: dict[str, Array], keys: Key[Array, " b"], most: int, temperature: float
) -> Int[Array, "b n"]:
    """Tokens after the prompt, [B, N] int32, up to and with the end of each row; padding follows.

    Args:
        net: with its weights.
        observation: normalised, with the prompt's tokens; without an axis of observation steps.
        keys: of the randomness, one a row; not looked at when temperature is 0.
        most: N.
        temperature: 0 takes the likeliest token.
    """
    cache, valid, logits, first = net.read(observation)
    b, p = valid.shape
    room = [(0, 0), (0, 0), (0, 0), (0, most), (0, 0), (0, 0)]
    seen, place = jnp.pad(valid, ((0, 0), (0, most))), jnp.arange(p + most)

    def going(now: Decoding) -> Bool[Array, ""]:
        return (now.count < most) & ~now.ended.all()

    def step(now: Decoding) -> Decoding:
        if temperature > 0:
            own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, now.count)
            token = jax.vmap(jax.random.categorical)(own, now.logits / temperature)
        else:
            token = now.logits.argmax(-1)
        token = jnp.where(now.ended, PAD, token.astype(jnp.int32))
        decoded = (place >= p) & (place < p + now.count)
        logits, new = net.step(token, first + now.count, now.cache, seen | decoded[None])
        cache = jax.lax.dynamic_update_slice_in_dim(now.cache, new, p + now.count, axis=3)
        ended = now.ended | (token == END)
        return Decoding(now.count + 1, logits, now.tokens.at[:, now.count].set(token), ended, cache)

    start = Decoding(
        jnp.zeros((), jnp.int32),
        logits,
        jnp.full((b, most), PAD, jnp.int32),
        jnp.zeros(b, bool),
        jnp.pad(cache, room),
    )
    return jax.lax.while_loop(going, step, start).tokens


class Pi0FastPolicy:
    """The policy of `rlsvc.policies.api`, static; weights are the nnx state of a Pi0FastNet."""

    narrow = NARROW
    compiler_options = COMPILER_OPTIONS

    def __init__(self, spec: Pi0FastSpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits the specification.

        Raises:
            ContractError: as `check_contract`, or a hold_action of another width.
        """
        check_contract(spec, contract)
        width = contract.action.shape[0]
        if spec.hold_action is not None and len(spec.hold_action) != width:
            raise ContractError(f"policy.hold_action: got {len(spec.hold_action)} numbers, the action has {width}")
        self.spec, self.contract, self.dtype = spec, contract, dtype

    def _net(self, key: Key[Array, ""]) -> Pi0FastNet:
        return Pi0FastNet(self.spec, self.contract, dtype=self.dtype, rngs=nnx.Rngs(params=key))

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def net(self, params: Params) -> Pi0FastNet:
        """The net with these weights."""
        return nnx.merge(self._graph, params)

    @property
    def frozen(self) -> tuple[str, ...]:
        """See `rlsvc.policies.api.AdaptedPolicy`; an adapted backbone's embedding is frozen too, as published."""
        return () if self.spec.lora_backbone is None else (r"backbone\.(?!.*lora).*", "embedding")

    @property
    def merged_spec(self) -> Pi0FastSpec:
        """The specification without adaptations."""
        return self.spec.replace(lora_backbone=None)

    def merged(self, params: Params) -> Params:
        """The weights for `merged_spec`."""
        flat = merged_weights(params, {"backbone": self.spec.lora_backbone})
        acting = Pi0FastPolicy(self.merged_spec, self.contract, self.dtype)
        return unflatten_params(flat, jax.eval_shape(acting.init, jax.random.key(0)))

    def loss(self, params: Params, batch: Batch, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        """`token_loss` with these weights."""
        return token_loss(self.net(params), {**batch, "observation": newest(batch["observation"])}, key)

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """No state: every chunk is decoded from the newest observation alone."""
        del batch_size
        return ()

    def act(
        self,
        params: Params,
        observation: dict[str, Array],
        carry: tuple[()],
        keys: Key[Array, " b"],
        options: ActOptions,
    ) -> tuple[Int[Array, "b n"], tuple[()], dict[str, Array]]:
        """Tokens [B, N], which the prompter's `finish` turns into actions.

        Raises:
            ContractError: denoising steps are asked for.
        """
        if options.sample_steps is not None:
            raise ContractError("sample_steps: pi0_fast decodes tokens, and does not denoise in steps; leave it out")
        tokens = decode(self.net(params), newest(observation), keys, self.spec.max_action_tokens, self.spec.temperature)
        return tokens, carry, {}
