"""SigLIP's vision transformer (arXiv:2303.15343): an image to one token a patch, in the width of a language model.

Pre-norm blocks, learnt positions, no pooling; a last product brings the tokens to the width of who reads them
(PaliGemma, arXiv:2407.07726). Layers are stacked, so that one scan compiles one layer.

Letters: B batch, H W height and width, P patch, S tokens, C width, D layers, M hidden width, N heads, O output width.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rlsvc.nn.layers import along_last
from rlsvc.nn.sharding import matrix
from rlsvc.spec.pi0 import SiglipSpec

EPS = 1e-6


class Siglip(nnx.Module):
    """An image in [-1, 1] to tokens. `patches` [P P 3, C] is the kernel of the patches, row by row, colours last."""

    def __init__(
        self, size: SiglipSpec, image_size: tuple[int, int], width_out: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        d, c, m, p = size.depth, size.width, size.mlp_dim, size.patch
        self.size, self.dtype = size, dtype
        self.grid = (image_size[0] // p, image_size[1] // p)

        def normal(*shape: int, fan_in: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in))

        self.patches, self.patches_bias = normal(p * p * 3, c, fan_in=p * p * 3), nnx.Param(jnp.zeros((c,)))
        self.positions = normal(self.grid[0] * self.grid[1], c, fan_in=c)
        shapes = {"qkv": (c, 3 * c), "out": (c, c), "up": (c, m), "down": (m, c)}
        layers: dict[str, nnx.Param] = {}
        for name, shape in shapes.items():
            layers[name] = normal(d, *shape, fan_in=shape[0])
            layers[f"{name}_bias"] = nnx.Param(jnp.zeros((d, shape[1])))
        for name in ("attention_norm", "feed_forward_norm"):
            layers[name], layers[f"{name}_bias"] = nnx.Param(jnp.ones((d, c))), nnx.Param(jnp.zeros((d, c)))
        self.layers = nnx.Dict(layers)
        self.norm, self.norm_bias = nnx.Param(jnp.ones((c,))), nnx.Param(jnp.zeros((c,)))
        self.head, self.head_bias = normal(c, width_out, fan_in=c), nnx.Param(jnp.zeros((width_out,)))

    def __call__(
        self, image: Float[Array, "b h w 3"], *, remat: bool = False, unroll: int = 1
    ) -> Float[Array, "b s o"]:
        """Tokens, row by row. `remat`: compute activations anew in the backward pass; `unroll`: layers in one."""
        p, (rows, columns) = self.size.patch, self.grid
        b = image.shape[0]
        assert image.shape[1:] == (rows * p, columns * p, 3), f"{image.shape}: not of {rows} x {columns} patches of {p}"
        # A convolution whose stride is its kernel is one product over patches.
        x = image.astype(jnp.float32).reshape(b, rows, p, columns, p, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(b, rows * columns, p * p * 3) @ matrix(self.patches[...], "patches", jnp.float32)
        x = x + along_last(self.patches_bias[...], x) + self.positions[...][None]
        layers = {name: value[...] for name, value in self.layers.items()}
        step = jax.checkpoint(self._layer, prevent_cse=False) if remat else self._layer
        x, _ = jax.lax.scan(step, x.astype(self.dtype), layers, unroll=unroll)
        x = layer_norm(x, self.norm[...], self.norm_bias[...])
        return _affine(x, matrix(self.head[...], "head", x.dtype), self.head_bias[...])

    def _layer(self, x: Float[Array, "b s c"], w: dict[str, Any]) -> tuple[Float[Array, "b s c"], None]:
        b, s, c = x.shape
        n = self.size.heads
        y = layer_norm(x, w["attention_norm"], w["attention_norm_bias"])
        qkv = self._product(y, w, "qkv").reshape(b, s, 3, n, c // n)
        # cuDNN's attention keeps the logits, and reads heads where they lie; it has none for float32.
        cudnn = jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16
        y = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], implementation="cudnn" if cudnn else "xla"
        ).reshape(b, s, c)
        x = x + self._product(y, w, "out")
        y = layer_norm(x, w["feed_forward_norm"], w["feed_forward_norm_bias"])
        return x + self._product(jax.nn.gelu(self._product(y, w, "up")), w, "down"), None

    @staticmethod
    def _product(x: Array, w: dict[str, Any], name: str) -> Array:
        return _affine(x, matrix(w[name], name, x.dtype), w[f"{name}_bias"])


def layer_norm(x: Float[Array, "b s c"], scale: Float[Array, " c"], bias: Float[Array, " c"]) -> Float[Array, "b s c"]:
    """Over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = ((wide - mean) ** 2).mean(-1, keepdims=True)
    normal = (wide - mean) * jax.lax.rsqrt(variance + EPS)
    return (normal * along_last(scale, x) + along_last(bias, x)).astype(x.dtype)


def _affine(x: Array, kernel: Array, bias: Array) -> Array:
    # Apart, since XLA reads a layer out of the stacked weights in place for a bare product, but copies it for one with
    # a bias: a sixth of the tower's time on a GPU.
    y = jax.lax.optimization_barrier(x @ kernel)
    return y + along_last(bias.astype(x.dtype), y)
