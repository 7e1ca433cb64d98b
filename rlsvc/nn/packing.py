"""Arrays of the host as one, since every array that is sent to a GPU takes its own tenth of a millisecond."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each array, in the order in which they lie."""


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[UInt8[np.ndarray, " n"], Layout]:
    """The bytes of the arrays behind each other, in JAX's dtypes (float64 becomes float32), and what lies where."""
    narrow = {name: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype), order="C") for name, x in arrays.items()}
    layout = tuple((name, x.shape, x.dtype.name) for name, x in narrow.items())
    return np.concatenate([x.reshape(-1).view(np.uint8) for x in narrow.values()]), layout


def unpack(packed: UInt8[Array, " n"], layout: Layout) -> dict[str, Array]:
    """The arrays of `pack`; to be compiled, with the layout static."""
    arrays, start = {}, 0
    for name, shape, dtype in layout:
        size = np.dtype(dtype).itemsize
        end = start + int(np.prod(shape)) * size
        x = packed[start:end]
        if dtype == "bool":
            x = x != 0
        elif dtype != "uint8":
            x = jax.lax.bitcast_convert_type(x.reshape(-1, size) if size > 1 else x, jnp.dtype(dtype))
        arrays[name], start = x.reshape(shape), end
    return arrays
