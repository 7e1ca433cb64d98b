"""openpi's normalisation statistics: `norm_stats.json`, read into and written from a Normalizer.

What stands beside a checkpoint of PI0, PI0.5 or PI0-FAST (`assets/<asset_id>/norm_stats.json`):
`{"norm_stats": {"state": {"mean", "std", "q01", "q99"}, "actions": {...}}}`, lists of W numbers, of which q01 and q99
may be null. PI0 takes the z-score, PI0.5 and PI0-FAST the quantiles; the file does not say which.

Facts of openpi (Apache-2.0, src/openpi/transforms.py and shared/normalize.py), and what differs here:

    z-score    (x - mean) / (std + 1e-6)              `mean_std` has no 1e-6: off by 1e-6 / std of the value
    quantile   (x - q01) / (q99 - q01 + 1e-6) * 2 - 1  `openpi_quantile` is the same map

A dimension that does not move (std 0, or q01 == q99) has a slope of 1e6 or more in openpi, here 1: its constant becomes
what it becomes in openpi (0 by the z-score, -1 by the quantiles), and what leaves the constant is not blown up. The way
back differs likewise: openpi presses whatever a policy says for such a dimension onto the constant, here its deviation
is passed on. Our own `quantile` maps a constant to 0: a checkpoint of openpi needs `openpi_quantile`.

openpi cuts statistics that are too wide without a look, and passes over keys that it does not find. Both are errors
here, since they are how one robot's statistics get to another. What cannot be told from the file, and must be known:
the statistics are of states and actions after openpi's own transforms (many of its robots learn differences to the
state, and some flip or rescale the gripper), and of the dataset that the checkpoint was trained on.

Letters: W width of one key's statistics.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import DatasetError, nearest
from rlsvc.data.normalize import Normalizer, Stats

FILE = "norm_stats.json"
KEYS = {"observation.state": "state", "action": "actions"}


@dataclass(frozen=True)
class NormStats:
    """Statistics of one key of the file, float64 [W]; q01 and q99 are both there or both None."""

    mean: np.ndarray
    std: np.ndarray
    q01: np.ndarray | None
    q99: np.ndarray | None


def read_norm_stats(path: str | Path) -> dict[str, NormStats]:
    """Read a norm_stats.json by key, every key in the file.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        DatasetError: no such file, not openpi's format, or statistics that cannot be (lists of unequal width, a value
            that is not finite, a negative std, q01 above q99). Names the file and the key.
    """
    path = Path(path)
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise DatasetError(
            f"{file}: not readable ({error.strerror}); expected openpi's {FILE} or its folder"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{file}: not JSON ({error}); copy it again") from error
    found = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise DatasetError(f'{file}: not openpi\'s statistics; expected {{"norm_stats": {{"state": {{"mean": ...}}}}}}')
    return {key: _parse(f"{file}: '{key}'", entry) for key, entry in found.items()}


def _parse(where: str, entry: Any) -> NormStats:
    if not isinstance(entry, dict):
        raise DatasetError(f"{where}: got {type(entry).__name__}, expected mean, std, q01 and q99")
    arrays: dict[str, np.ndarray] = {}
    for name in ("mean", "std", "q01", "q99"):
        if entry.get(name) is None and name in ("q01", "q99"):
            continue
        try:
            array = np.asarray(entry[name], np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise DatasetError(f"{where} has no list of numbers '{name}'; compute the statistics anew") from error
        if array.ndim != 1 or not array.size:
            raise DatasetError(f"{where} '{name}': got shape {array.shape}, expected one number for each dimension")
        if not np.isfinite(array).all():
            raise DatasetError(f"{where} '{name}': dimension {_first(~np.isfinite(array))} is not finite")
        arrays[name] = array
    widths = {name: len(array) for name, array in arrays.items()}
    if len(set(widths.values())) > 1:
        raise DatasetError(f"{where} has lists of unequal width: {_list(f'{name} {w}' for name, w in widths.items())}")
    if (arrays["std"] < 0).any():
        raise DatasetError(f"{where} 'std': dimension {_first(arrays['std'] < 0)} is negative")
    if ("q01" in arrays) != ("q99" in arrays):
        raise DatasetError(f"{where} has one of q01 and q99; it needs both or neither")
    if "q01" in arrays and (crossed := arrays["q01"] > arrays["q99"]).any():
        raise DatasetError(f"{where}: q01 is above q99 in dimension {_first(crossed)}")
    return NormStats(arrays["mean"], arrays["std"], arrays.get("q01"), arrays.get("q99"))


def to_normalizer(
    stats: Mapping[str, NormStats],
    contract: Contract,
    mode: str,
    keys: Mapping[str, str] = KEYS,
    ignore: Iterable[str] = (),
) -> Normalizer:
    """The normaliser of a contract, with one group, "default".

    Statistics wider than a feature are cut where all that is cut is padding (mean, std and quantiles 0). Images take
    "image", texts nothing.

    Args:
        stats: as `read_norm_stats` gives them.
        contract: its features of numbers must be vectors, each with statistics of its own.
        mode: "mean_std" for PI0, "openpi_quantile" for PI0.5 and PI0-FAST (this file's docstring).
        keys: by feature name of the contract the key in `stats`.
        ignore: keys in `stats` that may be left unused ("coarse_actions").

    Raises:
        DatasetError: a feature without statistics, statistics without a feature, or of another width. Names the key.
        BundleError: a mode that needs what the statistics do not have (min_max; quantiles where there are none).
    """
    features = {**contract.observation, "action": contract.action}
    vectors = {name: f for name, f in features.items() if f.dtype != TEXT and not f.is_image}
    for name in keys:
        if name not in vectors:
            raise DatasetError(f"statistics for '{name}': the contract has no such vector; it has: {_list(vectors)}")
    made: dict[str, tuple[Stats, ...]] = {}
    for name, feature in vectors.items():
        if name not in keys:
            raise DatasetError(
                f"no statistics are named for '{name}'; there are: {_list(stats)}. Map it to one of them"
            )
        if (key := keys[name]) not in stats:
            guess = nearest(key, stats)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise DatasetError(f"the statistics have no '{key}' for '{name}'{hint}; there are: {_list(stats)}")
        if len(feature.shape) != 1:
            raise DatasetError(f"'{name}' has shape {feature.shape}; openpi's statistics are of vectors")
        s = _cut(stats[key], feature.shape[0], f"statistics '{key}' for '{name}'")
        made[name] = (Stats(s.mean, s.std, None, None, s.q01, s.q99, 0),)
    for key in stats:
        if key not in keys.values() and key not in tuple(ignore):
            raise DatasetError(
                f"statistics '{key}' ({len(stats[key].mean)} wide) belong to no feature of the contract "
                f"({_list(vectors)}); map a feature to it, or ignore it by name"
            )
    images = {name: "image" for name, f in features.items() if f.is_image}
    return Normalizer(("default",), {**dict.fromkeys(made, mode), **images}, made)


def _cut(stats: NormStats, width: int, where: str) -> NormStats:
    got = len(stats.mean)
    if got < width:
        raise DatasetError(
            f"{where}: got {got} dimensions, the contract has {width}; they are of another robot or dataset"
        )
    rest = [x[width:] for x in (stats.mean, stats.std, stats.q01, stats.q99) if x is not None]
    if (moves := np.any([x != 0 for x in rest], axis=0)).any():
        raise DatasetError(
            f"{where}: got {got} dimensions, the contract has {width}, and dimension {width + _first(moves)} is no "
            "padding (its statistics are not 0); they are of another robot, or the contract leaves dimensions out"
        )
    q01, q99 = (None if x is None else x[:width] for x in (stats.q01, stats.q99))
    return NormStats(stats.mean[:width], stats.std[:width], q01, q99)


def write_norm_stats(
    path: str | Path, normalizer: Normalizer, keys: Mapping[str, str] = KEYS, group: str | None = None
) -> Path:
    """Write one group's statistics as openpi's norm_stats.json; what openpi has no place for (min, max, count) is lost.

    Args:
        path: the file, or a folder that is there, in which the file takes openpi's name.
        normalizer: of any mode; the file does not say which, so tell openpi's configuration (`use_quantile_norm`).
        keys: by feature name the key in the file; features that are not named are not written.
        group: of the normaliser; None means the only one.

    Returns:
        The file.

    Raises:
        DatasetError: a feature without statistics, or that is no vector.
        BundleError: an unknown group.
        OSError: the file cannot be written.
    """
    index, found = normalizer.group_index(group), {}
    for name, key in keys.items():
        if name not in normalizer.stats:
            raise DatasetError(f"the normaliser has no statistics for '{name}'; it has: {_list(normalizer.stats)}")
        stats = normalizer.stats[name][index]
        if stats.mean.ndim != 1:
            raise DatasetError(f"'{name}' has shape {stats.mean.shape}; openpi's statistics are of vectors")
        arrays = {field: getattr(stats, field) for field in ("mean", "std", "q01", "q99")}
        found[key] = {field: None if x is None else x.tolist() for field, x in arrays.items()}
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    file.write_text(json.dumps({"norm_stats": found}, indent=2, allow_nan=False) + "\n", "utf-8")
    return file


def _first(flags: np.ndarray) -> int:
    return int(np.flatnonzero(flags)[0])


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
