"""What acts: the interface of every policy, and what a call may choose.

A policy is a static object (its specification and contract); its weights are a pytree beside it. Observations and
actions are normalised here; `rlsvc.runner` maps them to and from the contract's units.

Letters: B batch, T observation steps, H executed actions, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from rlsvc.core.contract import Contract
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Batch
from rlsvc.nn.distributions import HLGauss, TwoHot

Params = Any
Carry = Any
Metrics = dict[str, jax.Array]

PROMPT_TOKENS, PROMPT_MASK = "prompt_tokens", "prompt_mask"
"""What a text becomes before a policy sees it: [B, T, L] int32 tokens, and bools that are False for padding."""
PROMPT_AR_MASK, PROMPT_LOSS_MASK = "prompt_ar_mask", "prompt_loss_mask"
"""In training, of a sequence with actions in it: bools [B, T, L], True for tokens that only those after them see, and
for tokens to learn."""
ACTION_TOKENS, ACTION_MASK = "action_tokens", "action_mask"
"""In training, of a policy that learns to say its actions beside flowing to them: [B, T, F] int32 tokens of the chunk,
and bools that are False for padding."""

PRECISIONS = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
"""Types of matrix products by the name that a specification gives them."""


PREPARED = (PROMPT_TOKENS, PROMPT_MASK, PROMPT_AR_MASK, PROMPT_LOSS_MASK, ACTION_TOKENS, ACTION_MASK)
"""What the host made for the policy, which is not normalised."""


def normalize_observation(observation: Mapping[str, Any], normalizer: Normalizer, group: Any = 0) -> dict[str, Any]:
    """Every feature normalised, but for what was prepared from texts. `group`: as in `Normalizer.normalize`."""
    return {k: x if k in PREPARED else normalizer.normalize(k, x, group) for k, x in observation.items()}


@dataclass(frozen=True)
class ActOptions:
    """What may differ from call to call; hashable, since it is compiled in.

    Attributes:
        sample_steps: denoising steps; None takes the policy's own.
        guidance_scale: classifier-free guidance; None takes the policy's own.
        explore: act to learn, with the noise that the policy explores with, rather than as well as it can.
    """

    sample_steps: int | None = None
    guidance_scale: float | None = None
    explore: bool = False


@runtime_checkable
class Policy(Protocol):
    """A policy that acts in chunks.

    Attributes:
        dtype: of its matrix products.
        narrow: a regular expression of the weights that acting reads in the compute dtype alone, so that a runner keeps
            them in it; "" keeps all as they are.
        compiler_options: of XLA, for acting.
    """

    contract: Contract
    dtype: Any
    narrow: str
    compiler_options: Mapping[str, bool | int | str]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        ...

    def initial_carry(self, batch_size: int) -> Carry:
        """State before the first observation; an empty tuple when there is none."""
        ...

    def act(
        self, params: Params, observation: dict[str, Array], carry: Carry, keys: Key[Array, " b"], options: ActOptions
    ) -> tuple[Float[Array, "b h a"], Carry, dict[str, Array]]:
        """Normalised actions for normalised observations [B, T, ...]; one key a row, so that rows do not mix.

        A policy that says its actions gives tokens [B, N] int32, which its prompter's `finish` turns into actions.
        """
        ...


@runtime_checkable
class AdaptedPolicy(Protocol):
    """A policy whose weights may hold low-rank adaptations, which are merged for acting.

    Attributes:
        frozen: regular expressions of the weights that adaptations stand in for, and that are not trained.
        merged_spec: of the policy that acts, without adaptations.
    """

    frozen: tuple[str, ...]
    merged_spec: Any

    def merged(self, params: Params) -> Params:
        """The weights of the policy that acts."""
        ...


@runtime_checkable
class SupervisedPolicy(Policy, Protocol):
    """A policy that learns by a loss of its own."""

    def loss(self, params: Params, batch: Batch, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        """Mean loss over the unpadded actions of a normalised batch."""
        ...


@runtime_checkable
class Judge(Protocol):
    """What judges instead of acting: a value function, or a classifier."""

    contract: Contract

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        ...

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b k"]:
        """For a normalised batch; `key`: of training alone."""
        ...


@runtime_checkable
class ValueFunction(Protocol):
    """What judges instead of acting: V(s), or Q(s, a) where its contract has an action horizon above 0."""

    contract: Contract
    spec: Any  # with n_obs_steps, n_action_steps, horizon and returns
    head: TwoHot | HLGauss

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        ...

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b k"]:
        """What `head` makes a normalised return of, for a normalised batch; `key`: of training alone."""
        ...
