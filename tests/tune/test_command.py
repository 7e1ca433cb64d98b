"""`rlsvc sweep`: its words, and what it says of sweeps on disk."""

import json

import pytest
from typer.testing import CliRunner

from rlsvc.cli import app
from rlsvc.core.errors import NotFoundError, SpecError
from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.store.tracking import JsonlTracker
from rlsvc.tune.trial import Trial


@pytest.fixture
def stored(tmp_path, base):
    """A sweep under way: a trial that is over, one that runs, one that failed, one to come."""
    space = {"algo.learning_rate": {"uniform": [0.1, 0.9]}}
    spec = validate(SweepSpec, {"name": "night", "run": ["x"], "space": space, "samples": 4})
    folder = tmp_path / "sweeps" / "night"
    for number, (status, score) in enumerate([("finished", 0.4), ("running", 0.7), ("failed", 0.9)]):
        reason = "TrialError: eval/max_reward is nan at step 20" if status == "failed" else ""
        Trial(number, {"algo.learning_rate": 0.1 * (number + 1)}, status, reason).save(folder)
        JsonlTracker(folder / "trials" / f"{number:05d}.jsonl").log(10, {"eval/max_reward": score})
    plain = {"sweep": spec.model_dump(mode="json"), "base": base.model_dump(mode="json")}
    (folder / "sweep.json").write_text(json.dumps(plain))
    (folder / "meter.json").write_text(json.dumps({"seconds": 7200, "gpu_seconds": 3600, "ended": ""}))
    return folder


def run(*words: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["sweep", *words])


def test_status_counts_trials_and_hours_and_shows_the_best_first(stored, tmp_path):
    done = run("status", "night", "--root", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "night: 1 finished, 1 running, 1 failed, 1 to come of 4 trials; 2.00 h, 1.00 GPU h" in done.output
    lines = [line for line in done.output.splitlines() if "│" in line]
    assert [line.split("│")[2].strip() for line in lines] == ["running", "finished", "failed"]
    assert "eval/max_reward is nan at step 20" in lines[2]


def test_best_and_report_speak_of_a_sweep_that_is_under_way(stored, tmp_path):
    done = run("best", "night", "--root", str(tmp_path))
    assert "1 (trial_00001)" in done.output
    assert f"rlsvc train {stored / 'best.yaml'}" in done.output
    done = run("report", "night", "--root", str(tmp_path))
    assert str(stored / "report" / "index.html") in done.output
    assert "trial_00002" in (stored / "report" / "index.html").read_text()


@pytest.mark.parametrize("verb", ["status", "report", "best", "promote"])
def test_a_sweep_that_never_was_is_answered_with_those_that_were(stored, tmp_path, verb):
    done = run(verb, "day", "--root", str(tmp_path))
    assert isinstance(done.exception, NotFoundError)
    assert "no sweep 'day'" in str(done.exception)
    assert "There are: night." in str(done.exception)


def test_promote_says_when_no_trial_has_a_bundle_yet(stored, tmp_path):
    done = run("promote", "night", "--root", str(tmp_path))
    assert "sweep 'night' has no bundle" in str(done.exception)


def test_check_tries_the_space_and_runs_nothing(tmp_path):
    space = tmp_path / "space.yaml"
    text = f"run: [experiment=pusht_demo, root={tmp_path}]\nspace:\n  algo.learning_rate: {{uniform: [0.1, 0.2]}}\n"
    space.write_text(text)
    done = run(str(space), "samples=3", "--check")
    assert "3 configurations" in done.output
    assert "The space fits the run" in done.output
    assert not (tmp_path / "sweeps").exists()
    space.write_text(text.replace("learning_rate", "learning_rat"))
    done = run("--check", str(space))
    assert isinstance(done.exception, SpecError)
    assert "Did you mean 'algo.learning_rate'?" in str(done.exception)
