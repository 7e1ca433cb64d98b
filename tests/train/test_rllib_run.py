"""Runs of RLlib's algorithms on a real Ray: trained, stored, resumed, survived, served."""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 - before RLlib

# isort: split

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from safetensors.numpy import load_file
from starlette.testclient import TestClient

from rlsvc.backends.rllib import SKELETON, STATE
from rlsvc.backends.rllib_runner import RLlibRunner
from rlsvc.backends.rllib_state import pack
from rlsvc.cli import main
from rlsvc.core.errors import UserError
from rlsvc.runner import PolicyRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings
from rlsvc.spec.compose import compose, compose_file
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.sweep import SweepSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.rllib import make_trainer, run_rllib
from rlsvc.train.run import _env_contract, train
from rlsvc.train.standalone import evaluate_bundle
from rlsvc.tune.run import run_sweep

pytestmark = pytest.mark.usefixtures("ray_cluster")
SMALL = [
    "policy.config.fcnet_hiddens=[8]", "checkpoint.interval=100000", "evaluation.interval=null",
    "evaluation.episodes=2", "evaluation.parallel=2", "evaluation.videos=false", "tracking.trackers=[]",
    "device=cpu", "log_interval=1",
    "rollout.cpus_per_worker=0.25", "rollout.envs_per_worker=2", "evaluation.cpus_per_worker=0.25",
]  # fmt: skip
TINY = {
    "ppo": ["experiment=rllib_ppo_cartpole", "algo.config.train_batch_size_per_learner=64",
            "algo.config.minibatch_size=32", "algo.config.num_epochs=2", "total_steps=128"],
    "appo": ["experiment=rllib_appo_cartpole", "algo.config.train_batch_size_per_learner=100", "total_steps=200",
             "+algo.config.min_sample_timesteps_per_iteration=100",
             "+algo.config.use_env_runner_state_server=false"],
    "impala": ["experiment=rllib_impala_cartpole", "algo.config.train_batch_size_per_learner=100",
               "total_steps=200", "+algo.config.min_sample_timesteps_per_iteration=100",
               "+algo.config.use_env_runner_state_server=false"],
    "sac": ["experiment=rllib_sac_pendulum", "algo.config.train_batch_size_per_learner=16", "total_steps=40",
            "algo.config.num_steps_sampled_before_learning_starts=20",
            "+algo.config.min_sample_timesteps_per_iteration=30",
            "algo.config.replay_buffer_config.type=PrioritizedEpisodeReplayBuffer",
            "algo.config.replay_buffer_config.capacity=1024"],
    "cql": ["experiment=rllib_cql_pendulum", "algo.config.train_batch_size_per_learner=16", "algo.config.bc_iters=2",
            "learner.updates_per_call=3", "total_steps=6"],
    "marwil": ["experiment=rllib_marwil_pendulum", "algo.config.train_batch_size_per_learner=150",
               "learner.updates_per_call=3", "total_steps=6"],
    "bc": ["experiment=rllib_bc_pusht", "algo.config.train_batch_size_per_learner=16", "learner.updates_per_call=3",
           "total_steps=6", "data.max_train_episodes=3"],
}  # fmt: skip


class Told:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.results: list[tuple[str, int, dict]] = []

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.append((step, metrics))

    def on_result(self, order, result) -> None:
        self.results.append((order.kind, order.step, result))


@pytest.fixture
def make_spec(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(root)
    return lambda kind, *words: compose([*TINY[kind], *SMALL, f"root={tmp_path}", f"name={kind}", *words])


def run(spec, folder: Path, stop: threading.Event | None = None) -> tuple[int, Told]:
    told = Told()
    return run_rllib(spec, folder, _env_contract(spec), told, stop or threading.Event()), told


def observed(runner, count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        name: rng.normal(size=(count, 1, *feature.shape)).astype(np.float32)
        for name, feature in runner.contract.observation.items()
    }


@pytest.fixture(scope="module")
def cartpole(ray_cluster, tmp_path_factory: pytest.TempPathFactory, root: Path):
    """A tiny PPO run through all of `train`: tracked, evaluated, checkpointed, registered."""
    folder = tmp_path_factory.mktemp("cartpole")
    spec = compose([
        *TINY["ppo"], *SMALL, f"root={folder}", "name=cartpole", "tracking.trackers=[mlflow, tensorboard]",
        "algo.observation_filter=mean_std",
    ])  # fmt: skip
    told: dict[str, float] = {}
    result = train(spec, on_metrics=lambda step, metrics: told.update(metrics))
    return spec, result, told


def test_a_run_trains_evaluates_tracks_and_registers_as_every_other(cartpole):
    _, result, told = cartpole
    assert result.step >= 128
    assert {
        "train/total_loss",
        "train/policy_loss",
        "collect/steps_per_s",
        "eval/return",
        "progress/env_steps",
    } <= told.keys()
    assert np.isfinite(list(told.values())).all()
    assert result.registered == "models:/rlsvc-cartpole/1"
    assert list((result.run_dir / "tensorboard").glob("events*"))
    assert read_metrics(result.run_dir / "metrics.jsonl")[-1]["progress/env_steps"] == result.step
    assert checkpoint.steps(result.run_dir / "checkpoints") == [result.step]
    assert read_bundle(result.bundle).run["step"] == result.step


def test_nothing_that_a_run_leaves_is_a_pickle(cartpole):
    _, result, _ = cartpole
    kept = result.run_dir / "checkpoints" / str(result.step)
    assert {file.name for file in kept.iterdir()} == {STATE, SKELETON, checkpoint.META}
    assert {file.suffix for file in result.bundle.iterdir()} == {".json", ".safetensors"}
    json.loads((kept / SKELETON).read_text())


def test_the_exported_bundle_acts_as_the_trained_module_does(cartpole):
    spec, result, _ = cartpole
    trainer = make_trainer(spec, _env_contract(spec), result.run_dir / "checkpoints")
    try:
        assert trainer.clock == result.step
        params = trainer.params()
        module = trainer.algorithm.get_module()
        runner = PolicyRunner.load(result.bundle, device="cpu")
        assert isinstance(runner, RLlibRunner)
        bundle = read_bundle(result.bundle)
        assert params.keys() == bundle.params.keys()
        assert all(np.array_equal(params[name], x) for name, x in bundle.params.items()), (
            "a resumed run has the weights"
        )
        assert not np.allclose(bundle.params["filter/mean"], 0), "and the statistics of its filter"
        seen = observed(runner, 5)
        with torch.inference_mode():
            inputs = module.forward_inference({Columns.OBS: torch.from_numpy(runner.seen(seen))})
        np.testing.assert_allclose(runner.inputs(seen), inputs[Columns.ACTION_DIST_INPUTS], atol=1e-6)
        chosen = runner.act(seen, np.zeros(5, int), np.zeros(5, int)).action
        assert chosen[:, 0].tolist() == inputs[Columns.ACTION_DIST_INPUTS].argmax(-1).tolist()

        # The same trainer goes on after its environment runner was killed.
        (pid,) = trainer.algorithm.env_runner_group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
        os.kill(pid, signal.SIGKILL)
        before = trainer.clock
        deadline = time.monotonic() + 240  # a busy machine takes a minute to start an actor anew
        while trainer.clock < before + 128 and time.monotonic() < deadline:
            trainer.step(1)
        assert trainer.clock >= before + 128
        (again,) = trainer.algorithm.env_runner_group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
        assert again != pid
    finally:
        trainer.close()


def test_evaluation_workers_and_a_served_policy_run_the_bundle_without_an_algorithm(cartpole):
    _, result, _ = cartpole
    found = evaluate_bundle(
        str(result.bundle),
        GymnasiumSpec(id="CartPole-v1", max_steps=20),
        episodes=3,
        parallel=3,
        local=True,
        device="cpu",
    )
    assert len(found.episodes) == 3
    runner = PolicyRunner.load(result.bundle, device="cpu", batch_sizes=(1, 2))
    runner.warm_up()
    seen = {name: x[0] for name, x in observed(runner, 1).items()}
    service = PolicyService("cartpole", runner, ServeSettings())
    with TestClient(build_app(service)) as client:
        body = {"observation": {name: x.tolist() for name, x in seen.items()}}
        answer: httpx.Response = client.post("/v1/policies/cartpole/act", json=body)
    service.close()
    assert answer.status_code == 200, answer.text
    assert answer.json()["version"] == read_bundle(result.bundle).id
    wanted = runner.act({name: x[None] for name, x in seen.items()}, np.zeros(1, int), np.zeros(1, int)).action[0]
    assert answer.json()["action"] == wanted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["appo", "impala"])
def test_two_iterations_of_an_asynchronous_algorithm_leave_a_bundle_and_a_checkpoint(make_spec, tmp_path, kind):
    step, told = run(make_spec(kind), tmp_path / kind)
    assert step >= 200
    assert "train/total_loss" in told.metrics[-1][1]
    assert [name for name, _, _ in told.results] == ["export", "checkpoint"]
    runner = PolicyRunner.load(told.results[0][2]["bundle"], device="cpu")
    assert runner.act(observed(runner, 2), np.zeros(2, int), np.zeros(2, int)).action.shape == (2, 1)


@pytest.mark.slow
def test_sac_goes_back_to_its_checkpoint_with_temperature_optimizers_replay_and_random_numbers(make_spec, tmp_path):
    spec = make_spec("sac")
    trainer = make_trainer(spec, _env_contract(spec), tmp_path / "checkpoints")
    try:
        metrics = trainer.step(1)
        assert {"train/qf_loss", "train/alpha_value"} <= metrics.keys()
        saved = load_file(trainer.save(tmp_path / "checkpoints") / STATE)
        at = trainer.clock
        trainer.step(1)
        assert trainer.clock > at
        after, _ = pack(trainer._state())
        moved = {
            name for name, x in saved.items() if after[name].shape == x.shape and not np.array_equal(after[name], x)
        }
        assert "/learned/curr_log_alpha/default_policy" in moved
        assert any("/optimizer/" in name for name in moved)
        assert len(after["/replay/columns/reward"]) > len(saved["/replay/columns/reward"]) == at

        trainer.restore(tmp_path / "checkpoints" / str(at))
        again, _ = pack(trainer._state())
        differs = [name for name, x in saved.items() if not np.array_equal(again[name], x)]
        assert differs == []
        assert again.keys() == saved.keys()
        assert trainer.clock == at
        assert np.isfinite(trainer.params()["module/pi.net.mlp.0.weight"]).all()
        runner = PolicyRunner.load(trainer.export(tmp_path / "bundle"), device="cpu")
        chosen = runner.act(observed(runner, 3), np.zeros(3, int), np.zeros(3, int)).action
        assert (np.abs(chosen) <= 2).all()
    finally:
        trainer.close()


@pytest.mark.parametrize("kind", ["bc", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cql", "marwil"))])
def test_a_run_on_recorded_data_that_stopped_and_resumed_equals_one_that_did_not(make_spec, tmp_path, kind):
    spec = make_spec(kind)
    whole, told = run(spec, tmp_path / "whole")
    assert whole == 6
    assert np.isfinite([value for _, metrics in told.metrics for value in metrics.values()]).all()
    stop, half = threading.Event(), Told()
    half.on_metrics = lambda step, _: stop.set()
    assert run_rllib(spec, tmp_path / "half", _env_contract(spec), half, stop) == 3
    assert run(spec, tmp_path / "half")[0] == 6
    first, second = (read_bundle(tmp_path / name / "bundles" / "6") for name in ("whole", "half"))
    assert first.id == second.id
    assert first.normalizer.stats["observation.state"][0].count > 0, "observations are normalised by the data"


def test_cqls_warm_up_by_cloning_ends_after_bc_iters(make_spec, tmp_path):
    """Past it the actor follows the critics: then another weight of theirs gives another actor."""
    actors = {}
    for iters in (100, 2):
        spec = make_spec("cql", f"algo.config.bc_iters={iters}", f"name=c{iters}")
        run(spec, tmp_path / f"c{iters}")
        params = read_bundle(tmp_path / f"c{iters}" / "bundles" / "6").params
        actors[iters] = np.concatenate([x.ravel() for x in params.values()])
    assert not np.allclose(actors[100], actors[2], atol=1e-5)


def test_a_key_that_rllib_lacks_ends_the_command_with_2_before_anything_starts(tmp_path, root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    words = ["train", *TINY["ppo"], f"root={tmp_path}", "+algo.config.clip_parm=0.2"]
    monkeypatch.setattr("sys.argv", ["rlsvc", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "did you mean 'clip_param'?" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "rlsvc" / "rllib_ppo_cartpole").exists()


def test_a_run_without_ray_is_refused_by_name(make_spec):
    with pytest.raises(UserError, match="--local: RLlib's runners and learners are Ray's"):
        train(make_spec("ppo"), local=True)


def test_a_damaged_checkpoint_is_refused_by_its_folder(cartpole, tmp_path):
    import shutil

    spec, result, _ = cartpole
    shutil.copytree(result.run_dir / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / str(result.step) / STATE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"checkpoint .*{result.step} cannot be read.*delete this folder"):
        make_trainer(spec, _env_contract(spec), tmp_path / "checkpoints")


@pytest.mark.slow
def test_two_learners_share_a_batch_and_end_with_the_same_weights(make_spec, tmp_path):
    spec = make_spec("ppo", "learner.ranks=2", "learner.cpus_per_rank=0.25", "total_steps=128")
    trainer = make_trainer(spec, _env_contract(spec), tmp_path / "none")
    try:
        before = trainer.params()
        while trainer.clock < 128:
            told = trainer.step(1)
        assert np.isfinite(told["train/total_loss"])
        one, two = (
            result.get()["rl_module"]["default_policy"]
            for result in trainer.algorithm.learner_group.foreach_learner(lambda learner: learner.get_state())
        )
    finally:
        trainer.close()
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    assert any(not np.array_equal(before[name], value) for name, value in trainer_params(one).items())


def trainer_params(state):
    """A learner's weights under the names of a bundle's."""
    return {f"module/{name}": value for name, value in state.items() if "encoder.actor" in name or "pi." in name}


@pytest.mark.slow
def test_a_sweeps_trials_train_an_algorithm_of_rllib_and_the_best_is_registered(
    ray_cluster, tmp_path, root, monkeypatch
):
    monkeypatch.chdir(root)
    ready = compose_file(SweepSpec, root / "tune_spaces" / "rllib_ppo.yaml")
    words = (*TINY["ppo"], *SMALL, f"root={tmp_path}", "name=swept", "evaluation.interval=64")
    space = {"algo.config.lr": ready.space["algo.config.lr"], "algo.config.num_epochs": {"grid": [1, 2]}}
    sweep = SweepSpec(name="s", run=words, space=space, samples=1, concurrency=1, metric="eval/return")
    report = run_sweep(sweep, compose(words))
    assert [trial.status for trial in report.trials] == ["finished"] * 2
    assert sorted(trial.values["algo.config.num_epochs"] for trial in report.trials) == [1, 2]
    assert read_bundle(report.best_bundle).policy["name"] == "rllib"


@pytest.mark.slow
def test_ppo_learns_cartpole(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    spec = compose(
        [
            "experiment=rllib_ppo_cartpole",
            "total_steps=20000",
            f"root={tmp_path}",
            "tracking.trackers=[]",
            "evaluation.videos=false",
        ]
    )
    result = train(spec)
    assert result.metrics["eval/return"] > 150, "a random policy has 22"
