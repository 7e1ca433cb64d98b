import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, DatasetError
from rlsvc.data.normalize import Normalizer, Stats, compute_stats

FEATURES = {"observation.state": Feature((2,), "float32"), "action": Feature((1,), "float32")}
A = {
    "observation.state": np.array([[0.0, 10.0], [4.0, 30.0], [2.0, 20.0]], np.float32),
    "action": np.array([[-1.0], [3.0], [1.0]], np.float32),
}
B = {
    "observation.state": np.array([[100.0, -5.0], [300.0, 5.0]], np.float32),
    "action": np.array([[0.0], [8.0]], np.float32),
}


def fit(modes=None, columns=None) -> Normalizer:
    return Normalizer.fit(columns or {"default": A}, FEATURES, modes or {})


def contract(state: tuple[int, ...] = (2,), action: tuple[int, ...] = (1,), **more: Feature) -> Contract:
    observation = {"observation.state": Feature(state, "float32"), **more}
    return Contract(observation, Feature(action, "float32"), 10.0)


def test_statistics_are_exact_on_the_data():
    stats = compute_stats(np.arange(101, dtype=np.float32)[:, None])
    assert (stats.min, stats.max, stats.mean, stats.q01, stats.q99, stats.count) == (0, 100, 50, 1, 99, 101)
    assert stats.std == pytest.approx(np.sqrt((101**2 - 1) / 12))


def test_min_max_takes_the_smallest_to_minus_one_and_the_largest_to_one():
    out = fit().normalize("observation.state", A["observation.state"])
    assert out.dtype == np.float32
    assert out.tolist() == [[-1, -1], [1, 1], [0, 0]]


def test_mean_std_gives_zero_mean_and_unit_deviation():
    out = fit({"observation.state": "mean_std"}).normalize("observation.state", A["observation.state"])
    np.testing.assert_allclose(out.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(out.std(0), 1, atol=1e-6)


def test_quantile_takes_the_1_and_99_percent_quantiles_to_minus_one_and_one():
    column = np.concatenate([np.arange(101.0), [1e6]])[:, None].astype(np.float32)
    columns = {"default": {**A, "action": column}}
    normalizer = fit({"action": "quantile"}, columns)
    low, high = np.quantile(column, [0.01, 0.99])
    edges = np.array([[low], [high], [(low + high) / 2]])
    np.testing.assert_allclose(normalizer.normalize("action", edges), [[-1], [1], [0]], atol=1e-6)


def test_identity_changes_nothing():
    assert np.array_equal(fit({"action": "identity"}).normalize("action", A["action"]), A["action"])


def test_images_go_from_0_255_to_minus_one_and_one():
    normalizer = Normalizer.fit({"default": {}}, {"image": Feature((1, 1, 3), "uint8")}, {})
    image = np.array([[[[0, 255, 51]]]], np.uint8)
    out = normalizer.normalize("image", image)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, [[[[-1, 1, -0.6]]]], atol=1e-6)


@pytest.mark.parametrize("mode", ["min_max", "mean_std", "quantile", "identity"])
def test_unnormalising_is_the_inverse(mode):
    normalizer = fit({"observation.state": mode})
    x = np.random.default_rng(0).uniform(-50, 50, (20, 2)).astype(np.float32)
    np.testing.assert_allclose(
        normalizer.unnormalize("observation.state", normalizer.normalize("observation.state", x)), x, atol=1e-4
    )


@pytest.mark.parametrize("mode", ["min_max", "mean_std", "quantile"])
@pytest.mark.parametrize("value", [0.0, 7.0, -1e5, 1e-9])
def test_a_constant_dimension_is_neutral(mode, value):
    columns = {"default": {**A, "action": np.full((5, 1), value, np.float32)}}
    normalizer = fit({"action": mode}, columns)
    assert normalizer.normalize("action", columns["default"]["action"]).tolist() == [[0.0]] * 5
    # What leaves the constant keeps its size: it is not blown up by a division by almost nothing.
    np.testing.assert_allclose(normalizer.normalize("action", np.float32([[value + 2]])), [[2]], rtol=1e-2)


def test_each_group_has_its_own_statistics():
    normalizer = fit(columns={"a": A, "b": B})
    assert normalizer.groups == ("a", "b")
    assert normalizer.normalize("observation.state", B["observation.state"], 1).tolist() == [[-1, -1], [1, 1]]
    assert normalizer.normalize("observation.state", A["observation.state"], 0).tolist() == [[-1, -1], [1, 1], [0, 0]]


@pytest.mark.parametrize("xp", [np, jnp])
def test_a_group_for_each_row_equals_the_groups_one_by_one(xp):
    normalizer = fit(columns={"a": A, "b": B})
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    group = np.array([0, 1, 1, 0], np.int32)

    def mapped(x, group):
        normal = normalizer.normalize("observation.state", x, group)
        return normal, normalizer.unnormalize("observation.state", normal, group)

    normal, back = (jax.jit(mapped) if xp is jnp else mapped)(xp.asarray(x), xp.asarray(group))
    for row, g in enumerate(group):
        np.testing.assert_allclose(
            normal[row], normalizer.normalize("observation.state", x[row], int(g)), rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(back, x, atol=1e-4)


def test_a_group_is_found_by_name_and_must_be_named_where_there_are_several():
    normalizer = fit(columns={"a": A, "b": B})
    assert (normalizer.group_index("b"), fit().group_index(None)) == (1, 0)
    with pytest.raises(BundleError, match=r"normaliser group: got None, expected one of a, b"):
        normalizer.group_index(None)
    with pytest.raises(BundleError, match=r"normaliser group: got 'c', expected one of a, b"):
        normalizer.group_index("c")


def test_json_round_trip_is_exact():
    columns = {"a": {k: v / np.float32(3) for k, v in A.items()}, "b": B}
    normalizer = Normalizer.fit(columns, FEATURES, {"action": "mean_std"})
    again = Normalizer.from_json(json.loads(json.dumps(normalizer.to_json())))
    assert again.to_json() == normalizer.to_json()
    for group in (0, 1):
        for key in FEATURES:
            x = columns["ab"[group]][key]
            assert np.array_equal(again.normalize(key, x, group), normalizer.normalize(key, x, group))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused_by_feature_and_row(bad):
    column = A["action"].copy()
    column[1] = bad
    with pytest.raises(DatasetError, match=r"'action': row 1 is not finite"):
        fit(columns={"default": {**A, "action": column}})


def test_statistics_of_nothing_are_refused():
    with pytest.raises(DatasetError, match=r"'observation.state': statistics need at least one step"):
        fit(columns={"default": {**A, "observation.state": np.zeros((0, 2), np.float32)}})


def test_a_mode_for_a_feature_that_is_not_there_is_refused():
    with pytest.raises(DatasetError, match=r"data.normalization names 'actions', which is not a feature"):
        fit({"actions": "mean_std"})


def test_texts_are_passed_over():
    normalizer = Normalizer.fit({"default": A}, {**FEATURES, "task": Feature((), "str")}, {})
    assert set(normalizer.modes) == set(FEATURES)
    normalizer.check_contract(contract(task=Feature((), "str")))


def test_statistics_that_lack_a_key_are_refused_not_skipped():
    """lerobot#4446."""
    with pytest.raises(
        BundleError, match=r"no statistics for 'observation.velocity'; it has: action, observation.state"
    ):
        fit().check_contract(contract(**{"observation.velocity": Feature((2,), "float32")}))
    with pytest.raises(BundleError, match=r"no statistics for 'observation.velocity'"):
        fit().normalize("observation.velocity", np.zeros(2))


def test_statistics_under_another_name_are_refused():
    """wall-x#113: the trained key and the served key must be one."""
    renamed = Normalizer.fit({"default": {"state": A["observation.state"], "action": A["action"]}},
                             {"state": FEATURES["observation.state"], "action": FEATURES["action"]}, {})  # fmt: skip
    with pytest.raises(BundleError, match=r"no statistics for 'observation.state'; it has: action, state"):
        renamed.check_contract(contract())


def test_statistics_for_a_key_that_the_contract_has_not_are_refused():
    with pytest.raises(BundleError, match=r"statistics for 'observation.state', which the contract does not name"):
        fit().check_contract(Contract({}, Feature((1,), "float32"), 10.0))


def test_statistics_7_wide_for_a_6_joint_robot_are_refused():
    """openpi#455, openpi#1025."""
    columns = {"default": {**A, "observation.state": np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)}}
    normalizer = Normalizer.fit(columns, FEATURES, {})
    with pytest.raises(
        BundleError,
        match=r"'mean' of 'observation\.state' \(group default\): got shape \(7,\), the contract says \(6,\)",
    ):
        normalizer.check_contract(contract(state=(6,)))


def test_one_wrong_width_among_the_statistics_of_a_key_is_refused_too():
    stats = fit().to_json()
    stats["stats"]["action"][0]["q99"] = [1.0, 1.0]
    with pytest.raises(BundleError, match=r"'q99' of 'action'"):
        Normalizer.from_json(stats).check_contract(contract())


def test_an_unknown_mode_or_a_group_without_statistics_is_refused():
    with pytest.raises(BundleError, match=r"mode of 'action': got 'minmax', expected one of mean_std"):
        fit({"action": "minmax"})
    with pytest.raises(BundleError, match=r"no statistics for 'action' in every group"):
        Normalizer(("a", "b"), {"action": "min_max"}, {"action": (compute_stats(A["action"]),)})


def test_statistics_from_json_keep_every_bit():
    stats = compute_stats(np.random.default_rng(0).normal(size=(7, 3)))
    again = Stats.from_json(json.loads(json.dumps(stats.to_json())))
    assert all(
        np.array_equal(getattr(again, n), getattr(stats, n)) for n in ("mean", "std", "min", "max", "q01", "q99")
    )


def test_the_identity_normaliser_covers_its_features():
    normalizer = Normalizer.identity({"observation.state": FEATURES["observation.state"], "action": FEATURES["action"]})
    normalizer.check_contract(contract())
    assert np.array_equal(normalizer.normalize("action", A["action"]), A["action"])


def test_from_a_contract_bounded_actions_become_minus_1_to_1_and_discrete_ones_stay():
    bounded = Contract({}, Feature((2,), "float32", low=(0.0, -4.0), high=(2.0, 4.0)), 10.0)
    action = np.array([[0.5, 4.0]], np.float32)
    np.testing.assert_allclose(Normalizer.from_contract(bounded).normalize("action", action), [[-0.5, 1.0]])
    discrete = Contract({}, Feature((), "int64", low=(0.0,), high=(1.0,)), 10.0)
    assert Normalizer.from_contract(discrete).modes["action"] == "identity"
