"""Simulators in processes of their own: what hangs or dies is made anew, and nothing outlives its owner."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlsvc.core.errors import UserError
from rlsvc.envs.process import SimulatorError
from rlsvc.envs.vector import VectorEnv, episode_seed
from rlsvc.spec.env import GymnasiumSpec

STATE = "observation.state"
HERE = Path(__file__).parent


def isolated(toy, timeout_s=20.0, **kwargs):
    options = {"isolation": "process", "step_timeout_s": timeout_s, **kwargs.pop("options", {})}
    return toy(options=options, **kwargs)


def act(env, *values):
    return env.step(np.array(values, np.float32)[:, None])


def gone(pid, within_s=10.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("fault", "reason"), [("exit", "ended (code 3)"), ("kill", "ended (signal 11)"), ("hang", "no answer within 1 s")]
)
def test_a_simulator_that_hangs_or_dies_is_killed_and_made_anew_alone(opened, toy, fault, reason):
    env = opened(isolated(toy, timeout_s=1.0 if fault == "hang" else 20.0, length=4, fault=fault, seed=20), 2)
    before = env._slots.pids
    env.reset([10, 20])
    act(env, 1.0, 1.0)
    started = time.monotonic()
    step = act(env, 1.0, 1.0)
    assert time.monotonic() - started < 10
    assert (step.lost.tolist(), step.reward.tolist()) == ([False, True], [1, 0])
    np.testing.assert_array_equal(step.observation[STATE], np.float32([[12, 2], [episode_seed(20, 1), 0]]))
    assert reason in env.failures[1]
    after = env._slots.pids
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)
    assert gone(before[1])
    assert act(env, 1.0, 1.0).lost.any() == np.False_


def test_a_stopped_simulator_is_killed_and_made_anew(opened, toy):
    env = opened(isolated(toy, timeout_s=0.5, length=99), 2)
    env.reset([1, 2])
    stopped = env._slots.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    assert act(env, 1.0, 1.0).lost.tolist() == [True, False]
    assert gone(stopped)


def test_a_simulator_that_leaks_is_made_anew_before_it_fills_the_memory(opened, toy, monkeypatch):
    monkeypatch.setattr("rlsvc.envs.process.MEMORY_INTERVAL_S", 0.0)
    env = opened(isolated(toy, length=1000, fault="leak", options={"max_memory_mb": 250}), 1)
    env.reset([0])
    lost = 0
    for _ in range(40):
        lost += int(act(env, 0.0).lost[0])
        assert env._slots._children[0].memory_mb < 350
    assert lost >= 1
    assert "more than max_memory_mb: 250" in env.failures[0]


def test_simulators_are_stepped_side_by_side(opened, toy):
    env = opened(isolated(toy, name="Sleeper"), 4)
    env.reset(range(4))
    started = time.monotonic()
    for _ in range(3):
        act(env, 1.0, 1.0, 1.0, 1.0)
    assert time.monotonic() - started < 3 * 0.2 * 3


def test_closing_ends_every_process(toy):
    env = VectorEnv(isolated(toy), 2)
    pids = env._slots.pids
    env.close()
    assert all(gone(pid) for pid in pids)


OWNER = """
import sys, time
import numpy as np
from rlsvc.envs.vector import VectorEnv
from rlsvc.spec.env import GymnasiumSpec

fault = sys.argv[1]
env = VectorEnv(GymnasiumSpec(id="toy/Walk-v0", import_module="toy_envs", isolation="process",
                              kwargs=dict(fault=fault, at=1, seed="any")), 2)
env.reset([0, 1])
print(*env._slots.pids, flush=True)
if fault:
    env.step(np.zeros((2, 1), np.float32))
time.sleep(600)
"""


@pytest.mark.parametrize("fault", ["", "hang"], ids=["idle", "while they hang"])
def test_simulators_die_with_an_owner_that_is_killed(fault):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, fault], stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.5)
        assert not any(gone(pid, within_s=0.1) for pid in pids)
        owner.kill()
    assert all(gone(pid) for pid in pids)


def test_simulators_outlive_the_thread_that_made_them(opened, toy):
    made = []
    thread = threading.Thread(target=lambda: made.append(opened(isolated(toy), 1)))
    thread.start()
    thread.join()
    time.sleep(0.3)
    made[0].reset([3])
    assert act(made[0], 1.0).observation[STATE].tolist() == [[4.0, 1.0]]


def test_a_single_environment_in_a_process_is_the_one_without(opened, toy):
    spec = toy("Camera", length=3)
    apart, here = opened(spec.replace(isolation="process")), opened(spec)
    assert apart.contract(2, 3) == here.contract(2, 3)
    assert apart.observation_space == here.observation_space
    assert apart.metadata["render_fps"] == here.metadata["render_fps"]
    (seen, _), (want, _) = apart.reset(seed=4), here.reset(seed=4)
    for _ in range(3):
        assert seen["task"] == want["task"]
        np.testing.assert_array_equal(seen["observation.camera"], want["observation.camera"])
        (seen, *rest), (want, *expected) = (env.step(np.ones(1, np.float32)) for env in (apart, here))
        assert rest == expected
        np.testing.assert_array_equal(apart.render(), here.render())


def test_a_single_environment_says_what_happened_to_its_process(opened, toy):
    env = opened(isolated(toy, fault="exit", at=1))
    env.reset(seed=0)
    with pytest.raises(SimulatorError, match=r"its process ended \(code 3\)"):
        env.step(np.zeros(1, np.float32))


def test_an_environment_that_dies_while_it_is_made_is_refused(opened):
    with pytest.raises(UserError, match=r"cannot be made: its process ended \(code 7\)"):
        opened(GymnasiumSpec(id="x", import_module="dies_when_imported", isolation="process"))
