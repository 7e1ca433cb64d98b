"""How weights and optimizer state lie on the devices of a learner group: one table of rules.

The mesh has three axes: `data` and `fsdp` share the rows of a batch, `fsdp` also cuts weights (each device holds a
part and gathers the rest when it is needed: ZeRO-3, arXiv:1910.02054; rlsvc/nn/sharding.py), `tensor` cuts products
(arXiv:1909.08053). A weight of no rule is whole on every device.

Letters in the rules' comments: D layers, W width, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlsvc.core.errors import UserError
from rlsvc.nn.params import leaf_names
from rlsvc.nn.sharding import MATRICES
from rlsvc.spec.learner import LearnerSpec

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embedding", (None, "fsdp")),  # [V, W]
    *((rf"(backbone|expert|vision)\.layers\.{name}", (None, *axes)) for name, axes in MATRICES.items()),  # [D, ...]
    *((rf"vision\.{name}", MATRICES[name]) for name in ("head", "patches")),
)
"""The end of a weight's name (moments and averages have the same), and the mesh axis of each of its own axes."""


def make_mesh(spec: LearnerSpec) -> Mesh:
    """The mesh of all devices of the group.

    Raises:
        UserError: fsdp x tensor does not divide the devices.
    """
    devices, cut = jax.device_count(), spec.fsdp * spec.tensor
    if devices % cut:
        raise UserError(
            f"learner.fsdp x learner.tensor: {spec.fsdp} x {spec.tensor} does not divide the {devices} devices of "
            f"{spec.ranks} ranks"
        )
    shape = (devices // cut, spec.fsdp, spec.tensor)
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """A sharding for every array of a train state (shapes).

    Raises:
        UserError: a mesh axis does not divide the axis of a weight that it cuts; names both.
    """
    leaves, tree = jax.tree.flatten(state)
    specs = [_spec(name, leaf.shape, mesh) for name, leaf in zip(leaf_names(state), leaves, strict=True)]
    return jax.tree.unflatten(tree, [NamedSharding(mesh, spec) for spec in specs])


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    for pattern, axes in RULES:
        if len(axes) == len(shape) and re.search(rf"(^|\.)({pattern})$", name):
            for size, axis in zip(shape, axes, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    raise UserError(
                        f"learner.{axis}: {mesh.shape[axis]} does not divide the {size} of weight '{name}' {shape}; "
                        "choose a divisor, or 1"
                    )
            return PartitionSpec(*(axis if axis and mesh.shape[axis] > 1 else None for axis in axes))
    return PartitionSpec()


def gathered(leaf: jax.Array) -> np.ndarray:
    """The whole of an array on this host; every process has to ask."""
    if leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    mesh = leaf.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue] - all shardings here are named
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)
    return np.asarray(whole)
