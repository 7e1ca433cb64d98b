"""Several policies of one replica, below a budget of memory. Without Ray, but for one test."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from prometheus_client.parser import text_string_to_metric_families
from serving_fakes import CONTRACT, SMALL_CONTRACT, FakeRunner, expected_action, observation, service_of, serving_app
from starlette.testclient import TestClient

from rlsvc.client import PolicyClient, RefusedError
from rlsvc.core.errors import UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.serve.app import build_app
from rlsvc.serve.application import deployment_of
from rlsvc.serve.codec import RequestError
from rlsvc.serve.deploy import APP, start
from rlsvc.serve.policies import Offered, Policies
from rlsvc.spec.serve import ServeSpec
from rlsvc.store.bundle import write_bundle

STATE = {"observation.state": np.array([1, 2, 3], np.float32)}
ANSWER = expected_action(STATE["observation.state"], 0, 0)


class Loader:
    """Loads a FakeRunner, once its gate is open."""

    def __init__(self, name: str) -> None:
        self.name, self.loads, self.gate, self.error = name, 0, threading.Event(), None
        self.gate.set()

    def __call__(self):
        assert self.gate.wait(10)
        self.loads += 1
        if self.error is not None:
            raise self.error
        return FakeRunner(SMALL_CONTRACT, version=self.name)


def offered(*names: str, size: int = 10) -> dict[str, Offered]:
    return {name: Offered(name, Loader(name), SMALL_CONTRACT, None, name, size) for name in names}


def run(test, others, **options):
    """`test(policies)` beside the policy "fake" of 10 bytes, which sees images too."""

    async def inner():
        with service_of(FakeRunner()) as service:
            policies = Policies(service, tuple(others.values()), first_bytes=10, **options)
            await test(policies)
            await policies.close()

    asyncio.run(inner())


def loaded(policies: Policies) -> list[str]:
    return [service.name for service in policies.services]


def test_a_policy_is_loaded_when_it_is_first_asked_for_and_once():
    others = offered("a", "b")

    async def test(policies):
        assert loaded(policies) == ["fake"]
        first, second = await asyncio.gather(policies.get("a"), policies.get("a"))
        assert first is second is await policies.get("a")
        assert (others["a"].load.loads, others["b"].load.loads, loaded(policies)) == (1, 0, ["fake", "a"])
        assert (await policies.get(None)).name == "fake"

    run(test, others)


def test_those_asked_for_longest_ago_are_let_go_for_others():
    others = offered("a", "b", "c")

    async def test(policies):
        for name in ("a", "b", "a", "c"):
            service = await policies.get(name)
        assert loaded(policies) == ["fake", "a", "c"]
        assert (others["a"].load.loads, service.name) == (1, "c")
        await policies.get("b")
        assert loaded(policies) == ["fake", "c", "b"]

    run(test, others, budget_bytes=30)


def test_a_policy_that_is_in_use_is_not_let_go():
    async def test(policies):
        a = await policies.get("a")
        session = a.open()
        with pytest.raises(RequestError, match="no room for policy 'b' while the others are in use") as refused:
            await policies.get("b")
        assert (refused.value.status, refused.value.reason, refused.value.retry_after_s) == (503, "memory", 1)
        a.close_session(session)
        await policies.get("b")
        assert loaded(policies) == ["fake", "b"]

    run(test, offered("a", "b"), budget_bytes=20)


def test_a_policy_that_takes_long_to_load_is_told_so_and_goes_on_loading(lines):
    others = offered("a")
    others["a"].load.gate.clear()

    async def inner():
        with service_of(FakeRunner(), deadline_s=0.05) as service:
            policies = Policies(service, tuple(others.values()))
            with pytest.raises(RequestError, match="policy 'a' is being loaded; try again") as refused:
                await policies.get("a")
            assert (refused.value.status, refused.value.retry_after_s) == (503, 5)
            others["a"].load.gate.set()
            async with asyncio.timeout(5):
                while loaded(policies) != ["fake", "a"]:
                    await asyncio.sleep(0.01)
            assert (await policies.get("a")).name == "a"
            await policies.close()

    asyncio.run(inner())
    assert [line["event"] for line in lines()] == ["policy_loaded", "policy_let_go"]


def test_a_policy_that_does_not_load_is_a_500_whose_reason_is_in_the_log_and_may_be_asked_for_again(lines):
    others = offered("a")
    others["a"].load.error = RuntimeError("secret path")

    async def test(policies):
        with pytest.raises(RequestError, match=r"internal error; request id \w+ is in the server's log") as refused:
            await policies.get("a")
        assert refused.value.status == 500
        assert "secret path" in lines()[0]["exception"]
        others["a"].load.error = None
        assert (await policies.get("a")).name == "a"

    run(test, others)


def test_a_policy_whose_contract_changed_since_it_was_offered_is_not_taken(lines):
    wide = Offered("a", Loader("a"), CONTRACT, None, "a", 10)

    async def test(policies):
        with pytest.raises(RequestError, match="internal error"):
            await policies.get("a")
        assert loaded(policies) == ["fake"]
        assert "has another contract" in lines()[0]["exception"]

    run(test, {"a": wide})


def test_names_that_are_not_served_are_refused_with_those_that_are():
    async def test(policies):
        with pytest.raises(RequestError, match=r"unknown policy 'aa'.*There are: a, fake") as refused:
            await policies.get("aa")
        assert refused.value.status == 404
        with pytest.raises(RequestError):
            policies.status("aa")

    run(test, offered("a"))


@pytest.fixture
def served():
    """ "127.0.0.1:port" of "fake", and of "a" and "b", which are loaded when they are asked for."""
    with service_of(FakeRunner()) as service:
        policies = Policies(service, tuple(offered("a", "b").values()), first_bytes=10, budget_bytes=20)
        with serving_app(build_app(policies)) as url:
            yield url


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_clients_name_their_policy(served, transport):
    with PolicyClient(served, policy="a", transport=transport) as client:
        assert (client.name, client.contract) == ("a", SMALL_CONTRACT)
        reply = client.act(STATE)
        assert reply.version == "a"
        np.testing.assert_array_equal(reply.action, ANSWER)
    with PolicyClient(served, policy="fake", transport=transport) as client:
        assert client.act(observation()).version == "fake-1"
    with pytest.raises(RefusedError, match="'c'"):
        PolicyClient(served, policy="c", transport=transport)


def test_without_a_name_a_websocket_means_the_first_and_http_asks_for_one(served):
    with PolicyClient(served) as client:
        assert client.name == "fake"
    with pytest.raises(RefusedError, match="name one of the policies served: fake, a, b"):
        PolicyClient(served, transport="http")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openpis_client_names_its_policy_in_the_address(served):
    policy = WebsocketClientPolicy(f"ws://{served}/?policy=b")
    assert policy.get_server_metadata()["name"] == "b"
    np.testing.assert_array_equal(policy.infer(STATE)["actions"], ANSWER)


def test_tritons_client_sees_each_model_and_its_contract(served):
    with tritonclient.http.InferenceServerClient(served) as client:
        assert [tensor["name"] for tensor in client.get_model_metadata("a")["inputs"]] == ["observation.state"]
        assert not client.is_model_ready("a")
        tensor = tritonclient.http.InferInput("observation.state", [1, 3], "FP32")
        tensor.set_data_from_numpy(STATE["observation.state"][None])
        answer = client.infer("a", [tensor])
        np.testing.assert_array_equal(answer.as_numpy("action"), ANSWER)
        assert client.is_model_ready("a")
        assert len(client.get_model_metadata("fake")["inputs"]) == 3


def test_all_policies_are_listed_and_their_metrics_are_one_text(served):
    for name in ("a", "b"):  # there is room for one of them
        body = {"observation": {"observation.state": [1, 2, 3]}}
        assert httpx.post(f"http://{served}/v1/policies/{name}/act", json=body).status_code == 200
    told = httpx.get(f"http://{served}/v1/policies").json()["policies"]
    assert [(one["name"], [each["role"] for each in one["versions"]]) for one in told] == [
        ("fake", ["current"]),
        ("a", []),
        ("b", ["current"]),
    ]
    families = list(text_string_to_metric_families(httpx.get(f"http://{served}/metrics").text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    (requests,) = [family for family in families if family.name == "rlsvc_requests"]
    counts = {
        s.labels["policy"]: s.value
        for s in requests.samples
        if s.labels["transport"] == "http" and s.name.endswith("_total")
    }
    assert counts == {"fake": 0.0, "b": 1.0}


def test_the_openapi_page_names_all_and_asks_for_no_particular_observation():
    with service_of(FakeRunner()) as service:
        policies = Policies(service, tuple(offered("a").values()))
        page = TestClient(build_app(policies)).get("/openapi.json").json()
    act = page["paths"]["/v1/policies/{name}/act"]["post"]
    assert act["parameters"][0]["schema"]["enum"] == ["fake", "a"]
    body = act["requestBody"]["content"]["application/json"]["schema"]["properties"]["observation"]
    assert "required" not in body


def made(folder: Path, name: str, weights: int) -> Path:
    features = {**SMALL_CONTRACT.observation, "action": SMALL_CONTRACT.action}
    return write_bundle(
        folder / name, policy={"name": "random"}, contract=SMALL_CONTRACT, normalizer=Normalizer.identity(features),
        params={"w": np.zeros(weights // 4, np.float32)},
    )  # fmt: skip


def test_a_specification_of_several_is_checked_before_anything_is_deployed(tmp_path):
    mib = 2**20
    paths = [str(made(tmp_path, name, mib)) for name in ("a", "b")]

    def spec(*names, **changes):
        also = [{"policy": paths[1], "name": name} for name in names]
        return ServeSpec.model_validate({"policy": paths[0], "name": "a", "also": also, **changes})

    one = deployment_of(spec("b", memory_gb=0.01))
    assert [each.name for each in one.also] == ["b"]
    assert one.weight_bytes == pytest.approx(mib, rel=0.01) == one.also[0].weight_bytes
    with pytest.raises(UserError, match="two policies of the application are named 'a'"):
        deployment_of(spec("a"))
    with pytest.raises(UserError, match=r"memory_gb: got 0.0015, but 'a', .* and 'b' need 0.00195 together"):
        deployment_of(spec("b", memory_gb=0.0015))
    with pytest.raises(UserError, match=r"memory_gb: got 0.0005, but 'a' needs 0.000977"):
        deployment_of(spec(memory_gb=0.0005))
    with pytest.raises(UserError, match=r"policy name '\.\./b'"):
        deployment_of(spec("../b"))


@pytest.mark.ray
def test_a_replica_on_a_real_serve_loads_what_it_is_asked_for(serve_port, tmp_path):
    from ray import serve

    paths = [str(made(tmp_path, name, 2**20)) for name in ("a", "b", "c")]
    also = [{"policy": path, "name": name} for path, name in zip(paths[1:], "bc", strict=True)]
    spec = ServeSpec.model_validate({"policy": paths[0], "name": "a", "also": also, "memory_gb": 0.0025, "cpus": 0.1})
    start(deployment_of(spec, port=serve_port))
    try:
        for name in ("b", "c", "a"):
            with PolicyClient(f"127.0.0.1:{serve_port}", policy=name) as client:
                assert client.act(STATE).action.shape == (4, 2)
        deadline = time.monotonic() + 10
        while True:
            told = httpx.get(f"http://127.0.0.1:{serve_port}/v1/policies").json()["policies"]
            there = [one["name"] for one in told if one["versions"]]
            if there == ["a", "c"]:
                break
            assert time.monotonic() < deadline, there
            time.sleep(0.1)
    finally:
        serve.delete(APP)
