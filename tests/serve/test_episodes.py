"""Episodes that are sent to a learner: held once they are on its disk, and trusted with nothing."""

import asyncio
import contextlib
import errno
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from serving_fakes import SMALL_CONTRACT, FakeRunner, service_of
from starlette.testclient import TestClient
from typer.testing import CliRunner

from rlsvc.cli import app as cli
from rlsvc.core.contract import Feature
from rlsvc.core.errors import DatasetError, UserError
from rlsvc.core.http_server import ThreadServer
from rlsvc.data.load import load_table
from rlsvc.data.pack_episode import dataset_id, pack_episode, unpack_episode
from rlsvc.data.recorder import Recorder
from rlsvc.serve.app import build_app
from rlsvc.serve.codec import RequestError
from rlsvc.serve.episodes import EpisodeInbox, add_episode_routes
from rlsvc.spec.data import DatasetSpec

DATASET = "ab" * 16
MANY = 10_000_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A dataset of two episodes, with a camera."""
    folder = tmp_path_factory.mktemp("recorded") / "ds"
    observation = {
        "observation.state": Feature((2,), "float32", "rad", ("a", "b")),
        "observation.images.top": Feature((32, 48, 3), "uint8"),
    }
    rng = np.random.default_rng(0)
    with Recorder(folder, observation, Feature((2,), "float32", "rad", ("a", "b")), 10, "fake") as recorder:
        for episode in range(2):
            for step in range(5 + episode):
                image = np.full((32, 48, 3), 40 * step, np.uint8)
                row = {"observation.state": rng.normal(size=2).astype(np.float32), "observation.images.top": image}
                numbers = {"action": np.zeros(2, np.float32), "commanded": np.zeros(2, np.float32), "reward": 0.0}
                words = {"intervention": False, "actor": "7", "reward_source": ""}
                recorder.add({**row, **numbers, **words}, dict.fromkeys(row, step / 10))
            recorder.end_episode("success", "push", reward=1.0, reward_source="anna")
    return folder


@pytest.fixture(scope="module")
def packed(recorded, tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / "episode.tar"
    pack_episode(recorded, 1, file)
    return file.read_bytes()


def steps_of(folder):
    return load_table(DatasetSpec(path=str(folder))).num_steps


def inbox_of(folder, **changes):
    return EpisodeInbox(folder, **{"read": steps_of, "max_bytes": MANY, **changes})


def receive(inbox, data, number=1, client="arm"):
    async def pieces():
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    asyncio.run(inbox.receive(client, DATASET, number, pieces()))


def test_an_episode_arrives_as_it_was_recorded(recorded, packed, tmp_path):
    (tmp_path / "episode.tar").write_bytes(packed)
    unpack_episode(tmp_path / "episode.tar", tmp_path / "there", MANY)
    there, here = (load_table(DatasetSpec(path=str(path))) for path in (tmp_path / "there", recorded))
    assert there.num_episodes == 1
    assert there.tasks == ["push"]
    for name, column in here.episode(1).items():
        np.testing.assert_array_equal(there.columns[name], column, name)


def test_a_dataset_keeps_its_id_and_two_have_different_ones(recorded, tmp_path):
    (tmp_path / "meta").mkdir()
    assert dataset_id(recorded) == dataset_id(recorded) != dataset_id(tmp_path)
    (tmp_path / "meta" / "rlsvc.json").write_text("{}")
    with pytest.raises(DatasetError, match="expected a map with an id"):
        dataset_id(tmp_path)


def test_what_was_received_is_held_announced_once_and_read_again_after_a_restart(packed, tmp_path):
    inbox = inbox_of(tmp_path)
    receive(inbox, packed)
    receive(inbox, packed)
    assert inbox.held("arm", DATASET) == [1]
    assert inbox.held("other", DATASET) == []
    (one,) = inbox.take(0.0)
    assert (one.client, one.dataset, one.number, one.content) == ("arm", DATASET, 1, 6)
    (tmp_path / ".receiving-killed").mkdir()
    (tmp_path / ".receiving-killed" / "episode.tar").write_bytes(packed[:100])
    again = inbox_of(tmp_path)
    assert again.take(0.0) == [one]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arm"]


def test_what_need_not_be_read_again_is_held_all_the_same(packed, tmp_path):
    receive(inbox_of(tmp_path), packed)
    again = inbox_of(tmp_path, known=lambda client, dataset, number: (client, dataset, number) == ("arm", DATASET, 1))
    assert again.take(0.0) == []
    assert again.held("arm", DATASET) == [1]


@contextlib.contextmanager
def served(inbox):
    """A client of a server that takes episodes."""
    with service_of(FakeRunner(SMALL_CONTRACT)) as service:
        app = build_app(service)
        add_episode_routes(app, inbox)
        with TestClient(app) as client:
            yield client


@pytest.mark.parametrize("where", ["receiving", "unpacking"])
def test_a_disk_that_is_full_is_said_and_leaves_nothing(packed, tmp_path, monkeypatch, where):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    owner, name = (tarfile.TarFile, "extractall") if where == "unpacking" else (Path, "open")
    inbox = inbox_of(tmp_path)
    monkeypatch.setattr(owner, name, full)
    with served(inbox) as client:
        answer = client.put(f"/v1/episodes/{DATASET}/1", content=packed)
    assert (answer.status_code, answer.json()["reason"]) == (503, "disk_full")
    assert list(tmp_path.iterdir()) == []


def test_a_caller_that_goes_away_leaves_nothing_and_is_no_fault_of_the_server(packed, tmp_path, caplog):
    messages = iter([{"type": "http.request", "body": packed[:100], "more_body": True}, {"type": "http.disconnect"}])
    answer = []

    async def receive():
        return next(messages)

    async def send(message):
        answer.append(message)

    path = f"/v1/episodes/{DATASET}/1"
    scope = {
        "type": "http",
        "method": "PUT",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    with served(inbox_of(tmp_path)) as client:
        asyncio.run(client.app({**scope, "http_version": "1.1"}, receive, send))
    assert answer[0]["status"] == 400
    assert not caplog.records
    assert list(tmp_path.iterdir()) == []


def test_the_command_sends_what_the_learner_lacks_and_says_what_it_has(recorded, tmp_path):
    run, inbox = CliRunner(), inbox_of(tmp_path)
    with service_of(FakeRunner(SMALL_CONTRACT)) as service:
        app = build_app(service)
        add_episode_routes(app, inbox)
        server = ThreadServer(app, "127.0.0.1", 0, "episodes")
        try:
            for _ in range(2):
                result = run.invoke(cli, ["dataset", "send", str(recorded), server.address])
                assert result.exit_code == 0, result.output
                assert "the learner has 2 of 2 episodes" in result.output
        finally:
            server.close()
    assert [received.content for received in inbox.take(0.0)] == [5, 6]
    result = run.invoke(cli, ["dataset", "send", str(recorded), server.address, "--timeout-s", "0.5"])
    assert result.exit_code == 1
    assert "the learner has 0 of 2 episodes" in result.output


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def named(name: str, **changes: object) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(member, key, value)
    return member


BAD = {
    "no tar": b"x" * 5000,
    "nothing": b"",
    "a path upwards": tar_of((named("../evil"), b"x")),
    "a path upwards inside": tar_of((named("meta/../../evil"), b"x")),
    "an absolute path": tar_of((named("/tmp/evil"), b"x")),
    "a symbolic link": tar_of((named("meta", type=tarfile.SYMTYPE, linkname="/etc"), b"")),
    "a hard link": tar_of((named("meta", type=tarfile.LNKTYPE, linkname="/etc/passwd"), b"")),
    "a device": tar_of((named("meta", type=tarfile.CHRTYPE), b"")),
    "a hidden name": tar_of((named(".bashrc"), b"x")),
    "a name with a newline": tar_of((named("meta/a\nb"), b"x")),
    "a deep path": tar_of((named("/".join("a" * 9)), b"x")),
    "many files": tar_of(*[(named(f"f{i}"), b"x") for i in range(300)]),
    "no dataset": tar_of((named("meta/other.json"), b"{}")),
    "a dataset of nothing": tar_of((named("meta/info.json"), b"{}")),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_episode_is_refused_and_leaves_nothing(tmp_path, data):
    inbox = inbox_of(tmp_path / "inbox")
    with pytest.raises(RequestError) as refusal:
        receive(inbox, data)
    assert refusal.value.status == 422
    assert str(tmp_path) not in str(refusal.value)
    assert list(tmp_path.rglob("*")) == [tmp_path / "inbox"]


def test_an_episode_that_is_too_large_is_refused_packed_and_unpacked(packed, tmp_path):
    with served(inbox_of(tmp_path / "inbox", max_bytes=1000)) as client:
        answer = client.put(f"/v1/episodes/{DATASET}/1", content=packed)
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert "larger than 1000 bytes" in answer.json()["error"]
    assert list((tmp_path / "inbox").iterdir()) == []
    (tmp_path / "episode.tar").write_bytes(tar_of((named("a"), b"x" * 600), (named("b"), b"x" * 600)))
    with pytest.raises(DatasetError, match="at most 256 files and 1000 bytes"):
        unpack_episode(tmp_path / "episode.tar", tmp_path / "there", 1000)
    assert not (tmp_path / "there").exists()


def test_an_episode_of_no_use_is_refused_with_the_reason(packed, tmp_path):
    def refuses(folder):
        raise UserError(f"{folder}: 10 steps a second, the run has 30")

    with pytest.raises(RequestError, match=r"^the episode: 10 steps a second, the run has 30$"):
        receive(inbox_of(tmp_path, read=refuses), packed)
    assert inbox_of(tmp_path).held("arm", DATASET) == []


def test_over_http_the_status_says_what_is_wrong(packed, tmp_path):
    inbox = inbox_of(tmp_path)
    with served(inbox) as client:
        assert client.put(f"/v1/episodes/{DATASET}/3", content=packed).json() == {"held": 3}
        assert client.get(f"/v1/episodes/{DATASET}").json() == {"held": [3]}
        assert client.put(f"/v1/episodes/{DATASET}/4", content=b"x").status_code == 422
        for bad in ("-1", "01", "1e3", "1000000"):
            assert client.put(f"/v1/episodes/{DATASET}/{bad}", content=packed).status_code == 404
        for bad in ("zz/1", f"..%2f{DATASET[:30]}/1"):
            assert client.put(f"/v1/episodes/{bad}", content=packed).status_code == 404
    assert [received.number for received in inbox.take(0.0)] == [3]
    assert inbox.held("anybody", DATASET) == [3]
