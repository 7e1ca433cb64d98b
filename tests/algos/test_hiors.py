"""Which episodes Hi-ORS learns from, and what of them, by numbers that can be read off."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.algos.hiors import accepts, learned_rows, moves, targets
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import DatasetError
from rlsvc.spec.hiors import HiORSSpec

CONTRACT = Contract({"observation.state": Feature((2,), "float32")}, Feature((2,), "float32"), 10.0)


def episode(**columns):
    """Three steps and the final observation; nothing moves in the second step, in which a person acts."""
    return {
        "observation.state": np.array([[0, 0], [1, 0], [1, 0], [1, 3]], np.float32),
        "action": np.array([[1, 0], [0, 0], [0, 3], [0, 0]], np.float32),
        "reward": np.array([0, 0, 1, 0], np.float32),
        "intervention": np.array([False, True, False, False]),
        **columns,
    }


def learned(episode, **fields):
    return learned_rows(episode, HiORSSpec.model_validate({"min_length": 1, **fields}), CONTRACT)


@pytest.mark.parametrize(
    ("reward", "above", "min_length", "accepted"),
    [
        ([0, 0, 1], 0.5, 3, True),
        ([0, 0, 1], 0.5, 4, False),  # too short
        ([0, 1, 0], 0.5, 1, False),  # a reward on the way is not the outcome
        ([0, 0, 0.5], 0.5, 1, False),  # at the threshold is not above it
        ([0, 0, np.nan], 0.5, 1, False),
    ],
)
def test_an_episode_is_accepted_by_its_last_reward_and_its_length(reward, above, min_length, accepted):
    assert accepts(np.array(reward, np.float32), above, min_length) is accepted


def test_a_vector_moves_where_any_number_changes_by_more_than_the_threshold():
    rows = np.array([[0, 0], [0.5, 0], [0.5, 0.25], [0.5, 0.25]])
    assert moves(rows, 0.25).tolist() == [True, False, False]
    assert moves(rows, 0.2).tolist() == [True, True, False]


def test_the_target_is_what_was_executed_what_was_asked_for_or_where_the_robot_then_was():
    commanded = np.full((4, 2), 9, np.float32)
    assert targets(episode(), "action", "observation.state").tolist() == [[1, 0], [0, 0], [0, 3]]
    assert targets(episode(), "state", "observation.state").tolist() == [[1, 0], [1, 0], [1, 3]]
    assert targets(episode(commanded=commanded), "commanded", "").tolist() == [[9, 9]] * 3


def test_a_target_that_is_not_recorded_or_does_not_fit_is_refused_by_name():
    with pytest.raises(DatasetError, match=r"algo\.targets: commanded, which this environment does not record"):
        targets(episode(), "commanded", "")
    wide = episode(**{"observation.state": np.zeros((4, 6), np.float32)})
    with pytest.raises(DatasetError, match=r"'observation\.state' .* has shape \[6\], actions have \[2\]"):
        targets(wide, "state", "observation.state")


def test_a_rejected_episode_gives_nothing_and_an_accepted_one_all_its_steps_interventions_too():
    assert learned(episode(), reward_above=1.0) is None
    rows = learned(episode())
    assert rows["observation.state"].tolist() == [[0, 0], [1, 0], [1, 0]]
    assert rows["action"].tolist() == [[1, 0], [0, 0], [0, 3]]
    assert set(rows) == {"observation.state", "action"}


def test_steps_in_which_nothing_moves_are_dropped_with_their_targets():
    rows = learned(episode(), no_op={"of": "observation.state", "threshold": 0.1})
    assert rows["observation.state"].tolist() == [[0, 0], [1, 0]]
    assert rows["action"].tolist() == [[1, 0], [0, 3]]
    by_state = learned(episode(), no_op={"of": "observation.state", "threshold": 0.1}, targets="state")
    assert by_state["action"].tolist() == [[1, 0], [1, 3]]
    by_action = learned(episode(), no_op={"of": "action", "threshold": 1.0})
    assert by_action["action"].tolist() == [[0, 3]]


def test_the_step_that_ended_an_episode_stays_when_nothing_moves_in_it():
    still = episode(**{"observation.state": np.zeros((4, 2), np.float32)})
    rows = learned(still, no_op={"of": "observation.state", "threshold": 0.1})
    assert rows["action"].tolist() == [[0, 3]]


def test_a_vector_that_the_policy_does_not_see_is_refused_by_name():
    with pytest.raises(DatasetError, match=r"no 'observation\.joints'; the policy sees: observation\.state"):
        learned(episode(), no_op={"of": "observation.joints"})
