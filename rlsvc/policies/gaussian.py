"""A Gaussian that a tanh squashes, over an encoder of vectors and images: the actor of SAC (arXiv:1812.05905, app. C).

    z = h(s)     u ~ N(mean(z), std(z))     a = tanh(u)     log p(a) = log N(u) - sum log(1 - tanh(u)^2)
Each image goes through four convolutions to `image_dim` numbers with layer norm and tanh, as in DrQ (arXiv:2004.13649);
vectors are taken as they are. Acting without exploration gives tanh(mean).

Letters: B batch, N rows, A action dimensions, D encoded width, H height, W width, C channels.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.nn.distributions import bounded_log_std, gaussian_log_prob, tanh_log_det_before
from rlsvc.nn.layers import LayerNorm, Linear
from rlsvc.nn.mlps import ConvEncoder, Mlps
from rlsvc.nn.vision import augment_window
from rlsvc.policies.api import ActOptions, Params
from rlsvc.spec.diffusion import VisionSpec
from rlsvc.spec.sac import GaussianPolicySpec


class Encoder(nnx.Module):
    """h: what actor and critics see of an observation."""

    def __init__(self, spec: GaussianPolicySpec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        features, kw = contract.observation, {"dtype": dtype, "rngs": rngs}
        self.vectors = tuple(sorted(k for k, f in features.items() if not f.is_image))
        self.images = tuple(sorted(k for k, f in features.items() if f.is_image))
        self.vision, self.dtype = VisionSpec(crop=None, shift=spec.shift), dtype
        self.convs = nnx.List([ConvEncoder(features[k].shape[-1], spec.channels, **kw) for k in self.images])
        sizes = [
            jax.eval_shape(conv, jax.ShapeDtypeStruct((1, *features[k].shape), jnp.float32)).shape[-1]
            for k, conv in zip(self.images, self.convs, strict=True)
        ]
        self.outs = nnx.List([Linear(size, spec.image_dim, **kw) for size in sizes])
        self.norms = nnx.List([LayerNorm(spec.image_dim) for _ in sizes])
        self.width = sum(int(np.prod(features[k].shape)) for k in self.vectors) + spec.image_dim * len(sizes)

    def __call__(self, observation: dict[str, Array], key: Key[Array, ""] | None = None) -> Float[Array, "n d"]:
        """Float32. `key`: shifts images, in [-1, 1], at random, in training."""
        parts = [observation[k].reshape(observation[k].shape[0], -1).astype(jnp.float32) for k in self.vectors]
        for i, name in enumerate(self.images):
            shift_key = None if key is None else jax.random.fold_in(key, i)
            image = augment_window(observation[name][:, None].astype(self.dtype), self.vision, shift_key)[:, 0]
            encoded = self.outs[i](jax.nn.relu(self.convs[i](image)))
            parts.append(jnp.tanh(self.norms[i](encoded.astype(jnp.float32))))
        return jnp.concatenate(parts, -1)


class Actor(nnx.Module):
    """Mean and log standard deviation of u."""

    def __init__(
        self, spec: GaussianPolicySpec, width: int, action_dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.net = Mlps(width, spec.hidden_dims, 2 * action_dim, dtype=dtype, rngs=rngs)
        self.log_std_range = spec.log_std_range

    def __call__(self, z: Float[Array, "n d"]) -> tuple[Float[Array, "n a"], Float[Array, "n a"]]:
        """Before tanh."""
        mean, log_std = jnp.split(self.net(z)[0], 2, axis=-1)
        return mean, bounded_log_std(log_std, *self.log_std_range)

    def sample(
        self, z: Float[Array, "n d"], eps: Float[Array, "n a"]
    ) -> tuple[Float[Array, "n a"], Float[Array, " n"]]:
        """Actions from standard normal noise, and their log densities."""
        mean, log_std = self(z)
        return squashed(mean, log_std, eps)


def squashed(
    mean: Float[Array, "n a"], log_std: Float[Array, "n a"], eps: Float[Array, "n a"]
) -> tuple[Float[Array, "n a"], Float[Array, " n"]]:
    """tanh(mean + std eps) and its log density."""
    u = mean + jnp.exp(log_std) * eps
    return jnp.tanh(u), gaussian_log_prob(eps, log_std) - tanh_log_det_before(u)


class GaussianPolicy:
    """The policy: static. Its weights are {"encoder", "actor"}."""

    narrow = ""
    compiler_options: ClassVar = {}

    def __init__(self, spec: GaussianPolicySpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the nets can be built for this contract.

        Raises:
            ContractError: an observation or action that this policy cannot take; names it.
        """
        for key, feature in contract.observation.items():
            if feature.dtype == TEXT:
                raise ContractError(f"observation '{key}' is a text; the gaussian policy takes vectors and images")
        if len(contract.action.shape) != 1 or not contract.action.dtype.startswith("float"):
            raise ContractError(
                f"action: got {contract.action.dtype} of shape {contract.action.shape}; the gaussian policy gives one "
                "vector of floats"
            )
        if (contract.n_obs_steps, contract.action_horizon) != (1, 1):
            raise ContractError(
                f"contract has n_obs_steps = {contract.n_obs_steps}, action_horizon = {contract.action_horizon}; "
                "the gaussian policy sees one observation and gives one action (stack frames in the environment)"
            )
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.action_dim = contract.action.shape[0]

    def _nets(self, key: Key[Array, ""]) -> tuple[Encoder, Actor]:
        encoder_key, actor_key = jax.random.split(key)
        encoder = Encoder(self.spec, self.contract, dtype=self.dtype, rngs=nnx.Rngs(params=encoder_key))
        rngs = nnx.Rngs(params=actor_key)
        return encoder, Actor(self.spec, encoder.width, self.action_dim, dtype=self.dtype, rngs=rngs)

    @cached_property
    def _graphs(self) -> tuple[nnx.GraphDef, nnx.GraphDef]:
        encoder, actor = nnx.eval_shape(lambda: self._nets(jax.random.key(0)))
        return nnx.split(encoder)[0], nnx.split(actor)[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        encoder, actor = self._nets(key)
        return {"encoder": nnx.state(encoder), "actor": nnx.state(actor)}

    def encoder(self, params: Params) -> Encoder:
        """The encoder with the weights `params["encoder"]`."""
        return nnx.merge(self._graphs[0], params)

    def actor(self, params: Params) -> Actor:
        """The actor with the weights `params["actor"]`."""
        return nnx.merge(self._graphs[1], params)

    @cached_property
    def width(self) -> int:
        """D."""
        return self.encoder(self._abstract["encoder"]).width

    @cached_property
    def _abstract(self) -> Any:
        return jax.eval_shape(self.init, jax.random.key(0))

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """None."""
        del batch_size
        return ()

    def act(
        self,
        params: Params,
        observation: dict[str, Array],
        carry: tuple[()],
        keys: Key[Array, " b"],
        options: ActOptions,
    ) -> tuple[Float[Array, "b 1 a"], tuple[()], dict[str, Array]]:
        """One action in [-1, 1] for each row: drawn when exploring, else tanh of the mean."""
        z = self.encoder(params["encoder"])({name: x[:, -1] for name, x in observation.items()})
        mean, log_std = self.actor(params["actor"])(z)
        if not options.explore:
            return jnp.tanh(mean)[:, None], carry, {}
        eps = jax.vmap(lambda key: jax.random.normal(key, (self.action_dim,)))(keys)
        return squashed(mean, log_std, eps)[0][:, None], carry, {}
