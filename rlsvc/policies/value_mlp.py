"""V(s) or Q(s, a) as a perceptron: it stands where a policy does in a run and in a bundle, but judges and does not act.

Observations and actions come normalised; what the head gives out is the return as `Normalizer` normalises it.

Letters: B batch, T observation steps, H actions of a window, n actions from the present on, A action dimensions, E
features, K outputs of the head.
"""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.windows import Batch
from rlsvc.nn.distributions import HLGauss, TwoHot
from rlsvc.nn.mlps import Mlps
from rlsvc.policies.api import Params
from rlsvc.spec.value_function import HLGaussHeadSpec, RegressionHeadSpec, ValueMlpSpec


def make_head(spec: RegressionHeadSpec | HLGaussHeadSpec) -> TwoHot | HLGauss:
    """How outputs stand for a return: without bins one number, else a histogram."""
    if isinstance(spec, RegressionHeadSpec):
        return TwoHot(bins=0)
    return HLGauss(spec.bins, *spec.support, sigma_ratio=spec.sigma_ratio)


def flat_features(batch: Batch, names: tuple[str, ...], n_obs_steps: int, n_action_steps: int) -> Float[Array, "b e"]:
    """The last T observations, and the n actions from the present on, in one vector; padded actions are 0."""
    parts = [batch["observation"][name] for name in names]
    if n_action_steps:
        first = n_obs_steps - 1
        mask = batch["mask"][:, first:, None]
        parts.append(jnp.where(mask, batch["action"][:, first:], 0.0))
    rows = [part.reshape(part.shape[0], int(np.prod(part.shape[1:]))).astype(jnp.float32) for part in parts]
    return jnp.concatenate(rows, axis=-1)


class ValueMlp:
    """The value function of `rlsvc.policies.api`; weights are the nnx state of its perceptron."""

    def __init__(self, spec: ValueMlpSpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits the specification.

        Raises:
            ContractError: an observation that is not numbers in a vector, or step counts that differ.
        """
        for key, feature in contract.observation.items():
            if feature.dtype == TEXT or feature.is_image:
                kind = "a text" if feature.dtype == TEXT else "an image"
                raise ContractError(
                    f"observation '{key}' is {kind}, which value_mlp does not read; leave it out of data.observation, "
                    "or take value_vlm"
                )
        if (contract.n_obs_steps, contract.action_horizon) != (spec.n_obs_steps, spec.n_action_steps):
            raise ContractError(
                f"contract has n_obs_steps = {contract.n_obs_steps}, action_horizon = {contract.action_horizon}; "
                f"the value function has n_obs_steps = {spec.n_obs_steps}, n_action_steps = {spec.n_action_steps}"
            )
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.head = make_head(spec.head)
        self.names = tuple(sorted(contract.observation))
        sizes = [spec.n_obs_steps * int(np.prod(contract.observation[name].shape)) for name in self.names]
        self.width = sum(sizes) + spec.n_action_steps * int(np.prod(contract.action.shape))

    def _net(self, key: Key[Array, ""]) -> Mlps:
        # The last layer begins at 0: the first values are the middle of the support, the same everywhere.
        return Mlps(
            self.width, self.spec.hidden, self.head.width, zero_last=True, dtype=self.dtype, rngs=nnx.Rngs(params=key)
        )

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b k"]:
        """What the head gives out for a normalised batch of windows; see `rlsvc.policies.api.ValueFunction`."""
        del key
        features = flat_features(batch, self.names, self.spec.n_obs_steps, self.spec.n_action_steps)
        return nnx.merge(self._graph, params)(features)[0]
