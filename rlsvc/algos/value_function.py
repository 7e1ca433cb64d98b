"""Value functions from Monte-Carlo returns: V(s), or Q(s, a) of the behaviour that was recorded.

    G_t = sum_k discount^k r_(t+k)      over the rest of the episode (rlsvc/data/monte_carlo.py)
    regression                          loss = (V(s_t) - g_t)^2
    HL-Gauss (arXiv:2403.03950)         loss = -sum_i p_i(g_t) log softmax(V(s_t))_i

where g is the return as the normaliser maps it (data.normalization.return), so that targets are of one scale whatever
the rewards are, and p the histogram of a Gaussian around it. Nothing is bootstrapped, so there is no target network;
what is learned is the value of the behaviour in the data.

Letters: B batch, K outputs of the head.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from rlsvc.algos.imitation import Imitation, normalize_batch
from rlsvc.data.normalize import RETURN
from rlsvc.data.windows import Batch
from rlsvc.nn.distributions import HLGauss, TwoHot
from rlsvc.policies.api import Params, ValueFunction


def value_loss(logits: Float[Array, "b k"], target: Float[Array, " b"], head: TwoHot | HLGauss) -> Float[Array, ""]:
    """Mean loss over normalised returns: the squared error of one number, or the cross-entropy of a histogram."""
    return head.loss(logits, target).mean()


def explained_variance(value: Float[Array, " b"], returns: Float[Array, " b"]) -> Float[Array, ""]:
    """1 - Var[G - V] / Var[G]: 1 is perfect, 0 no better than a constant. 0 where all returns are the same."""
    variance = returns.var()
    return jnp.where(variance > 0, 1 - (returns - value).var() / jnp.where(variance > 0, variance, 1.0), 0.0)


class ValueLearning(Imitation):
    """The algorithm of `rlsvc.algos.api`: the updates of imitation, on the loss of a value function.

    Metrics besides: `value` and `return` (means, in the units of the reward), `explained_variance`, and where the head
    is a histogram `out_of_support`, the share of returns that lie beyond its ends.
    """

    def weight(self, batch: Batch) -> Float[Array, ""]:
        """Every step counts the same."""
        return jnp.asarray(batch[RETURN].shape[0], jnp.float32)

    def loss(
        self, params: Params, batch: Batch, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """`value_loss` of a batch as `Windows` gives it, and metrics."""
        assert isinstance(self.policy, ValueFunction)
        head, group, returns = self.policy.head, batch["group"], batch[RETURN]
        target = self.normalizer.normalize(RETURN, returns, group)
        logits = self.policy.logits(params, normalize_batch(batch, self.normalizer), key).astype(jnp.float32)
        loss = value_loss(logits, target, head)
        value = self.normalizer.unnormalize(RETURN, head.mean(logits), group)
        metrics = {
            "loss": loss,
            "value": value.mean(),
            "return": returns.mean(),
            "explained_variance": explained_variance(value, returns),
        }
        if isinstance(head, HLGauss):
            metrics["out_of_support"] = head.outside(target).astype(jnp.float32).mean()
        return loss, metrics
