"""Matrix products of stacked layers, with low-rank adaptation (Hu et al., arXiv:2106.09685).

A layer's weights are a dictionary by name; `name_lora_a` [I, R] and `name_lora_b` [R, O] adapt `name` [I, O]:
    y = x W + alpha / R (x A) B.

Letters: D layers, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlsvc.nn.params import leaf_names
from rlsvc.nn.sharding import matrix
from rlsvc.spec.pi0 import LoraSpec

A, B = "_lora_a", "_lora_b"


def lora_params(name: str, d: int, i: int, o: int, spec: LoraSpec, rngs: nnx.Rngs) -> dict[str, nnx.Param]:
    """The adaptation of D matrices [I, O]: it starts at nothing, since B is zero."""
    down = jax.random.normal(rngs.params(), (d, i, spec.rank)) * 0.01
    return {name + A: nnx.Param(down), name + B: nnx.Param(jnp.zeros((d, spec.rank, o)))}


def product(
    x: Float[Array, "*b i"], layer: Mapping[str, Any], name: str, dtype: DTypeLike, lora: LoraSpec | None
) -> Float[Array, "*b o"]:
    """X W in the compute dtype, adapted where the layer has an adaptation of this matrix."""
    x = x.astype(dtype)
    y = x @ matrix(layer[name], name, dtype)
    if lora is None or name + A not in layer:
        return y
    return y + (x @ layer[name + A].astype(dtype)) @ layer[name + B].astype(dtype) * (lora.alpha / lora.rank)


def merged(layers: Mapping[str, Any], lora: LoraSpec) -> dict[str, Any]:
    """The same layers with every adaptation added to its matrix, [D, ...] by name: what serving needs."""
    out = {}
    for name, weight in layers.items():
        if name.endswith((A, B)):
            continue
        if name + A in layers:
            update = jnp.einsum("dir,dro->dio", layers[name + A], layers[name + B]) * (lora.alpha / lora.rank)
            weight = (weight + update).astype(weight.dtype)
        out[name] = weight
    return out


def merged_weights(params: Any, adaptations: Mapping[str, LoraSpec | None]) -> dict[str, Any]:
    """All weights of a policy by name, with those of each adapted transformer merged.

    Args:
        params: of the policy.
        adaptations: by the transformer's name ("backbone").
    """
    flat = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    for transformer, lora in adaptations.items():
        if lora is not None:
            prefix = f"{transformer}.layers."
            layers = {name.removeprefix(prefix): flat.pop(name) for name in list(flat) if name.startswith(prefix)}
            flat |= {prefix + name: x for name, x in merged(layers, lora).items()}
    return flat
