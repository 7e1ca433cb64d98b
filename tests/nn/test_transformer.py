import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlsvc.nn.transformer import ActionTransformer
from rlsvc.spec.diffusion import TransformerSpec


@functools.cache
def make(causal: bool = True) -> ActionTransformer:
    spec = TransformerSpec(layers=1, heads=2, embed_dim=8, dropout=0.5, causal=causal)
    return nnx.jit(
        lambda: ActionTransformer(2, 6, 2, 5, spec, dtype=jnp.float32, rngs=nnx.Rngs(params=jax.random.key(0)))
    )()


X = jax.random.normal(jax.random.key(1), (2, 6, 2))
OBS = jax.random.normal(jax.random.key(2), (2, 2, 5))
T = jnp.array([3, 7])
call = nnx.jit(lambda net, x, obs, key=None: net(x, T, obs, key))


def changed(net, x, obs) -> list[bool]:
    """Which of the 6 predictions moved."""
    return (np.abs(call(net, x, obs) - call(net, X, OBS)).max((0, 2)) > 1e-6).tolist()


def test_a_prediction_looks_at_no_later_action():
    assert changed(make(), X.at[:, 3].add(1.0), OBS) == [False, False, False, True, True, True]


def test_the_first_prediction_sees_the_first_observation_only():
    # Observation token s may be seen from action s on: the actions of a window begin with its first observation.
    assert changed(make(), X, OBS.at[:, 1].add(1.0)) == [False] + [True] * 5
    assert changed(make(), X, OBS.at[:, 0].add(1.0)) == [True] * 6


def test_without_the_causal_mask_every_prediction_sees_everything():
    assert changed(make(causal=False), X.at[:, 3].add(1.0), OBS) == [True] * 6


def test_dropout_needs_a_key():
    net = make()
    assert np.array_equal(call(net, X, OBS), call(net, X, OBS))
    noisy = call(net, X, OBS, jax.random.key(0))
    assert not np.array_equal(noisy, call(net, X, OBS))
    assert not np.array_equal(noisy, call(net, X, OBS, jax.random.key(1)))
    assert (noisy.shape, noisy.dtype) == (X.shape, jnp.float32)
