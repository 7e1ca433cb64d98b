"""config.json of LeRobot's pi0 and pi0.5 (PI0Config, PI05Config), written for a bundle and read as what describes one.

What it has no place for is refused by name where the policy would act differently without it, and told where it would
not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import BundleError, UserError
from rlsvc.policies.pi0 import action_dim
from rlsvc.policies.vision_language import CAMERA_MASK, cameras, vectors
from rlsvc.spec.pi0 import GEMMA_SIZES, SIGLIP_SIZES, Pi0Spec
from rlsvc.spec.tokenizer import PaliGemmaTokenizerSpec
from rlsvc.store.bundle import Bundle
from rlsvc.store.lerobot_processors import norm_map

STATE, EMPTY = "observation.state", "observation.images.empty_camera_"
GEMMA = {name: GEMMA_SIZES[name] for name in ("gemma_2b", "gemma_300m")}
VISION = {"So400m/14": SIGLIP_SIZES["So400m/14"]}
"""The sizes that LeRobot's pi0 has."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Our precisions, and LeRobot's."""
VARIANTS = {"paligemma_variant": "backbone", "action_expert_variant": "expert"}
"""LeRobot's fields of sizes, and ours."""
ALIKE = {
    "chunk_size": "horizon",
    "n_action_steps": "n_action_steps",
    "num_inference_steps": "sample_steps",
    "image_resolution": "image_size",
}
"""LeRobot's fields, and ours of the same meaning."""
FIXED = {
    "n_obs_steps": 1,
    "min_period": 4e-3,
    "max_period": 4.0,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "use_relative_actions": False,
    "use_peft": False,
}
"""LeRobot's fields that are no choice here."""


def described_by(bundle: Bundle, spec: Pi0Spec) -> dict[str, Any]:
    """The contents of config.json for a bundle.

    Raises:
        BundleError: LeRobot has no place for something; names the field.
    """
    contract, width = bundle.contract, action_dim(spec, bundle.contract)
    _refuse(bundle, spec)
    return {
        "type": spec.variant,
        **FIXED,
        **{theirs: _name(GEMMA, getattr(spec, ours)) for theirs, ours in VARIANTS.items()},
        **{theirs: getattr(spec, ours) for theirs, ours in ALIKE.items()},
        "dtype": DTYPES[bundle.precision],
        "tokenizer_max_length": spec.prompt_tokens,
        "max_state_dim": width,
        "max_action_dim": width,
        "empty_cameras": 0,
        "input_features": {
            **{name: _visual(contract.observation[name]) for name in cameras(spec, contract)},
            STATE: {"type": "STATE", "shape": contract.observation[STATE].shape},
        },
        "output_features": {"action": {"type": "ACTION", "shape": contract.action.shape}},
        "normalization_mapping": norm_map(bundle.normalizer),
    }


def _refuse(bundle: Bundle, spec: Pi0Spec) -> None:
    seen, images = bundle.contract.observation, cameras(spec, bundle.contract)
    state = vectors(bundle.contract)
    masks = [name for name in seen if name not in images and name.removesuffix(CAMERA_MASK) in images]
    sizes = " and ".join(GEMMA)
    refused = (
        (_name(VISION, spec.vision) is None, "policy.vision", f"{spec.vision!r}; LeRobot has {' and '.join(VISION)}"),
        (_name(GEMMA, spec.backbone) is None, "policy.backbone", f"{spec.backbone!r}; LeRobot has {sizes}"),
        (_name(GEMMA, spec.expert) is None, "policy.expert", f"{spec.expert!r}; LeRobot has {sizes}"),
        (len(set(spec.image_size)) > 1, "policy.image_size", f"{list(spec.image_size)}; LeRobot's are square"),
        (spec.tokenizer.name != "paligemma", "policy.tokenizer", f"{spec.tokenizer.name}; LeRobot has PaliGemma's"),
        (
            spec.variant == "pi05" and not spec.tells_state,
            "policy.state_in_prompt",
            "false; LeRobot's pi05 tells the state",
        ),
        (spec.advantage_in_prompt, "policy.advantage_in_prompt", "true; LeRobot's prompts tell no advantage"),
        (state != (STATE,), "contract", f"the state is {', '.join(state) or 'none'}; LeRobot reads {STATE} alone"),
        (bool(masks), "contract", f"{', '.join(masks)}; LeRobot has no masks of cameras"),
    )
    for bad, field, text in refused:
        if bad:
            raise BundleError(f"{bundle.path}: {field}: {text}")


def read_fields(file: Path) -> dict[str, Any]:
    """The plain values of the config.json of any LeRobot policy, `type` among them.

    Raises:
        UserError: no such file, or not one of LeRobot's.
    """
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: not readable ({error.strerror}); expected a folder of LeRobot's") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error}); copy it again") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("type"), str):
        raise UserError(f"{file}: has no 'type'; expected the config.json of a LeRobot policy")
    return fields


def read_config(file: Path) -> dict[str, Any]:
    """config.json of a pi0 or pi0.5, with the fields that are needed here.

    Raises:
        UserError: no such file, another policy's, or a field that is missing or that means another model; names it.
    """
    config = read_fields(file)
    if config["type"] not in ("pi0", "pi05"):
        raise UserError(f"{file}: type is {config['type']!r}, expected pi0 or pi05")
    widths = ("max_state_dim", "max_action_dim")
    needed = (*ALIKE, *VARIANTS, *widths, "dtype", "tokenizer_max_length", "input_features", "output_features")
    if lacking := [name for name in needed if name not in config]:
        raise UserError(f"{file}: has no '{lacking[0]}'; LeRobot 0.4 and later write it")
    for name, value in FIXED.items():
        if config.get(name, value) != value:
            raise UserError(f"{file}: {name} is {config[name]!r}, here it is always {value!r}")
    state, action = (config[name] for name in widths)
    if state != action:
        raise UserError(f"{file}: max_state_dim is {state}, max_action_dim {action}; here both are policy.action_dim")
    choices = {"dtype": DTYPES.values(), **dict.fromkeys(VARIANTS, GEMMA)}
    for name, allowed in choices.items():
        if config[name] not in allowed:
            raise UserError(f"{file}: {name} is {config[name]!r}, expected {' or '.join(allowed)}")
    return config


def describes(config: dict[str, Any], file: Path, rate_hz: float, tokenizer: Path) -> tuple[Pi0Spec, Contract]:
    """The specification and contract that a configuration means; empty cameras are left out.

    Args:
        config: as `read_config` gives it.
        file: where it stood, for messages.
        rate_hz: control rate of the contract.
        tokenizer: file of PaliGemma's.

    Raises:
        UserError: features that pi0 does not read, or values that cannot be; names them.
    """
    try:
        observation = {
            name: _feature(file, name, feature["type"], tuple(int(n) for n in feature["shape"]))
            for name, feature in config["input_features"].items()
            if not name.startswith(EMPTY)
        }
        action = Feature(tuple(int(n) for n in config["output_features"]["action"]["shape"]), "float32")
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: input_features or output_features are not LeRobot's ({error!r})") from error
    if STATE not in observation:
        raise UserError(f"{file}: input_features has no '{STATE}'; write it there, with its width")
    try:
        spec = Pi0Spec(
            variant=config["type"],
            vision=next(iter(VISION.values())),
            cameras=tuple(name for name, feature in observation.items() if feature.is_image),
            tokenizer=PaliGemmaTokenizerSpec(path=str(tokenizer)),
            max_tokens=config["tokenizer_max_length"],
            action_dim=config["max_action_dim"],
            **{ours: GEMMA[config[theirs]] for theirs, ours in VARIANTS.items()},
            **{ours: config[theirs] for theirs, ours in ALIKE.items()},
        )
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(f"{file}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
    return spec, Contract({**observation, "task": Feature((), TEXT)}, action, rate_hz, 1, spec.n_action_steps)


def _name(table: dict[str, Any], size: Any) -> str | None:
    return next((name for name, each in table.items() if each == size), None)


def _visual(feature: Feature) -> dict[str, Any]:
    height, width, channels = feature.shape
    return {"type": "VISUAL", "shape": [channels, height, width]}


def _feature(file: Path, name: str, kind: str, shape: tuple[int, ...]) -> Feature:
    if kind == "VISUAL":
        if len(shape) != 3 or shape[0] != 3:
            raise UserError(f"{file}: image '{name}' has shape {list(shape)}, expected [3, height, width]")
        return Feature((*shape[1:], 3), "uint8")
    if name != STATE:
        raise UserError(f"{file}: input '{name}' ({kind}) is nothing that pi0 reads; leave it out")
    return Feature(shape, "float32")
