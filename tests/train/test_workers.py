import os
import signal
import threading

import numpy as np
import pytest

from rlsvc.core.errors import UserError
from rlsvc.spec.env import PushTSpec
from rlsvc.train import workers as module
from rlsvc.train.workers import EpisodeWorker, InProcess, Processes, WorkerLost, make_workers

SPEC = PushTSpec(max_steps=4)


@pytest.fixture
def worker():
    made = EpisodeWorker(SPEC, n_obs_steps=2)
    yield made
    made.close()


def chunk(length: int) -> np.ndarray:
    return np.full((length, 2), 256, np.float32)


def test_a_window_holds_the_last_observations(worker):
    first = worker.reset([1, 2])
    assert first[0]["observation.state"].shape == (2, 2)
    window, done = worker.step({0: chunk(3)})[0]
    assert not done
    again, _ = worker.step({0: chunk(1)})[0]
    np.testing.assert_array_equal(again["observation.state"][0], window["observation.state"][1])


def test_a_chunk_stops_where_its_episode_ends(worker):
    worker.reset([1])
    _, done = worker.step({0: chunk(9)})[0]
    assert done
    result = worker.results()[0]
    assert (result.length, len(result.actions), result.success) == (4, 4, False)


def test_only_the_named_episodes_step(worker):
    worker.reset([1, 2])
    worker.step({1: chunk(2)})
    assert [result.length for result in worker.results()] == [0, 2]


def test_a_new_reset_forgets_the_old_episodes_and_reuses_the_environments(worker):
    worker.reset([1, 2])
    worker.step({0: chunk(4), 1: chunk(4)})
    worker.reset([3])
    assert [(result.seed, result.length) for result in worker.results()] == [(3, 0)]
    assert len(worker._envs) == 2


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("noticed", ["when it is asked", "when it does not answer"])
def test_a_process_that_dies_is_replaced_and_told(dead, noticed):
    pool = Processes(SPEC, 2, 2)
    try:
        pool.call("reset", [([1],), ([2],)])
        process = pool._workers[dead][0]
        if noticed == "when it is asked":
            process.kill()
            process.join()
        else:
            os.kill(process.pid, signal.SIGSTOP)
            threading.Timer(0.3, process.kill).start()
        with pytest.raises(WorkerLost, match=f"rollout process {dead} died or hung"):
            pool.call("step", [({0: chunk(1)},), ({0: chunk(1)},)])
        windows = pool.call("reset", [([1],), ([2],)])
        assert [len(part) for part in windows] == [1, 1]
        results = pool.call("results", [(), ()])
        assert [part[0].seed for part in results] == [1, 2]
    finally:
        pool.close()


def test_a_process_that_hangs_is_taken_for_lost(monkeypatch):
    pool = Processes(SPEC, 2, 1)
    try:
        pool.call("reset", [([1],)])
        monkeypatch.setattr(module, "STEP_TIMEOUT_S", 0.2)
        os.kill(pool._workers[0][0].pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="rollout process 0"):
            pool.call("step", [({0: chunk(1)},)])
    finally:
        pool.close()


def test_without_ray_one_worker_is_this_process_and_several_are_processes():
    one, two = make_workers(SPEC, 2, 1, local=True), make_workers(SPEC, 2, 2, local=True)
    assert (type(one), type(two)) == (InProcess, Processes)
    processes = [process for process, _ in two._workers]
    one.close()
    two.close()
    assert not any(process.is_alive() for process in processes)


def test_a_simulator_that_raises_costs_its_wave_and_is_made_anew():
    pool = InProcess(SPEC, 2)
    pool.call("reset", [([1, 2],)])
    broken = pool._worker

    def fail(action):
        raise ValueError("contact buffer is full")

    broken._envs[1].step = fail
    with pytest.raises(WorkerLost, match="the simulator raised ValueError: contact buffer is full"):
        pool.call("step", [({0: chunk(1), 1: chunk(1)},)])
    pool.call("reset", [([1, 2],)])
    assert len(pool.call("step", [({0: chunk(1), 1: chunk(1)},)])[0]) == 2
    assert pool._worker is not broken
    pool.close()


def test_a_persons_mistake_is_not_taken_for_a_broken_simulator():
    pool = InProcess(SPEC, 2)
    pool.call("reset", [([1],)])

    def refuse(action):
        raise UserError("the action's range is wrong")

    pool._worker._envs[0].step = refuse
    with pytest.raises(UserError, match="range is wrong"):
        pool.call("step", [({0: chunk(1)},)])
    pool.close()
