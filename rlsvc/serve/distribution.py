"""Whether what a policy is served looks like what it was trained on, by the statistics in its bundle.

A value is outside when it lies beyond the training values' range widened by `MARGIN` of its width on either side, or,
where a bundle has no range (openpi's), more than `DEVIATIONS` standard deviations from the mean. A dimension that was
constant in training counts as one unit wide, as in the normaliser. The share of values outside is kept for every
dimension as an average in which a request weighs `1 / REQUESTS` and the ones before it ever less; the alarm of a
feature is on from the request at which its worst dimension has `ALARM`, until that has less than `CLEAR`. So units
that are wrong (degrees for radians, millimetres for metres) are told within a dozen requests, by the dimension's name,
and a moment outside is not.

Images and texts are left out: a bundle has no statistics of them, and pixels would cost time in every request. It is
one average over all callers of a replica, and a wrong value that lies inside the range is not seen.

Letters: T observation steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.data.normalize import CONSTANT, Stats

MARGIN = 0.1
DEVIATIONS = 5.0
REQUESTS = 50
ALARM, CLEAR = 0.2, 0.1


@runtime_checkable
class Trained(Protocol):
    """A runner that knows what its policy was trained on."""

    contract: Contract

    def training_statistics(self) -> dict[str, Stats]:
        """By observed feature the statistics of its training values, where they are known."""
        ...

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """A feature's values as the statistics have them, out of those that a robot sends."""
        ...


@dataclass
class Watched:
    """One feature of a policy.

    Attributes:
        low, high: bounds of each dimension, of the feature's shape.
        names: of the dimensions, in the order of the flattened feature.
        shares: of values outside, averaged over the recent requests, by dimension.
        values, outside: how many values came so far, and how many of them were outside.
        alarm: whether the alarm is on.
    """

    low: np.ndarray
    high: np.ndarray
    names: tuple[str, ...]
    shares: np.ndarray = field(init=False)
    values: int = 0
    outside: int = 0
    alarm: bool = False

    def __post_init__(self) -> None:
        self.shares = np.zeros(self.low.shape)

    @property
    def share(self) -> float:
        """That of the worst dimension."""
        return float(self.shares.max(initial=0.0))

    def to_json(self) -> dict[str, Any]:
        """What is told of it."""
        share = self.share
        worst = self.names[int(self.shares.argmax())] if share > 0 else None
        return {"outside_share": round(share, 4), "dimension": worst, "alarm": self.alarm}

    def observe(self, x: np.ndarray) -> bool:
        """Take a request's values [T, ...]; gives whether the alarm went on or off."""
        outside = (x < self.low) | (x > self.high)
        self.values += outside.size
        self.outside += int(np.count_nonzero(outside))
        self.shares += (outside.mean(0) - self.shares) / REQUESTS
        share, before = self.share, self.alarm
        self.alarm = share >= (CLEAR if before else ALARM)
        return self.alarm is not before


class Distribution:
    """The features of a policy that are watched.

    Attributes:
        features: by name.
        left_out: the other features' names.
    """

    def __init__(self, runner: Trained) -> None:
        """Begin with no requests."""
        contract, statistics = runner.contract, runner.training_statistics()
        self._encode = runner.encode
        self.features = {
            name: Watched(*bounds(statistics[name]), _dimensions(feature.names, feature.shape))
            for name, feature in contract.observation.items()
            if name in statistics
        }
        self.left_out = [name for name in contract.observation if name not in self.features]

    @classmethod
    def of(cls, runner: object) -> Distribution | None:
        """Of a runner that was trained on data; None for any other."""
        made = cls(runner) if isinstance(runner, Trained) else None
        return made if made is not None and made.features else None

    def observe(self, observation: Mapping[str, np.ndarray]) -> list[str]:
        """Take a request's observation, which fits the contract; names the features whose alarm went on or off."""
        return [
            name for name, watched in self.features.items() if watched.observe(self._encode(name, observation[name]))
        ]

    def to_json(self) -> dict[str, Any]:
        """What is told of it: plain JSON types."""
        watched = {name: one.to_json() for name, one in self.features.items()}
        return {
            "alarm": any(one.alarm for one in self.features.values()),
            "features": watched,
            "left_out": self.left_out,
        }


def bounds(stats: Stats) -> tuple[np.ndarray, np.ndarray]:
    """Beyond which a value is outside."""
    if stats.min is None or stats.max is None:
        low, high, margin = stats.mean, stats.mean, DEVIATIONS * stats.std
        constant = stats.std <= CONSTANT * np.maximum(1.0, np.abs(stats.mean))
    else:
        low, high, width = stats.min, stats.max, stats.max - stats.min
        margin = MARGIN * width
        constant = width <= CONSTANT * np.maximum(1.0, np.abs(stats.min))
    margin = np.where(constant, MARGIN, margin)
    return low - margin, high + margin


def _dimensions(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    count = int(np.prod(shape))
    return names if len(names) == count else tuple(str(i) for i in range(count))
