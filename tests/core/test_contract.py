import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError

CONTRACT = Contract(
    observation={
        "observation.state": Feature((2,), "float32", "px", ("x", "y"), (0.0,), (512.0,)),
        "observation.image": Feature((4, 5, 3), "uint8"),
        "observation.gripper": Feature((1,), "int32"),
        "task": Feature((), "str"),
    },
    action=Feature((2,), "float32", "px", ("x", "y"), (0.0,), (512.0,)),
    rate_hz=10.0,
    n_obs_steps=2,
    action_horizon=8,
)
STATE = Contract({"observation.state": Feature((2,), "float32")}, Feature((2,), "float32"), 10.0)


def fitting(**changes):
    return {
        **CONTRACT.example_observation(),
        **{f"observation.{k}" if k != "task" else k: v for k, v in changes.items()},
    }


def test_the_example_observation_fits_and_has_the_stated_shapes():
    checked = CONTRACT.check_observation(CONTRACT.example_observation())
    assert {k: (v.shape, v.dtype.kind) for k, v in checked.items()} == {
        "observation.state": ((2, 2), "f"),
        "observation.image": ((2, 4, 5, 3), "u"),
        "observation.gripper": ((2, 1), "i"),
        "task": ((2,), "U"),
    }
    assert checked["task"].tolist() == ["example", "example"]
    assert CONTRACT.example_observation(3)["observation.image"].shape == (3, 2, 4, 5, 3)


def test_json_round_trip_is_exact():
    assert Contract.from_json(CONTRACT.to_json()) == CONTRACT


def test_a_misspelt_key_is_refused_with_the_nearest_name():
    observation = CONTRACT.example_observation()
    observation["observation.stat"] = observation.pop("observation.state")
    with pytest.raises(
        ContractError, match=r"'observation\.stat' is not in the contract \(did you mean 'observation\.state'\?\)"
    ):
        CONTRACT.check_observation(observation)


def test_a_key_too_many_is_refused_not_ignored():
    with pytest.raises(ContractError, match=r"'velocity' is not in the contract; expected: observation\.state"):
        CONTRACT.check_observation({**CONTRACT.example_observation(), "velocity": np.zeros(2)})


def test_a_missing_key_is_named():
    observation = CONTRACT.example_observation()
    del observation["observation.image"]
    with pytest.raises(ContractError, match=r"lacks 'observation\.image'; got: observation\.state, "):
        CONTRACT.check_observation(observation)


def test_something_that_is_no_mapping_is_refused():
    with pytest.raises(ContractError, match="got list, expected arrays by name"):
        CONTRACT.check_observation([1, 2])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"state": np.zeros((3, 2), np.float32)},
            r"'observation\.state': got shape \(3, 2\), expected \(2, 2\) \(2 observation",
        ),
        ({"state": np.zeros(2, np.float32)}, r"'observation\.state': got shape \(2,\), expected \(2, 2\)"),
        ({"state": [[0, 1], [2]]}, r"'observation\.state': not an array"),
        ({"state": np.array([[0, np.nan], [np.inf, 1]])}, r"'observation\.state': 2 values are not finite"),
        ({"state": np.full((2, 2), 1e300)}, r"'observation\.state': 4 values are not finite"),
        ({"state": np.full((2, 2), "1")}, r"'observation\.state': got dtype <U1, expected float32"),
        ({"state": np.zeros((2, 2), bool)}, r"'observation\.state': got dtype bool, expected float32"),
        ({"state": [[0.5, 1], [2, True]]}, r"'observation\.state': got true or false among numbers, expected float32"),
        ({"image": np.zeros((2, 4, 5, 3))}, r"'observation\.image': got dtype float64, expected uint8"),
        ({"image": np.full((2, 4, 5, 3), 256)}, r"'observation\.image': values outside uint8 \(0 to 255\)"),
        (
            {"image": np.zeros((2, 3, 4, 5), np.uint8)},
            r"'observation\.image': got shape \(2, 3, 4, 5\), expected \(2, 4, 5, 3\)",
        ),
        ({"gripper": np.full((2, 1), 2**40)}, r"'observation\.gripper': values outside int32"),
        ({"gripper": np.zeros((2, 1))}, r"'observation\.gripper': got dtype float64, expected int32"),
        ({"task": 3}, "'task': got int, expected a text"),
        ({"task": ["push", 3]}, "'task': got list, expected a text"),
        ({"task": ["push"] * 3}, "'task': got 3 texts, expected one for each of 2 steps"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(change, message):
    with pytest.raises(ContractError, match=message):
        CONTRACT.check_observation(fitting(**change))


def test_lists_and_whole_numbers_are_taken_for_a_float_feature():
    state = CONTRACT.check_observation(fitting(state=[[0, 1], [2, 3]]))["observation.state"]
    assert state.dtype == np.float32
    assert state.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_refused(text):
    with pytest.raises(ContractError, match="observation 'task': the text is empty, expected what to do"):
        CONTRACT.check_observation(fitting(task=text))


def test_one_text_stands_for_every_step():
    assert CONTRACT.check_observation(fitting(task="push"))["task"].tolist() == ["push", "push"]


def test_the_time_axis_may_be_left_out_only_where_one_step_is_seen():
    assert STATE.check_observation({"observation.state": [1, 2]})["observation.state"].tolist() == [[1, 2]]


def test_an_unknown_dtype_is_refused_when_the_feature_is_made():
    with pytest.raises(ContractError, match="dtype 'float16' is not one of float32"):
        Feature((2,), "float16")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"observation": {"image": Feature((2,), "float32")}},
            r"env gives no 'observation\.state', which the policy needs; it gives",
        ),
        (
            {"observation": {"observation.state": Feature((3,), "float32")}},
            r"'observation\.state' shape: policy has \(2,\), env has \(3,\)",
        ),
        (
            {"observation": {"observation.state": Feature((2,), "int32")}},
            r"'observation\.state' dtype: policy has float32",
        ),
        ({"action": Feature((7,), "float32")}, r"'action' shape: policy has \(2,\), env has \(7,\)"),
        ({"rate_hz": 20.0}, "rate_hz: policy has 10, env has 20"),
    ],
)
def test_two_contracts_that_differ_are_refused_by_key(other, message):
    same = {"observation": STATE.observation, "action": STATE.action, "rate_hz": 10.0}
    with pytest.raises(ContractError, match=message):
        STATE.check_same(Contract(**(same | other)), "policy", "env")


def test_units_and_names_are_compared_where_both_sides_know_them():
    def contract(unit: str, names: tuple[str, ...]) -> Contract:
        return Contract({}, Feature((2,), "float32", unit, names), 10.0)

    contract("px", ("x", "y")).check_same(contract("", ()), "policy", "env")
    with pytest.raises(ContractError, match="'action' unit: policy has px, env has m"):
        contract("px", ()).check_same(contract("m", ()), "policy", "env")
    with pytest.raises(ContractError, match="'action' names"):
        contract("px", ("x", "y")).check_same(contract("px", ("y", "x")), "policy", "env")


def test_an_environment_may_give_more_than_a_policy_sees():
    more = Contract({**STATE.observation, "extra": Feature((1,), "float32")}, STATE.action, 10.0)
    STATE.check_same(more, "policy", "env")
