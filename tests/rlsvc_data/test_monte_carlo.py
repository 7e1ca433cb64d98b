import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.monte_carlo import Outcomes, is_positive, monte_carlo_returns, n_step_advantages, read_outcomes
from rlsvc.spec.data import DataSpec
from rlsvc.spec.value_function import ReturnsSpec


def table(lengths=(3, 2), **columns) -> EpisodeTable:
    steps = sum(lengths)
    arrays = {name: np.asarray(column).reshape(steps, -1) for name, column in columns.items()}
    return EpisodeTable(arrays, np.cumsum(lengths), 10.0, np.zeros(steps, np.int32), ["a"], "here")


def names(**fields) -> DataSpec:
    return DataSpec.model_validate({"datasets": [{"path": "here"}], "observation": ["state"], **fields})


def outcomes(reward, lengths, truncated) -> Outcomes:
    return Outcomes(np.asarray(reward, np.float64), np.cumsum(lengths), np.asarray(truncated))


def test_returns_are_discounted_sums_over_the_rest_of_their_own_episode():
    returns, known = monte_carlo_returns(outcomes([1, 2, 4, 10, 20], (3, 2), [False, False]), ReturnsSpec(discount=0.5))
    # 4; 2 + 4/2; 1 + 4/2 | 20; 10 + 20/2
    assert returns.tolist() == [3, 4, 4, 20, 20]
    assert returns.dtype == np.float32
    assert known.all()


@pytest.mark.parametrize(("discount", "expected"), [(1, [7, 6, 4]), (0, [1, 2, 4])])
def test_a_discount_of_one_adds_everything_and_of_zero_nothing(discount, expected):
    returns, _ = monte_carlo_returns(outcomes([1, 2, 4], (3,), [False]), ReturnsSpec(discount=discount))
    assert returns.tolist() == expected


def test_the_steps_of_a_cut_episode_are_dropped_and_those_of_others_are_not():
    cut = outcomes([1, 2, 4, 10, 20], (3, 2), [True, False])
    _, known = monte_carlo_returns(cut, ReturnsSpec(discount=0.5))
    assert known.tolist() == [False, False, False, True, True]


def test_a_cut_is_taken_for_the_end_where_it_is_to_be_kept():
    returns, known = monte_carlo_returns(outcomes([1, 2, 4], (3,), [True]), ReturnsSpec(discount=0.5, truncated="keep"))
    assert returns.tolist() == [3, 4, 4]
    assert known.all()


def test_steps_of_a_cut_episode_stay_where_what_is_missing_weighs_no_more_than_the_tolerance():
    cut = outcomes([1, 1, 1, 1], (4,), [True])
    # What follows the cut weighs 1/16, 1/8, 1/4, 1/2 in these returns.
    _, known = monte_carlo_returns(cut, ReturnsSpec(discount=0.5, tolerance=0.25))
    assert known.tolist() == [True, True, True, False]


def test_without_a_discount_nothing_is_missing_from_a_cut_episode():
    _, known = monte_carlo_returns(outcomes([1, 1], (2,), [True]), ReturnsSpec(discount=0))
    assert known.all()


def test_the_bonus_goes_to_the_last_step_of_the_episodes_whose_last_step_says_success():
    # The second episode had success on the way and lost it.
    found = read_outcomes(
        table(reward=[1.0, 1, 1, 1, 1], success=[False, False, True, True, False]),
        names(reward="reward", success="success"),
        success_bonus=5,
    )
    assert found.reward.tolist() == [1, 1, 6, 1, 1]


def test_a_dataset_of_successes_needs_no_column_and_its_flag_goes_before_the_column():
    data = names(success="success")
    failed = table(success=[0, 0, 0, 0, 0])
    assert read_outcomes(failed, data, 2, success=True).reward.tolist() == [0, 0, 2, 0, 2]
    assert read_outcomes(table(), data, 2, success=False).reward.tolist() == [0] * 5


@pytest.mark.parametrize(
    ("fields", "truncated"),
    [
        ({"reward": "reward"}, [True, True]),
        ({"reward": "reward", "success": "success"}, [False, False]),
        ({"reward": "reward", "terminated": "done"}, [True, False]),
        ({"reward": "reward", "terminated": "done", "success": "success"}, [True, False]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_an_end_is_a_cut_unless_the_flag_says_otherwise_or_the_outcome_is_known(fields, truncated):
    columns = table(reward=[1.0] * 5, success=[0, 0, 1, 0, 0], done=[0, 1, 0, 0, 1])
    assert read_outcomes(columns, names(**fields), 1.0).truncated.tolist() == truncated


@pytest.mark.parametrize("fields", [{}, {"success": "success"}])
def test_returns_that_would_all_be_zero_are_refused(fields):
    with pytest.raises(DatasetError, match=r"here: every return would be 0; name the reward's column \(data\.reward\)"):
        read_outcomes(table(success=[1] * 5), names(**fields), success_bonus=0)


def test_columns_that_are_missing_or_no_numbers_are_refused_by_name():
    with pytest.raises(DatasetError, match=r"here: no column 'rewards' \(did you mean 'reward'\?\)"):
        read_outcomes(table(reward=[1.0] * 5), names(reward="rewards"), 0)
    with pytest.raises(DatasetError, match=r"here: 'reward' is float64 \(2,\) a step, expected one number or flag"):
        read_outcomes(table(reward=[[1.0, 2.0]] * 5), names(reward="reward"), 0)


VALUES = np.array([10.0, 20.0, 40.0])


@pytest.mark.parametrize(
    ("truncated", "n", "advantage", "known"),
    [
        # 1 + V'/2 - V, and 1 - V where it ended for good.
        (False, 1, [1, 1, -39], [True, True, True]),
        # 1 + 1/2 + 1/4 - 10; 1 + 1/2 - 20; 1 - 40.
        (False, 3, [-8.25, -18.5, -39], [True, True, True]),
        # The third observation is the final one: 1 + 40/2 - 20, and after it nothing is recorded.
        (True, 1, [1, 1, 0], [True, True, False]),
        # 1 + 1/2 + 40/4 - 10.
        (True, 3, [1.5, 1, 0], [True, True, False]),
    ],
)
def test_n_step_advantages_bootstrap_from_a_cut_and_not_from_a_termination(truncated, n, advantage, known):
    found = n_step_advantages(outcomes([1, 1, 1], (3,), [truncated]), VALUES, 0.5, n)
    assert found[0].tolist() == advantage
    assert found[1].tolist() == known


def test_no_value_and_no_reward_leaks_from_the_next_episode():
    both = outcomes([1, 1, 1, 1e6, 1e6], (3, 2), [False, False])
    advantage, _ = n_step_advantages(both, np.array([*VALUES, 1e9, 1e9]), 0.5, 2)
    # 1 + 1/2 + 40/4 - 10; 1 + 1/2 - 20; 1 - 40.
    assert advantage[:3].tolist() == [1.5, -18.5, -39]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.randoms(use_true_random=False),
)
def test_advantages_over_whole_terminated_episodes_are_returns_less_values(lengths, discount, random):
    steps = sum(lengths)
    reward, values = (np.array([float(random.randint(-4, 4)) for _ in range(steps)]) for _ in range(2))
    ended = outcomes(reward, lengths, [False] * len(lengths))
    advantage, known = n_step_advantages(ended, values, discount, 6)
    returns, _ = monte_carlo_returns(ended, ReturnsSpec(discount=discount))
    assert known.all()
    np.testing.assert_allclose(advantage, returns - values, atol=1e-5)


def test_each_task_has_a_quantile_of_its_own_steps():
    advantage = np.array([1.0, 2, 3, 4, 5, 100, 200, 300, 400, 500])
    task = np.repeat([0, 1], 5)
    keep = is_positive(advantage, np.ones(10, bool), task, quantile=0.5)
    assert keep.tolist() == [False, False, True, True, True] * 2


def test_what_is_not_known_is_never_good_enough_and_sets_no_bound():
    advantage, known = np.array([1.0, 2, 3, 1e9, 1e9]), np.array([True, True, True, False, False])
    task = np.zeros(5, int)
    assert is_positive(advantage, known, task, quantile=0.5).tolist() == [False, True, True, False, False]
    assert is_positive(advantage, known, task, threshold=0.0).tolist() == [True, True, True, False, False]
    assert not is_positive(advantage, np.zeros(5, bool), task, quantile=0.5).any()


def test_a_threshold_is_the_same_for_every_task_and_is_good_enough_itself():
    keep = is_positive(np.array([-1.0, 0, 1]), np.ones(3, bool), np.array([0, 1, 1]), threshold=0.0)
    assert keep.tolist() == [False, True, True]
