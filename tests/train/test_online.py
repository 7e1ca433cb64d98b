"""Online runs end to end: without Ray, and over a real Ray with a learner group and rollout actors."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlsvc.core.errors import UserError
from rlsvc.data.journal import Journal
from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.run import run_dir, train

MakeSpec = Callable[..., RunSpec]
YAML = """
name: tiny
log_interval: 100
env: {name: gymnasium, id: Pendulum-v1}
policy: {name: tdmpc2, size: 1M, encoder_dim: 16, hidden_dim: 16, latent_dim: 16, num_q: 2, episode_length: 200,
         plan: false}
algo: {name: tdmpc2, batch_size: 16}
replay: {capacity: 4000}
rollout: {workers: 2, envs_per_worker: 2, chunk_steps: 25, cpus_per_worker: 0.4}
phases:
  - {name: seed, type: online, acting: random, hooks: {collect: 1}, duration_steps: 200}
  - {name: train, type: online, hooks: {collect: 4, update: 1}, duration_steps: 400}
learner: {updates_per_call: 25, cpus_per_rank: 0.5}
checkpoint: {interval: 400}
evaluation: {interval: null, episodes: 1, parallel: 1, metric: return, videos: false, cpus_per_worker: 0.5}
tracking: {trackers: []}
"""


@pytest.fixture
def make_online(tmp_path: Path) -> MakeSpec:
    """A run that takes seconds; takes overrides."""
    file = tmp_path / "tiny.yaml"
    file.write_text(YAML)

    def make(*overrides: str) -> RunSpec:
        return compose([str(file), f"root={tmp_path}", *overrides])

    return make


def test_an_online_run_collects_what_its_phases_say_and_makes_the_updates_owed_to_it(make_online):
    spec = make_online()
    result = train(spec, local=True)
    assert result.step == 600
    assert read_bundle(result.bundle).policy["name"] == "tdmpc2"
    last = read_metrics(run_dir(spec) / "metrics.jsonl")[-1]
    assert (last["progress/env_steps"], last["progress/updates"]) == (600, 100)
    assert "eval/return" in result.metrics
    with Journal(run_dir(spec) / "journal", read_only=True) as journal:
        assert sum(chunk.num_steps for chunk in journal.read()) == 600


def test_the_same_seed_gives_the_same_online_run(make_online):
    first, second = (train(make_online(f"name={name}"), local=True) for name in ("a", "b"))
    assert read_bundle(first.bundle).id == read_bundle(second.bundle).id


def test_a_stopped_online_run_goes_on_with_its_counters_and_its_replay(make_online):
    stop = threading.Event()
    train(make_online(), local=True, stop=stop, on_metrics=lambda step, _: stop.set() if step >= 300 else None)
    folder = run_dir(make_online())
    at = checkpoint.steps(folder / "checkpoints")[-1]
    assert 300 <= at < 600
    counters = checkpoint.load_meta(folder / "checkpoints", at)["scheduler"]
    result = train(make_online("resume=true"), local=True)
    assert result.step == 600
    last = read_metrics(folder / "metrics.jsonl")[-1]
    assert (last["progress/env_steps"], last["progress/updates"]) == (600, 100)
    assert counters["updates"] < 100
    with Journal(folder / "journal", read_only=True) as journal:
        assert {incarnation for _, incarnation, _ in journal.ids()} == {0, 1}


def test_a_run_is_not_resumed_with_another_number_of_environments(make_online):
    stop = threading.Event()
    train(make_online(), local=True, stop=stop, on_metrics=lambda step, _: stop.set())
    with pytest.raises(UserError, match=r"rollout\.workers x rollout\.envs_per_worker is 6, the run has 4 .*stream"):
        train(make_online("resume=true", "rollout.workers=3"), local=True)


@pytest.mark.usefixtures("ray_cluster")
def test_more_workers_than_cpus_are_refused_by_name_before_anything_starts(make_online):
    with pytest.raises(UserError, match=r"64 rollout workers x 1.* the cluster has 2.*rollout\.workers"):
        train(make_online("rollout.workers=64", "rollout.cpus_per_worker=1"))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("words", [(), ("rollout.mode=async",), ("rollout.mode=async", "rollout.inference=central")])
def test_rollout_actors_and_a_learner_group_make_a_run_together(make_online, words):
    spec = make_online(*words)
    result = train(spec)
    assert result.step == 600
    last = read_metrics(run_dir(spec) / "metrics.jsonl")[-1]
    assert last["progress/updates"] >= 100
    assert last["progress/env_steps"] >= 600


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_goes_on_when_a_worker_and_a_rank_are_killed(make_online):
    spec = make_online("rollout.mode=async", "phases.1.duration_steps=6000", "checkpoint.interval=1000")
    killed: list[str] = []

    def kill(step: int, _: dict[str, float]) -> None:
        for name, after in (("_RayWorker", 1000), ("RayTrainWorker", 3000)):
            if step >= after and name not in killed:
                own = psutil.Process().children(recursive=True)
                victims = [p for p in own if name in " ".join(p.cmdline())]
                if victims:
                    os.kill(victims[0].pid, signal.SIGKILL)
                    killed.append(name)
                    time.sleep(0.1)

    result = train(spec, on_metrics=kill)
    assert killed == ["_RayWorker", "RayTrainWorker"]
    assert result.step == 6200
    with Journal(run_dir(spec) / "journal", read_only=True) as journal:
        steps = [(c.columns["episode"], c.columns["step"]) for c in journal.read()]
        rows = [row for episode, step in steps for row in zip(episode.tolist(), step.tolist(), strict=True)]
    assert len(rows) == len(set(rows))
