"""V(s) by a vision-language model: the tower and backbone of the PI0 family read images and prompt, and one token more.

That token is learnt and stands last; it sees images and prompt, which do not see it, and its output gives the value
(RECAP, arXiv:2511.14759, also judges by a small vision-language model with a histogram of the return as its head).
The state, if it is to be judged by, is told in the prompt. Numbers come normalised, and what the head gives out is the
return as `Normalizer` normalises it.

Letters: B batch, P tokens of images and prompt, W width of the backbone, K outputs of the head.
"""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.windows import Batch
from rlsvc.nn.gemma import block_mask, positions_of, transformer
from rlsvc.nn.layers import along_last
from rlsvc.policies.api import Params
from rlsvc.policies.value_mlp import make_head
from rlsvc.policies.vision_language import VisionLanguageNet, check_contract, newest, vectors
from rlsvc.spec.value_function import ValueVlmSpec


class ValueVlmNet(VisionLanguageNet):
    """Vision tower, embedding, backbone, the token that is judged by, and the last product."""

    spec: ValueVlmSpec

    def __init__(
        self, spec: ValueVlmSpec, contract: Contract, outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        super().__init__(spec, contract, dtype=dtype, rngs=rngs)
        w = spec.backbone.width
        self.judge = nnx.Param(0.02 * jax.random.normal(rngs.params(), (w,)))
        # Of zeros: the first values are the middle of the support, the same everywhere.
        self.value, self.value_bias = nnx.Param(jnp.zeros((w, outputs))), nnx.Param(jnp.zeros((outputs,)))

    def __call__(self, observation: dict[str, Array], key: Key[Array, ""] | None) -> Float[Array, "b k"]:
        """What the head makes a value of, float32. `key`: changes the images, in training."""
        tokens, valid = self.prefix(observation, key)
        b, p, w = tokens.shape
        judge = jnp.broadcast_to(self.judge[...].astype(tokens.dtype).reshape(1, 1, w), (b, 1, w))
        valid = jnp.concatenate([valid, jnp.ones((b, 1), bool)], axis=1)
        (out,), _ = transformer(
            [self.backbone],
            [jnp.concatenate([tokens, judge], axis=1)],
            block_mask(valid, jnp.arange(p + 1) == p),
            positions_of(valid),
            remat=self.spec.remat and key is not None,
            unroll=self._unroll,
        )
        assert out is not None
        logits = out[:, -1].astype(jnp.float32) @ self.value[...]
        return logits + along_last(self.value_bias[...], logits)


class ValueVlm:
    """The value function of `rlsvc.policies.api`; weights are the nnx state of a ValueVlmNet."""

    def __init__(self, spec: ValueVlmSpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits the specification.

        Raises:
            ContractError: cameras that are not there, no prompt, a state that the prompt does not tell (or is to tell,
                and there is none), or step counts that differ.
        """
        check_contract(spec, contract)
        state = vectors(contract)
        if state and not spec.state_in_prompt:
            raise ContractError(
                f"observation '{state[0]}': value_vlm reads numbers in its prompt alone; set policy.state_in_prompt, "
                "or leave them out of data.observation"
            )
        if spec.state_in_prompt and not state:
            raise ContractError(
                "policy.state_in_prompt: the observation has no numbers to tell; name them in data.observation, or "
                "leave it unset"
            )
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.head = make_head(spec.head)

    def _net(self, key: Key[Array, ""]) -> ValueVlmNet:
        return ValueVlmNet(self.spec, self.contract, self.head.width, dtype=self.dtype, rngs=nnx.Rngs(params=key))

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b k"]:
        """What the head gives out for a normalised batch of windows; see `rlsvc.policies.api.ValueFunction`."""
        return nnx.merge(self._graph, params)(newest(batch["observation"]), key)
