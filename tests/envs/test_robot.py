"""A robot as an environment: ticks, people and lost connections, seen from a rollout worker."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from fake_arm import CAMERA, GUARD, FakeArm
from websockets.sync.client import connect

from rlsvc.commands.collect import console
from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.envs.make import make_env
from rlsvc.envs.robot import EpisodeDiscardedError
from rlsvc.envs.vector import VectorEnv
from rlsvc.robots import drivers
from rlsvc.robots.console.app import address_file
from rlsvc.spec.env import RobotEnvSpec
from rlsvc.spec.run import RunSpec
from rlsvc.train.run import train

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arm(tmp_path, monkeypatch) -> FakeArm:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "robots"), str(ROOT)]))
    arm = FakeArm(tmp_path / "log", camera=True)
    monkeypatch.setitem(drivers.DRIVERS, "dobot", lambda spec: arm)
    return arm


def spec(**changes) -> RobotEnvSpec:
    station = {
        "id": f"env-{os.getpid()}", "driver": {"name": "dobot", "host": "127.0.0.1"}, "guard": GUARD, "rate_hz": 50,
        "max_skew_s": 1.0, "teleop": {"name": "jog", "speed": [0.5, 0.5]},
    }  # fmt: skip
    given = {
        "station": station,
        "task": "push the block",
        "start": "auto",
        "max_steps": 5,
        "start_timeout_s": 20,
        "console": None,
    }
    return RobotEnvSpec.model_validate({**given, **changes})


@pytest.fixture
def env(arm):
    env = make_env(spec())
    yield env
    env.close()


def test_its_contract_is_known_before_anything_is_opened_and_bounded_by_the_guard(arm):
    arm.connect = lambda: pytest.fail("the robot was touched")
    contract = make_env(spec()).contract()
    assert list(contract.observation) == ["observation.state", CAMERA, "task"]
    assert (contract.action.low, contract.action.high) == ((-1.0, -1.0), (1.0, 1.0))
    assert contract.action.names == ("shoulder.pos", "elbow.pos")
    assert contract.rate_hz == 50.0


def test_a_step_takes_a_tick_and_says_what_was_asked_for_and_what_was_sent(env, arm):
    observation, info = env.reset()
    assert observation["task"] == "push the block"
    assert info == {"is_success": False}
    begin = time.monotonic()
    observation, reward, terminated, truncated, info = env.step(np.array([0.01, 2.0]))
    assert 0.005 < time.monotonic() - begin < 1.0
    assert info["commanded"].tolist() == pytest.approx([0.01, 2.0])
    assert info["action"][0] == pytest.approx(0.01)
    assert info["action"][1] < 0.2
    assert not info["intervention"]
    assert observation["observation.state"].tolist() == pytest.approx(info["action"].tolist())
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "elbow.pos" in info["guard"]


def test_an_episode_is_cut_after_its_steps(env):
    env.reset()
    ends = [env.step(np.zeros(2))[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


@pytest.mark.parametrize("ending", ["its steps", "a person"])
def test_between_two_episodes_no_command_is_missed(arm, ending):
    """A learner may take its time there; in the middle of an episode the watchdog stops the robot."""
    short = spec(start="auto")
    hurried = {**GUARD, "expiry_s": 0.5}
    env = make_env(short.replace(station=short.station.replace(guard=short.station.guard.replace(**hurried))))
    try:
        env.reset()
        if ending == "a person":
            env.operator.mark("Ada", "success")
        while not any(env.step(np.zeros(2))[2:4]):
            pass
        time.sleep(1.0)
        assert env.station.robot.stopped is None
        env.reset()
        time.sleep(1.0)
        assert env.station.robot.stopped is not None
    finally:
        env.close()


@pytest.mark.parametrize(("ending", "reward"), [("success", 1.0), ("failure", 0.0)])
def test_a_person_ends_an_episode_and_their_word_is_the_reward(env, ending, reward):
    env.reset()
    env.operator.mark("Ada", ending)
    _, got, terminated, truncated, info = env.step(np.zeros(2))
    assert (got, terminated, truncated) == (reward, True, False)
    assert info["is_success"] == (ending == "success")
    assert info["actor"] == "Ada"


def test_a_person_takes_over_from_the_policy_and_the_step_says_so(env):
    env.reset()
    env.operator.take_over("Ada")
    *_, info = env.step(np.array([0.9, 0.9]))
    assert info["intervention"]
    assert info["actor"] == "Ada"
    assert info["action"].tolist() == [0.0, 0.0]
    env.operator.hand_back("Ada")
    *_, info = env.step(np.array([0.01, 0.0]))
    assert not info["intervention"]


def test_a_stopped_robot_cuts_the_episode_and_the_next_one_waits_for_a_person(env):
    env.reset()
    env.operator.stop("Ada")
    assert env.step(np.zeros(2))[3]
    began = threading.Event()

    def go_on():
        time.sleep(0.3)
        assert not began.is_set()
        env.operator.resume("Ada")
        env.operator.start("Ada")

    threading.Thread(target=go_on).start()
    env.reset()
    began.set()
    assert env.step(np.zeros(2))[2:4] == (False, False)


def test_nobody_who_starts_an_episode_is_an_error_in_the_end(arm):
    env = make_env(spec(start="person", start_timeout_s=0.3, console={"port": 0}))
    try:
        with pytest.raises(UserError, match=r"nobody started an episode; waited 0\.3 s for a person"):
            env.reset()
    finally:
        env.close()


def test_a_discarded_episode_and_a_lost_connection_are_lost_steps_and_the_worker_goes_on(arm, request):
    vector = VectorEnv(spec(), 1)
    request.addfinalizer(vector.close)
    vector.reset([0])
    read = arm.read
    assert not vector.step(np.zeros((1, 2))).lost[0]
    vector._slots._envs[0].operator.mark("Ada", "discard")
    assert vector.step(np.zeros((1, 2))).lost[0]
    assert "Ada discarded the episode" in vector.failures[0]
    assert not vector.step(np.zeros((1, 2))).lost[0]
    assert arm.connects == 1  # the person who discarded it keeps their page

    def lost_once():
        arm.read = read
        from rlsvc.robots.api import ConnectionLost

        raise ConnectionLost("the cable is out")

    arm.read = lost_once
    assert vector.step(np.zeros((1, 2))).lost[0]
    assert "the cable is out" in vector.failures[0]
    step = vector.step(np.full((1, 2), 0.01))
    assert not step.lost[0]
    assert arm.connects == 2
    assert step.columns["intervention"].tolist() == [False]
    assert step.columns["action"][0] == pytest.approx([0.01, 0.01])


def test_a_discarded_episode_is_its_own_error(env):
    env.reset()
    env.operator.mark("Ada", "discard")
    with pytest.raises(EpisodeDiscardedError, match="Ada discarded"):
        env.step(np.zeros(2))


def test_options_without_a_meaning_for_a_robot_are_refused(arm):
    with pytest.raises(UserError, match=r"env\.frame_stack: a robot's numbers are taken as they are"):
        make_env(spec(frame_stack=2))


RUN = {
    "policy": {"name": "tdmpc2", "size": "1M", "episode_length": 40},
    "algo": {"name": "tdmpc2", "batch_size": 16},
    "phases": [{"name": "all", "type": "online", "hooks": {"collect": 1, "update": 1}, "duration_steps": 10}],
    "rollout": {"timeout_s": 30, "mode": "async"}, "evaluation": {"interval": None},
}  # fmt: skip


def test_a_run_on_a_robot_has_one_worker_no_evaluation_beside_it_and_time_for_a_person():
    env = spec().model_dump()
    RunSpec.model_validate({**RUN, "env": env})
    with pytest.raises(ValueError, match=r"got 2 environments, robot 'env-\d+' is one"):
        RunSpec.model_validate({**RUN, "env": env, "rollout": {**RUN["rollout"], "workers": 2}})
    with pytest.raises(ValueError, match=r"evaluation\.interval: got 100"):
        RunSpec.model_validate({**RUN, "env": env, "evaluation": {"interval": 100}})
    with pytest.raises(ValueError, match=r"rollout\.timeout_s: got 15"):
        RunSpec.model_validate({**RUN, "env": env, "rollout": {**RUN["rollout"], "timeout_s": 15}})
    with pytest.raises(ValueError, match=r"rollout\.mode: got sync, expected async: robot 'env-\d+' does not wait"):
        RunSpec.model_validate({**RUN, "env": env, "rollout": {"timeout_s": 30}})
    (phase,) = RUN["phases"]
    tried = {**phase, "hooks": {"collect": 5, "evaluate": 1}}
    with pytest.raises(ValueError, match=r"phase 'all': hook evaluate, but robot 'env-\d+' collects"):
        RunSpec.model_validate({**RUN, "env": env, "phases": [tried]})


def test_a_robot_does_not_wait_for_a_learner_in_its_process(arm, tmp_path):
    run = RunSpec.model_validate({**RUN, "env": spec(), "root": str(tmp_path), "tracking": {"trackers": []}})
    with pytest.raises(UserError, match=r"--local: robot 'env-\d+' does not wait while the learner updates"):
        train(run, local=True)
    assert not arm.connects


def test_a_worker_of_a_robot_takes_its_resource():
    from rlsvc.spec.env import GymnasiumSpec
    from rlsvc.train.cluster import robot_resources

    assert robot_resources(spec()) == {f"robot:env-{os.getpid()}": 1.0}
    assert robot_resources(GymnasiumSpec(id="Pendulum-v1")) == {}


def test_people_start_and_judge_a_runs_episodes_at_the_console_whose_address_a_command_says(arm, capsys):
    env = make_env(spec(start="person", console={"port": 0}, max_steps=500))
    robot = f"env-{os.getpid()}"
    results = []

    def episode():
        env.reset()
        while True:
            _, reward, terminated, truncated, _ = env.step(np.zeros(2))
            if terminated or truncated:
                results.append((reward, terminated))
                return

    thread = threading.Thread(target=episode, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not address_file(robot).exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    console(robot)
    address = capsys.readouterr().out.strip()
    with connect(address.replace("http", "ws").replace("/?", "/ws?")) as socket:
        socket.send('{"type": "hello", "person": "Ada"}')
        for wanted, then in (("waiting", {"type": "start"}), ("running", {"type": "mark", "ending": "success"})):
            while json.loads(socket.recv(timeout=10)).get("state") != wanted:
                pass
            socket.send(json.dumps(then))
        thread.join(20)
    env.close()
    assert results == [(1.0, True)]
    with pytest.raises(NotFoundError, match=f"no console of robot '{robot}'"):
        console(robot)


def test_an_episode_that_a_person_starts_needs_a_console():
    with pytest.raises(ValueError, match="nobody could start an episode"):
        spec(start="person", console=None)
