"""Statistics of episodes as LeRobot keeps them: by feature min, max, mean, std, count and five quantiles.

LeRobot's own functions for it bring torch along, which a robot's computer can do without. Letters: N steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}

FeatureStats = dict[str, np.ndarray]


def number_stats(column: np.ndarray) -> FeatureStats:
    """Of a column [N] or [N, ...] of numbers or booleans: by name an array [...], [1] for scalars."""
    values = column.reshape(len(column), *(column.shape[1:] or (1,))).astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        "count": np.array([len(values)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def image_stats(histogram: np.ndarray, frames: int) -> FeatureStats:
    """Of images, by channel, [3, 1, 1] in [0, 1].

    Args:
        histogram: [3, 256], how many pixels have each value.
        frames: how many images they are of.
    """
    levels = np.arange(256) / 255
    share = histogram / histogram.sum(1, keepdims=True)
    mean = share @ levels
    variance = (share * (levels[None] - mean[:, None]) ** 2).sum(1)
    there = histogram > 0
    values = {
        "min": levels[there.argmax(1)],
        "max": levels[255 - there[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(variance),
    }
    below = share.cumsum(1)
    for name, q in QUANTILES.items():
        values[name] = levels[(below >= q - 1e-12).argmax(1)]
    return {name: value.reshape(3, 1, 1) for name, value in values.items()} | {"count": np.array([frames])}


def merge_stats(old: Mapping[str, FeatureStats], new: Mapping[str, FeatureStats]) -> dict[str, FeatureStats]:
    """Statistics of both parts together. Quantiles are means weighted by count, as in LeRobot: they are approximate."""
    both = {key: _merge(old[key], new[key]) for key in old if key in new}
    return {**old, **new, **both}


def _merge(a: FeatureStats, b: FeatureStats) -> FeatureStats:
    count = a["count"] + b["count"]
    share = float(b["count"][0] / count[0])
    mean = a["mean"] + share * (b["mean"] - a["mean"])
    spread = (1 - share) * (a["std"] ** 2 + (a["mean"] - mean) ** 2) + share * (b["std"] ** 2 + (b["mean"] - mean) ** 2)
    merged = {
        "min": np.minimum(a["min"], b["min"]),
        "max": np.maximum(a["max"], b["max"]),
        "mean": mean,
        "std": np.sqrt(spread),
        "count": count,
    }
    quantiles = [name for name in QUANTILES if name in a and name in b]
    return merged | {name: a[name] + share * (b[name] - a[name]) for name in quantiles}
