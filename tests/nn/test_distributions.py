import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.nn.distributions import (
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
