"""Normalisation that training and serving share: one object, fitted on training episodes, stored in the bundle.

Every mode is an affine map of one feature, `normalized = (x - center) * scale`, so it is inverted up to rounding.
`openpi_quantile` is `quantile` as openpi's checkpoints were trained with (norm_stats.py); a new run needs it only to go
on from one of these.
Letters: N steps, G groups of datasets that share statistics, B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import BundleError, DatasetError

FIELDS = ("mean", "std", "min", "max", "q01", "q99")
MODES = ("mean_std", "min_max", "quantile", "openpi_quantile", "identity")
NEEDS = {"min_max": ("min", "max"), "quantile": ("q01", "q99"), "openpi_quantile": ("q01", "q99")}
RETURN = "return"
"""Name of a value function's target, which has statistics and is no feature of a contract."""
# A dimension that moves less than this, relative to its own size, is constant: it is centred and keeps scale 1.
CONSTANT = 1e-6
OPENPI_EPSILON = 1e-6


@dataclass(frozen=True)
class Stats:
    """Statistics of one feature over `count` steps; every array has the shape of one step, float64.

    `q01` and `q99` are the 1 % and 99 % quantiles; `std` is the population's. What another program's statistics do not
    have is None (openpi's have neither min nor max), and a mode that needs it is refused. A `count` of 0 is not known.
    """

    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray | None
    max: np.ndarray | None
    q01: np.ndarray | None
    q99: np.ndarray | None
    count: int

    def to_json(self) -> dict[str, Any]:
        """Lists of numbers, null for what is not there; `from_json` is the exact inverse."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return {**{name: None if x is None else x.tolist() for name, x in fields.items()}, "count": self.count}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Stats:
        """Inverse of `to_json`."""
        mean, std = (np.asarray(value[name], np.float64) for name in FIELDS[:2])
        rest = (None if value[name] is None else np.asarray(value[name], np.float64) for name in FIELDS[2:])
        return cls(mean, std, *rest, count=int(value["count"]))


def compute_stats(column: np.ndarray) -> Stats:
    """Statistics of a column [N, ...] in float64, exact on the data.

    Raises:
        DatasetError: no rows, or a value that is not finite.
    """
    if len(column) == 0:
        raise DatasetError("statistics need at least one step; got none")
    values = np.asarray(column, np.float64)
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise DatasetError(f"row {row} is not finite ({values[row]}); mend or drop its episode")
    q01, q99 = np.quantile(values, [0.01, 0.99], axis=0)
    return Stats(values.mean(0), values.std(0), values.min(0), values.max(0), q01, q99, len(values))


def affine(stats: Stats, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Center and scale of one feature, float64.

    Raises:
        BundleError: the mode needs statistics that are not there.
    """
    if mode == "identity":
        return np.zeros_like(stats.mean), np.ones_like(stats.mean)
    if mode == "mean_std":
        center, half = stats.mean, stats.std
    else:
        low, high = (getattr(stats, name) for name in NEEDS[mode])
        if low is None or high is None:
            there = [name for name in FIELDS if getattr(stats, name) is not None]
            raise BundleError(
                f"mode '{mode}' needs {' and '.join(NEEDS[mode])}, the statistics have {', '.join(there)}; "
                "take another mode, or compute the statistics anew from the data"
            )
        center, half = (low + high) / 2, (high - low) / 2
    constant = half <= CONSTANT * np.maximum(1.0, np.abs(center))
    if mode == "openpi_quantile":
        # (x - q01) / (q99 - q01 + epsilon) * 2 - 1, in which a constant is -1, not 0; off the constant openpi's slope
        # is 2e6, and here 1.
        center = np.where(constant, low + 1.0, center + OPENPI_EPSILON / 2)
        half = half + OPENPI_EPSILON / 2
    return center, np.where(constant, 1.0, 1.0 / np.where(constant, 1.0, half))


@dataclass(frozen=True)
class Normalizer:
    """Affine maps by feature name and group.

    Attributes:
        groups: names of the groups, in the order of the group index.
        modes: by feature name one of MODES, or "image" (uint8 0..255 to -1..1).
        stats: by feature name the statistics of each group, G long; empty for images.
    """

    groups: tuple[str, ...]
    modes: dict[str, str]
    stats: dict[str, tuple[Stats, ...]]
    _center: dict[str, np.ndarray] = field(init=False, repr=False, compare=False)
    _scale: dict[str, np.ndarray] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        center, scale = {}, {}
        for key, mode in self.modes.items():
            if mode == "image":
                pairs = [(np.float64(127.5), np.float64(1 / 127.5))] * len(self.groups)
            else:
                if mode not in MODES:
                    raise BundleError(f"normaliser mode of '{key}': got '{mode}', expected one of {', '.join(MODES)}")
                if len(self.stats.get(key, ())) != len(self.groups):
                    raise BundleError(f"normaliser has no statistics for '{key}' in every group of {self.groups}")
                try:
                    pairs = [affine(stats, mode) for stats in self.stats[key]]
                except BundleError as error:
                    raise BundleError(f"normaliser statistics of '{key}': {error}") from error
            center[key] = np.stack([c for c, _ in pairs]).astype(np.float32)
            scale[key] = np.stack([s for _, s in pairs]).astype(np.float32)
        object.__setattr__(self, "_center", center)
        object.__setattr__(self, "_scale", scale)

    @classmethod
    def fit(
        cls,
        columns: Mapping[str, Mapping[str, np.ndarray]],
        features: Mapping[str, Feature],
        modes: Mapping[str, str],
    ) -> Normalizer:
        """Fit on training steps.

        Args:
            columns: by group, by feature name, an array [N, ...] of that group's training steps.
            features: the features to normalise; texts are passed over, images take "image".
            modes: by feature name; a feature that is not named takes min_max. An unknown name is an error.

        Raises:
            DatasetError: a mode for a feature that is not there, or data that is not finite (names the feature).
        """
        for key in modes:
            if key not in features:
                raise DatasetError(
                    f"data.normalization names '{key}', which is not a feature of the run; there are: "
                    f"{', '.join(features)}"
                )
        groups = tuple(sorted(columns))
        chosen: dict[str, str] = {}
        stats: dict[str, tuple[Stats, ...]] = {}
        for key, feature in features.items():
            if feature.dtype == TEXT:
                continue
            chosen[key] = "image" if feature.is_image else modes.get(key, "min_max")
            if not feature.is_image:
                try:
                    stats[key] = tuple(compute_stats(columns[group][key]) for group in groups)
                except DatasetError as error:
                    raise DatasetError(f"'{key}': {error}") from error
        return cls(groups, chosen, stats)

    def with_stats(self, key: str, stats: tuple[Stats, ...]) -> Normalizer:
        """The same with other statistics of one feature, one for each group."""
        return replace(self, stats={**self.stats, key: stats})

    def normalize(self, key: str, x: Any, group: Any = 0) -> Any:
        """Map raw values to normalised ones, float32.

        Args:
            key: feature name.
            x: [..., *shape] numpy or JAX array; uint8 for images.
            group: group index, an int, or [B] integers for rows of x [B, ..., *shape].
        """
        center, scale = self._of(key, x, group)
        return (x - center) * scale

    def unnormalize(self, key: str, x: Any, group: Any = 0) -> Any:
        """Inverse of `normalize`, float32."""
        center, scale = self._of(key, x, group)
        return x / scale + center

    def _of(self, key: str, x: Any, group: Any) -> tuple[Any, Any]:
        if key not in self._center:
            raise BundleError(f"normaliser has no statistics for '{key}'; it has: {', '.join(self._center)}")
        center, scale = self._center[key], self._scale[key]
        between = (1,) * (x.ndim - center.ndim)
        if isinstance(group, int):
            # As many axes as x: broadcasting is written out.
            lead = (1,) * (x.ndim - center.ndim + 1)
            return center[group].reshape(lead + center.shape[1:]), scale[group].reshape(lead + scale.shape[1:])
        xp = group.__array_namespace__()
        shape = (group.shape[0], *between, *center.shape[1:])
        return (
            xp.take(xp.asarray(center), group, axis=0).reshape(shape),
            xp.take(xp.asarray(scale), group, axis=0).reshape(shape),
        )

    def group_index(self, group: str | None) -> int:
        """Index of a group; None means the only one.

        Raises:
            BundleError: an unknown group, or none named where there are several.
        """
        if group is None and len(self.groups) == 1:
            return 0
        if group not in self.groups:
            raise BundleError(f"normaliser group: got {group!r}, expected one of {', '.join(self.groups)}")
        return self.groups.index(group)

    def check_contract(self, contract: Contract) -> None:
        """Refuse statistics that do not cover the contract, key by key and width by width.

        Raises:
            BundleError: names the key, what the statistics have and what the contract says.
        """
        wanted = {key: f for key, f in {**contract.observation, "action": contract.action}.items() if f.dtype != TEXT}
        if missing := sorted(set(wanted) - set(self.modes)):
            raise BundleError(
                f"normaliser has no statistics for '{missing[0]}'; it has: {', '.join(sorted(self.modes))}"
            )
        if extra := sorted(set(self.modes) - set(wanted) - {RETURN}):
            raise BundleError(
                f"normaliser has statistics for '{extra[0]}', which the contract does not name; the contract has: "
                f"{', '.join(sorted(wanted))}"
            )
        for key, feature in wanted.items():
            for group, stats in zip(self.groups, self.stats.get(key, ()), strict=False):
                for name in FIELDS:
                    array = getattr(stats, name)
                    if array is not None and (shape := array.shape) != feature.shape:
                        raise BundleError(
                            f"normaliser statistics '{name}' of '{key}' (group {group}): got shape {shape}, "
                            f"the contract says {feature.shape}"
                        )
                    if array is not None and not np.isfinite(array).all():
                        raise BundleError(f"normaliser statistics '{name}' of '{key}' (group {group}) are not finite")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the exact inverse."""
        return {
            "groups": list(self.groups),
            "modes": dict(self.modes),
            "stats": {key: [s.to_json() for s in stats] for key, stats in self.stats.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Normalizer:
        """Inverse of `to_json`."""
        return cls(
            groups=tuple(value["groups"]),
            modes=dict(value["modes"]),
            stats={key: tuple(Stats.from_json(s) for s in stats) for key, stats in value["stats"].items()},
        )

    @classmethod
    def identity(cls, features: Mapping[str, Feature], groups: Sequence[str] = ("default",)) -> Normalizer:
        """A normaliser that changes nothing, for policies that were not fitted to data."""
        zeros = {key: np.zeros(f.shape) for key, f in features.items() if f.dtype != TEXT and not f.is_image}
        stats = {key: (Stats(z, z + 1, z, z, z, z, 0),) * len(groups) for key, z in zeros.items()}
        images = {key: "image" for key, f in features.items() if f.is_image}
        return cls(tuple(groups), {**dict.fromkeys(zeros, "identity"), **images}, stats)

    @classmethod
    def from_contract(cls, contract: Contract) -> Normalizer:
        """For policies that learn from rollouts: vectors as they are, images to [-1, 1], actions from their bounds.

        An action without bounds on every side stays as it is, and so does a discrete one.
        """
        base = cls.identity({**contract.observation, "action": contract.action})
        action = contract.action
        if not action.dtype.startswith("float"):
            return base
        if action.low is None or action.high is None or not np.isfinite([*action.low, *action.high]).all():
            return base
        low, high = (
            np.broadcast_to(np.asarray(bound), action.shape).astype(np.float64) for bound in (action.low, action.high)
        )
        middle = (low + high) / 2
        stats = Stats(middle, np.maximum(high - low, 1e-6) / 2, low, high, low, high, 0)
        return cls(base.groups, {**base.modes, "action": "min_max"}, {**base.stats, "action": (stats,)})
