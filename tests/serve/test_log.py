"""The server's log: one JSON line for what went wrong, under an id that the client has too."""

import json
import logging
import re

import numpy as np
import pytest
from serving_fakes import POISON, FakeRunner, observation, service_of
from starlette.testclient import TestClient

from rlsvc.core.wire import pack, unpack
from rlsvc.serve import log
from rlsvc.serve.app import build_app
from rlsvc.serve.keys import Keys, new_key

ACT = "/v1/policies/fake/act"
MSGPACK = {"content-type": "application/msgpack"}
KEY, KEPT = new_key("left_arm", ("act",))


@pytest.fixture
def client(lines):
    with service_of(FakeRunner()) as service, TestClient(build_app(service)) as client:
        yield client


def post(client, message, **headers):
    return client.post(ACT, content=pack(message), headers=MSGPACK | headers)


def test_a_refusal_is_one_line_that_says_who_what_and_why(client, lines):
    post(client, {"observation": {}}, **{"x-request-id": "robot-7.42"})
    *_, line = lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("milliseconds") > 0
    assert line == {
        "level": "warning",
        "event": "refused",
        "policy": "fake",
        "version": "fake-1",
        "replica": "local",
        "request_id": "robot-7.42",
        "route": "/v1/policies/{name}/act",
        "reason": "observation",
        "status": 422,
    }


def test_an_answer_is_no_line_unless_debug_lines_are_asked_for(client, lines):
    before = len(lines())
    assert post(client, {"observation": observation()}).status_code == 200
    assert len(lines()) == before
    logging.getLogger("rlsvc").setLevel(logging.DEBUG)
    post(client, {"observation": observation()})
    assert lines()[-1]["event"] == "answered"


def test_start_and_stop_are_lines(lines):
    with service_of(FakeRunner()) as service, TestClient(build_app(service)):
        assert [line["event"] for line in lines()] == ["started"]
    assert [line["event"] for line in lines()] == ["started", "stopped"]
    assert lines()[0]["version"] == "fake-1"


def test_a_bug_is_one_line_with_its_traceback_and_the_id_that_the_client_has(client, lines):
    answer = post(client, {"observation": observation(POISON)})
    error = unpack(answer.content)
    found = [line for line in lines() if line["event"] not in ("started", "stopped")]
    assert [line["event"] for line in found] == ["internal_error"]
    assert found[0]["request_id"] == error["request_id"] == answer.headers["x-request-id"]
    assert error["request_id"] in error["error"]
    assert "secret detail of the policy" in found[0]["exception"]
    assert found[0]["level"] == "error"


def test_every_answer_brings_the_callers_id_back(client):
    for path in ("/healthz", "/metrics", "/v1/policies", "/v1/policies/nobody", "/nothing", "/v2/models/fake"):
        assert client.get(path, headers={"x-request-id": "abc_1"}).headers["x-request-id"] == "abc_1"
    assert client.get("/v1/policies/nobody", headers={"x-request-id": "abc_1"}).json()["request_id"] == "abc_1"
    assert post(client, {"observation": observation()}, **{"x-request-id": "abc_1"}).headers["x-request-id"] == "abc_1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, '"}', "a/1", "\xe4"])
def test_an_id_that_is_none_is_replaced(client, lines, given):
    answer = client.get("/v1/policies/nobody", headers={"x-request-id": given.encode("latin-1")})
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert lines()[-1]["request_id"] == answer.headers["x-request-id"]


def test_answers_without_the_header_have_the_id_all_the_same(lines):
    """Behind Ray Serve, which puts the header on itself."""
    with service_of(FakeRunner()) as service, TestClient(build_app(service, echo_request_id=False)) as client:
        answer = client.get("/v1/policies/nobody", headers={"x-request-id": "abc"})
    assert "x-request-id" not in answer.headers
    assert answer.json()["request_id"] == "abc"


def test_an_answer_to_a_bug_outside_of_acting_has_the_id_too(lines, monkeypatch):
    with service_of(FakeRunner()) as service:
        monkeypatch.setattr(service, "status", lambda: 1 / 0)
        with TestClient(build_app(service), raise_server_exceptions=False) as client:
            answer = client.get("/v1/policies", headers={"x-request-id": "abc"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "abc"


def test_messages_of_a_websocket_count_on_from_the_id_of_its_connection(client, lines):
    with client.websocket_connect("/", headers={"x-request-id": "arm"}) as socket:
        socket.receive_bytes()
        socket.send_bytes(pack({"observation": observation()}))
        socket.receive_bytes()
        socket.send_bytes(pack({"observation": {}}))
        assert unpack(socket.receive_bytes())["request_id"] == "arm/2"
        socket.send_bytes(pack({"observation": {}}))
        assert unpack(socket.receive_bytes())["request_id"] == "arm/3"
    assert [line["request_id"] for line in lines() if line["event"] == "refused"] == ["arm/2", "arm/3"]


def test_neither_keys_nor_observations_are_in_the_log(lines):
    values = {**observation(), "task": "fetch the letter", "observation.state": np.full((2, 2), 31.4159, np.float32)}
    with service_of(FakeRunner()) as service, TestClient(build_app(service, Keys((KEPT,)))) as client:
        post(client, {"observation": values}, authorization=f"Bearer {KEY}")
        post(client, {"observation": {**values, "task": 31.4159}}, authorization=f"Bearer {KEY}")
        post(client, {"observation": values, "seed": "31.4159"}, authorization=f"Bearer {KEY}")
        post(client, {"observation": values}, authorization=f"Bearer {KEY}x")
    refused = [line for line in lines() if line["event"] == "refused"]
    assert [line["reason"] for line in refused] == ["observation", "observation", "malformed", "key"]
    assert [line.get("caller") for line in refused] == ["left_arm", "left_arm", "left_arm", None]
    text = json.dumps(lines())
    for secret in (KEY, KEY.split("_")[1], "31.4", "letter"):
        assert secret not in text


def test_a_flood_of_refusals_is_cut_and_the_next_line_says_by_how_much(client, lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log.TokenBucket.__init__, "__defaults__", (lambda: now[0],))
    with service_of(FakeRunner()) as service, TestClient(build_app(service)) as client:
        for _ in range(150):
            client.get("/nothing")
        assert len([line for line in lines() if line["event"] == "refused"]) == 100
        now[0] = 1.0
        client.get("/nothing")
        assert 'reason="route",replica="local"} 151.0' in client.get("/metrics").text
    refused = [line for line in lines() if line["event"] == "refused"]
    assert len(refused) == 101
    assert refused[-1]["refusals_left_out"] == 50


def test_other_records_become_lines_too(lines):
    logging.getLogger("rlsvc.elsewhere").warning("three of %d", 4)
    assert lines()[-1]["message"] == "three of 4"
