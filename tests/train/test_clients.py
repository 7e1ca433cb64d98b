"""A robot's computer without Ray beside a run that learns: it asks for actions, sends episodes, bears lost networks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_arm import GUARD, FakeArm

from rlsvc.collect import collect
from rlsvc.collect_send import EpisodeSender, read_key
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import NotFoundError, SpecError, UserError
from rlsvc.data.episodes import EpisodeAssembler
from rlsvc.data.journal import Journal
from rlsvc.data.load import load_table
from rlsvc.data.normalize import Normalizer
from rlsvc.data.recorder import Recorder
from rlsvc.serve.haproxy import free_ports
from rlsvc.serve.keys import new_key, write_file
from rlsvc.spec.collect import CollectSpec
from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.store.bundle import write_bundle
from rlsvc.train.clients import CLIENTS, ClientRollouts, EpisodeReader, far_contract
from rlsvc.train.learner_data import SequenceData
from rlsvc.train.rollout_worker import ACTING, make_acting
from rlsvc.train.run import train

STEPS = 12
DIFFUSION = {
    "name": "diffusion", "horizon": 4, "n_action_steps": 2, "train_steps": 10, "sample_steps": 2,
    "backbone": {"name": "unet1d", "down_dims": [16], "step_embed_dim": 16},
}  # fmt: skip


JOINTS = ("shoulder.pos", "elbow.pos")
STATE = Feature((2,), "float32", "rad", JOINTS)


def record(
    folder: Path,
    episodes: int,
    *,
    names=JOINTS,
    unit="rad",
    fps: int = 30,
    outcome="success",
    people=slice(0, 0),
    seed: int = 0,
) -> Path:
    """A dataset as rlsvc collect records one; weights of version 3 act, but where people do."""
    width = len(names)
    feature = Feature((width,), "float32", unit, names)
    rng = np.random.default_rng(seed)
    with Recorder(folder, {"observation.state": feature}, feature, fps, "fake") as recorder:
        for _ in range(episodes):
            acts = np.zeros(STEPS, bool)
            acts[people] = True
            for step in range(STEPS):
                state = rng.normal(size=width).astype(np.float32)
                numbers = {"observation.state": state, "action": state / 2, "commanded": state, "reward": 0.0}
                words = {"actor": "anna" if acts[step] else "3", "reward_source": "", "intervention": acts[step]}
                recorder.add({**numbers, **words}, {"observation.state": step / fps})
            recorder.end_episode(outcome, "reach", reward=float(outcome == "success"), reward_source="anna")
    return folder


@pytest.fixture
def demonstrations(tmp_path) -> Path:
    return record(tmp_path / "demonstrations", 3)


def run_spec(folder: Path, port: int, **changes) -> RunSpec:
    given = {
        "name": "far", "root": str(folder / "runs"), "policy": DIFFUSION, "log_interval": 5,
        "algo": {"name": "hiors", "batch_size": 8, "min_accepted": 1, "reward_above": -1.0, "no_op": None},
        "data": {
            "datasets": [{"path": str(folder / "demonstrations")}], "observation": ["observation.state"],
            "validation_fraction": 0,
        },
        "rollout": {"mode": "async", "clients": {"port": port, "keys": str(folder / "keys.json")}},
        "phases": [
            {"name": "warm", "type": "offline", "buffer": "demonstrations", "hooks": {"update": 1},
             "duration_updates": 4},
            {
                "name": "online", "type": "online", "buffer": {"replay": 0.5, "demonstrations": 0.5},
                "hooks": {"collect": 4, "update": 1}, "duration_steps": 30,
            },
        ],
        "checkpoint": {"interval": 1000}, "evaluation": {"interval": None}, "tracking": {"trackers": []},
    }  # fmt: skip
    return RunSpec.model_validate({**given, **changes})


@pytest.fixture
def key_file(tmp_path) -> Path:
    key, kept = new_key("left_arm", ("read", "act", "record"))
    write_file(tmp_path / "keys.json", (kept,))
    file = tmp_path / "left_arm.key"
    file.write_text(key + "\n")
    file.chmod(0o600)
    return file


def acting_of(folder: Path, demonstrations: Path):
    """What a rollout needs of the run, without its learner."""
    contract = Contract({"observation.state": STATE}, STATE, 30.0, 1, 2)
    write_bundle(
        folder / ACTING, policy={**DIFFUSION, "n_obs_steps": 1}, contract=contract,
        normalizer=Normalizer.from_contract(contract), params={},
    )  # fmt: skip
    return make_acting(run_spec(demonstrations.parent, 8100), None, folder)


class Proxy:
    """A network between robot and learner that can be taken away."""

    def __init__(self, port: int) -> None:
        self._to, self._pairs = port, []
        self.up = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                assert self.up
                far = socket.create_connection(("127.0.0.1", self._to))
            except (OSError, AssertionError):
                near.close()
                continue
            self._pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(a, b), daemon=True).start()

    @staticmethod
    def _copy(a: socket.socket, b: socket.socket) -> None:
        try:
            while data := a.recv(65536):
                b.sendall(data)
        except OSError:
            pass
        for end in (a, b):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self.up = False
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()


def wait_for(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


HIL_SERL = {
    "policy": {"name": "gaussian", "hidden_dims": [8]},
    "algo": {"name": "sac", "batch_size": 8, "critic_dims": [8]},
    "replay": {"capacity": 500},
}
"""Learns from steps, half of them from demonstrations."""


@pytest.mark.parametrize("algorithm", ["hiors", "sac"])
def test_an_arm_far_away_is_driven_and_learned_from_and_loses_nothing_with_the_network(
    tmp_path, demonstrations, key_file, monkeypatch, algorithm
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1] / "robots"), *os.sys.path]))
    arm = FakeArm(tmp_path / "log")
    monkeypatch.setitem(__import__("rlsvc.robots.drivers", fromlist=["DRIVERS"]).DRIVERS, "dobot", lambda spec: arm)
    (port,) = free_ports(1)
    spec, stop, done = run_spec(tmp_path, port), threading.Event(), []
    if algorithm == "sac":
        rewarded = spec.data.replace(reward="reward", terminated="next.done")
        spec = run_spec(tmp_path, port, **HIL_SERL, data=rewarded)
    learner = threading.Thread(target=lambda: done.append(train(spec, local=True, stop=stop)), daemon=True)
    learner.start()
    wait_for(lambda: listens(port))
    network, said = Proxy(port), []
    station = {
        "id": f"far-{os.getpid()}", "driver": {"name": "dobot", "host": "127.0.0.1"}, "guard": GUARD, "rate_hz": 30,
        "max_skew_s": 1.0,
    }  # fmt: skip
    session = {
        "station": station, "task": "reach", "dataset": str(tmp_path / "arm"), "robot_type": "fake", "episode_s": 0.6,
        "console": None, "episodes": 1,
        "policy": {
            "url": f"127.0.0.1:{network.port}", "key_file": str(key_file), "send_episodes": True, "mode": "sync",
        },
    }  # fmt: skip
    try:
        assert collect(CollectSpec.model_validate(session), say=said.append).episodes == 1
        assert not any("still to be sent" in line for line in said)
        wait_for(lambda: len(Journal(tmp_path / "runs/rlsvc/far/journal", read_only=True)) == 1)

        # Without a network people go on recording; what they recorded is sent when it is back.
        network.cut()
        record(tmp_path / "arm", 2)
        sender = EpisodeSender(tmp_path / "arm", f"127.0.0.1:{network.port}", read_key(str(key_file)), said.append)
        wait_for(lambda: any("is away" in line for line in said))
        assert sender.drain(0.0) == 3
        network.up = True
        sender.notify()
        assert sender.drain(60.0) == 0
        sender.close()
        assert any("is back" in line for line in said)
        learner.join(60)
        assert not learner.is_alive()
    finally:
        stop.set()
        network.close()
    assert done[0].bundle is not None
    with Journal(tmp_path / "runs/rlsvc/far/journal", read_only=True) as journal:
        assert sorted(number for _, _, number in journal.ids()) == [0, 1, 2]
        first = next(journal.read())
    # The learner's weights acted, by their number, and the guard's limits held.
    assert (first.columns["version"][:-1] >= 0).any()
    assert np.abs(first.columns["action"]).max() <= 1
    folders = sorted(path.name for path in (tmp_path / "runs/rlsvc/far" / CLIENTS).glob("left_arm/*/*"))
    assert folders == ["0", "1", "2"]


def test_a_run_that_was_killed_learns_of_what_it_held_and_had_not_written_down(tmp_path, demonstrations):
    folder = tmp_path / "run"
    acting = acting_of(folder, demonstrations)
    held = folder / CLIENTS / "left_arm" / ("ab" * 16)
    for number in range(2):
        record(held / str(number), 1)
    spec = run_spec(tmp_path, 8100, rollout={"mode": "async", "clients": {}})
    with Journal(folder / "journal") as journal:
        rollouts = ClientRollouts(spec, acting, journal, folder, "cpu")
        first, second = rollouts.poll(0.0)
        journal.append(first.chunk)
        again = ClientRollouts(spec, acting, journal, folder, "cpu")
        assert [one.chunk.id for one in again.poll(0.0)] == [second.chunk.id]
        assert again.metrics() == {"episodes_received": 1.0}  # what was written down is not read again


def test_rows_say_who_acted_and_end_as_the_episode_did(tmp_path, demonstrations):
    read = EpisodeReader(run_spec(tmp_path, 8100), acting_of(tmp_path / "run", demonstrations))
    rows, success = read(record(tmp_path / "one", 1, people=slice(4, 7)))
    assert success
    assert len(rows["step"]) == STEPS + 1
    assert rows["version"].tolist() == [3] * 4 + [-1] * 3 + [3] * 6
    assert np.flatnonzero(rows["intervention"]).tolist() == [4, 5, 6]
    assert rows["reward"].tolist() == [0.0] * (STEPS - 1) + [1.0, 0.0]
    assert np.flatnonzero(rows["terminated"]).tolist() == [STEPS - 1]
    assert rows["reward_source"][STEPS - 1] == 1
    assert rows["commanded"][:STEPS] == pytest.approx(2 * rows["action"][:STEPS])
    cut, success = read(record(tmp_path / "cut", 1, outcome="cut"))
    assert not success
    assert len(cut["step"]) == STEPS  # its last observation is the final one
    assert not cut["terminated"].any()


def test_chunks_of_far_robots_are_whole_episodes_with_numbers_of_their_own(tmp_path, demonstrations):
    folder = tmp_path / "run"
    acting = acting_of(folder, demonstrations)
    for client in ("left_arm", "right_arm"):
        record(folder / CLIENTS / client / ("ab" * 16) / "0", 1)
    spec = run_spec(tmp_path, 8100, rollout={"mode": "async", "clients": {}})
    with Journal(folder / "journal") as journal:
        chunks = [one.chunk for one in ClientRollouts(spec, acting, journal, folder, "cpu").poll(0.0)]
        for chunk in chunks:
            journal.append(chunk)
        assert len(journal) == 2
    assembler = EpisodeAssembler()
    episodes = [episode for chunk in chunks for episode in assembler.add(chunk)]
    assert [len(episode["step"]) for episode in episodes] == [STEPS + 1] * 2
    assert episodes[0]["episode"][0] != episodes[1]["episode"][0]
    assert [chunk.num_steps for chunk in chunks] == [STEPS] * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"names": (*JOINTS, "wrist.pos")}, "has shape \\[3\\], the run's demonstrations have \\[2\\]"),
        ({"fps": 10}, "10 steps a second, the run's demonstrations have 30"),
        ({"names": ("elbow.pos", "shoulder.pos")}, "'observation.state' has names \\('elbow.pos', 'shoulder.pos'\\)"),
        ({"unit": "deg"}, "has unit deg, the run's demonstrations have rad"),
        ({"episodes": 2}, "24 steps, expected two of one episode or more"),
    ],
)
def test_an_episode_of_another_robot_is_refused_by_name(tmp_path, demonstrations, changes, says):
    read = EpisodeReader(run_spec(tmp_path, 8100), acting_of(tmp_path / "run", demonstrations))
    given = {"episodes": 1, **changes}
    with pytest.raises(UserError, match=says):
        read(record(tmp_path / "one", given.pop("episodes"), **given))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollout": {"mode": "sync", "clients": {}}}, "rollout.mode: got sync, expected async"),
        ({"rollout": {"mode": "async", "clients": {"host": "0.0.0.0"}}}, "and no keys, expected loopback"),
        ({"rollout": {"mode": "async", "inference": "central", "clients": {}}}, "rollout.inference: got central"),
        ({"rollout": {"mode": "async", "clients": {}, "stand_in": {}}}, "rollout.stand_in: people stand beside"),
        ({"env": {"name": "gymnasium", "id": "Pendulum-v1"}}, "so the run has no env"),
        ({"rollout": {"mode": "async"}}, "the run has no `env`"),
        ({"rollout": {"mode": "async", "clients": {"port": 0}}}, "greater than or equal to 1"),
    ],
)
def test_a_run_that_far_robots_cannot_serve_is_refused(tmp_path, demonstrations, changes, says):
    with pytest.raises(ValueError, match=says):
        run_spec(tmp_path, 8100, **changes)


def test_an_algorithm_for_which_they_cannot_collect_is_refused_and_one_without_demonstrations():
    far = ["rollout.mode=async", "+rollout.clients.port=8100"]
    with pytest.raises(SpecError, match=r"do not collect for tdmpc2: they send whole episodes .*; take hiors or sac"):
        compose(["experiment=tdmpc2_pendulum", *far])
    with pytest.raises(SpecError, match=r"rollout\.clients: robots' episodes have the features of the demonstrations"):
        compose(["experiment=sac_pendulum", *far])


def test_steps_of_far_robots_lie_in_the_replay_as_they_were_recorded(tmp_path, demonstrations):
    """Those of a person are there as demonstrations too; an episode that was cut is no end of the task."""
    data = run_spec(tmp_path, 8100).data.replace(reward="reward", terminated="next.done")
    spec = run_spec(tmp_path, 8100, **HIL_SERL, data=data, rollout={"mode": "async", "clients": {}})
    contract = far_contract(spec)
    assert contract.action.names == JOINTS
    recorded = load_table(spec.data.datasets[0], ["action"]).columns["action"]
    np.testing.assert_allclose(contract.action.low, recorded.min(axis=0))
    folder = tmp_path / "run"
    for number, (outcome, people) in enumerate([("success", slice(4, 7)), ("cut", slice(0, 0))]):
        record(folder / CLIENTS / "left_arm" / ("ab" * 16) / str(number), 1, outcome=outcome, people=people, seed=1)
    with Journal(folder / "journal") as journal:
        rollouts = ClientRollouts(spec, make_acting(spec, contract, folder), journal, folder, "cpu")
        chunks = [one.chunk for one in rollouts.poll(0.0)]
    learner = SequenceData(spec, contract, lambda x: x, folder, 1)
    for chunk in chunks:
        learner._add(chunk)
    # The final observation of a cut episode is its last; that of the other stands beside its last step.
    assert [chunk.num_steps for chunk in chunks] == [STEPS, STEPS - 1]
    batch = learner.source({"replay": 1.0}).sample(jax.random.key(0), 2000, 1)
    assert set(np.unique(batch["reward"])) == {0.0, 1.0}
    assert batch["terminated"][batch["reward"] == 1].all()
    assert not batch["terminated"][batch["reward"] == 0].any()
    mixed = learner.source({"replay": 0.5, "demonstrations": 0.5}).sample(jax.random.key(0), 2000, 1)
    shown = np.unique(np.asarray(mixed["action"])[mixed["buffer"] == 1].reshape(-1, 2), axis=0)
    assert len(shown) == 3 * STEPS + 3


def test_a_key_file_that_others_may_read_or_that_holds_none_is_refused(tmp_path):
    file = tmp_path / "arm.key"
    with pytest.raises(NotFoundError, match="rlsvc keys add"):
        read_key(str(file))
    file.write_text("\n")
    file.chmod(0o600)
    with pytest.raises(UserError, match="holds no key"):
        read_key(str(file))
    file.write_text("rlsvc_a")
    file.chmod(0o640)
    with pytest.raises(UserError, match="others may read"):
        read_key(str(file))
    assert read_key(None) is None


@pytest.mark.parametrize("status", [401, 403, 422, 503])
def test_what_a_learner_refuses_is_said_and_counted_as_lacking(tmp_path, status):
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Learner(BaseHTTPRequestHandler):
        def answer(self, code, body):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer(*((status, {"error": "no"}) if status in (401, 403) else (200, {"held": []})))

        def do_PUT(self):
            self.close_connection = True
            self.answer(status, {"error": "no such thing"})

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Learner)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said: list[str] = []
    sender = EpisodeSender(record(tmp_path / "ds", 1), f"127.0.0.1:{server.server_port}", "k", said.append)
    try:
        wait_for(lambda: said)
        assert sender.drain(0.0) == 1
    finally:
        sender.close()
        server.shutdown()
        server.server_close()
    expected = {401: "episodes are not sent: no", 403: "episodes are not sent: no", 422: "episode 0: no such thing"}
    assert said[0] == expected.get(status, said[0])
    assert status != 503 or "is away" in said[0]
