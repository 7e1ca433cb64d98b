"""A policy on a real Ray Serve: openpi's own client, batching, limits, and a replica that dies or stops."""

import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import serving_fakes
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_fakes import SMALL_CONTRACT, FakeRunner, expected_action

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.core.wire import pack, unpack
from rlsvc.serve.deploy import APP, Deployment, StartError, start
from rlsvc.serve.settings import ServeSettings

ROOT = Path(__file__).parents[2]
STATE = {"observation.state": np.array([1, 2, 3], np.float32)}


@pytest.fixture(scope="module")
def served(serve_port):
    """ "127.0.0.1:port" of a FakeRunner that takes 5 ms for a batch of up to 8."""
    from ray import cloudpickle, serve

    cloudpickle.register_pickle_by_value(serving_fakes)  # replicas do not see the tests' folder
    settings = ServeSettings(max_body_bytes=2**20, max_batch=8, max_waiting=64)
    start(
        Deployment(
            "fake", lambda: FakeRunner(SMALL_CONTRACT, seconds=0.005), port=serve_port, cpus=0.1, settings=settings
        )
    )
    yield f"127.0.0.1:{serve_port}"
    serve.delete(APP)
    cloudpickle.unregister_pickle_by_value(serving_fakes)


@contextmanager
def openpi(url: str) -> Iterator[WebsocketClientPolicy]:
    """Its connection ends with the block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # openpi's client calls websockets the old way
        policy = WebsocketClientPolicy(f"ws://{url}")
    try:
        yield policy
    finally:
        policy._ws.close()


def replica_of(url: str) -> psutil.Process:
    """The process of the one replica of "fake" that this suite's own Ray started; others may run on this machine."""
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid in ours and "ServeReplica:rlsvc:fake" in " ".join(process.info["cmdline"] or [])
    ]
    return found


@pytest.mark.ray
def test_openpis_client_gets_metadata_and_actions(served):
    with openpi(served) as policy:
        assert policy.get_server_metadata()["contract"] == SMALL_CONTRACT.to_json()
        answer = policy.infer(STATE)
        np.testing.assert_array_equal(answer["actions"], expected_action(STATE["observation.state"], 0, 0))
        assert answer["server_timing"]["infer_ms"] > 0
        assert answer["policy_timing"]["infer_ms"] >= 5
        with pytest.raises(RuntimeError, match=r"got shape \(2,\), expected \(1, 3\)"):
            policy.infer({"observation.state": np.zeros(2)})
        assert policy.infer(STATE)["actions"].shape == (4, 2)


@pytest.mark.ray
def test_openpis_action_chunk_broker_executes_a_chunk(served):
    with openpi(served) as policy:
        broker = ActionChunkBroker(policy, action_horizon=4)
        actions = [broker.infer(STATE)["actions"] for _ in range(5)]
    np.testing.assert_array_equal(actions[:4], expected_action(STATE["observation.state"], 0, 0))
    np.testing.assert_array_equal(actions[4], expected_action(STATE["observation.state"], 0, 1)[0])


@pytest.mark.ray
def test_json_and_msgpack_over_http(served):
    url = f"http://{served}/v1/policies/fake/act"
    want = expected_action(STATE["observation.state"], 3, 4)
    answer = httpx.post(url, json={"observation": {"observation.state": [1, 2, 3]}, "seed": 3, "step": 4})
    np.testing.assert_array_equal(answer.json()["action"], want)
    body = pack({"observation": STATE, "seed": 3, "step": 4})
    answer = httpx.post(url, content=body, headers={"content-type": "application/msgpack"})
    np.testing.assert_array_equal(unpack(answer.content)["action"], want)
    assert httpx.get(f"http://{served}/readyz").json() == {"ready": True}
    assert httpx.post(url, json={"observation": {}}).status_code == 422
    assert httpx.post(f"http://{served}/v1/policies/fak/act", json={}).status_code == 404
    assert "rlsvc_requests_total" in httpx.get(f"http://{served}/metrics").text


@pytest.mark.ray
def test_a_replica_logs_json_lines_under_the_ids_that_answers_bring_back_once(served):
    answer = httpx.get(f"http://{served}/v1/policies/nobody", headers={"x-request-id": "robot-7"})
    assert answer.headers.get_list("x-request-id") == ["robot-7"]
    assert answer.json()["request_id"] == "robot-7"
    made = httpx.get(f"http://{served}/v1/policies/nobody")
    assert made.headers.get_list("x-request-id") == [made.json()["request_id"]]
    written = Path(f"/proc/{replica_of(served).pid}/fd/2").resolve().read_text().splitlines()
    lines = [json.loads(line) for line in written if line.startswith("{")]
    assert lines[0]["event"] == "started"
    assert lines[0]["replica"] == lines[-1]["replica"] != "local"
    assert [line["request_id"] for line in lines[-2:]] == ["robot-7", made.json()["request_id"]]


@pytest.mark.ray
def test_a_body_of_300_mb_is_refused_and_not_held_in_memory(served):
    replica = replica_of(served)
    url = f"http://{served}/v1/policies/fake/act"
    piece, sent = b"x" * 2**20, []
    # Libraries that an answer and a refusal load late count before: bodies of 2 MB hold nothing that matters.
    small = {"observation": {"observation.state": [1, 2, 3]}, "seed": 0, "step": 0}
    assert httpx.post(url, json=small).status_code == 200
    assert httpx.post(url, content=piece * 2, headers={"content-type": "application/json"}).status_code == 413
    before = replica.memory_info().rss

    def pieces():
        for _ in range(300):
            sent.append(1)
            yield piece

    answer = httpx.post(url, content=pieces(), headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 413
    assert "larger than 1048576 bytes" in answer.json()["error"]
    answer = httpx.post(url, content=piece * 300, headers={"content-type": "application/json"}, timeout=30)
    assert answer.status_code == 413
    assert replica.memory_info().rss - before < 50 * 2**20


@pytest.mark.ray
def test_batched_answers_equal_unbatched_ones(served):
    states = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)

    def robot(i):
        with PolicyClient(served) as client:
            return [client.act({"observation.state": states[i]}, seed=i, step=step) for step in range(10)]

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(robot, range(16)))
    assert max(reply.timing["batch_size"] for robots in replies for reply in robots) > 1
    for i, robots in enumerate(replies):
        for step, reply in enumerate(robots):
            np.testing.assert_array_equal(reply.action, expected_action(states[i], i, step))


@pytest.mark.ray
@pytest.mark.parametrize("transport", ["ws", "http"])
def test_a_stopped_replica_is_a_timeout_and_goes_on_when_it_wakes(served, transport):
    replica = replica_of(served)
    with PolicyClient(served, transport=transport, options=ClientOptions(timeout_s=1.0)) as client:
        client.act(STATE)
        replica.send_signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(TimeoutError):
                client.act(STATE)
            assert time.monotonic() - begun < 3
        finally:
            replica.send_signal(signal.SIGCONT)
    with PolicyClient(served, transport=transport) as client:
        assert client.act(STATE).action.shape == (4, 2)


@pytest.mark.ray
def test_a_killed_replica_costs_a_client_time_and_no_failure(served):
    """Both transports at once, since a replica takes long to start here."""

    def robot(transport):
        with PolicyClient(served, transport=transport, options=ClientOptions(timeout_s=90.0, retries=100)) as client:
            for step in range(10_000):
                reply = client.act(STATE, seed=1, step=step)
                np.testing.assert_array_equal(reply.action, expected_action(STATE["observation.state"], 1, step))
                answered[transport] += 1
                if killed.is_set() and answered[transport] > at_death[transport] + 1:
                    return
        raise AssertionError("the replica was never killed")

    killed, answered, at_death = threading.Event(), {"ws": 0, "http": 0}, {}
    before = replica_of(served).pid
    with ThreadPoolExecutor(2) as pool:
        robots = [pool.submit(robot, transport) for transport in answered]
        while min(answered.values()) == 0 and not any(robot.done() for robot in robots):
            time.sleep(0.01)
        os.kill(before, signal.SIGKILL)
        at_death |= answered
        killed.set()
        for one in robots:
            one.result(timeout=100)
    assert replica_of(served).pid != before


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_proxy_is_replaced_before_clients_give_up(served):
    """Serve's own settings leave the port closed for more than half a minute."""
    managers = [p for p in psutil.Process().children(recursive=True) if "HAProxyManager" in " ".join(p.cmdline())]
    with PolicyClient(served, options=ClientOptions(timeout_s=25.0, retries=100)) as client:
        client.act(STATE)
        for manager in managers:
            manager.kill()
        assert len(managers) == 1
        end = time.monotonic() + 30
        while time.monotonic() < end:
            assert client.act(STATE).action.shape == (4, 2)
            time.sleep(0.1)


@pytest.mark.ray
def test_a_policy_that_does_not_load_says_why_in_one_line(served):
    def load():
        raise ValueError("the weights do not fit")

    with pytest.raises(StartError) as caught:
        start(Deployment("broken", load, port=int(served.split(":")[1]), cpus=0.1))
    assert "the weights do not fit" in str(caught.value)
    assert "\n" not in str(caught.value)
