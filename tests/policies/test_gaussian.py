from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError
from rlsvc.policies import ActOptions, make_policy
from rlsvc.policies.gaussian import GaussianPolicy, squashed
from rlsvc.spec.sac import GaussianPolicySpec

STATE = {"observation.state": Feature((3,), "float32")}
IMAGE = {"observation.image": Feature((40, 40, 3), "uint8")}
EXPLORE, ACT = ActOptions(explore=True), ActOptions()


def contract(observation=None, action=None, n_obs_steps=1) -> Contract:
    return Contract(observation or STATE, action or Feature((2,), "float32"), 20.0, n_obs_steps, 1)


def make(observation=None, **changes) -> tuple[GaussianPolicy, dict]:
    spec = GaussianPolicySpec.model_validate({"hidden_dims": [8], "channels": 2, "image_dim": 4, **changes})
    policy = GaussianPolicy(spec, contract(observation))
    return policy, jax.jit(policy.init)(jax.random.key(0))


@partial(jax.jit, static_argnums=(0, 1))
def act(policy, options, params, observation, keys):
    return policy.act(params, observation, (), keys, options)[0]


ROWS = {"observation.state": np.random.default_rng(0).normal(size=(3, 1, 3)).astype(np.float32)}
KEYS = jax.random.split(jax.random.key(5), 3)


def test_an_action_does_not_depend_on_the_rest_of_its_batch():
    policy, params = make()
    together = act(policy, EXPLORE, params, ROWS, KEYS)
    alone = act(policy, EXPLORE, params, {k: x[1:2] for k, x in ROWS.items()}, KEYS[1:2])
    assert together.shape == (3, 1, 2)
    np.testing.assert_allclose(together[1:2], alone, atol=1e-6)


def test_exploring_draws_around_what_acting_gives():
    policy, params = make(log_std_range=[-20.0, -19.0])
    np.testing.assert_allclose(
        act(policy, EXPLORE, params, ROWS, KEYS), act(policy, ACT, params, ROWS, KEYS), atol=1e-6
    )
    policy, params = make()
    drawn = act(policy, EXPLORE, params, ROWS, KEYS)
    assert not np.allclose(drawn, act(policy, EXPLORE, params, ROWS, jax.random.split(KEYS[0], 3)))
    assert np.abs(drawn).max() <= 1


def test_the_log_density_is_that_of_a_squashed_gaussian():
    # u = 0.3 + 0.5 * 1 = 0.8: log N = -0.5 - log 0.5 - 0.918939; log(1 - tanh(0.8)^2) = -0.581507.
    action, log_prob = squashed(jnp.array([[0.3]]), jnp.log(jnp.array([[0.5]])), jnp.array([[1.0]]))
    assert float(action[0, 0]) == pytest.approx(0.664037, abs=1e-6)
    assert float(log_prob[0]) == pytest.approx(-0.5 + 0.693147 - 0.918939 + 0.581507, abs=1e-5)


def test_the_log_density_stays_finite_and_true_far_out_where_tanh_is_one():
    # At u = 20: log(1 - tanh^2) = 2 (log 2 - 20 - softplus(-40)) = 1.386294 - 40.
    action, log_prob = squashed(jnp.array([[20.0]]), jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    assert float(action[0, 0]) == 1.0
    assert float(log_prob[0]) == pytest.approx(-0.918939 - 1.386294 + 40.0, abs=1e-4)
    gradient = jax.grad(lambda m: squashed(m, jnp.zeros((1, 1)), jnp.zeros((1, 1)))[1][0])(jnp.array([[20.0]]))
    assert float(gradient[0, 0]) == pytest.approx(2.0, abs=1e-5)  # d/du of -2 (log 2 - u)


def test_densities_over_the_range_of_actions_sum_to_one():
    eps = jnp.linspace(-6, 6, 4001)[:, None]
    action, log_prob = squashed(jnp.full((4001, 1), 0.4), jnp.full((4001, 1), -0.3), eps)
    assert float(jnp.trapezoid(jnp.exp(log_prob), action[:, 0])) == pytest.approx(1.0, abs=1e-4)


def test_images_are_encoded_beside_vectors_and_shifted_in_training_alone():
    policy, params = make({**STATE, **IMAGE}, shift=4, channels=8)
    assert policy.width == 3 + 4
    encoder = policy.encoder(params["encoder"])
    image = jax.random.uniform(jax.random.key(1), (2, 40, 40, 3), minval=-1, maxval=1)
    rows = {"observation.state": jnp.ones((2, 3)), "observation.image": image}
    plain, shifted = jax.jit(encoder)(rows), jax.jit(encoder)(rows, jax.random.key(2))
    np.testing.assert_array_equal(plain[:, :3], 1.0)
    np.testing.assert_array_equal(shifted[:, :3], 1.0)
    assert not np.allclose(plain[:, 3:], shifted[:, 3:], atol=1e-4)
    assert np.abs(plain[:, 3:]).max() <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observation": {"task": Feature((), "str")}}, "observation 'task' is a text"),
        ({"action": Feature((2, 2), "float32")}, "one vector of floats"),
        ({"action": Feature((2,), "int64")}, "action: got int64"),
        ({"n_obs_steps": 2}, "n_obs_steps = 2, .*stack frames"),
    ],
)
def test_a_contract_that_it_cannot_act_by_is_refused(changes, message):
    with pytest.raises(ContractError, match=message):
        GaussianPolicy(GaussianPolicySpec(), contract(**changes))


def test_it_is_made_by_name():
    assert isinstance(make_policy({"name": "gaussian"}, contract()), GaussianPolicy)
    with pytest.raises(ValidationError, match="log_std_range: got 1 and 0, expected the smaller one first"):
        GaussianPolicySpec(log_std_range=(1.0, 0.0))
