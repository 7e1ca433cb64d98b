"""The HTTP and WebSocket face, without Ray: every kind of bad request gets one clear message."""

import asyncio
import base64
import json
import logging
import re
import tracemalloc

import msgpack
import numpy as np
import pytest
from serving_fakes import CONTRACT, POISON, SMALL_CONTRACT, FakeRunner, expected_action, observation, service_of
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import rlsvc.serve.app as application
import rlsvc.serve.service as service_module
from rlsvc.core.contract import Contract
from rlsvc.core.types import MALFORMED, ActionChunk
from rlsvc.core.wire import pack, unpack
from rlsvc.serve import body as reading
from rlsvc.serve.app import build_app

ACT = "/v1/policies/fake/act"
MSGPACK = {"content-type": "application/msgpack"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def client(runner):
    with (
        service_of(runner, max_body_bytes=100_000, deadline_s=5.0) as service,
        TestClient(build_app(service)) as client,
    ):
        yield client


def as_lists(values):
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in values.items()}


def post(client, message, headers=JSON):
    body = json.dumps(message).encode() if headers is JSON else pack(message)
    return client.post(ACT, content=body, headers=headers)


def test_json_lists_and_msgpack_give_the_same_action(client):
    want = expected_action(np.full((2, 3), 1.0), seed=5, step=16)
    answer = post(client, {"observation": as_lists(observation()), "seed": 5, "step": 16})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    np.testing.assert_array_equal(answer.json()["action"], want)
    assert answer.json()["version"] == "fake-1"
    assert answer.json()["expires_in_ms"] == 400.0  # 4 actions at 10 a second
    parts = {"preprocess_ms", "queue_ms", "model_ms", "wire_ms"}
    assert answer.json()["timing"].keys() == {"total_ms", *parts, "batch_size"}
    answer = post(client, {"observation": observation(), "seed": 5, "step": 16}, MSGPACK)
    assert answer.headers["content-type"] == "application/msgpack"
    np.testing.assert_array_equal(unpack(answer.content)["action"], want)
    assert unpack(answer.content)["expires_in_ms"] == 400.0


def test_how_long_a_chunk_may_be_executed_is_a_setting(runner):
    with service_of(runner, chunk_expiry_ms=150.0) as service, TestClient(build_app(service)) as client:
        assert post(client, {"observation": as_lists(observation())}).json()["expires_in_ms"] == 150.0
        with client.websocket_connect("/") as socket:
            socket.receive_bytes()
            socket.send_bytes(pack({"observation": observation()}))
            assert unpack(socket.receive_bytes())["expires_in_ms"] == 150.0
            socket.send_bytes(pack(observation()))
            assert "expires_in_ms" not in unpack(socket.receive_bytes())  # openpi's protocol has no such thing


def test_json_takes_base64_arrays(client):
    message = {"observation": as_lists(observation())}
    image = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    message["observation"]["observation.image"] = {
        "b64": base64.b64encode(image.tobytes()).decode(),
        "dtype": "uint8",
        "shape": [2, 4, 4, 3],
    }
    state = np.full((2, 3), 2.0, "<f4")
    message["observation"]["observation.state"] = {
        "b64": base64.b64encode(state.tobytes()).decode(),
        "dtype": "float32",
        "shape": [2, 3],
    }
    answer = post(client, message)
    assert answer.status_code == 200, answer.text
    np.testing.assert_array_equal(answer.json()["action"], expected_action(state, 0, 0))


def changed(**values):
    return {"observation": {**as_lists(observation()), **values}}


BAD_OBSERVATIONS = {
    "a wrong shape": (
        changed(**{"observation.state": [[1, 2], [1, 2]]}),
        422,
        r"'observation.state': got shape \(2, 2\), expected \(2, 3\)",
    ),
    "a missing window": (changed(**{"observation.state": [1, 2, 3]}), 422, "2 observation steps, oldest first"),
    "a wrong dtype": (
        changed(**{"observation.image": np.zeros((2, 4, 4, 3)).tolist()}),
        422,
        "got dtype float64, expected uint8",
    ),
    "a value outside the dtype": (
        changed(**{"observation.image": np.full((2, 4, 4, 3), 256).tolist()}),
        422,
        "values outside uint8",
    ),
    "a null": (changed(**{"observation.state": [[1, 2, None]] * 2}), 422, "got dtype object, expected float32"),
    "a text for a number": (changed(**{"observation.state": "abc"}), 422, "'observation.state'"),
    "a number for a text": (changed(task=3), 422, "'task': got int, expected a text"),
    "a number that overflows": (changed(**{"observation.state": [[1, 2, 1e300]] * 2}), 422, "not finite"),
    "ragged lists": (changed(**{"observation.state": [[1, 2, 3], [1, 2]]}), 422, "not an array"),
    "an unknown key": (changed(**{"observation.stat": 1}), 422, "did you mean 'observation.state'"),
    "a missing key": ({"observation": {"task": "x"}}, 422, "lacks 'observation.state'"),
    "no observation": ({"observations": {}}, 400, "did you mean 'observation'"),
    "an observation that is no map": ({"observation": [1]}, 400, "got list, expected a map"),
    "a list": ([1], 400, "the message is a list"),
    "a bad seed": ({**changed(), "seed": -1}, 400, "'seed': got -1"),
    "a seed that is no integer": ({**changed(), "seed": 1.5}, 400, "'seed': got 1.5"),
    "a boolean step": ({**changed(), "step": True}, 400, "'step': got True"),
    "a seed beyond 32 bits": ({**changed(), "seed": 2**31}, 400, "'seed'"),
    "base64 of a wrong length": (
        changed(**{"observation.state": {"b64": "AAAA", "dtype": "float32", "shape": [2, 3]}}),
        400,
        "needs 24 bytes",
    ),
    "base64 that is none": (
        changed(**{"observation.state": {"b64": "?", "dtype": "float32", "shape": [2, 3]}}),
        400,
        "not base64",
    ),
    "a base64 dtype of objects": (
        changed(**{"observation.state": {"b64": "", "dtype": "object", "shape": [0]}}),
        400,
        "dtype 'object'",
    ),
    "a base64 shape below zero": (
        changed(**{"observation.state": {"b64": "", "dtype": "float32", "shape": [-1]}}),
        400,
        "shape",
    ),
    "another map": (changed(**{"observation.state": {"data": "x"}}), 400, "exactly 'b64', 'dtype' and 'shape'"),
}


@pytest.mark.parametrize("case", BAD_OBSERVATIONS)
def test_a_bad_observation_is_refused_with_one_clear_message(client, runner, case):
    message, status, text = BAD_OBSERVATIONS[case]
    answer = post(client, message)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert "Traceback" not in answer.text
    assert re.search(text, answer.json()["error"]), answer.json()["error"]
    assert runner.batches == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b'{"observation": {"observation.state": [NaN]}}', JSON, 400, "not JSON"),
        (b"{", JSON, 400, "not JSON"),
        (b"\xff\xfe", JSON, 400, "not JSON"),
        (b"", JSON, 400, "not JSON"),
        (b"[" * 50_000, JSON, 400, "not JSON"),
        (b"\xc1", MSGPACK, 400, "not a msgpack message"),
        (b"", MSGPACK, 400, "not a msgpack message"),
        (pack({"observation": observation()})[:-3], MSGPACK, 400, "not a msgpack message"),
        (b"{}", {"content-type": "text/plain"}, 415, "content type 'text/plain'"),
        (b"{}", {}, 415, "content type ''"),
        (b"x" * 100_001, JSON, 413, "larger than 100000 bytes"),
        (b"x" * 100_001, MSGPACK, 413, "larger than 100000 bytes"),
    ],
)
def test_a_body_that_is_no_message_is_refused(client, body, headers, status, text):
    answer = client.post(ACT, content=body, headers=headers)
    assert answer.status_code == status
    error = unpack(answer.content) if answer.headers["content-type"] == "application/msgpack" else answer.json()
    assert text in error["error"]


def test_nan_in_msgpack_is_refused(client):
    values = observation()
    values["observation.state"][1, 2] = np.nan
    answer = post(client, {"observation": values}, MSGPACK)
    assert answer.status_code == 422
    assert "1 values are not finite" in unpack(answer.content)["error"]


def test_arrays_of_objects_in_msgpack_are_refused(client):
    hostile = {b"__ndarray__": True, b"data": b"\x00" * 8, b"dtype": "|O", b"shape": [1]}
    answer = client.post(ACT, content=msgpack.packb({"observation": {"observation.state": hostile}}), headers=MSGPACK)
    assert answer.status_code == 400
    assert "dtype '|O' is not accepted" in unpack(answer.content)["error"]


def test_an_array_for_the_name_of_a_dtype_is_refused(client):
    """Found by benchmarks/decoder_fuzz.py."""
    values = {**observation(), "observation.state": {"b64": "", "dtype": np.zeros(0), "shape": [0]}}
    answer = post(client, {"observation": values}, MSGPACK)
    assert answer.status_code == 400
    assert "is not one of float32" in unpack(answer.content)["error"]


async def refused_body(client, receive, headers):
    """What the application answers to a body; starlette's test client would join the pieces first."""
    answer = []

    async def send(message):
        answer.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": ACT,
        "raw_path": ACT.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await client.app(scope, receive, send)
    assert (b"connection", b"close") in answer[0]["headers"]
    return answer[0]["status"]


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"300000000")]], ids=["undeclared", "declared"])
def test_a_body_over_the_limit_is_read_to_its_end_and_not_held(client, headers):
    left = [3000]

    async def receive():
        left[0] -= 1
        return {"type": "http.request", "body": bytes(10_000), "more_body": left[0] > 0}

    tracemalloc.start()
    try:
        assert asyncio.run(refused_body(client, receive, headers)) == 413
        assert tracemalloc.get_traced_memory()[1] < 2e6  # of 30 MB
    finally:
        tracemalloc.stop()
    assert left == [0]


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"300000000")]], ids=["undeclared", "declared"])
def test_a_body_that_never_ends_is_answered_all_the_same(client, headers, monkeypatch):
    monkeypatch.setattr(reading, "LINGER_S", 0.05)

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.request", "body": bytes(100_000), "more_body": True}

    assert asyncio.run(refused_body(client, receive, headers)) == 413


def test_a_caller_that_asks_first_sends_nothing_of_a_body_over_the_limit(client):
    async def receive():
        raise AssertionError("the body was read")

    headers = [(b"content-length", b"300000000"), (b"expect", b"100-continue")]
    assert asyncio.run(refused_body(client, receive, headers)) == 413


@pytest.mark.parametrize("name", ["fak", "..", "%2e%2e%2fetc", "x" * 3000, "%00"])
def test_an_unknown_policy_is_404_with_the_list(client, name):
    answer = client.post(f"/v1/policies/{name}/act", json={}) if name != ".." else client.get("/v1/policies/fak")
    assert answer.status_code == 404
    assert len(answer.text) < 600
    if "%2f" not in name:
        assert "There are: fake." in answer.json()["error"]


def test_routes_that_are_not_there_say_so_in_json(client):
    assert "see /docs" in client.get("/nothing").json()["error"]
    assert client.get(ACT).status_code == 405


def test_a_failing_policy_gives_an_id_that_is_in_the_log_and_no_detail(client, caplog):
    with caplog.at_level(logging.ERROR):
        answer = post(client, {"observation": observation(POISON)}, MSGPACK)
    error = unpack(answer.content)["error"]
    assert answer.status_code == 500
    assert "secret" not in error
    request_id = error.split("request id ")[1].split()[0]
    assert request_id in caplog.text
    assert "secret detail of the policy" in caplog.text


def test_a_policy_that_hangs_is_answered_at_the_deadline(runner):
    with service_of(runner, deadline_s=0.2) as service, TestClient(build_app(service)) as client:
        runner.open.clear()
        answer = post(client, {"observation": observation()}, MSGPACK)
    assert answer.status_code == 504
    assert "did not answer within 0.2 s" in unpack(answer.content)["error"]


def test_a_stuck_policy_is_alive_and_not_ready(runner):
    with service_of(runner, deadline_s=0.1, stuck_s=0.05) as service, TestClient(build_app(service)) as client:
        assert client.get("/readyz").json() == {"ready": True}
        runner.open.clear()
        post(client, {"observation": observation()}, MSGPACK)
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200


def test_the_contract_is_told(client):
    told = client.get("/v1/policies/fake").json()
    assert Contract.from_json(told["contract"]) == CONTRACT
    assert told["version"] == "fake-1"
    assert client.get("/v1/policies").json() == {"policies": [told]}


def test_a_policy_that_said_no_action_is_answered_by_name_and_counted(runner, client):
    nothing = np.full((1, 4, 2), np.nan, np.float32)
    runner.act = lambda *_: ActionChunk(nothing, "x", extras={MALFORMED: np.array(["no_end"])})
    answer = post(client, {"observation": observation()}, MSGPACK)
    assert answer.status_code == 500
    assert "tokens are no actions (no_end)" in str(unpack(answer.content))
    runner.act = lambda *_: ActionChunk(np.zeros_like(nothing), "x", extras={MALFORMED: np.array(["no_end"])})
    assert post(client, {"observation": observation()}, MSGPACK).status_code == 200
    lines = client.get("/metrics").text.splitlines()
    assert 'rlsvc_malformed_total{policy="fake",reason="no_end",replica="local"} 2.0' in lines
    assert 'rlsvc_refused_total{policy="fake",reason="malformed_action",replica="local"} 1.0' in lines


def test_metrics_count_answers_and_refusals(client):
    post(client, {"observation": observation()}, MSGPACK)
    post(client, {"observation": {}}, MSGPACK)
    client.post(ACT, content=b"{", headers=JSON)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = set(answer.text.splitlines())
    assert 'rlsvc_requests_total{policy="fake",replica="local",transport="http"} 1.0' in lines
    assert 'rlsvc_refused_total{policy="fake",reason="observation",replica="local"} 1.0' in lines
    assert 'rlsvc_refused_total{policy="fake",reason="malformed",replica="local"} 1.0' in lines
    for part in ("preprocess", "wire", "queue", "model"):
        assert f'rlsvc_latency_seconds_count{{part="{part}",policy="fake",replica="local"}} 1.0' in lines


def test_decoding_and_checking_are_preprocessing_and_reading_and_encoding_are_wire(client, monkeypatch):
    now = [0.0]

    def taking(seconds, call):
        def slow(*args):
            now[0] += seconds
            return call(*args)

        return slow

    for module in (application, service_module):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(application, "read_body", taking(100.0, application.read_body))
    monkeypatch.setattr(application, "decode_request", taking(2000.0, application.decode_request))
    monkeypatch.setattr(Contract, "check_observation", taking(3000.0, Contract.check_observation))
    monkeypatch.setattr(application, "encode", taking(40_000.0, application.encode))
    timing = post(client, {"observation": as_lists(observation())}).json()["timing"]
    assert timing["preprocess_ms"] == 5e6
    assert timing["wire_ms"] == pytest.approx(1e5, abs=1e4)  # less what the batch took, which is real time
    assert timing["total_ms"] == sum(timing[f"{part}_ms"] for part in ("preprocess", "queue", "model", "wire"))
    text = client.get("/metrics").text
    assert 'rlsvc_latency_seconds_sum{part="preprocess",policy="fake",replica="local"} 5000.0' in text
    wire = re.search(r'rlsvc_latency_seconds_sum{part="wire",policy="fake",replica="local"} (.*)', text)
    assert float(wire[1]) == pytest.approx(40_100, abs=10)


def test_the_parts_of_an_answers_time_are_the_whole_over_every_protocol(client):
    with client.websocket_connect("/") as socket:
        socket.receive_bytes()
        socket.send_bytes(pack({"observation": observation()}))
        timing = unpack(socket.receive_bytes())["timing"]
    assert timing["preprocess_ms"] > 0
    assert timing["total_ms"] == pytest.approx(
        sum(timing[f"{part}_ms"] for part in ("preprocess", "queue", "model", "wire"))
    )
    lines = client.get("/metrics").text.splitlines()
    assert 'rlsvc_requests_total{policy="fake",replica="local",transport="websocket"} 1.0' in lines
    assert 'rlsvc_latency_seconds_count{part="preprocess",policy="fake",replica="local"} 1.0' in lines


def test_routes_that_are_not_there_are_counted_under_one_reason(client):
    for path in ("/a", "/b", "/v1/c"):
        client.get(path)
    assert 'rlsvc_refused_total{policy="fake",reason="route",replica="local"} 3.0' in client.get("/metrics").text


def test_the_openapi_page_has_an_example_that_the_server_takes(client):
    page = client.get("/openapi.json").json()
    body = page["paths"]["/v1/policies/{name}/act"]["post"]["requestBody"]["content"]
    example = body["application/json"]["examples"]["zeros"]["value"]
    assert client.post(ACT, json=example).status_code == 200
    assert "application/msgpack" in body


class TestWebSocket:
    """openpi's protocol at `/`."""

    def test_metadata_comes_first_then_actions(self, client):
        with client.websocket_connect("/") as socket:
            assert unpack(socket.receive_bytes())["contract"] == CONTRACT.to_json()
            socket.send_bytes(pack(observation()))
            answer = unpack(socket.receive_bytes())
            np.testing.assert_array_equal(answer["actions"], expected_action(np.ones((2, 3)), 0, 0))
            assert "prev_total_ms" not in answer["server_timing"]
            socket.send_bytes(pack(observation()))
            answer = unpack(socket.receive_bytes())
            # The step counts on by itself where the client names none.
            np.testing.assert_array_equal(answer["actions"], expected_action(np.ones((2, 3)), 0, 1))
            assert answer["server_timing"]["prev_total_ms"] > 0

    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (b"\xc1", "not a msgpack"),
            (pack([1]), "is a list"),
            (pack({"observation.state": np.zeros(3)}), "lacks 'observation.image'"),
        ],
    )
    def test_a_bad_observation_gets_a_text_frame_and_the_connection_stays(self, client, data, text):
        with client.websocket_connect("/") as socket:
            socket.receive_bytes()
            socket.send_bytes(data)
            assert text in socket.receive_text()
            socket.send_text("hello")
            assert "expected a binary frame" in socket.receive_text()
            socket.send_bytes(pack(observation()))
            assert "actions" in unpack(socket.receive_bytes())

    def test_a_failing_policy_sends_no_traceback(self, client):
        with client.websocket_connect("/") as socket:
            socket.receive_bytes()
            socket.send_bytes(pack(observation(POISON)))
            text = socket.receive_text()
            assert "request id" in text
            assert "secret" not in text

    def test_an_enveloped_request_is_answered_like_http(self, client):
        with client.websocket_connect("/") as socket:
            socket.receive_bytes()
            socket.send_bytes(pack({"observation": observation(), "seed": 3, "step": 8}))
            np.testing.assert_array_equal(
                unpack(socket.receive_bytes())["action"], expected_action(np.ones((2, 3)), 3, 8)
            )
            socket.send_bytes(pack({"observation": {}}))
            assert unpack(socket.receive_bytes())["status"] == 422

    def test_a_single_step_is_taken_where_the_contract_has_one(self):
        with (
            service_of(FakeRunner(SMALL_CONTRACT)) as service,
            TestClient(build_app(service)) as client,
            client.websocket_connect("/") as socket,
        ):
            socket.receive_bytes()
            socket.send_bytes(pack({"observation.state": np.ones(3)}))
            assert unpack(socket.receive_bytes())["actions"].shape == (4, 2)

    def test_a_foreign_web_page_may_not_connect(self, client):
        with (
            pytest.raises(WebSocketDisconnect),
            client.websocket_connect("/", headers={"origin": "https://evil.example"}),
        ):
            pass
        with client.websocket_connect("/", headers={"origin": "http://testserver"}) as socket:
            assert socket.receive_bytes()

    def test_open_connections_are_counted(self, client):
        with client.websocket_connect("/") as socket:
            socket.receive_bytes()
            assert 'rlsvc_websockets{policy="fake",replica="local"} 1.0' in client.get("/metrics").text
        assert 'rlsvc_websockets{policy="fake",replica="local"} 0.0' in client.get("/metrics").text
