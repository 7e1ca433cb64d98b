"""The learning curve of a run."""

from __future__ import annotations

import json

from rlsvc.train.plots import write_learning_curve


def test_a_run_that_was_stopped_before_its_first_log_has_no_curve(tmp_path):
    missing = tmp_path / "metrics.jsonl"
    assert write_learning_curve(missing, tmp_path / "curve.png", "run", returns=False, online=False) is None
    assert not (tmp_path / "curve.png").exists()


def test_losses_and_scores_make_a_picture(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "eval/success": 0.5}]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_learning_curve(metrics, tmp_path / "plots" / "curve.png", "run", returns=False, online=False)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
