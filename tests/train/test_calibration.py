"""Temperature and precision of a reward classifier, by numbers that can be read off."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.core.errors import BundleError
from rlsvc.train.calibration import calibrate, cross_entropy, fit_temperature, from_bytes, softmax, to_bytes

HALF, SURE = [0.0, 0.0], [0.0, 4.0]


def test_too_sure_a_classifier_is_cooled_to_how_often_it_is_right():
    # Log-odds of 4 (98 %), right three times of four, whose log-odds are ln 3: tau = 4 / ln 3.
    logits = np.array([[0, 4]] * 4, np.float32)
    tau = fit_temperature(logits, np.array([1, 1, 1, 0]))
    assert tau == pytest.approx(4 / np.log(3), rel=0.02)
    assert softmax(logits / tau)[0, 1] == pytest.approx(0.75, abs=0.01)


def test_cross_entropy_is_in_nats():
    assert cross_entropy(np.array([[0.0, 0.0]]), np.array([1])) == pytest.approx(np.log(2))


def test_precision_counts_episodes_by_the_first_time_they_are_called_done():
    logits = np.array(
        [
            *(HALF, HALF, SURE),  # called done when it is
            *(SURE, HALF, SURE),  # called done too early
            *(HALF, HALF, HALF),  # never called done, though it was
            *(HALF, HALF),  # never called done, and it was not
        ],
        np.float32,
    )
    label = np.array([0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0])
    episode = np.repeat([0, 3, 6, 9], [3, 3, 3, 2])
    found = calibrate(logits, label, episode, threshold=0.6)
    assert (found.says_done, found.episodes, found.precision) == (2, 4, 0.5)
    assert found.recall == pytest.approx(2 / 3)
    # Wilson's interval of 1 in 2: 0.5 +- 1.96 / (1 + 1.96^2 / 2) * sqrt(0.25 / 2 + 1.96^2 / 16).
    assert found.precision_low == pytest.approx(0.0945, abs=1e-3)
    assert found.precision_high == pytest.approx(0.9055, abs=1e-3)


def test_a_classifier_that_never_says_done_has_no_precision():
    found = calibrate(np.zeros((2, 2), np.float32), np.array([0, 1]), np.array([0, 0]), threshold=0.9)
    assert (found.precision, found.precision_low, found.precision_high) == (None, 0.0, 1.0)
    assert "calibration_precision" not in found.metrics()
    assert found.recall == 0.0


def test_it_survives_as_a_file_and_another_file_is_refused_by_name():
    found = calibrate(np.zeros((2, 2), np.float32), np.array([0, 1]), np.array([0, 0]), threshold=0.9)
    assert from_bytes(to_bytes(found), "x") == found
    with pytest.raises(BundleError, match=r"b/calibration\.json: not the calibration"):
        from_bytes(b"{}", "b/calibration.json")
