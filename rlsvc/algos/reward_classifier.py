"""A reward classifier from labelled steps: cross-entropy, and afterwards one temperature (arXiv:1706.04599).

    loss = -log softmax(f(o_t))_(label_t)          over steps whose label is known (rlsvc/data/labels.py)
    p    = softmax(f(o_t) / tau)                   tau: fitted to held-out episodes (rlsvc/train/calibration.py)

Letters: B batch, n classes.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from rlsvc.algos.imitation import Imitation, normalize_batch
from rlsvc.data.labels import LABEL
from rlsvc.data.windows import Batch
from rlsvc.policies.api import Judge, Params


def label_loss(logits: Float[Array, "b n"], label: Int[Array, " b"]) -> Float[Array, ""]:
    """Mean cross-entropy, nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


class RewardLearning(Imitation):
    """The algorithm of `rlsvc.algos.api`: the updates of imitation, on `label_loss`."""

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Every step counts the same."""
        return jnp.asarray(batch[LABEL].shape[0], jnp.float32)

    def loss(
        self, params: Params, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """`label_loss` of a batch as `Windows` gives it; with `accuracy`, and the share of steps that are `done`."""
        logits = self.logits(params, batch, key)
        loss, label = label_loss(logits, batch[LABEL]), batch[LABEL]
        accuracy = (logits.argmax(-1) == label).astype(jnp.float32).mean()
        done = (label == logits.shape[-1] - 1).astype(jnp.float32).mean()
        return loss, {"loss": loss, "accuracy": accuracy, "done": done}

    def logits(self, params: Params, batch: Batch, key: Key[Array, ""] | None = None) -> Float[Array, "b n"]:
        """Of a batch as `Windows` gives it; `key`: of training alone."""
        assert isinstance(self.policy, Judge)
        return self.policy.logits(params, normalize_batch(batch, self.normalizer), key)
