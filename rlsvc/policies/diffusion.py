"""Diffusion policy (Chi et al., arXiv:2303.04137): a chunk of actions is denoised, given the last observations.

Training draws a diffusion step t and noise eps, and learns to predict the target from
    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps                                   (DDPM, arXiv:2006.11239, eq. 4)
with the squared-cosine schedule abar (arXiv:2102.09672, eq. 17), where the target is eps, or
    v = sqrt(abar_t) eps - sqrt(1 - abar_t) x_0                                     (arXiv:2202.00512, section 4).
Acting denoises with DDIM (arXiv:2010.02502, eq. 12, eta = 0) over evenly spread steps, or with DDPM over all of them.
Classifier-free guidance (arXiv:2207.12598): eps = eps_null + s (eps_cond - eps_null).

Departures: padded actions have no loss (the paper learns them); with DDIM, eps is made anew from the clipped x_0, and
the first step is the last one of training, which matters when there are few.

Letters: B batch, T observation steps, H horizon, A action dimensions, E features of one observation, S denoising steps.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.windows import Batch
from rlsvc.nn.transformer import ActionTransformer
from rlsvc.nn.unet1d import UNet1d
from rlsvc.nn.vision import ImageEncoder, augment_window, check_images
from rlsvc.policies.api import ActOptions, Metrics, Params
from rlsvc.spec.diffusion import DiffusionSpec, UNet1dSpec


def squared_cosine_alpha_bar(steps: int) -> Float[np.ndarray, " steps"]:
    """abar_t for t = 0 .. steps - 1, float64; every beta at most 0.999."""
    t = np.arange(steps + 1) / steps
    f = np.cos((t + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - f[1:] / f[:-1], 0.999))


def masked_mse(
    prediction: Float[Array, "b h a"], target: Float[Array, "b h a"], mask: Bool[Array, "b h"]
) -> Float[Array, ""]:
    """Mean squared error over the actions that are not padded."""
    error = ((prediction - target) ** 2).mean(-1)
    return jnp.where(mask, error, 0.0).sum() / jnp.maximum(mask.sum(), 1)


class DiffusionNet(nnx.Module):
    """Encoders and denoiser."""

    def __init__(self, spec: DiffusionSpec, contract: Contract, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec, self.dtype = spec, dtype
        self.vectors = tuple(sorted(k for k, f in contract.observation.items() if not f.is_image))
        self.images = tuple(sorted(k for k, f in contract.observation.items() if f.is_image))
        self.encoders = nnx.List(
            [ImageEncoder(contract.observation[k].shape[-1], spec.vision, dtype=dtype, rngs=rngs) for k in self.images]
        )
        width = sum(int(np.prod(contract.observation[k].shape)) for k in self.vectors)
        width += 2 * spec.vision.keypoints * len(self.images)
        action_dim, t = contract.action.shape[0], spec.n_obs_steps
        if isinstance(spec.backbone, UNet1dSpec):
            self.backbone = UNet1d(action_dim, width * t, spec.backbone, dtype=dtype, rngs=rngs)
        else:
            self.backbone = ActionTransformer(action_dim, spec.horizon, t, width, spec.backbone, dtype=dtype, rngs=rngs)
        self.null = nnx.Param(jnp.zeros((t, width))) if spec.condition_dropout else None

    def encode(self, observation: dict[str, Array], key: Key[Array, ""] | None) -> Float[Array, "b t e"]:
        """Features of each observation. `key`: draws the image augmentation in training, None when acting."""
        parts = []
        for name in self.vectors:
            x = observation[name]
            parts.append(x.reshape(*x.shape[:2], int(np.prod(x.shape[2:]))).astype(jnp.float32))
        for i, (name, encoder) in enumerate(zip(self.images, self.encoders, strict=True)):
            image = observation[name].astype(self.dtype)
            image = augment_window(image, self.spec.vision, None if key is None else jax.random.fold_in(key, i))
            b, t = image.shape[:2]
            features = encoder(image.reshape(b * t, *image.shape[2:]))
            parts.append(features.reshape(b, t, features.shape[-1]).astype(jnp.float32))
        return jnp.concatenate(parts, axis=-1)

    def predict(
        self, x: Float[Array, "b h a"], t: Int[Array, " b"], cond: Float[Array, "b t e"], key: Key[Array, ""] | None
    ) -> Float[Array, "b h a"]:
        """The denoising target of noisy chunks. `key`: dropout in training."""
        if isinstance(self.backbone, UNet1d):
            return self.backbone(x, t, cond.reshape(cond.shape[0], cond.shape[1] * cond.shape[2]))
        return self.backbone(x, t, cond, key)


def diffusion_loss(
    net: DiffusionNet, batch: Batch, key: Key[Array, ""], alpha_bar: Float[Array, " s"]
) -> tuple[Float[Array, ""], Metrics]:
    """Denoising loss of a normalised batch (arXiv:2303.04137, eq. 5)."""
    spec, x0 = net.spec, batch["action"]
    augment_key, t_key, noise_key, drop_key, net_key = jax.random.split(key, 5)
    cond = net.encode(batch["observation"], augment_key)
    if net.null is not None:
        dropped = jax.random.bernoulli(drop_key, spec.condition_dropout, (x0.shape[0], 1, 1))
        cond = jnp.where(dropped, net.null[...][None], cond)
    t = jax.random.randint(t_key, (x0.shape[0],), 0, spec.train_steps)
    eps = jax.random.normal(noise_key, x0.shape)
    signal, noise = jnp.sqrt(alpha_bar[t])[:, None, None], jnp.sqrt(1 - alpha_bar[t])[:, None, None]
    target = eps if spec.target == "epsilon" else signal * eps - noise * x0
    loss = masked_mse(net.predict(signal * x0 + noise * eps, t, cond, net_key), target, batch["mask"])
    return loss, {"loss": loss}


def sample(
    net: DiffusionNet,
    observation: dict[str, Array],
    keys: Key[Array, " b"],
    alpha_bar: Float[np.ndarray, " s"],
    steps: int,
    guidance_scale: float,
) -> Float[Array, "b h a"]:
    """Denoise chunks from noise, [B, H, A] normalised; the noise of a row comes from its own key."""
    spec = net.spec
    action_dim = net.backbone.action_dim
    cond = net.encode(observation, None)
    guided = guidance_scale != 1.0
    if guided:
        assert net.null is not None
        cond = jnp.concatenate([cond, jnp.broadcast_to(net.null[...][None], cond.shape)])
    ddpm = spec.sampler == "ddpm"
    ts = (
        np.arange(spec.train_steps)[::-1]
        if ddpm
        else np.linspace(spec.train_steps - 1, 0, steps + 1).round().astype(int)[:-1]
    )
    if steps == 1 and not ddpm:
        ts = np.asarray([spec.train_steps - 1])
    previous = np.append(alpha_bar[ts[1:]], 1.0)
    b = keys.shape[0]
    x = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, 0), (spec.horizon, action_dim)))(keys)

    if isinstance(net.backbone, UNet1d):
        flat = cond.reshape(cond.shape[0], cond.shape[1] * cond.shape[2])
        grid = (len(ts), *flat.shape)
        film = net.backbone.film(
            jnp.broadcast_to(jnp.asarray(ts)[:, None], grid[:2]), jnp.broadcast_to(flat[None], grid)
        )
    else:
        film = jnp.zeros((len(ts), 0))

    def predict(x: Array, t: Array, film: Array) -> Array:
        if isinstance(net.backbone, UNet1d):
            return net.backbone.denoise(x, film)
        return net.backbone(x, jnp.full((x.shape[0],), t), cond)

    def step(x: Array, inputs: tuple[Array, ...]) -> tuple[Array, None]:
        i, t, film, a, a_prev = inputs
        if guided:
            both = predict(jnp.concatenate([x, x]), t, film)
            out = both[b:] + guidance_scale * (both[:b] - both[b:])
        else:
            out = predict(x, t, film)
        signal, noise = jnp.sqrt(a), jnp.sqrt(1 - a)
        x0 = (x - noise * out) / signal if spec.target == "epsilon" else signal * x - noise * out
        x0 = jnp.clip(x0, -spec.clip_sample, spec.clip_sample)
        if ddpm:
            # Posterior mean and variance, arXiv:2006.11239 eq. 7; no noise after the last step.
            beta = 1 - a / a_prev
            mean = jnp.sqrt(a_prev) * beta / (1 - a) * x0 + jnp.sqrt(1 - beta) * (1 - a_prev) / (1 - a) * x
            deviation = jnp.sqrt(jnp.maximum((1 - a_prev) / (1 - a) * beta, 0.0))
            fresh = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(k, i + 1), x.shape[1:]))(keys)
            return mean + deviation * fresh, None
        eps = (x - signal * x0) / noise
        return jnp.sqrt(a_prev) * x0 + jnp.sqrt(1 - a_prev) * eps, None

    inputs = (
        jnp.arange(len(ts)),
        jnp.asarray(ts),
        film,
        jnp.asarray(alpha_bar[ts], jnp.float32),
        jnp.asarray(previous, jnp.float32),
    )
    # On a GPU a few steps are unrolled, so that no loop control stands between the kernels; on a CPU that only costs
    # compile time.
    unroll = len(ts) if jax.default_backend() == "gpu" and len(ts) <= 16 else 1
    x, _ = jax.lax.scan(step, x, inputs, unroll=unroll)
    return x


class DiffusionPolicy:
    """The policy of `rlsvc.policies.api`, static and hashable; weights are the nnx state of a DiffusionNet."""

    narrow = ""
    compiler_options: ClassVar = {}

    def __init__(self, spec: DiffusionSpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits the specification.

        Raises:
            ContractError: a text feature, an image that is too small, or step counts that differ.
        """
        for key, feature in contract.observation.items():
            if feature.dtype == TEXT:
                raise ContractError(
                    f"observation '{key}' is a text, which the diffusion policy does not read; "
                    "leave it out of data.observation"
                )
        check_images(spec.vision, contract)
        if (contract.n_obs_steps, contract.action_horizon) != (spec.n_obs_steps, spec.n_action_steps):
            raise ContractError(
                f"contract has n_obs_steps = {contract.n_obs_steps}, action_horizon = {contract.action_horizon}; "
                f"the policy has n_obs_steps = {spec.n_obs_steps}, n_action_steps = {spec.n_action_steps}"
            )
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.alpha_bar = squared_cosine_alpha_bar(spec.train_steps)

    def _net(self, key: Key[Array, ""]) -> DiffusionNet:
        return DiffusionNet(self.spec, self.contract, dtype=self.dtype, rngs=nnx.Rngs(params=key))

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def loss(self, params: Params, batch: Batch, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        """`diffusion_loss` with these weights."""
        return diffusion_loss(nnx.merge(self._graph, params), batch, key, jnp.asarray(self.alpha_bar, jnp.float32))

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """No state: every chunk is sampled from the observation window alone."""
        del batch_size
        return ()

    def act(
        self,
        params: Params,
        observation: dict[str, Array],
        carry: tuple[()],
        keys: Key[Array, " b"],
        options: ActOptions,
    ) -> tuple[Float[Array, "b h a"], tuple[()], dict[str, Array]]:
        """The n_action_steps actions from the present on, [B, H, A] normalised.

        Raises:
            ContractError: more sampling steps than training steps, or guidance for a policy trained without it.
        """
        spec = self.spec
        steps = options.sample_steps or spec.sample_steps
        scale = spec.guidance_scale if options.guidance_scale is None else options.guidance_scale
        if not 1 <= steps <= spec.train_steps:
            raise ContractError(f"sample_steps: got {steps}, expected 1 to {spec.train_steps}")
        if scale != 1.0 and not spec.condition_dropout:
            raise ContractError(f"guidance_scale: got {scale}, but the policy was trained with condition_dropout = 0")
        net = nnx.merge(self._graph, params)
        chunk = sample(net, observation, keys, self.alpha_bar, steps, scale)
        first = spec.n_obs_steps - 1
        return chunk[:, first : first + spec.n_action_steps], carry, {}
