"""What stands around the model in a folder of LeRobot's pi0 or pi0.5: the steps of its processors, and its statistics.

    policy_preprocessor.json            steps from an observation to what the model sees
    policy_postprocessor.json           steps from what it says to an action
    policy_*_normalizer_*.safetensors   statistics, "observation.state.mean"

Facts of LeRobot 0.6 (Apache-2.0, processor/normalize_processor.py): images, states and actions have one kind of map
each,

    MEAN_STD    (x - mean) / (std + 1e-8)
    QUANTILES   2 (x - q01) / (q99 - q01) - 1; what does not move (q01 == q99) is -1
    MIN_MAX     likewise with min and max
    IDENTITY    x

Ours give what does not move a slope of 1 instead. So the statistics that a map reads are written as those that make
LeRobot's the same map as ours, constants and openpi's 1e-6 included, and are read as those that make ours the same as
LeRobot's on the data.

Letters: W numbers of a feature.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import DatasetError
from rlsvc.data.normalize import FIELDS, Normalizer, Stats, affine

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
TOKENIZER_NAME = "google/paligemma-3b-pt-224"
"""What LeRobot calls PaliGemma's tokenizer, which it fetches by itself."""
MODES = {
    "mean_std": "MEAN_STD",
    "quantile": "QUANTILES",
    "openpi_quantile": "QUANTILES",
    "min_max": "MIN_MAX",
    "identity": "IDENTITY",
}
"""By our mode the map of LeRobot's that can be the same."""
READS = {"MEAN_STD": "mean_std", "QUANTILES": "quantile", "MIN_MAX": "min_max", "IDENTITY": "identity"}
ENDS = {"QUANTILES": ("q01", "q99"), "MIN_MAX": ("min", "max")}
KINDS = {"observation.state": "STATE", "action": "ACTION"}


def norm_map(normalizer: Normalizer) -> dict[str, str]:
    """By kind of feature LeRobot's map (`normalization_mapping` of a configuration)."""
    return {"VISUAL": "IDENTITY", **{kind: MODES[normalizer.modes[name]] for name, kind in KINDS.items()}}


def write_processors(folder: Path, variant: str, config: Mapping[str, Any], normalizer: Normalizer, group: int) -> None:
    """Write both processors and their statistics.

    Args:
        folder: of the policy.
        variant: pi0 or pi05.
        config: as in config.json beside them.
        normalizer: of a contract with `observation.state` and `action`.
        group: whose statistics.
    """
    inputs, outputs = config["input_features"], config["output_features"]
    stats = {
        f"{name}.{field}": x
        for name in KINDS
        for field, x in _written(normalizer.stats[name][group], normalizer.modes[name]).items()
    }
    maps = {"eps": 1e-8, "norm_map": config["normalization_mapping"]}
    normalize = ("normalizer_processor", {**maps, "features": {**inputs, **outputs}})
    tokenize = {
        "tokenizer_name": TOKENIZER_NAME,
        "max_length": config["tokenizer_max_length"],
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
    }
    # pi0 ends its prompt with a newline; pi05 tells the state, which has to be normalised before.
    rest = {
        "pi0": [("pi0_new_line_processor", {}), ("tokenizer_processor", tokenize), normalize],
        "pi05": [normalize, ("pi05_prepare_state_tokenizer_processor_step", {}), ("tokenizer_processor", tokenize)],
    }
    device = ("device_processor", {"device": "cpu", "float_dtype": None})
    before = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {}), *rest[variant], device]
    after = [("unnormalizer_processor", {**maps, "features": outputs}), device]
    for name, steps in ((PREPROCESSOR, before), (POSTPROCESSOR, after)):
        entries = []
        for i, (step, fields) in enumerate(steps):
            entry: dict[str, Any] = {"registry_name": step, "config": fields}
            if "normalizer" in step:
                entry["state_file"] = f"{name}_step_{i}_{step}.safetensors"
                save_file(stats, folder / entry["state_file"])
            entries.append(entry)
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": entries}, indent=2))


def _written(stats: Stats, mode: str) -> dict[str, np.ndarray]:
    """float64 [W] each."""
    found = {name: x for name in FIELDS if (x := getattr(stats, name)) is not None}
    center, scale = affine(stats, mode)
    kind = MODES[mode]
    if kind == "MEAN_STD":
        found |= {"mean": center, "std": 1 / scale}
    elif kind in ENDS:
        low, high = ENDS[kind]
        found |= {low: center - 1 / scale, high: center + 1 / scale}
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


def read_normalizer(folder: Path, contract: Contract) -> Normalizer:
    """The normaliser that the preprocessor's statistics make, with one group, "default".

    Raises:
        DatasetError: no preprocessor, one without statistics of a feature, or a map that is not known; names it.
    """
    file = folder / f"{PREPROCESSOR}.json"
    maps, found = _read(file)
    features = {**contract.observation, "action": contract.action}
    modes, stats = {}, {}
    for name, feature in features.items():
        if feature.dtype == TEXT:
            continue
        kind = "VISUAL" if feature.is_image else KINDS[name]
        got = maps.get(kind, "IDENTITY")
        if feature.is_image:
            if got != "IDENTITY":
                raise DatasetError(f"{file}: normalises images by {got}; pi0 sees them in [-1, 1] alone (IDENTITY)")
            modes[name] = "image"
            continue
        if got not in READS:
            raise DatasetError(f"{file}: normalises {kind} by {got}; expected one of {', '.join(READS)}")
        modes[name] = READS[got]
        stats[name] = (_taken(found.get(name, {}), got, feature.shape, f"{file}: '{name}'"),)
    return Normalizer(("default",), modes, stats)


def _taken(found: Mapping[str, np.ndarray], kind: str, shape: tuple[int, ...], where: str) -> Stats:
    if kind == "IDENTITY":
        return Stats(np.zeros(shape), np.ones(shape), None, None, None, None, 0)
    needed = ("mean", "std", *ENDS.get(kind, ()))
    if lacking := [name for name in needed if name not in found]:
        raise DatasetError(
            f"{where} has no statistics '{lacking[0]}', which {kind} needs (it has: {', '.join(found) or 'none'}); "
            "give openpi's with --norm-stats"
        )
    arrays = {name: np.asarray(found[name], np.float64) for name in FIELDS if name in found}
    if kind in ENDS:
        low, high = ENDS[kind]
        # LeRobot's makes -1 of what does not move.
        arrays[high] = np.where(arrays[high] == arrays[low], arrays[low] + 2, arrays[high])
    count = int(np.max(found["count"])) if "count" in found else 0
    return Stats(*(arrays.get(name) for name in FIELDS), count=count)  # pyright: ignore[reportArgumentType] - needed


def _read(file: Path) -> tuple[dict[str, str], dict[str, dict[str, np.ndarray]]]:
    """Maps by kind of feature, and statistics by feature and field."""
    if not file.is_file():
        raise DatasetError(f"{file}: not there; the statistics come from there, or from openpi's with --norm-stats")
    try:
        steps = json.loads(file.read_bytes())["steps"]
        (step,) = (each for each in steps if each.get("registry_name") == "normalizer_processor")
        maps = {str(kind): str(mode) for kind, mode in step["config"]["norm_map"].items()}
        state = step.get("state_file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(f"{file}: not LeRobot's, or without one normalizer_processor ({error})") from error
    found: dict[str, dict[str, np.ndarray]] = {}
    if state is not None:
        path = file.parent / Path(str(state)).name
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DatasetError(f"{path}: not readable ({error}); copy the folder again") from error
        for name, value in tensors.items():
            feature, _, field = name.rpartition(".")
            found.setdefault(feature, {})[field] = value
    return maps, found
