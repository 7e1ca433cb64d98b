"""Which axes of a transformer's matrices are cut over devices, and how a matrix is put together for its product.

Left alone, XLA's partitioner answers a product of cut rows with cut weights by gathering the rows of all devices and
summing partial products: with long sequences far more bytes than the weights. So the rule is said where a product is:
its weights are gathered over `fsdp`, in the compute dtype, and their gradient goes back in parts (ZeRO-3,
arXiv:1910.02054). Without a mesh in scope that cuts (`jax.set_mesh`) nothing here does anything.

Letters: B batch, W width, M hidden width or several heads.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

ROWS = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are spread."""

Axes = tuple[str | None, str | None]

MATRICES: dict[str, Axes] = {
    "qkv": ("fsdp", "tensor"),  # [W, M]
    "gate_up": ("fsdp", "tensor"),
    "up": ("fsdp", "tensor"),
    "out": ("tensor", "fsdp"),  # [M, W]
    "down": ("tensor", "fsdp"),
    "attention_norm_kernel": ("fsdp", None),  # [W, 3 W]
    "feed_forward_norm_kernel": ("fsdp", None),
    "patches": (None, "fsdp"),
    "head": (None, "fsdp"),
}
"""Mesh axis of each axis of a matrix, by its name in a layer or a tower; any other is whole on every device."""


def matrix(weight: Float[Array, "i o"], name: str, dtype: DTypeLike) -> Float[Array, "i o"]:
    """A weight in the compute dtype as its product needs it: put together over `fsdp`, still cut over `tensor`."""
    narrow = weight.astype(dtype)
    axes = MATRICES.get(name)
    return narrow if axes is None or not _cuts() else _gather(narrow, axes)


def rows(x: Array) -> Array:
    """Activations [B, ...] with their rows spread over the devices, and nothing else of them."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS)) if _cuts() else x


def _cuts() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape.get("fsdp", 1) > 1


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(weight: Array, axes: Axes) -> Array:
    whole = (None if axis == "fsdp" else axis for axis in axes)
    return jax.lax.with_sharding_constraint(weight, PartitionSpec(*whole))


def _forward(weight: Array, axes: Axes) -> tuple[Array, None]:
    return _gather(weight, axes), None


def _backward(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(gradient, PartitionSpec(*axes)),)


_gather.defvjp(_forward, _backward)
