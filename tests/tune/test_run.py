"""Sweeps over Ray Tune, with trials that do not train."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray.cloudpickle

from rlsvc.core.errors import BusyError, NotFoundError, SpecError
from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.run import run_sweep, wait_for_others
from rlsvc.tune.trial import load_trials

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # trials' processes cannot import a test
pytestmark = pytest.mark.ray


def sweep(**changes) -> SweepSpec:
    space = {"algo.learning_rate": {"loguniform": [1e-4, 0.9]}}
    return validate(SweepSpec, {"name": "s", "run": ["x"], "space": space, "samples": 4, "concurrency": 2, **changes})


def calls(folder: Path) -> list[str]:
    return (folder / "calls.log").read_text().split()


@pytest.mark.slow
def test_trials_run_in_other_processes_from_the_spec_and_the_best_one_is_found(ray_cluster, base, tmp_path):
    def train(run, on_metrics):
        import os

        assert os.getpid() != driver
        bundle = Path(run.root) / run.project / run.name / "bundles" / "30"
        bundle.mkdir(parents=True)
        (bundle / "bundle.json").write_text(run.name)
        for step in (10, 20, 30):
            on_metrics(step, {"train/loss": 1.0, "eval/max_reward": run.algo.batch_size / 1000 + step / 1000})
        return bundle

    import os

    driver = os.getpid()
    over = []
    lock = threading.Lock()  # cannot be pickled, as a console cannot

    def on_trial(trial):
        with lock:
            over.append(trial)

    space = {"algo.batch_size": {"grid": [8, 32, 16]}}
    report = run_sweep(sweep(space=space, samples=1), base, train=train, on_trial=on_trial)
    assert sorted(trial.status for trial in over) == ["finished"] * 3
    assert report.complete
    assert report.best.values == {"algo.batch_size": 32}
    assert (report.best_bundle / "bundle.json").read_text() == report.best.name
    assert "batch_size: 32" in report.best_yaml.read_text()
    with pytest.raises(BusyError, match=r"exists already.*--resume"):
        run_sweep(sweep(space=space, samples=1), base, train=train)
    with pytest.raises(SpecError, match=r"sweep\.samples: was 1, got 2"):
        run_sweep(sweep(space=space, samples=2), base, train=train, resume=True)
    again = run_sweep(sweep(space=space, samples=1, retries=2, concurrency=1), base, train=train, resume=True)
    assert again.trials == report.trials  # what a sweep may cost can change; nothing ran again


def test_asha_stops_the_worse_trials_early_and_lets_the_best_write_its_bundle(ray_cluster, base, tmp_path):
    def train(run, on_metrics):
        for step in range(10, 101, 10):
            on_metrics(step, {"eval/max_reward": run.algo.batch_size * step})
        return Path(run.root) / "bundle"  # reached only by a trial that was not stopped, also not at its last report

    space = {"algo.batch_size": {"grid": [64, 32, 16, 8]}}  # the best first: the later ones are worse at every rung
    asha = {"name": "asha", "grace": 10, "reduction": 2}
    report = run_sweep(sweep(space=space, samples=1, concurrency=1, scheduler=asha), base, train=train)
    assert {trial.values["algo.batch_size"]: trial.status for trial in report.trials} == {
        64: "finished", 32: "stopped", 16: "stopped", 8: "stopped"
    }  # fmt: skip
    assert report.best.bundle == str(report.folder / "bundle")
    assert max(trial.history[-1][0] for trial in report.trials if trial.status == "stopped") < 100


@pytest.mark.slow
def test_a_nan_and_a_dead_trial_are_reported_with_their_reasons_and_the_sweep_goes_on(ray_cluster, base):
    # ray#6659, #11670: after one NaN, ASHA stopped nothing any more
    def train(run, on_metrics):
        import os
        import signal

        for step in range(10, 101, 10):
            if run.seed == 1:
                on_metrics(step, {"eval/max_reward": float("nan")})
            if run.seed == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            on_metrics(step, {"eval/max_reward": -run.seed * step})

    asha = {"name": "asha", "grace": 10, "reduction": 2}
    spec = sweep(space={"seed": {"grid": [0, 1, 2, 3, 4]}}, samples=1, concurrency=1, scheduler=asha, retries=1)
    report = run_sweep(spec, base, train=train)
    status = {trial.values["seed"]: trial.status for trial in report.trials}
    assert status == {0: "finished", 1: "failed", 2: "failed", 3: "stopped", 4: "stopped"}
    reasons = {trial.values["seed"]: trial.reason for trial in report.trials}
    assert "eval/max_reward is nan at step 10" in reasons[1]
    assert "its process died" in reasons[2]
    assert {trial.values["seed"]: trial.attempts for trial in report.trials} == {0: 1, 1: 1, 2: 2, 3: 1, 4: 1}
    assert report.best.values == {"seed": 0}
    assert report.complete


def train_by_learning_rate(run, on_metrics):
    """A run of ten steps of 10 that writes checkpoints; its reward is step times learning rate."""
    folder = Path(run.root) / run.project / run.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").touch()
    done = max((int(path.name) for path in folder.glob("checkpoints/[0-9]*")), default=0) if run.resume else 0
    with (Path(run.root) / "calls.log").open("a") as file:
        file.write(f"{run.name}:{done}:{run.algo.learning_rate}\n")
    for step in range(done + 10, 101, 10):
        on_metrics(step, {"eval/max_reward": run.algo.learning_rate * step})
        (folder / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        on_metrics(step, {"progress/checkpoint": step})


@pytest.fixture
def stepwise(base):
    """A run that is judged and written every 10 steps."""
    return base.replace(evaluation={"interval": 10}, checkpoint={"interval": 10}, log_interval=10)


@pytest.mark.slow
def test_a_trial_that_was_killed_goes_on_from_its_checkpoint_and_no_report_is_heard_twice(ray_cluster, stepwise):
    def train(run, on_metrics):
        import os
        import signal

        def once(step, metrics):
            mark = Path(run.root) / "killed"
            if step == 50 and "progress/checkpoint" in metrics and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            on_metrics(step, metrics)

        train_by_learning_rate(run, once)

    report = run_sweep(sweep(samples=1, concurrency=1), stepwise, train=train)
    (trial,) = report.trials
    assert (trial.status, trial.attempts) == ("finished", 2)
    assert [step for step, _ in trial.history] == list(range(10, 101, 10))
    assert [call.split(":")[1] for call in calls(report.folder)] == ["0", "50"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pbt", "pb2"])
def test_a_population_replaces_the_worse_by_copies_of_the_better_and_all_come_to_the_end(ray_cluster, stepwise, name):
    space = {"algo.learning_rate": {"uniform": [0.01, 0.9]}}
    spec = sweep(space=space, samples=4, concurrency=None, scheduler={"name": name, "interval": 10})
    report = run_sweep(spec, stepwise, train=train_by_learning_rate)
    assert [trial.status for trial in report.trials] == ["finished"] * 4
    # By its own steps or by another's: one that took over a run at its end has nothing left to report.
    assert all((report.folder / "demo" / trial.name / "checkpoints" / "100").is_dir() for trial in report.trials)
    rates = {}
    for call in calls(report.folder):
        run, _, rate = call.split(":")
        rates.setdefault(run, []).append(float(rate))
    assert any(len(set(tried)) > 1 for tried in rates.values())
    assert report.complete


@pytest.mark.slow
def test_hyperband_halves_its_brackets_and_lets_the_best_go_on_from_their_checkpoints(ray_cluster, stepwise):
    spec = sweep(samples=8, concurrency=None, scheduler={"name": "hyperband", "grace": 10, "reduction": 3})
    report = run_sweep(spec, stepwise, train=train_by_learning_rate)
    status = [trial.status for trial in report.trials]
    assert set(status) == {"finished", "stopped"}
    assert report.best.status == "finished"
    assert report.best.values["algo.learning_rate"] == max(t.values["algo.learning_rate"] for t in report.trials)
    for trial in report.trials:
        assert [step for step, _ in trial.history] == list(range(10, trial.history[-1][0] + 1, 10))


@pytest.mark.slow
def test_median_stopping_ends_what_is_below_the_median(ray_cluster, base):
    def train(run, on_metrics):
        for step in range(10, 101, 10):
            on_metrics(step, {"eval/max_reward": run.algo.batch_size * step})

    space = {"algo.batch_size": {"grid": [64, 32, 16, 8]}}
    median = {"name": "median", "grace": 10, "min_trials": 2}
    report = run_sweep(sweep(space=space, samples=1, concurrency=1, scheduler=median), base, train=train)
    assert [trial.status for trial in report.trials] == ["finished", "finished", "stopped", "stopped"]


@pytest.mark.slow
def test_rules_end_a_trial_or_the_whole_sweep_and_a_budget_pauses_what_runs(ray_cluster, stepwise):
    space = {"algo.learning_rate": {"grid": [0.1, 0.2, 0.9, 0.3]}}
    rules = {"steps": 30, "sweep_reached": 20.0}
    spec = sweep(space=space, samples=1, concurrency=1, stop=rules)
    report = run_sweep(spec, stepwise, train=train_by_learning_rate)
    assert [trial.history[-1][0] for trial in report.trials] == [30, 30, 30]
    assert report.complete
    assert "stop.sweep_reached" in report.page.read_text()

    spec = sweep(name="budget", samples=2, concurrency=1, budget={"hours": 1e-6})
    report = run_sweep(spec, stepwise, train=train_by_learning_rate)
    assert not report.complete
    more = sweep(name="budget", samples=2, concurrency=1, budget={"hours": 1.0})
    report = run_sweep(more, stepwise, train=train_by_learning_rate, resume=True)
    assert [trial.status for trial in report.trials] == ["finished", "finished"]
    assert report.complete


@pytest.mark.slow
def test_seeds_of_each_configuration_are_judged_by_their_mean_by_searcher_and_report(ray_cluster, stepwise):
    def train(run, on_metrics):
        on_metrics(100, {"eval/max_reward": run.algo.learning_rate + run.seed})

    tpe = {"name": "tpe", "startup": 2}
    report = run_sweep(sweep(samples=3, seeds=2, searcher=tpe), stepwise.replace(seed=4), train=train)
    assert [trial.status for trial in report.trials] == ["finished"] * 6
    for each in report.found:
        rate = each.values["algo.learning_rate"]
        assert each.scores["eval/max_reward"] == pytest.approx(rate + 4.5)
    assert len({each.values["algo.learning_rate"] for each in report.found}) == 3
    assert "seed: 5" in report.best_yaml.read_text()  # of the better seed


def driver(tmp_path: Path, *, resume: bool, address: str | None = None) -> subprocess.Popen:
    """A driver in a process of its own whose trials take turns of a second, in this Ray cluster or one of its own."""
    where = (
        f"ray.init({address!r}, log_to_driver=False)" if address else "ray.init(num_cpus=2, include_dashboard=False)"
    )
    program = f"""
import os, sys, time
from pathlib import Path
import ray
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.run import run_sweep

folder = Path({str(tmp_path)!r})

def train(run, on_metrics):
    with (folder / "calls.log").open("a") as file:
        file.write(f"{{run.name}}:{{run.algo.learning_rate}}:{{int(run.resume)}}\\n")
    (Path(run.root) / run.project / run.name / "checkpoints" / "1").mkdir(parents=True, exist_ok=True)
    for step in (1, 2):
        time.sleep(0.4)
        on_metrics(step, {{"eval/max_reward": run.algo.learning_rate}})
    return None

{where}
run_sweep(
    SweepSpec.model_validate_json((folder / "sweep.json").read_text()),
    RunSpec.model_validate_json((folder / "base.json").read_text()),
    resume={resume}, train=train, on_trial=lambda trial: print(trial.name, flush=True),
)
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_and_resume(tmp_path: Path, base, spec: SweepSpec, address: str | None, kill) -> None:
    """Kills a sweep in mid-run, goes on with it, and holds it to have lost nothing."""
    (tmp_path / "sweep.json").write_text(spec.model_dump_json())
    (tmp_path / "base.json").write_text(base.model_dump_json())
    first = driver(tmp_path, resume=False, address=address)
    assert first.stdout is not None
    over = [first.stdout.readline().strip() for _ in range(3)]
    kill(first)
    first.communicate()
    assert all(name.startswith("trial_") for name in over)
    folder = tmp_path / "sweeps" / "s"
    before = load_trials(folder, spec.metric)
    finished = {trial.name: trial for trial in before if trial.status == "finished"}
    assert set(over) <= set(finished)
    time.sleep(2)  # the dead driver's trials end with it

    called = calls(tmp_path)
    second = driver(tmp_path, resume=True, address=address)
    output, errors = second.communicate(timeout=240)
    assert second.returncode == 0, output + errors
    trials = load_trials(folder, spec.metric)
    assert [trial.status for trial in trials] == ["finished"] * 6
    assert len({trial.values["algo.learning_rate"] for trial in trials}) == 6
    assert {trial.name: trial for trial in trials if trial.name in finished} == finished
    again = [call.split(":")[0] for call in calls(tmp_path)[len(called) :]]
    assert sorted(again) == sorted({trial.name for trial in trials} - set(finished))
    values = {trial.name: trial.values for trial in trials}
    assert all(values[trial.name] == trial.values for trial in before)  # the search did not draw anew what had begun


@pytest.mark.slow
@pytest.mark.parametrize("searcher", [{"name": "random"}, {"name": "tpe", "startup": 2}], ids=["random", "tpe"])
def test_a_sweep_whose_driver_was_killed_resumes_and_loses_no_finished_trial(ray_cluster, base, tmp_path, searcher):
    # ray#30861: what was finished and what was still to come were lost on restore
    import ray

    address = ray.get_runtime_context().gcs_address
    spec = sweep(samples=6, searcher=searcher)
    kill_and_resume(tmp_path, base, spec, address, lambda process: process.send_signal(signal.SIGKILL))


@pytest.mark.slow
def test_a_sweep_whose_head_was_killed_with_all_that_ran_on_it_resumes(base, tmp_path):
    import psutil

    def kill(process):
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert any("gcs_server" in each.name() for each in everything)
        for each in everything:
            each.kill()

    kill_and_resume(tmp_path, base, sweep(samples=6), None, kill)


@pytest.mark.slow
def test_a_real_sweep_from_the_command_line_ends_with_a_registered_policy_and_a_run_that_trains_as_it_is(
    ray_cluster, tmp_path, monkeypatch
):
    from typer.testing import CliRunner

    from rlsvc.cli import app
    from rlsvc.spec.compose import compose
    from rlsvc.store.bundle import read_bundle
    from rlsvc.store.mlflow_store import open_store
    from rlsvc.store.registry import Registry

    space = tmp_path / "space.yaml"
    space.write_text(f"""\
name: real
run:
  - experiment=pusht_demo
  - root={tmp_path}
  - total_steps=4
  - log_interval=2
  - learner.updates_per_call=2
  - algo.batch_size=8
  - algo.schedule.warmup_steps=1
  - policy.backbone.down_dims=[16,32]
  - env.max_steps=16
  - evaluation.interval=2
  - evaluation.episodes=1
  - evaluation.videos=false
  - checkpoint.interval=2
space:
  algo.learning_rate: {{loguniform: [1e-4, 1e-3]}}
samples: 2
concurrency: 1
""")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def rlsvc(*words: str):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*words])
        assert done.exit_code == 0, f"{words}: {done.output}{done.exception!r}"
        return done.output

    output = rlsvc("sweep", str(space))
    assert "[2/2] trial_0000" in output
    assert "registered as: models:/rlsvc-real/1" in output
    folder = tmp_path / "sweeps" / "real"
    assert read_bundle(folder / "best_bundle").policy["name"] == "diffusion"
    rates = [trial.values["algo.learning_rate"] for trial in load_trials(folder, "eval/max_reward")]
    best = compose([str(folder / "best.yaml")])
    assert best.algo.learning_rate in rates

    client = open_store(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("rlsvc").experiment_id])
    (parent,) = (run for run in runs if run.info.run_name == "real")
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.info.run_name for run in children) == ["trial_00000", "trial_00001"]
    assert {float(run.data.params["algo.learning_rate"]) for run in children} == set(rates)
    logged = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert {"index.html", "curves.png", "trials.csv", "best.yaml"} <= logged
    (version,) = Registry(tmp_path).versions("rlsvc-real")
    assert version.run_id in {run.info.run_id for run in children}

    assert "2 finished of 2 trials" in rlsvc("sweep", "status", "real", "--root", str(tmp_path))
    shown = rlsvc("sweep", "best", "real", "--root", str(tmp_path))
    assert f"rlsvc train {folder / 'best.yaml'}" in shown
    assert "algo.learning_rate" in shown
    assert "index.html" in rlsvc("sweep", "report", "real", "--root", str(tmp_path))
    promoted = rlsvc("sweep", "promote", "real", "--alias", "arm", "--root", str(tmp_path))
    assert "models:/rlsvc-real@arm is version 1" in promoted
    assert Registry(tmp_path).resolve("models:/rlsvc-real@arm").is_dir()

    again = rlsvc("sweep", str(space), "--resume")
    assert "registered as: models:/rlsvc-real/1" in again  # the same bundle is the same version
    assert "real-best" in rlsvc("train", str(folder / "best.yaml"), "--local")


@pytest.mark.slow
def test_trials_with_learner_groups_and_workers_of_their_own_do_not_deadlock_on_a_full_cluster(ray_cluster, tmp_path):
    from rlsvc.spec.compose import compose

    words = [
        "experiment=sac_pendulum", f"root={tmp_path}", "tracking.trackers=[]", "replay.capacity=500",
        "phases.0.duration_steps=40", "phases.1.duration_steps=40", "log_interval=20", "algo.batch_size=16",
        "rollout.workers=2", "rollout.envs_per_worker=1", "rollout.cpus_per_worker=0.25", "learner.cpus_per_rank=0.3",
        "evaluation.interval=40", "evaluation.episodes=1", "evaluation.cpus_per_worker=0.1", "evaluation.videos=false",
        "checkpoint.interval=40", "env.max_steps=10", "learner.updates_per_call=4",
    ]  # fmt: skip
    space = {"algo.learning_rate": {"loguniform": [1e-4, 1e-3]}}
    # Each holds 0.91 CPUs of the two: two at once, and what they need later is there for them.
    spec = sweep(space=space, samples=3, concurrency=3, metric="eval/return", retries=0)
    report = run_sweep(spec, compose(words))
    assert [(trial.status, trial.reason) for trial in report.trials] == [("finished", "")] * 3
    assert report.best_bundle is not None


@pytest.mark.slow
def test_short_trials_run_in_as_many_processes_as_there_is_room_for(ray_cluster, base):
    # Tune gives a trial whose process is starting to one that became free, and ends the starting one.
    def train(run, on_metrics):
        import os

        with (Path(run.root) / "calls.log").open("a") as file:
            file.write(f"{os.getpid()}\n")
        on_metrics(1, {"eval/max_reward": 1.0})

    report = run_sweep(sweep(samples=10, concurrency=None), base, train=train)
    pids = calls(report.folder)
    assert len(pids) == 10
    assert len(set(pids)) == 2


def test_a_process_waits_for_the_others_only_once_and_not_for_ever(tmp_path):
    began = time.monotonic()
    wait_for_others(tmp_path / "up", 2, timeout_s=0.3)
    assert time.monotonic() - began >= 0.3
    wait_for_others(tmp_path / "up", 2, timeout_s=1e6)  # it has waited
    assert len(list((tmp_path / "up").iterdir())) == 1


def test_a_sweep_that_another_process_runs_is_busy(ray_cluster, base, tmp_path):
    import fcntl

    folder = tmp_path / "sweeps" / "s"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="being run by another process"):
            run_sweep(sweep(), base)


def test_a_trial_that_asks_for_more_gpus_than_the_cluster_has_is_refused_at_once(ray_cluster, base):
    with pytest.raises(SpecError, match=r"resources: a trial asks for 2 GPU \(1 CPU, 2 GPU\), the cluster has 0"):
        run_sweep(sweep(resources={"gpu": 2}), base)
    with pytest.raises(SpecError, match=r"a trial asks for 5\.01 CPU .*the cluster has 2"):
        run_sweep(sweep(space={"learner.ranks": {"choice": [1, 4]}, "algo.batch_size": {"choice": [8]}}), base)


def test_resuming_a_sweep_that_never_was_lists_those_that_were(base, tmp_path):
    (tmp_path / "sweeps" / "other").mkdir(parents=True)
    (tmp_path / "sweeps" / "other" / "sweep.json").write_text("{}")
    with pytest.raises(NotFoundError, match=r"no sweep 's' to resume.*There are: other"):
        run_sweep(sweep(), base, resume=True)
