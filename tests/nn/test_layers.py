"""Layers against PyTorch's, with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

from rlsvc.nn.layers import Conv1d, GroupNorm, LayerNorm, Linear, Upsample1d, dropout, mish, sinusoidal

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def tensor(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def rngs() -> nnx.Rngs:
    return nnx.Rngs(params=jax.random.key(0))


@pytest.mark.parametrize(("k", "stride", "t"), [(1, 1, 8), (3, 1, 8), (5, 1, 7), (3, 2, 8), (5, 2, 16)])
def test_convolution_equals_pytorchs(k, stride, t):
    layer = Conv1d(3, 4, k, stride=stride, dtype=jnp.float32, rngs=rngs())
    x = normal(2, t, 3)
    want = functional.conv1d(
        tensor(x).mT, tensor(layer.kernel[...]).permute(2, 1, 0), tensor(layer.bias[...]), stride=stride, padding=k // 2
    ).mT
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=1e-5)


@pytest.mark.parametrize("t", [1, 4, 7])
def test_upsampling_equals_pytorchs_transposed_convolution(t):
    layer = Upsample1d(3, dtype=jnp.float32, rngs=rngs())
    x = normal(2, t, 3)
    want = functional.conv_transpose1d(
        tensor(x).mT, tensor(layer.kernel[...]).permute(1, 2, 0), tensor(layer.bias[...]), stride=2, padding=1
    ).mT
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 4, 3, 8)])
def test_group_norm_equals_pytorchs(shape):
    layer = GroupNorm(8, 4)
    layer.scale[...], layer.bias[...] = jnp.asarray(normal(8)), jnp.asarray(normal(8))
    x = 3 * normal(*shape) + 2
    want = functional.group_norm(tensor(x).movedim(-1, 1), 4, tensor(layer.scale[...]), tensor(layer.bias[...]))
    np.testing.assert_allclose(layer(jnp.asarray(x)), want.movedim(1, -1), atol=1e-4)


def test_layer_norm_and_mish_equal_pytorchs():
    x = 3 * normal(2, 5, 8) + 2
    np.testing.assert_allclose(LayerNorm(8)(jnp.asarray(x)), functional.layer_norm(tensor(x), (8,)), atol=1e-5)
    np.testing.assert_allclose(mish(jnp.asarray(x)), functional.mish(tensor(x)), atol=1e-5)


def test_statistics_are_float32_however_the_net_computes():
    x = (100 + normal(2, 64, 8)).astype(jnp.bfloat16)
    out = GroupNorm(8, 4)(jnp.asarray(x))
    assert out.dtype == jnp.bfloat16
    wide = GroupNorm(8, 4)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(out.astype(jnp.float32), wide, atol=0.02)


def test_weights_are_float32_and_start_as_pytorchs_do():
    layer = Linear(16, 1000, dtype=jnp.bfloat16, rngs=rngs())
    kernel = np.asarray(layer.kernel[...])
    assert kernel.dtype == np.float32
    assert 0.24 < np.abs(kernel).max() <= 1 / np.sqrt(16)
    assert kernel.std() == pytest.approx(0.25 / np.sqrt(3), rel=0.02)
    assert layer(jnp.ones((1, 16))).dtype == jnp.bfloat16


def test_sinusoidal_features_are_sines_and_cosines_of_known_angles():
    out = sinusoidal(jnp.array([0.0, 1.0]), 4)
    want = [[0, 0, 1, 1], [np.sin(1), np.sin(1e-4), np.cos(1), np.cos(1e-4)]]
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_dropout_zeroes_its_share_and_keeps_the_mean_and_does_nothing_without_a_key():
    x = jnp.ones((100, 100))
    out = dropout(x, 0.3, jax.random.key(0))
    assert float((out == 0).mean()) == pytest.approx(0.3, abs=0.02)
    assert float(out.mean()) == pytest.approx(1, abs=0.03)
    assert dropout(x, 0.3, None) is x
