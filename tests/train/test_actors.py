"""Rollout and inference actors on a real Ray, and what happens when one dies in the middle of an evaluation."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from rlsvc.core.errors import UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.envs.make import make_env
from rlsvc.runner import BaselineRunner
from rlsvc.spec.env import GymnasiumSpec, PushTSpec
from rlsvc.spec.rollout import RolloutSpec
from rlsvc.store.bundle import write_bundle
from rlsvc.train.evaluate import Evaluation, evaluate
from rlsvc.train.inference import LocalInference, RayInference
from rlsvc.train.rollout import RayRollouts
from rlsvc.train.rollout_worker import Acting
from rlsvc.train.workers import InProcess, RayWorkers, WorkerLost

SPEC = PushTSpec(max_steps=12)
SEEDS = [5, 6, 7]


@pytest.fixture(scope="module")
def contract():
    env = make_env(SPEC)
    try:
        return env.contract(n_obs_steps=2, action_horizon=5)
    finally:
        env.close()


@pytest.fixture(scope="module")
def reference(contract) -> Evaluation:
    workers = InProcess(SPEC, 2)
    try:
        return evaluate(BaselineRunner("random", contract), workers, SEEDS, parallel=3)
    finally:
        workers.close()


def rewards(evaluation: Evaluation) -> list[tuple[int, list[float]]]:
    return [(episode.seed, episode.rewards) for episode in evaluation.episodes]


def test_a_rollout_actor_that_dies_is_replaced_and_the_result_is_the_same(contract, reference, ray_cluster):
    import ray

    class KillsOne(RayWorkers):
        steps = 0

        def call(self, method, arguments):
            self.steps += method == "step"
            if self.steps == 2:
                self.steps += 1
                ray.kill(self._actors[1])
            return super().call(method, arguments)

    workers = KillsOne(SPEC, 2, 2, cpus=0.5)
    try:
        found = evaluate(BaselineRunner("random", contract), workers, SEEDS, parallel=3)
    finally:
        workers.close()
    assert workers.steps > 3  # the wave was run again
    assert rewards(found) == rewards(reference)


@pytest.mark.slow
def test_an_inference_actor_that_dies_is_replaced_with_its_bundle_and_the_result_is_the_same(
    contract, reference, ray_cluster, tmp_path
):
    import ray

    features = {**contract.observation, "action": contract.action}
    data = {key: np.stack([np.zeros(f.shape), np.ones(f.shape)]) for key, f in features.items()}
    normalizer = Normalizer.fit({"default": data}, features, {})
    path = write_bundle(tmp_path / "b", policy={"name": "random"}, contract=contract, normalizer=normalizer, params={})
    inference = RayInference((3,))

    class KillsInference(InProcess):
        killed = False

        def call(self, method, arguments):
            if method == "step" and not self.killed:
                self.killed = True
                ray.kill(inference._actor)
            return super().call(method, arguments)

    workers = KillsInference(SPEC, 2)
    try:
        assert inference.load(path) == contract
        found = evaluate(inference, workers, SEEDS, parallel=3)
    finally:
        workers.close()
        inference.close()
    assert workers.killed
    assert rewards(found) == rewards(reference)


@pytest.mark.slow
def test_an_inference_actor_that_dies_over_a_bundle_twice_is_one_clear_message(ray_cluster):
    inference = RayInference((3,))

    def dies(self, path):
        os.kill(os.getpid(), signal.SIGKILL)

    import ray

    inference._class = ray.remote(num_cpus=0)(type("Dies", (LocalInference,), {"load": dies}))
    ray.kill(inference._actor)
    inference._actor = inference._class.remote(*inference._make)
    try:
        with pytest.raises(UserError, match="bundle /b: the inference actor died or hung twice while loading it"):
            inference.load("/b")
    finally:
        inference.close()


def test_an_inference_actor_that_hangs_is_replaced_and_told(ray_cluster, monkeypatch):
    import ray

    monkeypatch.setattr("rlsvc.train.inference.ANSWER_TIMEOUT_S", 1.0)
    inference = RayInference((3,))
    inference._class = ray.remote(num_cpus=0)(
        type("Hangs", (LocalInference,), {"warm_up": lambda self: time.sleep(60)})
    )
    ray.kill(inference._actor)
    inference._actor = inference._class.remote(*inference._make)
    before = inference._actor
    try:
        with pytest.raises(WorkerLost, match="died or hung"):
            inference.warm_up()
        assert inference._actor is not before
    finally:
        inference.close()


@pytest.mark.slow
def test_a_rollout_worker_that_hangs_before_its_first_chunk_is_replaced(ray_cluster, request):
    import ray

    spec = GymnasiumSpec(id="Pendulum-v1")
    env = make_env(spec)
    request.addfinalizer(env.close)
    contract = env.contract(1, 1)
    rollouts = RayRollouts(
        spec,
        RolloutSpec(mode="async", chunk_steps=4, cpus_per_worker=0.5, timeout_s=1.0, start_timeout_s=20.0),
        Acting({}, contract, Normalizer.from_contract(contract), "fp32"),
        seed=0,
        incarnations=[0],
    )
    request.addfinalizer(rollouts.close)
    hangs = ray.get(rollouts.actors[0].pid.remote())
    os.kill(hangs, signal.SIGSTOP)
    arrived, deadline = [], time.monotonic() + 90
    while not arrived and time.monotonic() < deadline:
        rollouts.pump(64, "random")
        arrived = rollouts.poll(0.2)
    assert [one.chunk.incarnation for one in arrived][:1] == [1]
    assert rollouts.restarts == 1
