"""Two-hot heads over symlog bins, histograms of a Gaussian (HL-Gauss), and the Gaussian that a tanh squashes.

A scalar x is learned as a distribution over K evenly spread bins of symlog(x) = sign(x) ln(1 + |x|)
(Hafner et al., arXiv:2301.04104, eq. 8-10): the target puts its weight on the two bins next to it, the loss is the
cross-entropy, and the prediction is symexp of the expected bin. HL-Gauss (Farebrother et al., arXiv:2403.03950, section
3.1) spreads the target over more of them, and knows no symlog.

Letters: K bins, A action dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rlsvc.nn.layers import along_last

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def symlog(x: Array) -> Array:
    """sign(x) ln(1 + |x|): the identity near 0, logarithmic far away."""
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: Array) -> Array:
    """The inverse of `symlog`."""
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


@dataclass(frozen=True)
class TwoHot:
    """A head over `bins` values from `low` to `high` in symlog space; without bins a plain scalar with squared error.

    Attributes:
        bins: K, at least 2; 0 for a scalar head.
        low: symlog of the smallest value.
        high: symlog of the largest value.
    """

    bins: int = 101
    low: float = -10.0
    high: float = 10.0

    @property
    def width(self) -> int:
        """Outputs that a net needs."""
        return self.bins or 1

    def weights(self, x: Float[Array, "*n"]) -> Float[Array, "*n k"]:
        """The two-hot target of raw values; they sum to 1."""
        step = (self.high - self.low) / (self.bins - 1)
        place = (jnp.clip(symlog(x), self.low, self.high) - self.low) / step
        return jax.nn.relu(
            1 - jnp.abs(place[..., None] - along_last(jnp.arange(self.bins, dtype=x.dtype), place[..., None]))
        )

    def loss(self, logits: Float[Array, "*n k"], x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Cross-entropy of logits against raw values, or the squared error of a scalar head."""
        if not self.bins:
            return (logits[..., 0] - x) ** 2
        return jax.nn.logsumexp(logits, axis=-1) - (self.weights(x) * logits).sum(-1)

    def mean(self, logits: Float[Array, "*n k"]) -> Float[Array, "*n"]:
        """Raw values that logits stand for."""
        if not self.bins:
            return logits[..., 0]
        values = jnp.asarray(np.linspace(self.low, self.high, self.bins), logits.dtype)
        return symexp((jax.nn.softmax(logits, axis=-1) * along_last(values, logits)).sum(-1))


@dataclass(frozen=True)
class HLGauss:
    """A head over `bins` of one width from `low` to `high`, learned from the histogram of a Gaussian around the target.

    The Gaussian is cut at the ends of the support: a bin's weight is its share of what lies within.

    Attributes:
        bins: K, at least 2.
        low: lower end of the first bin.
        high: upper end of the last bin.
        sigma_ratio: standard deviation, in widths of a bin; 0.75 is what the paper found to do well.
    """

    bins: int = 101
    low: float = -1.0
    high: float = 1.0
    sigma_ratio: float = 0.75

    @property
    def width(self) -> int:
        """Outputs that a net needs."""
        return self.bins

    def outside(self, x: Float[Array, "*n"]) -> Bool[Array, "*n"]:
        """Which targets lie beyond the support; they are learned as its ends."""
        return (x < self.low) | (x > self.high)

    def weights(self, x: Float[Array, "*n"]) -> Float[Array, "*n k"]:
        """The histogram that is the target of a value; it sums to 1."""
        step = (self.high - self.low) / self.bins
        edges = jnp.asarray(np.linspace(self.low, self.high, self.bins + 1), x.dtype)
        x = jnp.clip(x, self.low, self.high)[..., None]
        # Twice the distribution function, less 1: the ratio is the same.
        cdf = jax.scipy.special.erf((along_last(edges, x) - x) / (math.sqrt(2) * self.sigma_ratio * step))
        return jnp.diff(cdf) / (cdf[..., -1:] - cdf[..., :1])

    def loss(self, logits: Float[Array, "*n k"], x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Cross-entropy of logits against values."""
        return jax.nn.logsumexp(logits, axis=-1) - (self.weights(x) * logits).sum(-1)

    def mean(self, logits: Float[Array, "*n k"]) -> Float[Array, "*n"]:
        """Values that logits stand for: the expected middle of a bin."""
        half = (self.high - self.low) / self.bins / 2
        middles = jnp.asarray(np.linspace(self.low + half, self.high - half, self.bins), logits.dtype)
        return (jax.nn.softmax(logits, axis=-1) * along_last(middles, logits)).sum(-1)


def bounded_log_std(x: Array, low: float, high: float) -> Array:
    """Any real number to a log standard deviation between `low` and `high`, smoothly."""
    return low + 0.5 * (high - low) * (jnp.tanh(x) + 1)


def gaussian_log_prob(eps: Float[Array, "*n a"], log_std: Float[Array, "*n a"]) -> Float[Array, "*n"]:
    """Log density of mean + std * eps under that Gaussian, summed over the action dimensions."""
    return (-0.5 * eps**2 - log_std - LOG_SQRT_2PI).sum(-1)


def tanh_log_det_before(u: Float[Array, "*n a"]) -> Float[Array, "*n"]:
    """The same as `tanh_log_det` given u, which tells it however far out u lies (arXiv:1812.05905, app. C).

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)).
    """
    return 2 * (math.log(2) - u - jax.nn.softplus(-2 * u)).sum(-1)


def tanh_log_det(action: Float[Array, "*n a"]) -> Float[Array, "*n"]:
    """Log of |d tanh(x) / dx|, summed over the action dimensions, given action = tanh(x) in [-1, 1]."""
    return jnp.log(jax.nn.relu(1 - action**2) + 1e-6).sum(-1)
