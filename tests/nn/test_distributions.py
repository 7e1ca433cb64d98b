import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.nn.distributions import (
    HLGauss,
    TwoHot,
    bounded_log_std,
    gaussian_log_prob,
    symexp,
    symlog,
    tanh_log_det,
)


def test_symexp_undoes_symlog_on_both_sides_of_zero():
    x = jnp.array([-1e4, -1.0, 0.0, 1e-3, np.e - 1, 2e4])
    np.testing.assert_allclose(symexp(symlog(x)), x, rtol=1e-5)
    assert float(symlog(jnp.array(np.e - 1))) == pytest.approx(1.0)


def test_the_target_lies_on_the_two_bins_next_to_the_value():
    head = TwoHot(5, -2.0, 2.0)
    # symlog(e^0.25 - 1) = 0.25: a quarter of the way from bin 0 to bin 1.
    weights = head.weights(jnp.array([np.exp(0.25) - 1, 0.0, 1e9, -1e9], jnp.float32))
    expected = [[0, 0, 0.75, 0.25, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_a_head_that_predicts_its_target_gives_the_value_back():
    head = TwoHot(101, -10.0, 10.0)
    values = jnp.array([-40.0, -0.3, 0.0, 1.7, 900.0])
    logits = jnp.log(head.weights(values) + 1e-12)
    np.testing.assert_allclose(head.mean(logits), values, rtol=1e-3, atol=1e-4)


def test_the_loss_is_the_cross_entropy_with_the_two_hot_target():
    head = TwoHot(3, -1.0, 1.0)
    logits = jnp.log(jnp.array([0.2, 0.3, 0.5]))
    # 0.5 lies half way between bins 1 and 2.
    assert float(head.loss(logits, jnp.array(np.exp(0.5) - 1))) == pytest.approx(-0.5 * np.log(0.3) - 0.5 * np.log(0.5))


def test_without_bins_a_head_is_a_scalar_with_squared_error():
    head = TwoHot(0)
    assert head.width == 1
    assert float(head.mean(jnp.array([3.0]))) == 3
    assert float(head.loss(jnp.array([3.0]), jnp.array(1.0))) == 4


def test_log_std_stays_in_its_range():
    np.testing.assert_allclose(bounded_log_std(jnp.array([-50.0, 0.0, 50.0]), -10.0, 2.0), [-10, -4, 2])


def test_the_squashed_gaussian_has_the_density_that_integrates_to_one():
    x = np.linspace(-0.99999, 0.99999, 200_001)
    mean, std = 0.3, 0.7
    eps = (np.arctanh(x) - mean) / std
    log_std = jnp.full((len(x), 1), np.log(std))
    log_prob = gaussian_log_prob(jnp.asarray(eps)[:, None], log_std) - tanh_log_det(jnp.asarray(x)[:, None])
    assert float(np.trapezoid(np.exp(np.asarray(log_prob)), x)) == pytest.approx(1, abs=2e-3)


def test_the_density_of_a_saturated_action_has_a_finite_gradient():
    gradient = jax.grad(lambda a: tanh_log_det(a))(jnp.ones(2))
    assert np.isfinite(gradient).all()


def test_the_histogram_of_a_gaussian_has_the_shares_of_its_bins_within_the_support():
    head = HLGauss(4, -2.0, 2.0, sigma_ratio=1.0)
    # Of a standard normal 0.1359 lies in [-2, -1], 0.3413 in [-1, 0], 0.9545 in [-2, 2].
    expected = np.array([0.13591, 0.34134, 0.34134, 0.13591]) / 0.95450
    np.testing.assert_allclose(head.weights(jnp.array(0.0)), expected, atol=1e-5)


def test_every_histogram_sums_to_one_also_of_a_value_beyond_the_support():
    head = HLGauss(51, -1.0, 1.0)
    weights = head.weights(jnp.array([-1e6, -1.0, -0.3, 0.0, 0.99, 1.0, 1e6]))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (np.asarray(weights) >= 0).all()


def test_the_mean_of_a_histogram_is_the_value_it_was_made_of():
    head = HLGauss(51, -10.0, 30.0)
    values = jnp.array([-7.7, -0.3, 0.0, 12.34, 27.0])
    np.testing.assert_allclose(head.mean(jnp.log(head.weights(values) + 1e-30)), values, atol=1e-3)


def test_a_value_beyond_the_support_is_learned_as_its_end_and_counted():
    head = HLGauss(11, -1.0, 1.0)
    values = jnp.array([-3.0, -1.0, 0.5, 1.0, 1.01])
    np.testing.assert_array_equal(head.outside(values), [True, False, False, False, True])
    np.testing.assert_array_equal(head.weights(values[:1]), head.weights(jnp.array([-1.0])))
    np.testing.assert_array_equal(head.weights(values[-1:]), head.weights(jnp.array([1.0])))


def test_the_loss_of_a_histogram_is_its_cross_entropy_and_has_a_finite_gradient_far_away():
    head = HLGauss(4, -2.0, 2.0, sigma_ratio=1.0)
    logits = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    p = np.array([0.14239, 0.35761, 0.35761, 0.14239])
    expected = -(p * np.log([0.1, 0.2, 0.3, 0.4])).sum()
    assert float(head.loss(logits, jnp.array(0.0))) == pytest.approx(expected, abs=1e-4)
    gradient = jax.grad(lambda logits: HLGauss(101).loss(logits, jnp.array(1e9)))(jnp.zeros(101))
    assert np.isfinite(gradient).all()
