"""Folders of LeRobot's pi0 and pi0.5: a bundle written as one, and one made a bundle.

    config.json         sizes, features and horizons (lerobot_config.py)
    model.safetensors   weights by LeRobot's names, float32
    policy_*            processors with the statistics (lerobot_processors.py)
    tokenizer.model     PaliGemma's; ours to add, since LeRobot fetches its own

Weights go there and back bit for bit. A bundle has float32 weights also where it computes in bf16, and so has the
folder; bf16 ones of LeRobot's become the same numbers in float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlsvc.core.contract import Contract
from rlsvc.core.errors import BundleError, UserError
from rlsvc.data.norm_stats import read_norm_stats, to_normalizer
from rlsvc.data.text_tokenizer import PaliGemmaTokenizer
from rlsvc.nn.params import flatten_params, unflatten_params
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.policies.pi0_weights import EMBEDDING, TIED, UNUSED, from_lerobot, to_lerobot
from rlsvc.policies.prompt import TOKENIZER_FILE
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.store.bundle import Bundle, write_bundle
from rlsvc.store.folders import new_folder, refuse_in_the_way
from rlsvc.store.lerobot_config import DTYPES, EMPTY, described_by, describes, read_config
from rlsvc.store.lerobot_processors import read_normalizer, write_processors

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def to_lerobot_folder(bundle: Bundle, path: Path, *, group: str | None = None, processors: bool = True) -> list[str]:
    """Write a bundle of pi0 or pi0.5 as a folder that LeRobot's PI0Policy or PI05Policy loads.

    Args:
        bundle: verified.
        path: of the folder, which is not there yet.
        group: whose statistics, for a bundle that has several.
        processors: False writes configuration and weights alone, for a bundle whose robot LeRobot cannot follow.

    Returns:
        What LeRobot has to be told otherwise.

    Raises:
        BundleError: another policy, or one that LeRobot has no place for; names the field. Or an unknown group.
        UserError: `path` is there already.
    """
    name, robot = bundle.policy.get("name"), bundle.robot
    if name != "pi0":
        raise BundleError(f"{bundle.path}: a bundle of '{name}'; pi0 and pi0.5 (policy.name=pi0) can be converted")
    if processors and robot is not None and (robot.maps or robot.delta is not None):
        raise BundleError(
            f"{bundle.path}: robot '{robot.name}' has its numbers changed ({'maps' if robot.maps else 'delta'}), which "
            "LeRobot's processors do not do; write configuration and weights alone with --weights-only, and do it there"
        )
    spec = Pi0Spec.model_validate(bundle.policy)
    config = described_by(bundle, spec)
    index = bundle.normalizer.group_index(group)
    tensors = to_lerobot(bundle.params, spec)
    # LeRobot asks for the embedding a second time, as the output that it is tied to, and for one of the expert's; it
    # reads neither.
    tensors[f"model.{TIED[0]}"] = tensors[f"model.{EMBEDDING}"]
    tensors[f"model.{UNUSED[0]}"] = np.zeros((spec.tokenizer.vocab_size, spec.expert.width), np.float32)
    with new_folder(path) as folder:
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        shutil.copyfile(bundle.path / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        if processors:
            write_processors(folder, spec.variant, config, bundle.normalizer, index)
    told = []
    if spec.prompt is not None:
        told.append(f"policy.prompt: give LeRobot the task '{spec.prompt}'")
    if spec.real_time is not None:
        told.append("policy.real_time: LeRobot's is rtc_config, set when it acts")
    return told


def from_lerobot_folder(
    folder: Path, path: Path, *, rate_hz: float, tokenizer: Path | None = None, norm_stats: Path | None = None
) -> list[str]:
    """Make a bundle of a folder of LeRobot's pi0 or pi05.

    Args:
        folder: with config.json and model.safetensors.
        path: of the bundle, which is not there yet.
        rate_hz: control rate, which the folder does not know.
        tokenizer: PaliGemma's, as a file; None takes tokenizer.model in the folder.
        norm_stats: openpi's statistics, z-scores for pi0 and quantiles for pi0.5; None takes the preprocessor's.

    Returns:
        What was left out.

    Raises:
        UserError: a file that is not there, a field or weight that does not fit, or `path` is there already.
        DatasetError: statistics that are missing or of another robot.
        BundleError: likewise.
    """
    refuse_in_the_way(path)
    config = read_config(folder / CONFIG)
    source = tokenizer or folder / TOKENIZER_FILE
    text = PaliGemmaTokenizer.load(source)
    spec, contract = describes(config, folder / CONFIG, rate_hz, source)
    if norm_stats is None:
        normalizer = read_normalizer(folder, contract)
    else:
        mode = "mean_std" if spec.variant == "pi0" else "openpi_quantile"
        normalizer = to_normalizer(read_norm_stats(norm_stats), contract, mode)
    normalizer.check_contract(contract)
    write_bundle(
        path,
        policy=spec.model_dump(mode="json"),
        contract=contract,
        normalizer=normalizer,
        params=_read_weights(folder / WEIGHTS, spec, contract),
        precision={theirs: ours for ours, theirs in DTYPES.items()}[config["dtype"]],
        run={"converted_from": folder.name},
        files={TOKENIZER_FILE: text.model},
    )
    return [
        f"{name}: an empty camera, which no policy here needs" for name in config["input_features"] if EMPTY in name
    ]


def _read_weights(file: Path, spec: Pi0Spec, contract: Contract) -> dict[str, np.ndarray]:
    """All weights by our names, float32."""
    import jax

    try:
        theirs = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: not readable ({error}); copy the folder again") from error
    try:
        taken = from_lerobot(theirs, spec)
        like = jax.eval_shape(Pi0Policy(spec, contract).init, jax.random.key(0))
        params = flatten_params(unflatten_params(taken.weights, like))
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    if unknown := sorted(set(theirs) - taken.used):
        raise UserError(
            f"{file}: '{unknown[0]}'"
            + (f" and {len(unknown) - 1} more are no weights" if len(unknown) > 1 else " is no weight")
            + f" of {spec.variant}"
        )
    return params
