import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, NotFoundError
from rlsvc.policies import make_policy, make_value_function
from rlsvc.policies.api import Policy, ValueFunction
from rlsvc.policies.value_mlp import ValueMlp, flat_features
from rlsvc.spec.value_function import ValueMlpSpec

STATE = {"state": Feature((2,), "float32"), "angle": Feature((), "float32")}


def contract(n_obs_steps=2, n_action_steps=2, **observation) -> Contract:
    return Contract(observation or STATE, Feature((1,), "float32"), 10.0, n_obs_steps, n_action_steps)


def value(n_action_steps=2, **fields) -> ValueMlp:
    spec = ValueMlpSpec.model_validate({"n_obs_steps": 2, "n_action_steps": n_action_steps, "hidden": [8], **fields})
    return ValueMlp(spec, contract(n_action_steps=n_action_steps))


def batch(horizon=3):
    return {
        "observation": {
            "state": jnp.arange(1.0, 9.0).reshape(2, 2, 2),
            "angle": jnp.array([[0.1, 0.2], [0.3, 0.4]]),
        },
        "action": jnp.array([[5.0, 6, 7], [5, 6, 7]])[:, :horizon, None],
        "mask": jnp.array([[True, True, True], [True, True, False]])[:, :horizon],
    }


def test_features_are_all_observations_and_the_actions_from_the_present_on_with_padding_as_zero():
    q = flat_features(batch(), ("angle", "state"), 2, 2)
    np.testing.assert_allclose(q, [[0.1, 0.2, 1, 2, 3, 4, 6, 7], [0.3, 0.4, 5, 6, 7, 8, 6, 0]])
    v = flat_features(batch(), ("angle", "state"), 2, 0)
    np.testing.assert_allclose(v, [[0.1, 0.2, 1, 2, 3, 4], [0.3, 0.4, 5, 6, 7, 8]])


@pytest.mark.parametrize(("steps", "horizon"), [(0, 2), (1, 2), (4, 5)])
def test_the_window_holds_the_actions_that_are_judged(steps, horizon):
    assert ValueMlpSpec(n_obs_steps=2, n_action_steps=steps).horizon == horizon


def test_a_q_function_depends_on_the_action_and_a_v_function_does_not():
    for steps, differs in ((2, True), (0, False)):
        function = value(steps)
        params = jax.tree.map(lambda x: x + 0.1, function.init(jax.random.key(0)))
        one = batch(3 if steps else 2)
        other = {**one, "action": one["action"] + 1}
        same = np.allclose(function.logits(params, one), function.logits(params, other))
        assert same != differs


def test_a_padded_action_changes_nothing():
    function, one = value(), batch()
    params = jax.tree.map(lambda x: x + 0.1, function.init(jax.random.key(0)))
    other = {**one, "action": one["action"].at[1, 2].set(1e6)}
    np.testing.assert_array_equal(function.logits(params, one), function.logits(params, other))


@pytest.mark.parametrize(("head", "width"), [({"name": "hl_gauss", "bins": 7}, 7), ({"name": "regression"}, 1)])
def test_a_fresh_one_says_the_middle_of_the_scale_everywhere(head, width):
    function = value(head=head)
    logits = function.logits(function.init(jax.random.key(0)), batch())
    assert logits.shape == (2, width)
    np.testing.assert_allclose(function.head.mean(logits), [0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature((8, 8, 3), "uint8"), "observation 'x' is an image, which value_mlp does not read"),
        (Feature((), "str"), "observation 'x' is a text, which value_mlp does not read"),
    ],
)
def test_what_is_no_vector_is_refused_by_name(feature, message):
    with pytest.raises(ContractError, match=message):
        ValueMlp(ValueMlpSpec(n_obs_steps=2, n_action_steps=2), contract(x=feature))


def test_another_number_of_steps_than_the_contract_s_is_refused():
    with pytest.raises(ContractError, match="n_action_steps = 1"):
        ValueMlp(ValueMlpSpec(n_obs_steps=2, n_action_steps=1), contract())


def test_a_value_function_is_no_policy_and_a_policy_no_value_function():
    function = make_value_function({"name": "value_mlp", "n_obs_steps": 2, "n_action_steps": 2}, contract())
    assert isinstance(function, ValueFunction)
    assert not isinstance(function, Policy)
    with pytest.raises(ContractError, match="'value_mlp' is a value function, which does not act"):
        make_policy({"name": "value_mlp"}, contract())
    with pytest.raises(ContractError, match="'diffusion' is not a value function; there are: value_mlp"):
        make_value_function({"name": "diffusion"}, contract())
    with pytest.raises(NotFoundError, match="unknown policy 'difusion'"):
        make_policy({"name": "difusion"}, contract())
