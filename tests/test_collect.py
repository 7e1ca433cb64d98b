"""Sessions of `rlsvc collect`: a fake arm with the real guard, recorder and console, and a virtual SO-101."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from fake_arm import CAMERA, GUARD, FakeArm, read_log
from websockets.sync.client import connect

from rlsvc.collect import collect
from rlsvc.collect_replay import replay
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BusyError, ContractError, DatasetError, SpecError, UserError
from rlsvc.data.load import load_table
from rlsvc.data.normalize import Normalizer
from rlsvc.robots.lock import RobotLock
from rlsvc.spec.collect import CollectSpec
from rlsvc.spec.compose import compose_file
from rlsvc.spec.data import DatasetSpec
from rlsvc.store.bundle import read_bundle, write_bundle

ROOT = Path(__file__).parents[1]


@pytest.fixture
def arm(tmp_path, monkeypatch) -> FakeArm:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "robots"), str(ROOT)]))
    arm = FakeArm(tmp_path / "log", camera=True)
    monkeypatch.setitem(__import__("rlsvc.robots.drivers", fromlist=["DRIVERS"]).DRIVERS, "dobot", lambda spec: arm)
    return arm


def bundle(folder: Path, arm: FakeArm, **changes) -> Path:
    action = Feature((2,), "float32", "rad", arm.action.names, (-0.5,), (0.5,))
    given = {"observation": dict(arm.observation), "action": action, "rate_hz": 30.0, "action_horizon": 6}
    contract = Contract(**{**given, **changes})
    return write_bundle(
        folder / "bundle", policy={"name": "random"}, contract=contract, normalizer=Normalizer.from_contract(contract),
        params={},
    )  # fmt: skip


def session(folder: Path, **changes) -> CollectSpec:
    station = {
        "id": f"collect-{os.getpid()}", "driver": {"name": "dobot", "host": "127.0.0.1"}, "guard": GUARD, "rate_hz": 30,
        "max_skew_s": 1.0, "teleop": {"name": "jog", "speed": [0.5, 0.5]},
    }  # fmt: skip
    given = {
        "station": station, "task": "push the block", "dataset": str(folder / "ds"), "robot_type": "fake",
        "episodes": 2, "episode_s": 0.5, "console": None, "policy": {"bundle": str(folder / "bundle"), "execute": 3},
    }  # fmt: skip
    return CollectSpec.model_validate({**given, **changes})


def recorded(folder: Path):
    return load_table(DatasetSpec(path=str(folder / "ds")))


def test_a_policy_collects_by_itself_and_each_step_says_who_acted(arm, tmp_path):
    bundle(tmp_path, arm)
    said: list[str] = []
    result = collect(session(tmp_path), say=said.append)
    assert (result.episodes, result.discarded, result.interrupted) == (2, 0, False)
    table = recorded(tmp_path)
    assert table.num_episodes == 2
    assert table.tasks == ["push the block"]
    # Half a second at 30 Hz, less the ticks for which the first chunk had not come.
    lengths = np.diff([0, *table.episode_ends])
    assert ((lengths >= 5) & (lengths <= 15)).all()
    columns = table.columns
    assert not columns["intervention"].any()
    assert len(set(columns["actor"].ravel())) == 1
    assert columns["action"].std() > 0.01
    # The arm stands where it was sent: what is measured in a step is what was sent in the one before.
    assert columns["observation.state"][1 : lengths[0]] == pytest.approx(columns["action"][: lengths[0] - 1], abs=1e-6)
    assert np.abs(columns["commanded"]).max() <= 0.5
    assert not columns["next.done"].any()
    assert columns[CAMERA].shape[1:] == (48, 64, 3)
    assert columns[CAMERA][0].mean(axis=(0, 1)) == pytest.approx([200, 30, 30], abs=6)
    assert said == ["episode 0 is saved: cut", "episode 1 is saved: cut"]


def test_another_session_adds_to_the_dataset(arm, tmp_path):
    bundle(tmp_path, arm)
    collect(session(tmp_path, episodes=1))
    collect(session(tmp_path, episodes=1, task="pull the block"))
    table = recorded(tmp_path)
    assert table.num_episodes == 2
    assert sorted(table.tasks) == ["pull the block", "push the block"]


def test_a_robot_that_is_lost_in_an_episode_ends_it_is_found_again_and_the_session_goes_on(arm, tmp_path):
    bundle(tmp_path, arm)
    reads, read, connect_arm, connects = [0], arm.read, arm.connect, [0]
    there: list[int] = []

    def loses_once():
        reads[0] += 1
        arm.lost = reads[0] > 8 and connects[0] == 1
        return read()

    def connect_again():
        connects[0] += 1
        arm.lost = False
        connect_arm()
        if connects[0] == 2:
            there.append(recorded(tmp_path).num_episodes)

    arm.read, arm.connect = loses_once, connect_again
    said: list[str] = []
    result = collect(session(tmp_path), say=said.append)
    assert connects[0] == 2
    assert there == [1]  # saved before the arm was looked for
    assert result.episodes == 2
    assert said[0] == "the episode ends: the arm does not answer"
    assert recorded(tmp_path).num_episodes == 2


def test_a_policy_of_another_robot_is_refused_before_the_robot_is_touched(arm, tmp_path):
    other = Feature((2,), "float32", "rad", ("left.pos", "right.pos"), (-1.0,), (1.0,))
    bundle(tmp_path, arm, action=other)
    arm.connect = lambda: pytest.fail("the robot was touched")
    with pytest.raises(ContractError, match=r"'action' names: policy has .*left\.pos.* trained for this robot"):
        collect(session(tmp_path))


def test_a_policy_for_another_rate_is_refused(arm, tmp_path):
    bundle(tmp_path, arm, rate_hz=10.0)
    with pytest.raises(ContractError, match=r"rate_hz: policy has 10, robot .* has 30"):
        collect(session(tmp_path))


def test_a_policy_is_not_asked_to_execute_more_than_its_chunk(arm, tmp_path):
    bundle(tmp_path, arm)
    with pytest.raises(UserError, match=r"policy\.execute: got 7, the policy's chunks have 6 actions"):
        collect(session(tmp_path, policy={"bundle": str(tmp_path / "bundle"), "execute": 7}))


def test_a_robot_in_use_is_refused_by_name(arm, tmp_path):
    bundle(tmp_path, arm)
    with RobotLock(f"collect-{os.getpid()}"), pytest.raises(BusyError, match=f"in use by process {os.getpid()}"):
        collect(session(tmp_path))


def test_what_would_never_move_is_refused(tmp_path):
    still = {"id": "a", "driver": {"name": "dobot", "host": "h"}, "guard": GUARD, "rate_hz": 30}
    with pytest.raises(ValueError, match="nothing would move the robot"):
        session(tmp_path, station=still, policy=None, console={})


def test_a_guard_that_would_stop_between_two_commands_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"stops the robot between two commands at 1 Hz; expected 1\.5 or more"):
        session(tmp_path, station={**session(tmp_path).station.model_dump(), "rate_hz": 1})


def test_a_limit_that_is_missing_is_named_with_its_place(tmp_path):
    file = tmp_path / "arm.yaml"
    guard = {key: value for key, value in GUARD.items() if key != "velocity"}
    file.write_text(json.dumps({**session(tmp_path).model_dump(mode="json"), "console": None}, indent=1))
    tree = json.loads(file.read_text())
    tree["station"]["guard"] = guard
    file.write_text(json.dumps(tree, indent=1))
    with pytest.raises(SpecError, match=r"arm\.yaml:\d+: 'station\.guard\.velocity' is missing"):
        compose_file(CollectSpec, file)
    with pytest.raises(SpecError, match="'episodes': got -1"):
        compose_file(CollectSpec, file, ["station.guard.velocity=[1,1]", "episodes=-1"])


def test_a_recorded_episode_is_replayed_through_the_guard(arm, tmp_path):
    bundle(tmp_path, arm)
    spec = session(tmp_path, episodes=1)
    collect(spec)
    actions = recorded(tmp_path).columns["action"]
    before = len(sent(arm))
    done = replay(spec.station, tmp_path / "ds", 0)
    assert (done.steps, done.refused) == (len(actions), 0)
    # The way to where it began is not part of it.
    assert np.array(sent(arm)[before:])[-len(actions) :] == pytest.approx(actions, abs=0.15)
    assert done.error.max() < 0.3


def test_an_episode_of_another_robot_or_rate_or_one_that_there_is_not_is_not_replayed(arm, tmp_path):
    bundle(tmp_path, arm)
    spec = session(tmp_path, episodes=1)
    collect(spec)
    arm.connect = lambda: pytest.fail("the robot was touched")
    with pytest.raises(DatasetError, match="got episode 1, it has 1"):
        replay(spec.station, tmp_path / "ds", 1)
    with pytest.raises(ContractError, match="recorded at 30 Hz, the robot is driven at 20 Hz"):
        replay(spec.station.replace(rate_hz=20.0), tmp_path / "ds", 0)
    arm.action = Feature((2,), "float32", "rad", ("left.pos", "right.pos"))
    with pytest.raises(ContractError, match=r"it is of another robot: got shoulder\.pos, elbow\.pos, expected left"):
        replay(spec.station, tmp_path / "ds", 0)


def sent(arm: FakeArm) -> list[list[float]]:
    return [line["position"] for line in read_log(arm.log) if line["what"] == "send"]


class Person:
    """Somebody at the console, without a browser."""

    def __init__(self, name: str, said: list[str]) -> None:
        deadline = time.monotonic() + 60
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.name, self._address = name, said[0].removeprefix("console: ").replace("http", "ws").replace("/?", "/ws?")

    def __enter__(self) -> Person:
        self._stack = ExitStack()
        self.socket = self._stack.enter_context(connect(self._address))
        self.say(type="hello", person=self.name)
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def say(self, **message) -> None:
        self.socket.send(json.dumps(message))

    def wait(self, **expected) -> dict:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message = json.loads(self.socket.recv(timeout=30))
            if message["type"] == "state" and all(message[key] == value for key, value in expected.items()):
                return message
        raise AssertionError(f"never {expected}")


def in_thread(spec: CollectSpec) -> tuple[threading.Thread, list[str], list]:
    said: list[str] = []
    results: list = []
    stop = threading.Event()

    def run() -> None:
        try:
            results.append(collect(spec, say=said.append, stop=stop))
        except BaseException as error:
            results.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, said, results


def test_a_person_demonstrates_discards_and_corrects_a_policy_at_the_console(arm, tmp_path):
    bundle(tmp_path, arm)
    thread, said, results = in_thread(session(tmp_path, episodes=2, episode_s=60, console={"port": 0}))
    with Person("Ada", said) as ada:
        for ending in ("discard", "success", "failure"):
            ada.wait(state="waiting")
            ada.say(type="start")
            ada.wait(state="running", intervention=False)
            ada.say(type="take_over")
            ada.say(type="axes", axes=[0.0, 1.0])
            ada.wait(intervention=True, actor="Ada")
            time.sleep(0.2)
            ada.say(type="hand_back")
            ada.wait(intervention=False, state="running")
            ada.say(type="mark", ending=ending)
        thread.join(30)
    assert (results[0].episodes, results[0].discarded) == (2, 1)
    table = recorded(tmp_path)
    assert table.num_episodes == 2
    first = slice(0, int(table.episode_ends[0]))
    acted, actors = table.columns["intervention"].ravel(), table.columns["actor"].ravel()
    assert set(actors[acted]) == {"Ada"}
    assert 0 < acted[first].sum() < len(acted[first])
    last = table.episode_ends - 1
    assert table.columns["reward"].ravel()[last].tolist() == [1.0, 0.0]
    assert table.columns["reward_source"].ravel()[last].tolist() == ["Ada", "Ada"]
    assert table.columns["next.success"].ravel()[last].tolist() == [True, False]
    assert table.columns["next.done"].ravel()[last].tolist() == [True, True]


def test_a_stopped_robot_ends_the_episode_and_starts_no_other_until_somebody_resumes(arm, tmp_path):
    bundle(tmp_path, arm)
    thread, said, results = in_thread(session(tmp_path, episodes=2, episode_s=60, console={"port": 0}))
    with Person("Ada", said) as ada:
        ada.say(type="start")
        ada.wait(state="running")
        time.sleep(0.3)
        ada.say(type="stop")
        ada.wait(state="waiting", stopped={"why": "a person pressed STOP", "by": "Ada"})
        ada.say(type="start")
        ada.wait(said="the robot is stopped (a person pressed STOP); resume it first")
        ada.say(type="resume")
        ada.say(type="start")
        ada.wait(state="running", stopped=None)
        time.sleep(0.3)
        ada.say(type="mark", ending="success")
        thread.join(30)
    assert results[0].episodes == 2
    assert recorded(tmp_path).columns["next.success"].sum() == 1


def test_two_policies_are_compared_in_pairs_by_a_judge_who_is_not_told_which_one_acts(arm, tmp_path):
    bundle(tmp_path, arm)
    other = Feature((2,), "float32", "rad", arm.action.names, (-0.4,), (0.4,))
    (tmp_path / "other").mkdir()
    bundle(tmp_path / "other", arm, action=other)
    against = {"bundle": str(tmp_path / "other" / "bundle"), "execute": 3}
    spec = session(tmp_path, episodes=4, episode_s=60, console={"port": 0}, against=against)
    thread, said, results = in_thread(spec)
    shown = set()
    with Person("Ada", said) as ada:
        for _ in range(4):
            ada.wait(state="waiting")
            ada.say(type="start")
            message = ada.wait(state="running", actor="policy")
            shown |= {message["policy"], message["actor"], message["holder"]["name"]}
            time.sleep(0.2)
            ada.say(type="mark", ending="success")
        thread.join(60)
    assert shown == {"one of two", "policy"}
    assert results[0].judged == {"policy": (2, 2), "against": (2, 2)}
    table = recorded(tmp_path)
    actors = table.columns["actor"].ravel()[table.episode_ends - 1].tolist()
    assert len(set(actors)) == 2
    assert len(set(actors[:2])) == len(set(actors[2:])) == 2
    assert sum("put everything back as it was" in line for line in said) == 2


def test_a_comparison_needs_a_judge_and_pairs(tmp_path):
    against = {"bundle": "b"}
    with pytest.raises(ValueError, match="a console at which a person judges"):
        session(tmp_path, against=against)
    with pytest.raises(ValueError, match="episodes: got 3, expected an even number"):
        session(tmp_path, against=against, console={}, episodes=3)


def test_without_a_policy_the_robot_waits_for_a_person_and_that_is_not_recorded(arm, tmp_path):
    thread, said, results = in_thread(session(tmp_path, policy=None, episodes=1, episode_s=60, console={"port": 0}))
    with Person("Ada", said) as ada:
        ada.say(type="start")
        ada.wait(state="running")
        time.sleep(1.5 * GUARD["expiry_s"])
        ada.say(type="take_over")
        ada.wait(intervention=True, stopped=None)
        time.sleep(0.2)
        ada.say(type="mark", ending="success")
        thread.join(30)
    assert results[0].episodes == 1
    assert recorded(tmp_path).columns["intervention"].all()


@pytest.mark.slow
@pytest.mark.render
def test_a_person_demonstrates_on_a_virtual_so101_through_lerobots_own_driver(tmp_path):
    from rlsvc.robots.virtual.so101 import start

    with start("--size", "160x120", "--fps", "15", "--id", "arm", "--calibration-dir", str(tmp_path)) as arm:
        camera = {"type": "mjpeg", "url": arm.cameras["front"], "width": 160, "height": 120, "fps": 15}
        driver = {
            "name": "so101", "port": arm.port, "id": "arm", "calibration_dir": str(tmp_path),
            "cameras": {"front": camera},
        }  # fmt: skip
        guard = {
            **GUARD, "low": [-110, -105, -100, -100, -160, 0], "high": [110, 105, 100, 100, 160, 100],
            "velocity": [90, 90, 90, 90, 90, 200], "acceleration": [600] * 5 + [2000], "step": [25] * 5 + [60],
        }  # fmt: skip
        station = {
            "id": f"so101-{os.getpid()}", "driver": driver, "guard": guard, "rate_hz": 30, "max_skew_s": 1.0,
            "teleop": {"name": "jog", "speed": [60, 60, 60, 60, 60, 120]},
        }  # fmt: skip
        spec = session(
            tmp_path, station=station, robot_type="so101", policy=None, episodes=1, episode_s=60, console={"port": 0}
        )
        before = arm.state()["angles"]
        thread, said, results = in_thread(spec)
        with Person("Ada", said) as ada:
            ada.say(type="start")
            ada.wait(state="running")
            ada.say(type="take_over")
            until = time.monotonic() + 3
            while time.monotonic() < until:
                ada.say(type="axes", axes=[0.5, 0.5, 0, 0, 0, 0.5])
                ada.wait(type="state")
            ada.say(type="mark", ending="success")
            thread.join(60)
        moved = np.array(list(arm.state()["angles"].values())) - np.array(list(before.values()))
    assert results[0].episodes == 1
    # Half of 60 degrees a second, for about three seconds.
    assert 0.5 < moved[0] < 1.8
    table = recorded(tmp_path)
    assert table.columns["intervention"].all()
    assert table.columns["observation.images.front"].std() > 5
    behind = table.columns["observation.state"][-1, 0] - table.columns["action"][-1, 0]
    assert abs(behind) < 25.01  # guard.step


def classifier(folder: Path, names: tuple[str, ...], arm: FakeArm) -> Path:
    """A bundle of a reward classifier that has learned nothing: it gives both classes one half, and asks for 0.4."""
    import jax

    from rlsvc.nn.params import flatten_params
    from rlsvc.policies import make_classifier
    from rlsvc.spec.reward_classifier import RewardClassifierSpec
    from rlsvc.train.calibration import CALIBRATION, Calibration, to_bytes

    observation = {name: arm.observation.get(name, Feature((9,), "float32")) for name in names}
    seen = Contract(observation, arm.action, 30.0, 1, 0)
    fields = {"vision": {"crop": None, "width": 8, "keypoints": 8}, "hidden": [16]}
    spec = RewardClassifierSpec.model_validate(fields).model_dump(mode="json")
    return write_bundle(
        folder / "classifier", policy=spec, contract=seen,
        normalizer=Normalizer.identity({**seen.observation, "action": seen.action}),
        params=flatten_params(make_classifier(spec, seen).init(jax.random.key(0))),
        files={CALIBRATION: to_bytes(Calibration(1.0, 0.4, 1.0, 0.5, 1.0, 1.0, 3, 3, 0.1, 0.2))},
    )  # fmt: skip


def test_a_reward_classifier_ends_an_episode_as_a_success_and_says_that_it_did(arm, tmp_path):
    bundle(tmp_path, arm)
    path = classifier(tmp_path, ("observation.state", CAMERA), arm)
    sure, unsure = ({"classifier": str(path), "consecutive": 3, "threshold": t} for t in (None, 0.6))
    said: list[str] = []
    collect(session(tmp_path, episodes=2, reward=sure), say=said.append)
    collect(session(tmp_path, episodes=1, reward=unsure), say=said.append)
    assert said == ["episode 0 is saved: success", "episode 1 is saved: success", "episode 2 is saved: cut"]
    table = recorded(tmp_path)
    ends = table.episode_ends - 1
    assert table.columns["reward"][ends].ravel().tolist() == [1.0, 1.0, 0.0]
    assert table.columns["reward"].sum() == 2
    assert table.columns["next.success"][ends].ravel().tolist() == [True, True, False]
    sources = [str(source) for source in table.columns["reward_source"][ends].ravel()]
    assert sources[0] == sources[1] == f"classifier {read_bundle(path).id[:12]}"
    assert sources[2] == ""


def test_a_classifier_that_sees_what_the_robot_does_not_give_is_refused_before_it_moves(arm, tmp_path):
    bundle(tmp_path, arm)
    path = classifier(tmp_path, (CAMERA, "observation.force"), arm)
    with pytest.raises(ContractError, match=r"reward: the classifier sees 'observation\.force', the environment gives"):
        collect(session(tmp_path, reward={"classifier": str(path)}))
    assert not (tmp_path / "log").exists()
