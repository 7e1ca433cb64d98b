"""An alias of a real registry that moves while it is served: by the source alone, and on a real Ray Serve."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from serving_fakes import SMALL_CONTRACT
from typer.testing import CliRunner

from rlsvc.client import PolicyClient
from rlsvc.commands.policies import app as policies
from rlsvc.core.contract import Contract
from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.serve.application import BuildError, build, deployment_of
from rlsvc.serve.deploy import APP, start
from rlsvc.serve.source import PolicySource
from rlsvc.serve.version import CANARY, CURRENT, SHADOW
from rlsvc.spec.serve import ServeSpec
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.store.mlflow_store import store_uri
from rlsvc.store.registry import Registry

WAIT_S = 60.0


def made(folder: Path, name: str, contract: Contract = SMALL_CONTRACT) -> Path:
    """A bundle of the "random" policy that is another one for each name."""
    rows = np.linspace(0, len(name), 30, dtype=np.float32)
    columns = {"observation.state": rows.reshape(10, 3), "action": rows[:20].reshape(10, 2)}
    features = {**contract.observation, "action": contract.action}
    return write_bundle(
        folder / name,
        policy={"name": "random"},
        contract=contract,
        normalizer=Normalizer.fit({"all": columns}, features, {}),
        params={},
    )


@pytest.fixture
def registry(tmp_path):
    """Version 1 is in production."""
    registry = Registry(tmp_path)
    registry.register(made(tmp_path, "a"), "arm")
    registry.promote("arm", 1, "production")
    return registry


def test_a_source_means_what_its_alias_means_now(registry, tmp_path):
    source = PolicySource("models:/arm@production", registry.uri)
    assert source().version == source.find() == read_bundle(tmp_path / "a").id
    registry.register(made(tmp_path, "bb"), "arm")
    assert source.find() == read_bundle(tmp_path / "a").id
    registry.promote("arm", 2, "production")
    assert source.find() == source.load().version == read_bundle(tmp_path / "bb").id
    folder = PolicySource(str(tmp_path / "a"))
    assert folder.find() == folder.load().version == read_bundle(tmp_path / "a").id


def test_a_replica_starts_with_what_was_known_while_the_registry_is_away_and_says_so(registry, tmp_path, lines):
    del registry
    away = tmp_path / "away"
    away.mkdir()
    source = PolicySource("models:/arm@production", store_uri(away), known=tmp_path / "a")
    assert source().version == read_bundle(tmp_path / "a").id
    (line,) = lines()
    assert (line["level"], line["event"], line["taken"]) == ("warning", "registry_away", str(tmp_path / "a"))
    with pytest.raises(NotFoundError):
        replace(source, known=None)()


def test_what_is_watched_follows_from_the_specification(registry, tmp_path):
    registry.promote("arm", 1, "candidate")
    root = {"root": str(tmp_path)}
    alias = {"policy": "models:/arm@production", **root}
    assert deployment_of(ServeSpec(**alias)).sources.keys() == {CURRENT}
    assert not deployment_of(ServeSpec(**alias, watch_s=None)).sources
    assert not deployment_of(ServeSpec(policy="models:/arm/1", **root)).sources
    assert not deployment_of(ServeSpec(policy=str(tmp_path / "a"))).sources
    candidates = {"canary": {"policy": "models:/arm@candidate", "share": 0.25}, "shadow": str(tmp_path / "a")}
    one = deployment_of(ServeSpec.model_validate({**alias, **candidates}))
    assert one.sources.keys() == {CURRENT, CANARY, SHADOW}
    assert (one.settings.canary_share, one.watch_s) == (0.25, 10.0)
    assert {source.store for source in one.sources.values()} == {registry.uri}


@pytest.mark.parametrize("role", ["canary", "shadow"])
def test_a_candidate_that_is_not_there_or_does_not_fit_is_refused_before_anything_is_deployed(registry, tmp_path, role):
    slower = made(tmp_path, "slow", replace(SMALL_CONTRACT, rate_hz=5.0))

    def spec(target):
        candidate = {"policy": target} if role == "canary" else target
        return {"policy": "models:/arm@production", "root": str(tmp_path), role: candidate}

    with pytest.raises(
        BuildError, match=rf"{role} .*slow: version .* has another contract: its rate_hz is 5.0, served"
    ):
        build(spec(str(slower)))
    with pytest.raises(UserError, match="unknown alias of policy 'arm' 'candidat'"):
        build(spec("models:/arm@candidat"))
    assert deployment_of(ServeSpec.model_validate(spec(str(tmp_path / "a")))).sources.keys() == {CURRENT, role}


def versions(url: str) -> dict[str, str]:
    """By what it is the id of each version, of the replica that answers."""
    (told,) = httpx.get(f"http://{url}/v1/policies").json()["policies"]
    return {one["role"]: one["version"] for one in told["versions"]}


def wait_for(url: str, **expected: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while versions(url) != expected:
        assert time.monotonic() < deadline, (versions(url), expected)
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_served_alias_is_promoted_refused_and_rolled_back_while_a_robot_acts(serve_port, registry, tmp_path):
    from ray import serve

    ids = {name: read_bundle(made(tmp_path, name)).id for name in ("a", "bb", "ccc")}
    for name in ("bb", "ccc"):
        registry.register(tmp_path / name, "arm")
    registry.promote("arm", 3, "candidate")
    registry.register(made(tmp_path, "slow", replace(SMALL_CONTRACT, rate_hz=5.0)), "arm")
    url = f"127.0.0.1:{serve_port}"
    spec = ServeSpec(
        policy="models:/arm@production", root=str(tmp_path), watch_s=0.2, cpus=0.1, shadow="models:/arm@candidate"
    )
    start(deployment_of(spec, port=serve_port))
    state = {"observation.state": np.zeros((1, 3), np.float32)}
    try:
        wait_for(url, current=ids["a"], shadow=ids["ccc"])
        with PolicyClient(url) as robot:
            assert robot.act(state, step=1).version == ids["a"]
            registry.promote("arm", 2, "production")
            wait_for(url, current=ids["bb"], draining=ids["a"], shadow=ids["ccc"])
            # Within its episode the robot keeps its version; over HTTP, and with the next episode, it is the new one.
            assert robot.act(state, step=2).version == ids["a"]
            with PolicyClient(url, transport="http") as other:
                assert other.act(state).version == ids["bb"]
            registry.promote("arm", 4, "production")
            deadline = time.monotonic() + WAIT_S
            while 'rlsvc_refused_versions_total{policy="arm"' not in httpx.get(f"http://{url}/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert robot.act(state, step=0).version == ids["bb"]
            assert versions(url) == {"current": ids["bb"], "shadow": ids["ccc"]}
            for _ in range(2):
                result = CliRunner().invoke(policies, ["rollback", "arm", "production", "--root", str(tmp_path)])
                assert result.exit_code == 0, result.output
            wait_for(url, current=ids["a"], draining=ids["bb"], shadow=ids["ccc"])
            assert robot.act(state, step=0).version == ids["a"]
            (told,) = httpx.get(f"http://{url}/v1/policies").json()["policies"]
            assert told["shadow"]["compared"] >= 1
            shutil.rmtree(tmp_path / "a")  # what was registered has a copy of its own
            assert robot.act(state, step=1).version == ids["a"]
    finally:
        serve.delete(APP)
