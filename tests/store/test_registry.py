"""The model registry: a bundle becomes a version, and comes back verified."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from rlsvc.commands.policies import app
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, NotFoundError, SpecError
from rlsvc.data.normalize import Normalizer
from rlsvc.serve.haproxy import free_ports
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.store.mlflow_store import TrackingError
from rlsvc.store.registry import Registry, register, resolve

CONTRACT = Contract(
    observation={"observation.state": Feature((2,), "float32")},
    action=Feature((2,), "float32"),
    rate_hz=10.0,
    n_obs_steps=1,
    action_horizon=4,
)


def bundle(path: Path, weight: float = 1.0) -> Path:
    rows = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    features = {**CONTRACT.observation, "action": CONTRACT.action}
    normalizer = Normalizer.fit({"default": {"observation.state": rows, "action": rows}}, features, {})
    params = {"layer.kernel": np.full((3, 2), weight, np.float32)}
    return write_bundle(path, policy={"name": "zero"}, contract=CONTRACT, normalizer=normalizer, params=params)


def test_a_registered_bundle_is_found_by_alias_version_and_latest_and_verifies(root):
    first = bundle(root / "runs" / "a", 1.0)
    second = bundle(root / "runs" / "b", 2.0)
    assert register(first, "pusht", root=root) == 1
    assert register(second, "pusht", root=root) == 2
    Registry(root).promote("pusht", 1, "production")
    for target, source in (("@production", first), ("/1", first), ("/2", second), ("/latest", second)):
        assert read_bundle(resolve(f"models:/pusht{target}", root=root)).id == read_bundle(source).id
    assert resolve(str(first)) == first


def test_an_alias_moves_to_the_version_that_is_promoted(root):
    for index in (1, 2):
        register(bundle(root / str(index), float(index)), "pusht", root=root)
        Registry(root).promote("pusht", index, "best")
    assert [version.aliases for version in Registry(root).versions("pusht")] == [(), ("best",)]


def test_an_alias_goes_back_the_way_that_it_came(root):
    for index in (1, 2, 3):
        register(bundle(root / str(index), float(index)), "pusht", root=root)
    for version in (1, 3, 3, 2):  # promoted twice is pointed at once
        Registry(root).promote("pusht", version, "production")
    Registry(root).promote("pusht", 3, "best")
    assert [Registry(root).rollback("pusht", "production") for _ in range(2)] == [3, 1]
    assert [version.aliases for version in Registry(root).versions("pusht")] == [("production",), (), ("best",)]
    with pytest.raises(NotFoundError, match=r"models:/pusht@production: version 1 is the first that it points at"):
        Registry(root).rollback("pusht", "production")
    Registry(root).promote("pusht", 2, "production")
    assert Registry(root).rollback("pusht", "production") == 1


def test_an_alias_that_there_is_not_goes_nowhere(root):
    register(bundle(root / "a"), "pusht", root=root)
    Registry(root).promote("pusht", 1, "production")
    with pytest.raises(NotFoundError, match=r"'producton'.*production"):
        Registry(root).rollback("pusht", "producton")


def test_the_same_bundle_registered_twice_is_one_version(root):
    path = bundle(root / "a")
    assert [register(path, "pusht", root=root) for _ in range(2)] == [1, 1]
    assert len(Registry(root).versions("pusht")) == 1


def test_a_registered_bundle_takes_no_second_copy_and_outlives_its_run_folder(root):
    path = bundle(root / "a")
    inode = (path / "params.safetensors").stat().st_ino
    register(path, "pusht", root=root)
    shutil.rmtree(path)
    found = resolve("models:/pusht/1", root=root)
    assert (found / "params.safetensors").stat().st_ino == inode
    assert read_bundle(found).params["layer.kernel"].shape == (3, 2)


def test_a_version_knows_the_run_that_made_it(root):
    registry = Registry(root)
    client = registry._client
    run = client.create_run(client.create_experiment("demo"))
    registry.register(bundle(root / "a"), "pusht", run.info.run_id)
    assert registry.versions("pusht")[0].run_id == run.info.run_id


def test_a_changed_weight_file_is_refused_when_registered_and_when_resolved(root):
    path = bundle(root / "a")
    register(path, "pusht", root=root)
    stored = resolve("models:/pusht/1", root=root) / "params.safetensors"
    data = bytearray(stored.read_bytes())
    data[-1] ^= 1
    stored.write_bytes(bytes(data))
    with pytest.raises(BundleError, match=r"params\.safetensors"):
        resolve("models:/pusht/1", root=root)
    with pytest.raises(BundleError, match=r"params\.safetensors"):
        register(path, "other", root=root)
    assert Registry(root).names() == ["pusht"]


def test_another_bundle_in_the_place_of_the_registered_one_is_refused(root):
    register(bundle(root / "a", 1.0), "pusht", root=root)
    stored = resolve("models:/pusht/1", root=root)
    shutil.rmtree(stored)
    with pytest.raises(BundleError, match="which is gone"):
        resolve("models:/pusht/1", root=root)
    bundle(stored, 2.0)
    with pytest.raises(BundleError, match="was registered there"):
        resolve("models:/pusht/1", root=root)


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("models:/pust/1", NotFoundError, r"unknown policy in sqlite:///.*: 'pust'\. Did you mean 'pusht'\?"),
        ("models:/pusht/7", NotFoundError, r"no version 7\. There are: 1"),
        ("models:/pusht@prodution", NotFoundError, r"Did you mean 'production'\? There are: production"),
        ("models:pusht", SpecError, r"expected models:/name@alias"),
        ("models:/pusht", SpecError, r"expected models:/name@alias"),
        ("/no/such/bundle", NotFoundError, r"expected the folder of a policy bundle"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(root, target, error, message):
    register(bundle(root / "a"), "pusht", root=root)
    Registry(root).promote("pusht", 1, "production")
    with pytest.raises(error, match=message):
        resolve(target, root=root)


@pytest.mark.parametrize("alias", ["latest", "v2", "7", "a b", "", "best!"])
def test_an_alias_that_cannot_be_one_is_refused(root, alias):
    register(bundle(root / "a"), "pusht", root=root)
    with pytest.raises(SpecError, match="alias"):
        Registry(root).promote("pusht", 1, alias)


def test_a_name_with_a_slash_is_refused(root):
    with pytest.raises(SpecError, match="policy name 'a/b'"):
        register(bundle(root / "a"), "a/b", root=root)


def test_an_unreachable_store_is_named(tmp_path):
    with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9 cannot be used"):
        Registry(tmp_path, "http://127.0.0.1:9")


@pytest.mark.slow
def test_a_remote_store_takes_the_bundle_and_hands_it_back_to_another_machine(root, tmp_path, monkeypatch):
    (port,) = free_ports(1)
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{root}/mlflow.db",
               "--artifacts-destination", str(root / "server")]  # fmt: skip
    uri = f"http://127.0.0.1:{port}"
    with (
        (root / "server.log").open("w") as log,
        subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True) as server,
    ):
        try:
            wait_for_server(uri, server)
            registry = Registry(root, uri)
            client = registry._client
            run = client.create_run(client.create_experiment("demo"))
            path = bundle(root / "a")
            with pytest.raises(SpecError, match="needs the id of an MLflow run"):
                registry.register(path, "pusht")
            assert registry.register(path, "pusht", run.info.run_id) == 1
            bundle_id = read_bundle(path).id
            shutil.rmtree(path)
            monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "cache"))
            for _ in range(2):  # downloaded, then from the cache
                found = resolve("models:/pusht/1", root=root, uri=uri)
                assert found.is_relative_to(tmp_path / "cache")
                assert read_bundle(found).id == bundle_id
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def wait_for_server(uri: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{uri}/health").status_code == 200:
                return
        time.sleep(0.3)
    raise AssertionError(f"mlflow server did not come up: {server.poll()}")


def test_the_commands_list_show_and_promote(root):
    register(bundle(root / "a"), "pusht", root=root)
    run = CliRunner()
    assert run.invoke(app, ["promote", "pusht", "1", "best", "--root", str(root)]).exit_code == 0
    assert run.invoke(app, ["rollback", "pusht", "best", "--root", str(root)]).exit_code == 1
    listed = run.invoke(app, ["list", "--root", str(root)], env={"COLUMNS": "200"}).output
    assert "pusht" in listed
    assert "best -> 1" in listed
    shown = run.invoke(app, ["show", "pusht", "--root", str(root)], env={"COLUMNS": "300"}).output
    assert read_bundle(root / "a").id[:12] in shown
    failed = run.invoke(app, ["show", "pusth", "--root", str(root)])
    assert isinstance(failed.exception, NotFoundError)
