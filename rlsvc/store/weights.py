"""Trained weights from elsewhere: bundles, openpi's JAX checkpoints, PaliGemma's .npz, LeRobot's .safetensors.

Nothing is loaded in part unseen: what is missing, not known or of another shape is an error that names it, unless the
specification says that it may be so; and the report says what was done.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rlsvc.core.errors import UserError
from rlsvc.nn.params import leaf_names
from rlsvc.policies import pi0_weights
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.value_function import ValueVlmSpec
from rlsvc.spec.weights import WeightsSpec
from rlsvc.store.bundle import META, read_bundle


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


def load_weights(spec: WeightsSpec, policy: Any, like: Any) -> tuple[dict[str, np.ndarray], Report]:
    """Weights by our names, float32.

    Args:
        spec: where from, and which.
        policy: the specification of the policy that gets them.
        like: a pytree of the policy's shapes.

    Raises:
        UserError: no such file, a format that is not known, or weights that are missing, unexpected or of another
            width; names the first, and how many.
    """
    path = Path(spec.path)
    kind, theirs = _read(path)
    if kind == "bundle":
        weights, used = theirs, set(theirs)
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
        return "LeRobot", load_file(path)
    if (path / "model.safetensors").is_file():
        return "LeRobot", load_file(path / "model.safetensors")
    if path.suffix == ".npz":
        return "PaliGemma", _read_npz(path)
    for folder in (path / "params", path):
        if any((folder / name).exists() for name in ("_METADATA", "manifest.ocdbt", "checkpoint")):
            return "openpi", _read_orbax(folder)
    raise UserError(
        f"algo.weights.path: {path}: expected a bundle, an openpi checkpoint (a folder with `params`), a .npz of "
        "PaliGemma or a .safetensors of LeRobot"
    )


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        names = {name: name.removeprefix("params/") for name in file.files}
        return {f"PaliGemma/{name}": file[key] for key, name in names.items()}


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.resolve()).item_metadata
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
