"""Weights as a flat table by name, "backbone.blocks.0.conv1.kernel": the names of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlsvc.core.errors import BundleError, nearest


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(
        str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
        for part in path
        if getattr(part, "name", None) != "value"
    )


def leaf_names(tree: Any) -> list[str]:
    """Names of all leaves, in the order of `jax.tree.leaves`."""
    return [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def flatten_params(params: Any) -> dict[str, np.ndarray]:
    """Host copies of every weight by name."""
    return {_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def unflatten_params(flat: Mapping[str, np.ndarray | jax.Array], like: Any) -> Any:
    """A tree like `like` (arrays or shapes) with these weights.

    Raises:
        BundleError: a weight that is missing, unexpected, or of another shape; names it.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    names = [_name(path) for path, _ in leaves]
    if unexpected := sorted(set(flat) - set(names)):
        guess = nearest(unexpected[0], names)
        raise BundleError(
            f"weight '{unexpected[0]}' is not of this policy" + (f" (did you mean '{guess}'?)" if guess else "")
        )
    out = []
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if name not in flat:
            raise BundleError(f"weight '{name}' is missing; the file has {len(flat)} weights, the policy {len(names)}")
        if flat[name].shape != leaf.shape:
            raise BundleError(f"weight '{name}': got shape {flat[name].shape}, the policy has {leaf.shape}")
        out.append(flat[name] if flat[name].dtype == leaf.dtype else flat[name].astype(leaf.dtype))
    return jax.tree_util.tree_unflatten(tree, out)
