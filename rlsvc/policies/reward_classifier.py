"""A reward classifier: images to the probability of success, or of each stage of progress. It does not act.

Letters: B batch, T = 1 observation steps, n classes.
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
from rlsvc.nn.mlps import Mlps
from rlsvc.nn.vision import ImageEncoder, augment_window, check_images
from rlsvc.policies.api import Params
from rlsvc.spec.reward_classifier import RewardClassifierSpec


class _Net(nnx.Module):
    def __init__(
        self, spec: RewardClassifierSpec, images: list[int], width: int, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.encoders = nnx.List([ImageEncoder(c, spec.vision, dtype=dtype, rngs=rngs) for c in images])
        width += 2 * spec.vision.keypoints * len(images)
        # The last layer begins at 0: the first probabilities are all the same.
        self.head = Mlps(width, spec.hidden, spec.classes, zero_last=True, dtype=dtype, rngs=rngs)


class RewardClassifier:
    """A judge of `rlsvc.policies.api.Judge`; weights are the nnx state of its net."""

    def __init__(self, spec: RewardClassifierSpec, contract: Contract, dtype: DTypeLike = jnp.float32) -> None:
        """Check that the contract fits.

        Raises:
            ContractError: no image, one that is too small, or a text among the observations.
        """
        for key, feature in contract.observation.items():
            if feature.dtype == TEXT:
                raise ContractError(
                    f"observation '{key}' is a text, which reward_classifier does not read; train one for each task, "
                    "and leave it out of data.observation"
                )
        check_images(spec.vision, contract)
        self.spec, self.contract, self.dtype = spec, contract, dtype
        self.images = tuple(sorted(k for k, f in contract.observation.items() if f.is_image))
        self.vectors = tuple(sorted(k for k, f in contract.observation.items() if not f.is_image))
        if not self.images:
            raise ContractError("reward_classifier sees images, and data.observation names none")

    def _net(self, key: Key[Array, ""]) -> _Net:
        features = self.contract.observation
        channels = [features[k].shape[-1] for k in self.images]
        width = sum(int(np.prod(features[k].shape)) for k in self.vectors)
        return _Net(self.spec, channels, width, self.dtype, nnx.Rngs(params=key))

    @cached_property
    def _graph(self) -> nnx.GraphDef:
        return nnx.split(nnx.eval_shape(lambda: self._net(jax.random.key(0))))[0]

    def init(self, key: Key[Array, ""]) -> Params:
        """Fresh float32 weights."""
        return nnx.state(self._net(key))

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b n"]:
        """Before calibration, for a normalised batch of windows; `key` draws the images' augmentation in training."""
        net, observation = nnx.merge(self._graph, params), batch["observation"]
        keys = [None] * len(self.images) if key is None else jax.random.split(key, len(self.images))
        parts = [
            encoder(augment_window(observation[name], self.spec.vision, k)[:, 0])
            for name, encoder, k in zip(self.images, net.encoders, keys, strict=True)
        ]
        rows = [observation[name].reshape(parts[0].shape[0], -1) for name in self.vectors]
        features = jnp.concatenate([part.astype(jnp.float32) for part in (*parts, *rows)], axis=-1)
        return net.head(features)[0].astype(jnp.float32)
