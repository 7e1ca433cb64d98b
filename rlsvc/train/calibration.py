"""How far a reward classifier can be trusted: a temperature, and its precision at a threshold, on held-out episodes.

Letters: N steps, E episodes, n classes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from rlsvc.core.errors import BundleError
from rlsvc.data.labels import LABEL
from rlsvc.train.evaluate import share_interval

CALIBRATION = "calibration.json"
"""Name of the file in a bundle."""
TEMPERATURES = np.geomspace(0.05, 20.0, 400)
BATCH = 64


@dataclass(frozen=True)
class Calibration:
    """What was found on held-out episodes.

    Attributes:
        temperature: logits are divided by it.
        threshold: probability of the last class from which the task counts as done.
        precision: of the episodes in which it says so, the share in which it is right the first time it does, since
            that ends an episode; None where it never says so. `precision_low`, `precision_high`: Wilson's 95 %.
        recall: of the episodes that have steps in which the task is done, the share in which it says so in one of them.
        says_done: episodes in which it says so.
        episodes: that were held out.
        loss: mean cross-entropy with the temperature, nats; `loss_before` without.
    """

    temperature: float
    threshold: float
    precision: float | None
    precision_low: float
    precision_high: float
    recall: float | None
    says_done: int
    episodes: int
    loss: float
    loss_before: float

    def metrics(self) -> dict[str, float]:
        """What is logged."""
        named = {k: v for k, v in asdict(self).items() if v is not None and k not in ("threshold", "loss_before")}
        return {f"calibration_{name}": float(value) for name, value in named.items()}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    x = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def cross_entropy(logits: np.ndarray, label: np.ndarray) -> float:
    """Mean over [N, n] logits and [N] labels, nats."""
    return float(-np.log(np.maximum(softmax(logits)[np.arange(len(label)), label], 1e-300)).mean())


def fit_temperature(logits: np.ndarray, label: np.ndarray) -> float:
    """The temperature of TEMPERATURES with the least cross-entropy; at an end of them where the data bounds it not."""
    losses = [cross_entropy(logits / temperature, label) for temperature in TEMPERATURES]
    return float(TEMPERATURES[int(np.argmin(losses))])


def calibrate(logits: np.ndarray, label: np.ndarray, episode: np.ndarray, threshold: float) -> Calibration:
    """Fit the temperature, and judge what is then said at the threshold.

    Args:
        logits: [N, n] of the steps whose label is known, in the order of time.
        label: [N].
        episode: [N], which episode each step is of.
        threshold: see Calibration.
    """
    temperature = fit_temperature(logits, label)
    done = label == logits.shape[1] - 1
    says = softmax(logits / temperature)[:, -1] >= threshold
    right = found = fired = possible = 0
    for one in np.unique(episode):
        rows = episode == one
        if says[rows].any():
            fired += 1
            right += int(done[rows][np.argmax(says[rows])])
        if done[rows].any():
            possible += 1
            found += int((says & done)[rows].any())
    interval = share_interval(right, fired) if fired else None
    return Calibration(
        temperature,
        threshold,
        None if interval is None else interval.mean,
        0.0 if interval is None else interval.low,
        1.0 if interval is None else interval.high,
        found / possible if possible else None,
        fired,
        len(np.unique(episode)),
        cross_entropy(logits / temperature, label),
        cross_entropy(logits, label),
    )


def calibrate_windows(algorithm: Any, params: Any, windows: Any, threshold: float) -> Calibration:
    """`calibrate` on held-out windows, with the weights that the bundle gets."""
    logits_of = jax.jit(lambda params, batch: algorithm.logits(params, batch))
    count, parts = windows.num_windows, []
    for start in range(0, count, BATCH):
        index = np.minimum(np.arange(start, start + BATCH), count - 1)
        parts.append(np.asarray(logits_of(params, windows.gather(index))))
    label = np.asarray(windows.columns[LABEL])[np.asarray(windows.anchor)]
    return calibrate(np.concatenate(parts)[:count], label, np.asarray(windows.start), threshold)


def to_bytes(calibration: Calibration) -> bytes:
    """The file of a bundle."""
    return json.dumps(asdict(calibration), indent=1).encode()


def from_bytes(data: bytes, where: object) -> Calibration:
    """Inverse of `to_bytes`.

    Raises:
        BundleError: not a calibration.
    """
    try:
        return Calibration(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise BundleError(f"{where}: not the calibration of a reward classifier ({error})") from error
