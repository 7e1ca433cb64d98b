"""Labels of steps for a reward classifier."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.labels import outcome_labels, reward_labels
from rlsvc.spec.data import DatasetSpec, DataSpec
from rlsvc.spec.reward_classifier import RewardLearningSpec


def test_the_last_steps_of_a_success_are_done_those_before_unknown_and_failures_are_not_done():
    labels = outcome_labels(np.array([6, 9]), np.array([True, False]), 2, success_steps=2, margin_steps=1)
    assert labels.tolist() == [0, 0, 0, -1, 1, 1, 0, 0, 0]


def test_a_success_shorter_than_its_end_is_done_throughout():
    assert outcome_labels(np.array([2]), np.array([True]), 2, success_steps=5, margin_steps=5).tolist() == [1, 1]


def test_stages_are_equal_parts_of_the_episodes_that_succeeded():
    labels = outcome_labels(np.array([6, 8]), np.array([True, False]), 3, success_steps=1, margin_steps=0)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, -1, -1]


def of(table, *, classes=2, success=None, data=None, **fields):
    data = DataSpec.model_validate({"datasets": [{"path": "x"}], "observation": ["i"], **(data or {})})
    labels = reward_labels(RewardLearningSpec.model_validate(fields), data, classes)
    dataset = DatasetSpec(path="x", success=success)
    return labels.columns(dataset), labels.of(table, dataset)


def table(**columns):
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    return EpisodeTable(arrays, np.array([2, 4]), 10.0, np.zeros(4, np.int32), [""], "some.npz")


def test_outcomes_come_from_the_dataset_or_from_the_last_step_s_flag():
    one = {"success_steps": 1, "margin_steps": 0}
    assert of(table(), success=True, **one)[1].tolist() == [0, 1, 0, 1]
    columns, labels = of(table(done=[0, 1, 1, 0]), data={"success": "done"}, **one)
    assert columns == ("done",)
    assert labels.tolist() == [0, 1, 0, 0]


def test_labels_that_are_given_are_taken_as_they_are():
    columns, labels = of(table(stage=[0, 2, -1, 1]), classes=3, label="stage")
    assert columns == ("stage",)
    assert labels.tolist() == [0, 2, -1, 1]


@pytest.mark.parametrize(
    ("columns", "fields", "message"),
    [
        ({}, {}, r"some\.npz: nothing says which episodes succeeded; name algo\.label"),
        ({"stage": [0, 2, 0, 1]}, {"label": "stage"}, r"'stage' has labels from 0 to 2, .* policy\.classes = 2"),
        ({"stage": [0, 0.5, 0, 1]}, {"label": "stage"}, r"'stage' has labels from 0.0 to 1.0, expected whole numbers"),
        ({"stage": [0, 0, 0, 1]}, {"label": "stagf"}, r"no column 'stagf' \(did you mean 'stage'\?\)"),
    ],
)
def test_labels_that_are_none_are_refused_by_name(columns, fields, message):
    with pytest.raises(DatasetError, match=message):
        of(table(**columns), **fields)
