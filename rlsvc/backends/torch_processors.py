"""LeRobot's processors of a policy and the statistics in them: made for a training run, or read from a folder.

    policy_preprocessor.json     steps from an observation to what the model sees
    policy_postprocessor.json    steps from what it says to an action

A step may be named by the path of a class, which runs code of whoever wrote the file; here they have to be among
LeRobot's registered ones (or a plug-in's).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.processor.pipeline import ProcessorStepRegistry
from lerobot.utils.constants import IMAGENET_STATS

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import BundleError, SpecError, UserError
from rlsvc.data.normalize import FIELDS, Normalizer, Stats

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor", "policy_postprocessor"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json")
"""A tokenizer's files, which are kept where a folder has them; else its processor fetches them by name."""
MODES = {"mean_std": "MEAN_STD", "min_max": "MIN_MAX", "quantile": "QUANTILES", "identity": "IDENTITY"}
"""Our modes, and LeRobot's of the same meaning."""

Processors = tuple[Any, Any]
"""LeRobot's pipelines before and after a policy."""


def lerobot_stats(normalizer: Normalizer, contract: Contract) -> dict[str, dict[str, torch.Tensor]]:
    """Statistics as LeRobot's datasets have them, float32; of images ImageNet's, as LeRobot trains with."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, feature in {**contract.observation, "action": contract.action}.items():
        if feature.is_image:
            ends = {"min": torch.zeros(feature.shape[-1], 1, 1), "max": torch.ones(feature.shape[-1], 1, 1)}
            known = (
                {key: torch.tensor(value) for key, value in IMAGENET_STATS.items()} if feature.shape[-1] == 3 else {}
            )
            found[name] = {**known, **ends}
        elif feature.dtype != TEXT:
            (stats,) = normalizer.stats[name]
            arrays = {key: getattr(stats, key) for key in FIELDS}
            found[name] = {key: torch.tensor(x, dtype=torch.float32) for key, x in arrays.items() if x is not None}
    return found


def norm_mode(config: PreTrainedConfig, kind: FeatureType) -> str:
    """LeRobot's name of how features of a kind are normalised."""
    mapping: Mapping[str, NormalizationMode] = getattr(config, "normalization_mapping", {})
    return mapping.get(kind.value, NormalizationMode.IDENTITY).value


def with_modes(normalizer: Normalizer, config: PreTrainedConfig) -> Normalizer:
    """The same statistics with the modes that LeRobot's processors normalise by, for what reads a bundle.

    Raises:
        SpecError: a mode whose statistics are not computed here.
    """
    ours = {theirs: mode for mode, theirs in MODES.items()}
    modes = dict(normalizer.modes)
    for name, feature in {**(config.input_features or {}), **(config.output_features or {})}.items():
        if modes.get(name, "image") == "image":
            continue
        mode = norm_mode(config, feature.type)
        if mode not in ours:
            raise SpecError(
                f"policy.config.normalization_mapping: {feature.type.value} is {mode}; statistics are computed for "
                f"{', '.join(ours)}"
            )
        modes[name] = ours[mode]
    return Normalizer(normalizer.groups, modes, normalizer.stats)


def make_processors(config: PreTrainedConfig, stats: Mapping[str, Mapping[str, torch.Tensor]]) -> Processors:
    """Fresh processors of a policy.

    Raises:
        UserError: a tokenizer that is not there.
    """
    try:
        return make_pre_post_processors(config, dataset_stats={name: dict(x) for name, x in stats.items()})
    except (OSError, ImportError) as error:
        raise UserError(f"policy.type={config.type}: its processors need what is not there: {error}") from error


def read_steps(folder: Path, name: str = PREPROCESSOR) -> list[dict[str, Any]]:
    """The steps of a processor's file, all of them registered ones.

    Raises:
        BundleError: no such file, not LeRobot's, or a step that is named by the path of a class.
    """
    file = folder / f"{name}.json"
    try:
        steps = json.loads(file.read_bytes())["steps"]
        named = [(step.get("registry_name"), step.get("class"), step.get("config", {})) for step in steps]
    except OSError as error:
        raise BundleError(f"{file}: not readable ({error.strerror}); LeRobot 0.4 and later write it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{file}: not LeRobot's ({error})") from error
    known = ProcessorStepRegistry.list()
    for registered, path, fields in named:
        if registered is None or registered not in known:
            raise BundleError(
                f"{file}: step {str(registered or path)[:80]!r} is none of LeRobot's registered ones, nor of an "
                f"installed plug-in's; there are: {', '.join(sorted(known))}"
            )
        if not isinstance(fields, dict):
            raise BundleError(f"{file}: step '{registered}' has no map of fields")
    return steps


def load_processors(config: PreTrainedConfig, folder: Path) -> Processors:
    """The processors in a folder, on the configuration's device.

    Raises:
        BundleError: a file that is missing or not LeRobot's, or a step that is not known.
    """
    device = {"device_processor": {"device": config.device}}
    overrides = {}
    for name in (PREPROCESSOR, POSTPROCESSOR):
        import_steps(config)
        found = {step["registry_name"] for step in read_steps(folder, name)}
        overrides[name] = device if name == PREPROCESSOR and "device_processor" in found else {}
        if "tokenizer_processor" in found and (folder / TOKENIZER[0]).is_file():
            overrides[name] |= {"tokenizer_processor": {"tokenizer_name": str(folder)}}
    try:
        return make_pre_post_processors(
            config,
            pretrained_path=str(folder),
            preprocessor_overrides=overrides[PREPROCESSOR],
            postprocessor_overrides=overrides[POSTPROCESSOR],
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise BundleError(f"{folder}: its processors cannot be made: {error}") from error


def import_steps(config: PreTrainedConfig) -> None:
    """A policy's own steps are registered when its module is imported."""
    module = type(config).__module__.replace("configuration_", "processor_")
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"policy.type={config.type}: {error}") from error


def read_normalizer(config: PreTrainedConfig, contract: Contract, preprocessor: Any) -> Normalizer:
    """What the preprocessor's statistics say of the training data, with one group, "default".

    The processors do the normalising; this is for what looks at a bundle from outside. Features whose statistics are
    not there, or not as wide, take the identity.
    """
    found = {key: value for step in preprocessor.steps for key, value in (getattr(step, "stats", None) or {}).items()}
    modes, stats = {}, {}
    for name, feature in {**contract.observation, "action": contract.action}.items():
        if feature.is_image:
            modes[name] = "image"
        elif feature.dtype != TEXT:
            arrays = {
                key: np.asarray(torch.as_tensor(found[name][key]).cpu(), np.float64)
                for key in FIELDS
                if key in found.get(name, {})
            }
            fits = {"mean", "std"} <= set(arrays) and all(x.shape == feature.shape for x in arrays.values())
            zeros = np.zeros(feature.shape)
            if not fits:
                modes[name], stats[name] = "identity", (Stats(zeros, zeros + 1, None, None, None, None, 0),)
                continue
            made = Stats(*(arrays.get(key) for key in FIELDS), count=0)  # pyright: ignore[reportArgumentType]
            kind = config.input_features.get(name) if config.input_features else None
            feature_type = FeatureType.ACTION if name == "action" else kind.type if kind else FeatureType.STATE
            mode = norm_mode(config, feature_type)
            ours = {theirs: mode for mode, theirs in MODES.items()}.get(mode, "mean_std")
            lacks = (ours == "min_max" and made.min is None) or (ours == "quantile" and made.q01 is None)
            modes[name], stats[name] = "mean_std" if lacks else ours, (made,)
    return Normalizer(("default",), modes, stats)
