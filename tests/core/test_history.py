"""ObservationHistory: the window that a policy sees."""

import numpy as np
import pytest

from rlsvc.core.history import ObservationHistory


def test_the_first_steps_repeat_the_oldest_observation():
    history = ObservationHistory(3)
    assert history.append({"x": np.array([1.0])})["x"].tolist() == [[1.0], [1.0], [1.0]]
    assert history.append({"x": np.array([2.0])})["x"].tolist() == [[1.0], [1.0], [2.0]]
    assert history.append({"x": np.array([3.0])})["x"].tolist() == [[1.0], [2.0], [3.0]]
    assert history.append({"x": np.array([4.0])})["x"].tolist() == [[2.0], [3.0], [4.0]]


def test_reset_forgets_the_episode_before():
    history = ObservationHistory(2)
    history.append({"x": 1.0})
    history.reset()
    assert len(history) == 0
    assert history.append({"x": 5.0})["x"].tolist() == [5.0, 5.0]


def test_a_buffer_that_the_robot_writes_again_does_not_change_the_past():
    history, buffer = ObservationHistory(2), np.zeros(2, np.float32)
    history.append({"x": buffer})
    buffer[:] = 9
    assert history.append({"x": buffer})["x"].tolist() == [[0, 0], [9, 9]]


def test_dtypes_and_texts_are_kept():
    window = ObservationHistory(2).append({"image": np.zeros((4, 4, 3), np.uint8), "task": "push"})
    assert window["image"].dtype == np.uint8
    assert window["image"].shape == (2, 4, 4, 3)
    assert window["task"].tolist() == ["push", "push"]


def test_an_observation_that_changes_within_an_episode_is_refused():
    history = ObservationHistory(2)
    history.append({"x": np.zeros(2)})
    with pytest.raises(ValueError, match=r"'x' changed its shape: \(2,\), then \(3,\)"):
        history.append({"x": np.zeros(3)})
    with pytest.raises(ValueError, match="keys changed"):
        history.append({"y": np.zeros(2)})


def test_an_empty_history_has_no_window():
    with pytest.raises(ValueError, match="empty"):
        ObservationHistory(2).window()
    with pytest.raises(ValueError, match="n_obs_steps"):
        ObservationHistory(0)
