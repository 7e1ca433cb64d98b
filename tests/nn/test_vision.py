import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlsvc.nn.vision import ImageEncoder, augment_window, spatial_softmax
from rlsvc.spec.diffusion import VisionSpec

# Every pixel of an image differs, every frame and window shows the same one.
GRADIENT = jnp.broadcast_to(jnp.linspace(-1, 1, 12 * 10 * 3).reshape(1, 1, 12, 10, 3), (4, 3, 12, 10, 3))
ALL = VisionSpec(crop=(8, 6), shift=2, brightness=0.5, contrast=0.5, saturation=0.5)


def test_the_encoder_gives_two_features_for_each_keypoint():
    spec = VisionSpec(keypoints=5, width=8, crop=None)
    net = nnx.jit(lambda: ImageEncoder(3, spec, dtype=jnp.float32, rngs=nnx.Rngs(params=jax.random.key(0))))()
    image = jax.random.uniform(jax.random.key(1), (2, 64, 40, 3), minval=-1)
    out = nnx.jit(lambda net, x: net(x))(net, image)
    assert out.shape == (2, 10)
    assert not np.allclose(out[0], out[1])


def test_the_full_encoder_has_the_weights_of_resnet_18():
    """torchvision's resnet18 without its classifier has 11,176,512; keypoints and output layer come on top."""

    def make() -> ImageEncoder:
        return ImageEncoder(3, VisionSpec(), dtype=jnp.float32, rngs=nnx.Rngs(params=jax.random.key(0)))

    keypoints, output = 512 * 32 + 32, 64 * 64 + 64
    weights = jax.tree.leaves(nnx.state(nnx.eval_shape(make)))
    assert sum(leaf.size for leaf in weights) == 11_176_512 + keypoints + output


def test_spatial_softmax_finds_a_peak():
    x = jnp.full((1, 5, 3, 2), -100.0).at[0, 0, 2, 0].set(100.0).at[0, 2, 1, 1].set(100.0)
    np.testing.assert_allclose(spatial_softmax(x), [[1, -1, 0, 0]], atol=1e-6)


def test_acting_takes_the_centre_crop_and_nothing_random():
    out = augment_window(GRADIENT, ALL, None)
    np.testing.assert_array_equal(out, GRADIENT[:, :, 2:10, 2:8])


def test_all_frames_of_a_window_get_one_draw_and_windows_get_their_own():
    out = augment_window(GRADIENT, ALL, jax.random.key(0))
    assert out.shape == (4, 3, 8, 6, 3)
    np.testing.assert_array_equal(out[:, 1:], jnp.broadcast_to(out[:, :1], out[:, 1:].shape))
    assert all(not np.array_equal(out[0], out[i]) for i in range(1, 4))


def test_a_crop_is_a_piece_of_the_image():
    spec = VisionSpec(crop=(8, 6))
    out = np.asarray(augment_window(GRADIENT, spec, jax.random.key(0)))
    image = np.asarray(GRADIENT[0, 0])
    pieces = [image[i : i + 8, j : j + 6] for i in range(5) for j in range(5)]
    for window in out:
        assert any(np.array_equal(window[0], piece) for piece in pieces)


def test_every_corner_of_the_room_is_reached():
    image = jnp.broadcast_to(jnp.arange(9.0).reshape(1, 1, 3, 3, 1) / 8, (400, 1, 3, 3, 1))
    out = np.asarray(augment_window(image, VisionSpec(crop=(2, 2)), jax.random.key(0)))
    assert sorted(np.unique(out[:, 0, 0, 0, 0] * 8).round().tolist()) == [0, 1, 3, 4]


@pytest.mark.parametrize("change", [{"brightness": 1.0}, {"contrast": 1.0}, {"saturation": 1.0}, {"shift": 2}])
def test_values_stay_in_range_under_every_augmentation(change):
    images = jax.random.uniform(jax.random.key(1), (8, 2, 12, 10, 3), minval=-1)
    out = augment_window(images, VisionSpec(crop=(8, 6), **change), jax.random.key(0))
    plain = augment_window(images, VisionSpec(crop=(8, 6)), jax.random.key(0))
    assert -1 <= float(out.min()) <= float(out.max()) <= 1
    assert not np.array_equal(out, plain)


def test_brightness_of_a_grey_image_is_scaled_by_the_stated_range():
    grey = jnp.zeros((500, 1, 2, 2, 3))  # 0.5 in [0, 1]
    out = np.asarray(augment_window(grey, VisionSpec(crop=None, brightness=0.4), jax.random.key(0)))
    factor = (out[:, 0, 0, 0, 0] + 1) / 2 / 0.5
    assert 0.6 <= factor.min() < 0.63
    assert 1.37 < factor.max() <= 1.4 + 1e-6


def test_without_a_crop_the_whole_image_is_seen():
    np.testing.assert_array_equal(augment_window(GRADIENT, VisionSpec(crop=None), jax.random.key(0)), GRADIENT)
