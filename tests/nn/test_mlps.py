import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlsvc.nn.mlps import ConvEncoder, Mlps, normed, simnorm


def made(d_in=5, widths=(16, 8), d_out=3, nets=3, **options) -> Mlps:
    net = Mlps(d_in, widths, d_out, nets=nets, dtype=jnp.float32, rngs=nnx.Rngs(params=0), **options)
    # Biases, scales and offsets that are not at their start, and kernels of a size at which a mistake shows.
    leaves, tree = jax.tree.flatten(nnx.state(net))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [
        x + 0.3 * jax.random.normal(k, x.shape) if x.shape[1] in (1, 3) and x.shape[0] == nets else x * 10
        for k, x in zip(keys, leaves, strict=True)
    ]
    nnx.update(net, jax.tree.unflatten(tree, moved))
    return net


def by_hand(net: Mlps, x: np.ndarray, e: int) -> np.ndarray:
    """One net of the stack, layer by layer, in float64."""
    x = np.pad(x, ((0, 0), (0, net.kernels[0].shape[0] - x.shape[1]))).astype(np.float64)
    last = len(net.kernels) - 1
    for i in range(last + 1):
        kernel, affine = np.asarray(net.kernels[i][...]), np.asarray(net.affines[i][...])[e]
        x = x @ (kernel[:, e] if i == 0 else kernel[e]) + affine[0]
        if i < last or net.latent:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            x = x * affine[1] + affine[2]
        if i < last:
            x = x * np.tanh(np.log1p(np.exp(x)))
    if net.latent:
        groups = np.exp(x.reshape(len(x), -1, net.simnorm_dim))
        x = (groups / groups.sum(-1, keepdims=True)).reshape(x.shape)
    return x[:, : net.d_out]


@pytest.mark.parametrize("options", [{}, {"d_out": 8, "latent": True, "simnorm_dim": 4}])
def test_every_net_of_the_stack_is_the_perceptron_that_its_weights_say(options):
    net, x = made(**options), np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    out = np.asarray(net(jnp.asarray(x)))
    for e in range(3):
        np.testing.assert_allclose(out[e], by_hand(net, x, e), rtol=2e-4, atol=2e-5)


def test_some_nets_of_a_stack_give_what_they_give_among_all():
    net, x = made(), jax.random.normal(jax.random.key(2), (4, 5))
    np.testing.assert_allclose(net(x, jnp.array([2, 0])), np.asarray(net(x))[[2, 0]], rtol=1e-5)
    np.testing.assert_allclose(net(x, slice(1, 2)), np.asarray(net(x))[1:2], rtol=1e-5)


def test_padding_never_learns():
    net, x = made(), jax.random.normal(jax.random.key(2), (4, 5))
    graph, state = nnx.split(net)
    grads = jax.grad(lambda s: (nnx.merge(graph, s)(x) ** 2).sum())(state)
    assert np.abs(grads["kernels"][0][...])[:5].min() > 0
    assert np.abs(grads["kernels"][0][...])[5:].max() == 0
    assert np.abs(grads["kernels"][2][...])[..., 3:].max() == 0


def test_dropout_reaches_the_chosen_nets_alone():
    net, x = made(), jax.random.normal(jax.random.key(2), (64, 5))
    out = np.asarray(net(x))
    dropped = np.asarray(net(x, drop=(0.5, jnp.array([False, True, True]), jax.random.key(0))))
    np.testing.assert_allclose(dropped[0], out[0], rtol=1e-6)
    assert (np.abs(dropped[1:] - out[1:]).max((1, 2)) > 0.1).all()


@pytest.mark.parametrize("group", [None, 4])
def test_the_written_out_gradient_is_that_of_the_plain_formula(group):
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    y, affine, gain, weight = draw(0, 2, 5, 8), draw(1, 2, 3, 8), jnp.abs(draw(2, 2, 5, 8)), draw(3, 2, 5, 8)

    def plain(y, affine):
        x = (y + affine[:, :1]) * gain
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
        u = x * affine[:, 1:2] + affine[:, 2:3]
        return simnorm(u, group) if group else u * jnp.tanh(jnp.log1p(jnp.exp(u)))

    expected = jax.grad(lambda *a: (weight * plain(*a)).sum(), (0, 1))(y, affine)
    got = jax.grad(lambda y, affine: (weight * normed(y, affine, gain, group)).sum(), (0, 1))(y, affine)
    np.testing.assert_allclose(normed(y, affine, gain, group), plain(y, affine), rtol=1e-4, atol=1e-5)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def test_a_layer_that_starts_at_zero_gives_zero():
    net = Mlps(5, (8,), 3, nets=2, zero_last=True, dtype=jnp.float32, rngs=nnx.Rngs(params=0))
    assert np.abs(net(jnp.ones((2, 5)))).max() == 0


def test_simnorm_groups_sum_to_one():
    z = simnorm(jax.random.normal(jax.random.key(0), (3, 16)), 8)
    np.testing.assert_allclose(z.reshape(3, 2, 8).sum(-1), 1, rtol=1e-5)


def test_a_64_pixel_image_gives_the_512_features_of_the_published_encoder():
    encoder = ConvEncoder(3, 32, dtype=jnp.float32, rngs=nnx.Rngs(params=0))
    assert jax.eval_shape(encoder, jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)).shape == (2, 512)


def test_bf16_products_keep_float32_weights_and_outputs():
    net = Mlps(5, (8, 8), 3, nets=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(params=0))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(net))} == {jnp.dtype("float32")}
    assert net(jnp.ones((2, 5))).dtype == jnp.float32
