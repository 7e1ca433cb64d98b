import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlsvc.nn.unet1d import UNet1d
from rlsvc.spec.diffusion import UNet1dSpec

TINY = UNet1dSpec(down_dims=(8, 16), step_embed_dim=8, n_groups=4)


@functools.cache
def make() -> UNet1d:
    return nnx.jit(lambda: UNet1d(2, 6, TINY, dtype=jnp.float32, rngs=nnx.Rngs(params=jax.random.key(0))))()


def count(net) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(net)))


def test_the_net_has_as_many_weights_as_lerobots_of_the_same_sizes():
    """Its DiffusionConditionalUnet1d for 2 observations of 20 numbers, 2 actions and a step embedding of 128."""
    spec = UNet1dSpec(down_dims=(256, 512, 1024), step_embed_dim=128)
    net = nnx.eval_shape(lambda: UNet1d(2, 2 * 20, spec, dtype=jnp.float32, rngs=nnx.Rngs(params=jax.random.key(0))))
    assert count(net) == 63_554_434


def test_the_prediction_has_the_chunks_shape_and_depends_on_chunk_step_and_condition():
    net = make()
    key = jax.random.key(1)
    x, t, cond = jax.random.normal(key, (3, 4, 2)), jnp.array([0, 1, 2]), jax.random.normal(key, (3, 6))
    call = nnx.jit(lambda net, *inputs: net(*inputs))
    out = call(net, x, t, cond)
    assert (out.shape, out.dtype) == ((3, 4, 2), jnp.float32)
    for other in (call(net, x + 1, t, cond), call(net, x, t + 5, cond), call(net, x, t, cond + 1)):
        assert float(jnp.abs(other - out).max()) > 1e-4


def test_rows_do_not_mix():
    net = make()
    x, cond = jax.random.normal(jax.random.key(1), (3, 8, 2)), jnp.ones((3, 6))
    call = nnx.jit(lambda net, x: net(x, jnp.zeros(3, int), cond))
    moved = call(net, x.at[0].add(1.0))
    np.testing.assert_array_equal(moved[1:], call(net, x)[1:])


def test_films_of_many_steps_at_once_are_those_of_each():
    net = make()
    cond = jax.random.normal(jax.random.key(1), (3, 6))
    steps = jnp.array([5, 2])
    many = net.film(jnp.broadcast_to(steps[:, None], (2, 3)), jnp.broadcast_to(cond[None], (2, 3, 6)))
    for i in range(2):
        np.testing.assert_allclose(many[i], net.film(jnp.full(3, steps[i]), cond), atol=1e-6)


def test_bf16_computes_in_bf16_and_predicts_float32():
    net = nnx.eval_shape(lambda: UNet1d(2, 6, TINY, dtype=jnp.bfloat16, rngs=nnx.Rngs(params=jax.random.key(0))))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(net))} == {jnp.dtype("float32")}
    assert nnx.eval_shape(lambda net: net.film(jnp.zeros(1, int), jnp.zeros((1, 6))), net).dtype == jnp.bfloat16
    out = nnx.eval_shape(lambda net: net(jnp.zeros((1, 8, 2)), jnp.zeros(1, int), jnp.zeros((1, 6))), net)
    assert out.dtype == jnp.float32
