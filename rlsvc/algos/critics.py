"""An ensemble of Q functions.

Letters: E critics, N rows, D encoded width, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rlsvc.nn.mlps import Mlps


class Critics(nnx.Module):
    """Q_i(z, a), i = 1 .. E: perceptrons with layer norm, which bounds their values (RLPD, section 4.2)."""

    def __init__(
        self, width: int, action_dim: int, dims: Sequence[int], count: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.nets = Mlps(width + action_dim, dims, 1, nets=count, dtype=dtype, rngs=rngs)

    def __call__(
        self, z: Float[Array, "n d"], action: Float[Array, "n a"], which: slice | Int[Array, " e"] = slice(None)
    ) -> Float[Array, "e n"]:
        """Values of all critics, or of these, float32."""
        return self.nets(jnp.concatenate([z, action], -1), which)[..., 0]
