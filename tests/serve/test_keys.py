"""API keys: what is kept of them, and that every route lets in those alone that it should."""

import contextlib
import datetime
import json
import re

import numpy as np
import pytest
from serving_fakes import SMALL_CONTRACT, FakeRunner, service_of, serving
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from typer.testing import CliRunner

from rlsvc.cli import app as cli
from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.client.protocol import PolicyUnavailableError, RefusedError
from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.core.wire import pack, unpack
from rlsvc.serve.app import build_app
from rlsvc.serve.bucket import TokenBucket
from rlsvc.serve.episodes import EpisodeInbox, add_episode_routes
from rlsvc.serve.keys import ROLES, ROUTES, Authenticated, Keys, new_key, read_file, role_of, write_file

TODAY = datetime.date(2030, 5, 5)
DATASET = "0" * 32
PATHS = {
    ("POST", r"/v1/policies/[^/]*/act"): "/v1/policies/fake/act",
    ("GET", r"/v1/policies(/[^/]*)?"): "/v1/policies/fake",
    ("GET", r"/(docs|redoc|openapi\.json)"): "/openapi.json",
    ("GET", r"/v2/health/(live|ready)"): "/v2/health/ready",
    ("GET", r"/v2(/models/[^/]*(/versions/[^/]*)?(/ready)?)?"): "/v2/models/fake",
    ("POST", r"/v2/models/[^/]*(/versions/[^/]*)?/infer"): "/v2/models/fake/infer",
    ("GET", r"/v1/episodes/[^/]*"): f"/v1/episodes/{DATASET}",
    ("PUT", r"/v1/episodes/[^/]*/[^/]*"): f"/v1/episodes/{DATASET}/0",
}
"""A path of each route whose pattern is none."""
HTTP = [
    (method, PATHS.get((method, pattern), pattern), role) for method, pattern, role in ROUTES if method != "WEBSOCKET"
]


@pytest.fixture(scope="module")
def issued():
    """A key of each role, one that has expired, and the keys of a server that has them all."""
    made = {role: new_key(role, (role,)) for role in ROLES}
    made["expired"] = new_key("expired", tuple(ROLES), datetime.date(2020, 1, 1))
    return {name: key for name, (key, _) in made.items()}, Keys(tuple(kept for _, kept in made.values()))


@pytest.fixture(scope="module")
def client(issued, tmp_path_factory):
    with service_of(FakeRunner(SMALL_CONTRACT)) as service:
        app = build_app(service, issued[1])
        add_episode_routes(app, EpisodeInbox(tmp_path_factory.mktemp("inbox"), lambda path: None, 1000))
        with TestClient(app) as client:
            yield client


def of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("method", "path", "role"), HTTP)
@pytest.mark.parametrize("who", [None, "bad", "expired", *ROLES])
def test_every_route_lets_in_the_role_it_asks_for_and_nobody_else(client, issued, method, path, role, who):
    key = {None: None, "bad": f"rlsvc_{'0' * 16}_{'a' * 43}"}.get(who, issued[0].get(who))
    status = client.request(method, path, headers=of(key)).status_code
    if role is None or who == role:
        assert status not in (401, 403, 404, 405)
    else:
        assert status == (401 if who in (None, "bad", "expired") else 403)


@pytest.mark.parametrize("who", [None, "expired", *ROLES])
def test_a_websocket_opens_for_those_who_may_act(client, issued, who):
    headers = of(None if who is None else issued[0][who])
    if who == "act":
        with client.websocket_connect("/", headers=headers) as socket:
            assert socket.receive_bytes()
        return
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/", headers=headers):
        pass


def test_every_route_of_the_application_is_in_the_table_and_a_new_one_would_be_closed(client):
    for route in client.app.routes:
        methods = getattr(route, "methods", None) or {"WEBSOCKET"}
        path = re.sub(r"{[^}]*}", "x", route.path)
        for method in methods - {"HEAD"}:
            assert any(m == method and re.fullmatch(p, path) for m, p, _ in ROUTES) or path.startswith("/docs/"), path
    assert role_of("GET", "/v1/secret") == role_of("DELETE", "/v1/policies/fake") == "administer"


def test_a_refusal_says_which_role_is_lacking_and_never_the_key(client, issued):
    answer = client.post("/v1/policies/fake/act", headers=of(issued[0]["read"]))
    assert answer.json()["error"] == "key 'read' has the roles read; this needs 'act'"
    answer = client.post("/v1/policies/fake/act", headers=of("rlsvc_secret"))
    assert "rlsvc keys add" in answer.json()["error"]
    assert "rlsvc_secret" not in answer.text


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """A client of a server, and by role a key with limits of a request in 1,000 s and of 1 KiB, each used once."""
    made = {role: new_key(role, (role,), requests_per_s=0.001, max_body_mb=2**-10) for role in ROLES}
    with service_of(FakeRunner(SMALL_CONTRACT)) as service:
        app = build_app(service, Keys(tuple(kept for _, kept in made.values())))
        add_episode_routes(app, EpisodeInbox(tmp_path_factory.mktemp("inbox"), lambda path: None, 10_000))
        with TestClient(app) as client:
            keys = {role: key for role, (key, _) in made.items()}
            for method, path, role in {role: (method, path, role) for method, path, role in HTTP if role}.values():
                assert client.request(method, path, headers=of(keys[role])).status_code != 429
            yield client, keys


@pytest.mark.parametrize(("method", "path", "role"), HTTP)
def test_every_route_that_asks_for_a_key_refuses_one_that_asks_too_often(limited, method, path, role):
    client, keys = limited
    answer = client.request(method, path, headers=of(keys[role or "read"]))
    if role is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 429
    assert 990 < int(answer.headers["retry-after"]) <= 1000
    assert answer.json()["reason"] == "rate"
    assert f"key '{role}' may send 0.001 requests a second; try again in" in answer.json()["error"]


def test_keys_have_their_limits_apart_and_refusals_are_counted():
    first, second = (new_key(name, ("read",), requests_per_s=0.001) for name in ("a", "b"))
    with (
        service_of(FakeRunner(SMALL_CONTRACT)) as service,
        TestClient(build_app(service, Keys((first[1], second[1])))) as client,
    ):
        statuses = [client.get("/v1/policies", headers=of(key)).status_code for key in (first[0], first[0], second[0])]
        assert statuses == [200, 429, 200]
        assert b'rlsvc_refused_total{policy="fake",reason="rate",replica="local"} 1.0' in service.metrics.render()


@pytest.mark.parametrize(("method", "path", "role"), [route for route in HTTP if route[0] in ("POST", "PUT")])
def test_every_route_that_takes_a_body_holds_a_key_to_its_size(tmp_path, method, path, role):
    small, large = (new_key(name, (role,), max_body_mb=size) for name, size in (("small", 2**-10), ("large", None)))
    with service_of(FakeRunner(SMALL_CONTRACT)) as service:
        app = build_app(service, Keys((small[1], large[1])))
        add_episode_routes(app, EpisodeInbox(tmp_path, lambda path: None, 10_000))
        with TestClient(app) as client:
            kind = {"content-type": "application/json"}
            body = b"[" + b" " * 1024
            refused = client.request(method, path, content=body, headers=kind | of(small[0]))
            assert refused.status_code == 413
            assert "larger than 1024 bytes" in refused.json()["error"]
            assert client.request(method, path, content=body, headers=kind | of(large[0])).status_code in (400, 422)


def test_messages_of_a_websocket_are_requests_and_held_to_the_size():
    key, kept = new_key("arm", ("act",), requests_per_s=0.001, max_body_mb=2**-10)
    fits = {"observation.state": np.ones((1, 3), np.float32)}
    with (
        service_of(FakeRunner(SMALL_CONTRACT)) as service,
        TestClient(build_app(service, Keys((kept,)))) as client,
        client.websocket_connect("/", headers=of(key)) as socket,
    ):
        socket.receive_bytes()
        socket.send_bytes(pack({"observation": fits}))
        assert "action" in unpack(socket.receive_bytes())
        socket.send_bytes(pack({"observation": fits}))
        answer = unpack(socket.receive_bytes())
        assert (answer["status"], answer["reason"]) == (429, "rate")
        socket.send_bytes(pack(fits))
        assert "may send 0.001 requests a second" in socket.receive_text()
        socket.send_bytes(pack({"observation": fits, "padding": "x" * 1024}))
        assert "1024 are the limit here" in socket.receive_text()


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_the_client_tries_again_what_came_too_often_and_then_says_so(transport):
    # Over HTTP the client's first request is for the contract.
    key, kept = new_key("robot", ("read", "act"), requests_per_s=0.001)
    options = ClientOptions(key=key, timeout_s=5.0, retries=1, backoff_s=0.0)
    with serving(FakeRunner(SMALL_CONTRACT), keys=Keys((kept,))) as url, contextlib.ExitStack() as stack:
        client = stack.enter_context(PolicyClient(url, transport=transport, options=options))
        if transport == "ws":
            client.act({"observation.state": [[1, 2, 3]]})
        with pytest.raises(PolicyUnavailableError, match=r"may send 0\.001 requests a second"):
            client.act({"observation.state": [[1, 2, 3]]})


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    now = [0.0]
    bucket = TokenBucket(2.0, 3.0, clock=lambda: now[0])
    assert [bucket.take() for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    now[0] = 0.25
    assert bucket.take() == 0.25
    now[0] = 0.5
    assert [bucket.take(), bucket.take()] == [0.0, 0.5]
    now[0] = 1000.0  # a pause fills no more than the burst
    assert [bucket.take() == 0.0 for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("limit", [{"requests_per_s": 0}, {"max_body_mb": -1.0}, {"requests_per_s": float("nan")}])
def test_a_limit_that_is_none_is_refused(tmp_path, limit):
    with pytest.raises(UserError, match="expected a number above 0"):
        new_key("arm", ("act",), **limit)
    file = tmp_path / "keys.json"
    stored = {"id": "a", "name": "x", "roles": ["act"], "sha256": "0" * 64, **limit}
    file.write_text(json.dumps({"keys": [stored]}))
    file.chmod(0o600)
    with pytest.raises(UserError, match="expected a number above 0"):
        Keys.read(file)


def test_refused_keys_are_counted(client, issued):
    def count():
        text = client.get("/metrics", headers=of(issued[0]["read"])).text
        found = re.search(r'^rlsvc_refused_total{policy="fake",reason="key",replica="local"} (.*)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = count()
    client.get("/v1/policies")
    client.post("/v1/policies/fake/act", headers=of(issued[0]["read"]))
    assert count() == before + 2


def test_openpis_way_of_sending_a_key_is_taken(issued):
    key = issued[0]["act"]
    assert issued[1].find(f"Api-Key {key}").name == "act"
    assert issued[1].find(f"bearer {key}").name == "act"
    for wrong in (key, f"Basic {key}", f"Bearer {key}x", f"Bearer {key[:-1]}", "", None):
        assert issued[1].find(wrong) is None


def test_a_key_holds_until_the_day_it_expires():
    key, kept = new_key("arm", ("act",), TODAY)
    keys = Keys((kept,))
    assert keys.find(f"Bearer {key}", TODAY - datetime.timedelta(1)) == kept
    assert keys.find(f"Bearer {key}", TODAY) is None


def test_two_keys_with_ids_exchanged_open_nothing():
    first, kept = new_key("one", ("act",))
    second, _ = new_key("two", ("act",))
    mixed = f"{first[:23]}{second[23:]}"
    assert Keys((kept,)).find(f"Bearer {mixed}") is None


def test_a_file_keeps_hashes_and_is_its_owners_alone(tmp_path):
    file = tmp_path / "keys.json"
    key, kept = new_key("arm", ("act", "record"))
    write_file(file, (kept,))
    assert file.stat().st_mode & 0o777 == 0o600
    assert key.split("_", 2)[2] not in file.read_text()
    assert read_file(file) == (kept,)
    file.chmod(0o622)
    with pytest.raises(UserError, match="others may write it"):
        Keys.read(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a file of keys"),
        ("[]", "expected a file of keys"),
        ('{"keys": []}', "it has no keys"),
        ('{"keys": [{"id": "a", "name": "x", "roles": ["act"]}]}', "sha256"),
        ('{"keys": [{"id": "a", "name": "x", "roles": ["fly"], "sha256": "' + "0" * 64 + '"}]}', "there is not: fly"),
        ('{"keys": [{"id": "a", "name": "x", "roles": [], "sha256": "' + "0" * 64 + '"}]}', "has no role"),
        ('{"keys": [{"id": "a", "name": "../x", "roles": ["act"], "sha256": "' + "0" * 64 + '"}]}', "is no name"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_by_name(tmp_path, text, says):
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(UserError, match=says):
        Keys.read(file)
    with pytest.raises(NotFoundError, match="rlsvc keys add"):
        Keys.read(tmp_path / "none.json")


def test_keys_are_made_listed_and_removed_from_the_command_line(tmp_path):
    run, file = CliRunner(), tmp_path / "keys.json"
    made = run.invoke(cli, ["keys", "add", "arm", "--role", "act", "--role", "record", "--file", str(file)])
    key = made.stdout.strip()
    assert Keys.read(file).find(f"Bearer {key}").roles == ("act", "record")
    limits = ["--requests-per-s", "12.5", "--max-body-mb", "3"]
    run.invoke(cli, ["keys", "add", "slow", "--role", "act", *limits, "--file", str(file)])
    assert [(key.requests_per_s, key.max_body_mb) for key in Keys.read(file).keys] == [(None, None), (12.5, 3.0)]
    listed = run.invoke(cli, ["keys", "list", "--file", str(file)]).stdout
    assert "12.5" in listed
    run.invoke(cli, ["keys", "remove", "slow", "--file", str(file)])
    assert "arm" in listed
    assert key not in listed
    again = run.invoke(cli, ["keys", "add", "arm", "--role", "act", "--file", str(file)])
    assert "there is a key for 'arm' already" in str(again.exception)
    assert isinstance(run.invoke(cli, ["keys", "remove", "arn", "--file", str(file)]).exception, NotFoundError)
    run.invoke(cli, ["keys", "remove", "arm", "--file", str(file)])
    assert json.loads(file.read_text()) == {"keys": []}
    assert run.invoke(cli, ["keys", "add", "arm", "--role", "act", "--file", str(file)]).exit_code == 0


@pytest.mark.parametrize(("name", "roles"), [("a b", ("act",)), ("", ("act",)), ("arm", ()), ("arm", ("fly",))])
def test_names_and_roles_that_there_are_not_are_refused(name, roles):
    with pytest.raises(UserError):
        new_key(name, roles)


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_the_client_sends_its_key_and_says_when_it_lacks_one(transport):
    key, kept = new_key("robot", ("read", "act"))
    with serving(FakeRunner(SMALL_CONTRACT), keys=Keys((kept,))) as url:
        with PolicyClient(url, transport=transport, options=ClientOptions(key=key)) as client:
            assert client.act({"observation.state": [[1, 2, 3]]}).action.shape == (4, 2)
        assert key not in repr(ClientOptions(key=key))
        with pytest.raises(RefusedError, match=r"key|403"):
            PolicyClient(url, transport=transport)


def test_roles_are_asked_for_below_the_prefix_of_an_application():
    """Serve mounts an application under its route prefix; without it a route's role would not be found."""
    reader, kept = new_key("reader", ("read",))

    async def inner(scope, receive, send):
        await JSONResponse({})(scope, receive, send)

    client = TestClient(Authenticated(inner, Keys((kept,)), lambda reason, status: None), root_path="/arm")
    headers = {"Authorization": f"Bearer {reader}"}
    assert client.get("/arm/healthz").status_code == 200
    assert client.get("/arm/metrics").status_code == 401
    assert client.get("/arm/metrics", headers=headers).status_code == 200
    assert client.get("/arm/healthz/arm/metrics", headers=headers).status_code == 403
    assert client.get("/armx/metrics", headers=headers).status_code == 403
