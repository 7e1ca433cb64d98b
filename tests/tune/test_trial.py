"""A trial's process: what it reports, records, and how it goes on after a kill."""

import pytest

from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.trial import Trial, TrialError, load_trials, run_trial, trial_run

VALUES = {"algo.learning_rate": 0.5}


def sweep() -> SweepSpec:
    return validate(SweepSpec, {"name": "s", "run": ["x"], "space": {"algo.learning_rate": {"uniform": [0.1, 0.9]}}})


def trainer(rewards, calls=None, bundle=None):
    def train(run, on_metrics):
        if calls is not None:
            calls.append(run)
        for step, reward in rewards:
            on_metrics(step, {"train/loss": 1.0})
            on_metrics(step, {"eval/max_reward": reward})
        return bundle

    return train


def test_a_finished_trial_records_its_values_history_and_bundle(tmp_path, base):
    reported = []
    train = trainer([(10, 0.1), (20, 0.4), (30, 0.3)], bundle=tmp_path / "b")
    run_trial(tmp_path, 3, VALUES, sweep(), base, train, reported.append)
    assert reported == [{"step": step, "eval/max_reward": value} for step, value in ((10, 0.1), (20, 0.4), (30, 0.3))]
    (trial,) = load_trials(tmp_path, "eval/max_reward")
    assert trial == Trial(3, VALUES, "finished", "", str(tmp_path / "b"), [(10, 0.1), (20, 0.4), (30, 0.3)])
    assert trial.best(sweep()) == (20, 0.4)


def test_a_trial_that_is_over_repeats_its_reports_and_does_not_train_again(tmp_path, base):
    calls, reported = [], []
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)], calls), lambda report: None)
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.9)], calls), reported.append)
    assert len(calls) == 1
    assert reported == [{"step": 10, "eval/max_reward": 0.1}]


def test_a_killed_trial_goes_on_from_its_checkpoint_in_the_same_folder(tmp_path, base):
    class Killed(BaseException):
        pass

    def killed(run, on_metrics):
        assert not run.resume
        (tmp_path / run.project / run.name / "checkpoints" / "10").mkdir(parents=True)
        on_metrics(10, {"eval/max_reward": 0.1})
        raise Killed

    with pytest.raises(Killed):
        run_trial(tmp_path, 0, VALUES, sweep(), base, killed, lambda report: None)
    calls, reported = [], []
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(20, 0.2)], calls), reported.append)
    assert (calls[0].resume, calls[0].overwrite) == (True, False)
    assert [report["step"] for report in reported] == [10, 20]
    assert load_trials(tmp_path, "eval/max_reward")[0].history == [(10, 0.1), (20, 0.2)]


def test_a_killed_trial_without_a_checkpoint_begins_again_in_its_own_folder(tmp_path, base):
    (tmp_path / "demo" / "trial_00000").mkdir(parents=True)
    run = trial_run(tmp_path, "trial_00000", VALUES, sweep(), base)
    assert (run.resume, run.overwrite) == (False, True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_fails_the_trial_by_that_reason(tmp_path, base, value):
    # ray#6659
    reported = []
    with pytest.raises(TrialError, match=r"eval/max_reward is .* at step 20"):
        run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1), (20, value)]), reported.append)
    (trial,) = load_trials(tmp_path, "eval/max_reward")
    assert trial.status == "failed"
    assert f"eval/max_reward is {value} at step 20" in trial.reason
    assert [report["step"] for report in reported] == [10]
    assert "Traceback" in (tmp_path / "trials" / "00000.log").read_text()


def test_a_metric_that_never_comes_fails_the_trial_and_names_the_nearest(tmp_path, base):
    def train(run, on_metrics):
        on_metrics(1, {"eval/max_rewards": 0.1, "train/loss": 1.0})

    with pytest.raises(TrialError, match=r"never reported 'eval/max_reward'\. Did you mean 'eval/max_rewards'\?"):
        run_trial(tmp_path, 0, VALUES, sweep(), base, train, lambda report: None)


def test_a_trial_that_the_scheduler_ends_is_stopped_not_failed(tmp_path, base):
    def report(metrics):
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)]), report)
    (trial,) = load_trials(tmp_path, "eval/max_reward")
    assert (trial.status, trial.history) == ("stopped", [(10, 0.1)])


def test_the_run_of_a_trial_lies_in_the_sweep_tracks_where_the_base_run_does_and_is_not_registered(
    tmp_path, base, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked = base.replace(tracking={"trackers": ["mlflow"]})
    run = trial_run(tmp_path / "sweeps" / "s", "trial_00001", VALUES, sweep(), tracked)
    assert (run.root, run.name, run.group) == (str(tmp_path / "sweeps" / "s"), "trial_00001", "s")
    assert run.tracking.mlflow_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert not run.tracking.register_bundle
    assert run.algo.learning_rate == 0.5


def test_a_record_of_other_values_is_not_taken_for_this_trial(tmp_path, base):
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)]), lambda report: None)
    with pytest.raises(TrialError, match="was begun with"):
        run_trial(tmp_path, 0, {"algo.learning_rate": 0.7}, sweep(), base, trainer([]), lambda report: None)
