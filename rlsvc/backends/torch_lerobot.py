"""LeRobot's Torch policies as they are: configuration, weights and processors, made for a contract or read from disk.

A folder that LeRobot's `save_pretrained` writes, and so a bundle of such a policy, has

    config.json                  the policy's configuration, with its `type`
    model.safetensors            weights by LeRobot's names
    policy_preprocessor.json     steps from an observation to what the model sees
    policy_postprocessor.json    steps from what it says to an action
    policy_*.safetensors         the statistics of these steps

Facts of LeRobot 0.6: a processor's steps may be named by the path of a class, which runs code of whoever wrote the
file; here they have to be among LeRobot's registered ones (or a plug-in's). `pretrained_backbone_weights` is fetched
whenever a policy is built, even if its weights are loaded next; so what is written says null there.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus
import lerobot.policies as lerobot_policies
import numpy as np
import torch
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.policies.factory import get_policy_class
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.import_utils import register_third_party_plugins
from safetensors.torch import load_file, save

from rlsvc.backends.torch_processors import (
    POSTPROCESSOR,
    PREPROCESSOR,
    TOKENIZER,
    Processors,
    import_steps,
    load_processors,
    read_normalizer,
    read_steps,
)
from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, SpecError, UserError, nearest, unknown_name
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec
from rlsvc.store.lerobot_config import read_fields

assert lerobot_policies  # what it imports registers the configurations
CONFIG, WEIGHTS = "config.json", "model.safetensors"
FILES = (CONFIG, f"{PREPROCESSOR}.json", f"{POSTPROCESSOR}.json")
"""Beside the weights; without these no bundle of such a policy is whole."""
ENV_STATE, TASK = "observation.environment_state", "task"
NEVER_SAVED = {"device": None, "push_to_hub": False, "pretrained_path": None, "pretrained_revision": None}
"""Fields of config.json that say nothing about the policy; a null device is whatever there is."""


def config_class(kind: str) -> type[PreTrainedConfig]:
    """LeRobot's configuration class of a policy, of an installed plug-in too.

    Raises:
        NotFoundError: an unknown one; lists those that there are.
    """
    if kind not in PreTrainedConfig.get_known_choices():
        register_third_party_plugins()
    if kind not in (known := PreTrainedConfig.get_known_choices()):
        raise unknown_name("policy of LeRobot", kind, known)
    return PreTrainedConfig.get_choice_class(kind)


def make_config(
    spec: LeRobotPolicySpec, contract: Contract | None, *, device: str = "cpu", precision: str = "fp32"
) -> PreTrainedConfig:
    """LeRobot's configuration for a specification.

    Args:
        spec: of the policy.
        contract: what it sees and does; None checks the specification alone.
        device: cpu or cuda.
        precision: bf16 sets `use_amp`, by which LeRobot acts in mixed precision too.

    Raises:
        SpecError: a field that the configuration lacks, or a value that it refuses; names the field.
        UserError: `pretrained` cannot be read.
    """
    given: dict[str, Any] = {}
    if spec.pretrained is not None:
        given = read_fields(Path(spec.pretrained) / CONFIG)
        if given.pop("type") != spec.type:
            raise SpecError(f"policy.pretrained: {spec.pretrained} has another type than policy.type = {spec.type}")
    made = config_class(spec.type)
    known = {field.name for field in dataclasses.fields(made)}
    for name in spec.config:
        if name not in known:
            guess = nearest(name, known)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise SpecError(f"policy.config: LeRobot's {made.__name__} has no field '{name}'{hint}")
    given |= {**spec.config, **NEVER_SAVED, "device": device, "use_amp": precision == "bf16"}
    if "n_obs_steps" in known:
        given["n_obs_steps"] = spec.n_obs_steps
    if "n_action_steps" in known:
        given["n_action_steps"] = spec.n_action_steps
    if contract is not None:
        inputs, outputs = features(contract)
        given |= {"input_features": inputs, "output_features": outputs}
    config = decode_config(spec.type, given, "policy.config")
    for name, got, expected in (
        ("n_obs_steps", spec.n_obs_steps, config.n_obs_steps),
        ("n_action_steps", spec.n_action_steps, executed(config)),
    ):
        if got != expected:
            raise SpecError(f"policy.{name}: got {got}, LeRobot's {spec.type} has {expected}")
    horizon(config)
    if contract is not None:
        try:
            config.validate_features()
        except (ValueError, NotImplementedError) as error:
            raise ContractError(
                f"policy.type={spec.type}: {error} It sees: {', '.join(contract.observation)}"
            ) from error
    return config


def decode_config(kind: str, fields: Mapping[str, Any], where: str) -> PreTrainedConfig:
    """A configuration of plain values.

    Raises:
        SpecError: unknown fields, or values that LeRobot refuses.
    """
    try:
        return draccus.decode(config_class(kind), dict(fields))
    except (draccus.ParsingError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # draccus wraps what a configuration says
            cause = cause.__cause__
        raise SpecError(f"{where}: LeRobot's {kind} refuses it: {' '.join(str(cause).split())}") from error


def executed(config: PreTrainedConfig) -> int:
    """Actions of a chunk that LeRobot executes before it asks again."""
    return int(getattr(config, "n_action_steps", None) or getattr(config, "action_chunk_size", 1))


def horizon(config: PreTrainedConfig) -> int:
    """H: actions of a training window, from the one at the oldest observation on.

    Raises:
        SpecError: a policy that learns from something else than windows of observations and actions.
    """
    first = 1 - config.n_obs_steps
    seen, done = config.observation_delta_indices, config.action_delta_indices
    fits = (
        (seen is None or list(seen) == list(range(first, 1)))
        and done is not None
        and list(done) == list(range(first, first + len(done)))
        and config.reward_delta_indices is None
    )
    if not fits:
        raise SpecError(
            f"policy.type: LeRobot's {config.type} learns from observations {seen}, actions {done} and rewards "
            f"{config.reward_delta_indices} around a step; torch_imitation has windows of observations up to it and "
            "actions from the oldest on"
        )
    return 0 if done is None else len(done)


def features(contract: Contract) -> tuple[dict[str, Any], dict[str, Any]]:
    """LeRobot's input and output features of a contract; a text is none of them."""
    inputs: dict[str, Any] = {}
    for name, feature in contract.observation.items():
        if feature.is_image:
            height, width, channels = feature.shape
            inputs[name] = {"type": "VISUAL", "shape": [channels, height, width]}
        elif feature.dtype != TEXT:
            inputs[name] = {"type": "ENV" if name == ENV_STATE else "STATE", "shape": list(feature.shape)}
    return inputs, {"action": {"type": "ACTION", "shape": list(contract.action.shape)}}


def described(config: PreTrainedConfig, steps: list[dict[str, Any]], rate_hz: float) -> Contract:
    """The contract that a configuration and its preprocessor's steps mean.

    Args:
        config: with features.
        steps: of the preprocessor's file.
        rate_hz: control rate, which a folder does not say.

    Raises:
        UserError: features that have no place here.
    """
    renamed = {new: old for step in steps for old, new in step.get("config", {}).get("rename_map", {}).items()}
    observation: dict[str, Feature] = {}
    for name, feature in (config.input_features or {}).items():
        if feature.type is FeatureType.VISUAL:
            channels, height, width = feature.shape
            made = Feature((height, width, channels), "uint8")
        elif feature.type in (FeatureType.STATE, FeatureType.ENV):
            made = Feature(tuple(feature.shape), "float32")
        else:
            raise UserError(f"config.json: input feature '{name}' is {feature.type.value}, which has no place here")
        observation[renamed.get(name, name)] = made
    if any(step.get("registry_name") == "tokenizer_processor" for step in steps):
        observation[TASK] = Feature((), TEXT)
    if config.action_feature is None:
        raise UserError("config.json: output_features has no 'action'")
    action = Feature(tuple(config.action_feature.shape), "float32")
    return Contract(observation, action, rate_hz, config.n_obs_steps, executed(config))


def build(config: PreTrainedConfig, params: Mapping[str, np.ndarray] | None = None) -> PreTrainedPolicy:
    """The policy on the configuration's device, with these weights or fresh ones.

    Raises:
        BundleError: weights that do not fit; names the first.
        UserError: a package or weights that LeRobot wants are not there.
    """
    if params is not None and hasattr(config, "pretrained_backbone_weights"):
        config = dataclasses.replace(config, pretrained_backbone_weights=None)
    try:
        policy = get_policy_class(config.type)(config)
    except ImportError as error:
        raise UserError(f"policy.type={config.type}: {error}") from error
    except OSError as error:
        raise UserError(
            f"policy.type={config.type}: LeRobot fetches weights or a tokenizer that are not there ({error}); name a "
            "local folder, or set policy.config.pretrained_backbone_weights to null"
        ) from error
    if params is not None:
        load_weights(policy, params)
    return policy.to(config.device)


def load_weights(policy: PreTrainedPolicy, params: Mapping[str, np.ndarray]) -> None:
    """Give a policy these weights.

    Raises:
        BundleError: a weight that is missing, unknown or of another shape; names it.
    """
    own = policy.state_dict()
    tied = _tied(own)
    for name, value in own.items():
        source = params.get(name)
        if source is None and not any(other in params for other in tied.get(name, ())):
            raise BundleError(f"weights: '{name}' is missing, which LeRobot's {policy.name} needs")
        if source is not None and tuple(source.shape) != tuple(value.shape):
            raise BundleError(f"weights: '{name}' has shape {source.shape}, expected {tuple(value.shape)}")
    if unknown := sorted(set(params) - set(own)):
        raise BundleError(f"weights: '{unknown[0]}' is no weight of LeRobot's {policy.name}")
    with torch.no_grad():
        for name, source in params.items():
            own[name].copy_(torch.from_numpy(np.array(source, order="C")))


def weights_of(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Weights by name on the host: of those that share memory the first alone, bf16 as the same numbers in float32."""
    tied, out = _tied(state), {}
    for name, value in state.items():
        if any(other in out for other in tied.get(name, ())):
            continue
        narrow = value.dtype in (torch.bfloat16, torch.float16)
        out[name] = (value.float() if narrow else value).detach().cpu().contiguous().numpy().copy()
    return out


def _tied(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """By name the others that are the same memory."""
    where: dict[tuple[int, Any], list[str]] = {}
    for name, value in state.items():
        if value.numel():
            where.setdefault((value.data_ptr(), value.shape), []).append(name)
    return {name: tuple(n for n in names if n != name) for names in where.values() for name in names if len(names) > 1}


def folder_files(config: PreTrainedConfig, processors: Processors) -> dict[str, bytes]:
    """What lies beside the weights, by file name."""
    saved = dataclasses.replace(config, push_to_hub=False)
    for name, value in NEVER_SAVED.items():
        setattr(saved, name, value)
    if hasattr(saved, "pretrained_backbone_weights"):
        saved.pretrained_backbone_weights = None  # pyright: ignore[reportAttributeAccessIssue]
    files = {CONFIG: json.dumps(draccus.encode(saved, PreTrainedConfig), indent=4).encode()}
    with tempfile.TemporaryDirectory() as folder:
        for processor, name in zip(processors, (PREPROCESSOR, POSTPROCESSOR), strict=True):
            processor.save_pretrained(folder, config_filename=f"{name}.json")
        for file in sorted(Path(folder).iterdir()):
            files[file.name] = file.read_bytes()
    # A GPU's name means nothing elsewhere.
    before = json.loads(files[f"{PREPROCESSOR}.json"])
    for step in before["steps"]:
        if step.get("registry_name") == "device_processor":
            step["config"]["device"] = "cpu"
    files[f"{PREPROCESSOR}.json"] = json.dumps(before, indent=2).encode()
    return files


def read_weights(file: Path) -> dict[str, np.ndarray]:
    """Weights of a folder by name, bf16 as the same numbers in float32.

    Raises:
        UserError: not there, or not safetensors.
    """
    try:
        return weights_of(load_file(file))
    except Exception as error:  # safetensors raises its own kind, and OSError
        raise UserError(f"{file}: not readable ({error}); copy the folder again") from error


def from_folder(folder: Path, rate_hz: float) -> dict[str, Any]:
    """What `rlsvc.store.bundle.write_bundle` takes for a folder that LeRobot's save_pretrained wrote.

    Args:
        folder: with config.json, model.safetensors and both processors.
        rate_hz: control rate, which the folder does not know.

    Raises:
        UserError: a file that is missing, damaged or of an unknown policy, or weights that do not fit; names it.
    """
    fields = read_fields(folder / CONFIG)
    kind = fields.pop("type")
    fields |= {**NEVER_SAVED, "device": "cpu"}
    if fields.get("use_peft"):
        raise UserError(f"{folder / CONFIG}: use_peft is set; merge the adapter into the weights first")
    config = decode_config(kind, fields, str(folder / CONFIG))
    import_steps(config)
    contract = described(config, read_steps(folder), rate_hz)
    params = read_weights(folder / WEIGHTS)
    policy = build(config, params)
    processors = load_processors(config, folder)
    files = folder_files(config, processors)
    files |= {name: (folder / name).read_bytes() for name in TOKENIZER if (folder / name).is_file()}
    spec = LeRobotPolicySpec(type=kind, n_obs_steps=config.n_obs_steps, n_action_steps=executed(config))
    return {
        "policy": spec.model_dump(mode="json"),
        "contract": contract,
        "normalizer": read_normalizer(config, contract, processors[0]),
        "params": weights_of(policy.state_dict()),
        "precision": "bf16" if config.use_amp else "fp32",
        "run": {"converted_from": folder.name},
        "files": files,
    }


def bundle_config(folder: Path, device: str) -> PreTrainedConfig:
    """The configuration in a bundle, for a device.

    Raises:
        BundleError: it cannot be read, or is none of LeRobot's.
    """
    try:
        fields = read_fields(folder / CONFIG)
        return decode_config(fields.pop("type"), {**fields, "device": device}, str(folder / CONFIG))
    except UserError as error:
        raise BundleError(str(error)) from error


def to_bytes(state: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors by name as safetensors."""
    return save({name: value.detach().cpu().contiguous() for name, value in state.items()})
