"""Trained weights from elsewhere: bundles, openpi's JAX checkpoints, PaliGemma's .npz, LeRobot's .safetensors.

Nothing is loaded in part unseen: what is missing, not known or of another shape is an error that names it, unless the
specification says that it may be so; and the report says what was done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.nn.params import leaf_names
from rlsvc.policies import pi0_weights
from rlsvc.policies.vision_language import cameras
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.value_function import ValueVlmSpec
from rlsvc.spec.weights import WeightsSpec
from rlsvc.store.bundle import META, read_bundle, read_contract


@dataclass(frozen=True)
class Report:
    """What was loaded.

    Attributes:
        source: the file or folder, and what it was taken for.
        loaded: names of our weights that came from there.
        fresh: names of our weights that did not.
        ignored: names there that were not used.
    """

    source: str
    loaded: tuple[str, ...]
    fresh: tuple[str, ...]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        """One line."""
        return f"{self.source}: {len(self.loaded)} weights loaded, {len(self.fresh)} fresh, {len(self.ignored)} ignored"


def load_weights(
    spec: WeightsSpec, policy: Any, like: Any, contract: Contract | None = None
) -> tuple[dict[str, np.ndarray], Report]:
    """Weights by our names, float32.

    Args:
        spec: where from, and which.
        policy: the specification of the policy that gets them.
        like: a pytree of the policy's shapes.
        contract: of the policy; with it a bundle of the PI0 family must see as many cameras.

    Raises:
        UserError: no such file, a format that is not known, or weights that are missing, unexpected or of another
            width; names the first, and how many. Or a bundle of another number of cameras.
    """
    path = Path(spec.path)
    kind, theirs = _read(path)
    if kind == "bundle":
        weights, used = theirs, set(theirs)
        if contract is not None and isinstance(policy, Pi0Spec | Pi0FastSpec):
            _check_cameras(spec, cameras(policy, contract))
    elif not isinstance(policy, Pi0Spec | Pi0FastSpec | ValueVlmSpec):
        raise UserError(
            f"algo.weights: {path} is {kind}, which is for pi0, pi0_fast and value_vlm; the policy is {policy.name}"
        )
    else:
        taken = (pi0_weights.from_lerobot if kind == "LeRobot" else pi0_weights.from_openpi)(theirs, policy)
        weights, used = taken.weights, taken.used
    shapes = dict(zip(leaf_names(like), (leaf.shape for leaf in _leaves(like)), strict=True))
    wanted = [name for name in shapes if _matches(name, spec.only)]
    if not wanted:
        raise UserError(f"algo.weights.only: {list(spec.only)} matches no weight of the policy")
    lacking = [name for name in wanted if name not in weights]
    _refuse(path, kind, "lacks", lacking, spec.may_lack, "may_lack", shapes)
    known = {name for name in weights if name in shapes}
    unused = sorted(set(theirs) - used if kind != "bundle" else set(weights) - known)
    _refuse(path, kind, "has weights that the policy does not know,", unused, spec.may_ignore, "may_ignore", shapes)
    loaded = {}
    for name in wanted:
        if name not in weights:
            continue
        value = weights[name]
        if value.shape != shapes[name]:
            raise UserError(
                f"algo.weights: {path} ({kind}): '{name}' has shape {value.shape}, the policy {shapes[name]}; choose "
                "the policy's sizes as those of the checkpoint, or leave the weight out with algo.weights.only"
            )
        loaded[name] = np.asarray(value, np.float32)
    fresh = tuple(name for name in shapes if name not in loaded)
    return loaded, Report(f"{path} ({kind})", tuple(loaded), fresh, tuple(unused))


def _check_cameras(spec: WeightsSpec, ours: tuple[str, ...]) -> None:
    """Weights fit any number of cameras, but have learnt to look at those of their bundle."""
    contract = read_contract(spec.path)
    theirs = tuple(key for key, feature in contract.observation.items() if feature.is_image)
    if len(ours) == len(theirs):
        return
    told = {name: "may_ignore" for name in theirs if name not in ours and not _matches(name, spec.may_ignore)}
    told |= {name: "may_lack" for name in ours if name not in theirs and not _matches(name, spec.may_lack)}
    if told:
        name, field = next(iter(told.items()))
        raise UserError(
            f"algo.weights: {spec.path} (bundle) sees {len(theirs)} cameras ({', '.join(theirs)}), the run {len(ours)} "
            f"({', '.join(ours)}). If that is meant, name '{name}' in algo.weights.{field}."
        )


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _refuse(
    path: Path, kind: str, what: str, names: list[str], allowed: tuple[str, ...], field: str, shapes: Mapping[str, Any]
) -> None:
    bad = [name for name in names if not _matches(name, allowed)]
    if bad:
        raise UserError(
            f"algo.weights: {path} ({kind}) {what} '{bad[0]}'"
            + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
            + f"; the policy has {len(shapes)} weights. If that is meant, name them in algo.weights.{field}."
        )


def _read(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """What kind of weights these are, and the weights by their own names."""
    if not path.exists():
        raise UserError(f"algo.weights.path: {path}: no such file or folder")
    if (path / META).is_file():
        return "bundle", read_bundle(path).params
    if path.suffix == ".safetensors":
        return "LeRobot", _opened(load_file, path)
    if (path / "model.safetensors").is_file():
        return "LeRobot", _opened(load_file, path / "model.safetensors")
    if path.suffix == ".npz":
        return "PaliGemma", _opened(_read_npz, path)
    for folder in (path / "params", path):
        if any((folder / name).exists() for name in ("_METADATA", "manifest.ocdbt", "checkpoint")):
            return "openpi", _opened(_read_orbax, folder)
    raise UserError(
        f"algo.weights.path: {path}: expected a bundle, an openpi checkpoint (a folder with `params`), a .npz of "
        "PaliGemma or a .safetensors of LeRobot"
    )


def _opened(read: Callable[[Path], dict[str, np.ndarray]], path: Path) -> dict[str, np.ndarray]:
    try:
        return read(path)
    except (OSError, ValueError, KeyError, BadZipFile, SafetensorError) as error:
        raise UserError(f"algo.weights.path: {path}: not readable ({error}); copy it again") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        names = {name: name.removeprefix("params/") for name in file.files}
        return {f"PaliGemma/{name}": file[key] for key, name in names.items()}


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.resolve()).item_metadata
        if metadata is None:
            raise ValueError("no orbax checkpoint, or a part of one")
        tree = metadata.tree if hasattr(metadata, "tree") else dict(metadata)
        restore = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = checkpointer.restore(folder.resolve(), args=ocp.args.PyTreeRestore(item=tree, restore_args=restore))
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        parts = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
        if parts[0] == "params":
            parts = parts[1:]
        if parts[-1] == "value":
            parts = parts[:-1]
        flat["/".join(parts)] = np.asarray(leaf)
    return flat
