"""A trial's process: what it reports, records, and how it goes on after a kill."""

from dataclasses import replace

import pytest

from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.trial import Trial, TrialError, load_trials, run_trial, trial_run

VALUES = {"algo.learning_rate": 0.5}


def sweep(**changes) -> SweepSpec:
    space = {"algo.learning_rate": {"uniform": [0.1, 0.9]}}
    return validate(SweepSpec, {"name": "s", "run": ["x"], "space": space, **changes})


def steps_heard(reported):
    return [report["step"] for report in reported if "done" not in report]


def begin(folder, run, step):
    """What a run has on disk once it has written a checkpoint."""
    run_dir = folder / run.project / run.name
    (run_dir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
    (run_dir / "spec.yaml").touch()


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
    points = [(10, 0.1), (20, 0.4), (30, 0.3)]
    *heard, last = reported
    assert heard == [{"step": step, "units": step, "eval/max_reward": value} for step, value in points]
    assert last == {**heard[-1], "done": True}
    (trial,) = load_trials(tmp_path, "eval/max_reward")
    assert trial.seconds > 0
    assert replace(trial, seconds=0) == Trial(
        3, VALUES, "finished", bundle=str(tmp_path / "b"), attempts=1, session="", history=points
    )
    assert trial.best(sweep()) == (20, 0.4)


def test_a_trial_that_is_over_repeats_its_reports_and_does_not_train_again(tmp_path, base):
    calls, reported = [], []
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)], calls), lambda report: None)
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.9)], calls), reported.append, session="next")
    assert len(calls) == 1
    assert steps_heard(reported) == [10]


def test_a_killed_trial_goes_on_from_its_checkpoint_in_the_same_folder(tmp_path, base):
    class Killed(BaseException):
        pass

    def killed(run, on_metrics):
        assert not run.resume
        begin(tmp_path, run, 10)
        on_metrics(10, {"eval/max_reward": 0.1})
        raise Killed

    with pytest.raises(Killed):
        run_trial(tmp_path, 0, VALUES, sweep(), base, killed, lambda report: None)
    calls, reported = [], []
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(20, 0.2)], calls), reported.append, session="next")
    assert (calls[0].resume, calls[0].overwrite) == (True, False)
    assert steps_heard(reported) == [10, 20]
    assert load_trials(tmp_path, "eval/max_reward")[0].history == [(10, 0.1), (20, 0.2)]


def test_a_killed_trial_without_a_checkpoint_begins_again_in_its_own_folder(tmp_path, base):
    (tmp_path / "demo" / "trial_00000").mkdir(parents=True)
    run = trial_run(tmp_path, Trial(0, VALUES), sweep(), base)
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
    assert steps_heard(reported) == [10]
    assert "Traceback" in (tmp_path / "trials" / "00000.log").read_text()


def test_a_metric_that_never_comes_fails_the_trial_and_names_the_nearest(tmp_path, base):
    def train(run, on_metrics):
        on_metrics(1, {"eval/max_rewards": 0.1, "train/loss": 1.0})

    with pytest.raises(TrialError, match=r"never reported 'eval/max_reward'\. Did you mean 'eval/max_rewards'\?"):
        run_trial(tmp_path, 0, VALUES, sweep(), base, train, lambda report: None)


def test_a_trial_whose_thread_is_ended_pauses_and_goes_on_where_it_was_without_telling_the_scheduler_twice(
    tmp_path, base
):
    # The driver knows whether it was stopped or is to wait.
    def report(metrics):
        raise SystemExit(0)

    def train(run, on_metrics):
        begin(tmp_path, run, 10)
        on_metrics(10, {"eval/max_reward": 0.1})

    with pytest.raises(SystemExit):
        run_trial(tmp_path, 0, VALUES, sweep(), base, train, report, session="one")
    (trial,) = load_trials(tmp_path, "eval/max_reward")
    assert (trial.status, trial.history) == ("paused", [(10, 0.1)])
    calls, reported = [], []
    train = trainer([(10, 0.1), (20, 0.2)], calls)
    run_trial(tmp_path, 0, VALUES, sweep(), base, train, reported.append, session="one")
    assert calls[0].resume
    assert steps_heard(reported) == [20]


def test_a_trial_that_the_driver_stopped_stays_stopped(tmp_path, base):
    def report(metrics):
        (trial,) = load_trials(tmp_path, "eval/max_reward")
        trial.status = "stopped"
        trial.save(tmp_path)
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)]), report)
    assert load_trials(tmp_path, "eval/max_reward")[0].status == "stopped"


def test_a_trial_that_failed_is_tried_again_and_one_with_a_nan_is_not(tmp_path, base):
    def broken(run, on_metrics):
        raise MemoryError("full")

    for attempt in (1, 2):
        with pytest.raises(MemoryError):
            run_trial(tmp_path, 0, VALUES, sweep(), base, broken, lambda report: None, session="one")
        assert load_trials(tmp_path, "eval/max_reward")[0].attempts == attempt
    calls = []
    with pytest.raises(TrialError, match="MemoryError: full"):  # one retry is allowed
        run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)], calls), calls.append, session="one")
    assert not calls
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)]), lambda report: None, session="resumed")
    assert load_trials(tmp_path, "eval/max_reward")[0].status == "finished"

    nan = trainer([(10, float("nan"))], calls)
    for _ in range(2):
        with pytest.raises(TrialError, match="eval/max_reward is nan at step 10"):
            run_trial(tmp_path, 1, VALUES, sweep(), base, nan, lambda report: None, session="one")
    assert len(calls) == 1


def test_the_mean_over_the_seeds_that_came_so_far_is_what_the_scheduler_hears(tmp_path, base):
    spec, reported, calls = sweep(seeds=2), [], []
    run_trial(tmp_path, 0, VALUES, spec, base, trainer([(10, 0.2), (20, 0.4)], calls), reported.append)
    run_trial(tmp_path, 1, VALUES, spec, base, trainer([(10, 0.4), (30, 0.9)], calls), reported.append)
    assert [report["eval/max_reward"] for report in reported if "done" not in report] == pytest.approx(
        [0.2, 0.4, 0.3, 0.9]
    )
    assert [run.seed for run in calls] == [0, 1]


def test_other_objectives_are_recorded_as_they_were_when_the_metric_came(tmp_path, base):
    spec = sweep(objectives={"train/loss": "min"})

    def train(run, on_metrics):
        for step, loss in ((5, 0.9), (10, 0.7)):
            on_metrics(step, {"train/loss": loss})
        on_metrics(10, {"eval/max_reward": 0.5})
        on_metrics(15, {"train/loss": 0.1})

    run_trial(tmp_path, 0, VALUES, spec, base, train, lambda report: None)
    assert load_trials(tmp_path, "eval/max_reward")[0].objectives == {10: {"train/loss": 0.7}}
    with pytest.raises(TrialError, match=r"never reported 'train/loss'"):
        run_trial(tmp_path, 1, VALUES, spec, base, lambda run, on: on(1, {"eval/max_reward": 1.0}), lambda report: None)


def test_a_population_is_judged_at_steps_whose_checkpoint_is_there(tmp_path, base):
    spec, order = sweep(scheduler={"name": "pbt", "interval": 10}, samples=2), []

    def train(run, on_metrics):
        for step in (10, 20):
            on_metrics(step, {"eval/max_reward": 0.1})
            order.append(f"checkpoint {step}")
            begin(tmp_path, run, step)
            on_metrics(step, {"progress/checkpoint": step})

    run_trial(
        tmp_path,
        0,
        VALUES,
        spec,
        base,
        train,
        lambda report: order.append(f"report {report['step']}{' done' * ('done' in report)}"),
    )
    assert order == ["checkpoint 10", "report 10", "checkpoint 20", "report 20", "report 20 done"]


def test_a_trial_of_a_population_goes_on_from_anothers_checkpoint_and_journal_with_its_own_values(tmp_path, base):
    spec = sweep(scheduler={"name": "pbt", "interval": 10}, samples=2)

    def train(run, on_metrics):
        begin(tmp_path, run, 10 + run.algo.batch_size)
        (tmp_path / run.project / run.name / "journal").mkdir(exist_ok=True)
        (tmp_path / run.project / run.name / "journal" / "0.journal").write_text(run.name)
        on_metrics(10, {"eval/max_reward": 0.1})

    for number in (0, 1):
        run_trial(tmp_path, number, VALUES, spec, base, train, lambda report: None, session="one")
    mine, donor = (tmp_path / "demo" / name for name in ("trial_00000", "trial_00001"))
    (donor / "checkpoints" / "300").mkdir()
    (donor / "checkpoints" / "300" / "meta.json").write_text("of 1")
    calls = []
    changed = {"algo.learning_rate": 0.25}
    run_trial(
        tmp_path, 0, changed, spec, base, trainer([(310, 0.3)], calls), lambda report: None, session="one", donor=1
    )
    assert (calls[0].resume, calls[0].algo.learning_rate) == (True, 0.25)
    assert [path.name for path in (mine / "checkpoints").iterdir()] == ["300"]
    assert (mine / "checkpoints" / "300" / "meta.json").read_text() == "of 1"
    journal = mine / "journal" / "0.journal"
    assert journal.read_text() == "trial_00001"
    assert not journal.samefile(donor / "journal" / "0.journal")
    assert "learning_rate: 0.25" in (mine / "spec.yaml").read_text()
    assert load_trials(tmp_path, "eval/max_reward")[0].values == changed


def test_the_run_of_a_trial_lies_in_the_sweep_tracks_where_the_base_run_does_and_is_not_registered(
    tmp_path, base, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracked = base.replace(tracking={"trackers": ["mlflow"]})
    run = trial_run(tmp_path / "sweeps" / "s", Trial(1, VALUES), sweep(), tracked, parent="p1")
    assert (run.root, run.name, run.group) == (str(tmp_path / "sweeps" / "s"), "trial_00001", "s")
    assert run.tracking.mlflow_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert not run.tracking.register_bundle
    assert run.tracking.parent_run == "p1"
    assert run.algo.learning_rate == 0.5


def test_a_record_of_other_values_is_not_taken_for_this_trial(tmp_path, base):
    run_trial(tmp_path, 0, VALUES, sweep(), base, trainer([(10, 0.1)]), lambda report: None)
    with pytest.raises(TrialError, match="was begun with"):
        run_trial(tmp_path, 0, {"algo.learning_rate": 0.7}, sweep(), base, trainer([]), lambda report: None)
