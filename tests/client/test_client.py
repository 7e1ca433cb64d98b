"""The clients against a real server on a socket: answers, deadlines, reconnection."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from serving_fakes import CONTRACT, POISON, SMALL_CONTRACT, FakeRunner, expected_action, observation, serving

from rlsvc.client import (
    AsyncPolicyClient,
    ClientOptions,
    PolicyClient,
    PolicyUnavailableError,
    RefusedError,
    ServerFaultError,
)
from rlsvc.client.protocol import Address, decode_reply
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, NotFoundError, UserError
from rlsvc.core.types import ActionChunk
from rlsvc.core.wire import pack
from rlsvc.serve.haproxy import free_ports

TRANSPORTS = ["ws", "http"]
QUICK = ClientOptions(timeout_s=1.0, connect_timeout_s=0.5)
STATE = {"observation.state": np.ones(3, np.float32)}


class Blocking:
    """AsyncPolicyClient with the face of PolicyClient, so that one test covers both."""

    def __init__(self, url, **options):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncPolicyClient(url, **options)
        try:
            self._loop.run_until_complete(self._client.connect())
        except BaseException:
            self._loop.close()
            raise

    def __getattr__(self, name):
        return getattr(self._client, name)

    def act(self, *args, **kwargs):
        return self._loop.run_until_complete(self._client.act(*args, **kwargs))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(params=[PolicyClient, Blocking], ids=["sync", "async"])
def make_client(request):
    return request.param


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


def test_a_client_learns_the_contract_and_gets_actions(make_client, transport):
    with serving(FakeRunner()) as url, make_client(url, transport=transport) as client:
        assert (client.name, client.version, client.contract) == ("fake", "fake-1", CONTRACT)
        for step in range(3):
            reply = client.act(observation(), seed=4, step=step)
            np.testing.assert_array_equal(reply.action, expected_action(np.ones((2, 3)), 4, step))
        assert reply.action.dtype == np.float32
        assert reply.version == "fake-1"
        assert reply.timing["model_ms"] > 0
        assert reply.expires_in_ms == 400.0


def test_a_bad_observation_is_refused_before_it_is_sent(make_client, transport):
    runner = FakeRunner()
    with serving(runner) as url, make_client(url, transport=transport) as client:
        with pytest.raises(ContractError, match=r"'observation\.state': got shape"):
            client.act({**observation(), "observation.state": np.zeros(2)})
        with pytest.raises(ContractError, match="not finite"):
            client.act(observation(np.nan))
    assert runner.batches == []


def test_what_the_server_refuses_is_not_sent_again(make_client, transport):
    with serving(FakeRunner()) as url, make_client(url, transport=transport) as client:
        with pytest.raises(RefusedError, match="'seed'"):
            client.act(observation(), seed=-1)
        assert client.act(observation()).action.shape == (4, 2)


def test_a_failing_policy_is_a_server_fault_with_an_id_and_not_sent_again(make_client, transport):
    runner = FakeRunner()
    with serving(runner) as url, make_client(url, transport=transport) as client:
        with pytest.raises(ServerFaultError, match="request id"):
            client.act(observation(POISON))
        assert runner.batches == [1]
        assert client.act(observation()).action.shape == (4, 2)


def test_an_overloaded_server_is_asked_again(make_client, transport):
    runner = FakeRunner()
    with serving(runner, max_waiting=1) as url, make_client(url, transport=transport) as client:
        runner.open.clear()
        others = [threading.Thread(target=lambda: PolicyClient(url).act(observation())) for _ in range(2)]
        for other in others:
            other.start()
            time.sleep(0.2)
        threading.Timer(0.3, runner.open.set).start()
        assert client.act(observation()).action.shape == (4, 2)
        for other in others:
            other.join()


def test_another_policy_than_the_one_asked_for_is_refused(make_client, transport):
    with serving(FakeRunner()) as url, pytest.raises(RefusedError, match="other"):
        make_client(url, policy="other", transport=transport)


def test_nothing_listening_is_unavailable_after_bounded_retries(make_client, transport, free_port):
    start = time.monotonic()
    with pytest.raises(PolicyUnavailableError, match="cannot be reached"):
        make_client(f"127.0.0.1:{free_port}", transport=transport, options=ClientOptions(retries=2, backoff_s=0.01))
    assert time.monotonic() - start < 3


def test_a_server_that_comes_up_late_is_found(make_client, transport, free_port):
    with contextlib.ExitStack() as stack:
        start = threading.Timer(0.5, lambda: stack.enter_context(serving(FakeRunner(), port=free_port)))
        start.start()
        with make_client(f"127.0.0.1:{free_port}", transport=transport) as client:
            assert client.act(observation()).action.shape == (4, 2)
        start.join()


def test_a_server_that_restarts_is_asked_again_and_answers_the_same(make_client, transport, free_port):
    with contextlib.ExitStack() as first:
        url = first.enter_context(serving(FakeRunner(), port=free_port))
        with make_client(url, transport=transport) as client:
            before = client.act(observation(), seed=1, step=2)
            first.close()
            with contextlib.ExitStack() as second:
                start = threading.Timer(0.5, lambda: second.enter_context(serving(FakeRunner(), port=free_port)))
                start.start()
                np.testing.assert_array_equal(client.act(observation(), seed=1, step=2).action, before.action)
                start.join()


def test_a_contract_that_changed_over_a_restart_is_refused_even_where_the_shapes_fit(make_client, transport, free_port):
    other = dataclasses.replace(CONTRACT, action=dataclasses.replace(CONTRACT.action, unit="m"))
    with contextlib.ExitStack() as first:
        url = first.enter_context(serving(FakeRunner(), port=free_port))
        with make_client(url, transport=transport) as client:
            first.close()
            with (
                serving(FakeRunner(other, version="fake-2"), port=free_port),
                pytest.raises(ContractError, match="changed its contract"),
            ):
                client.act(observation())


def test_a_new_version_of_the_same_contract_is_taken(make_client, transport, free_port):
    with contextlib.ExitStack() as first:
        url = first.enter_context(serving(FakeRunner(), port=free_port))
        with make_client(url, transport=transport) as client:
            first.close()
            with serving(FakeRunner(version="fake-2"), port=free_port):
                assert client.act(observation()).version == "fake-2"
                assert client.version == "fake-2"


def test_a_dead_link_raises_and_never_repeats_an_action(make_client, transport):
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(FakeRunner()))
        with make_client(url, transport=transport, options=ClientOptions(retries=1, backoff_s=0.01)) as client:
            client.act(observation())
            stack.close()
            with pytest.raises(PolicyUnavailableError):
                client.act(observation())


def test_a_listener_that_says_nothing_is_a_timeout(make_client, transport):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            make_client(f"127.0.0.1:{silent.getsockname()[1]}", transport=transport, options=QUICK)
        assert time.monotonic() - start < 3


def test_a_server_that_trickles_does_not_outlive_the_deadline(make_client, transport):
    def trickle(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection):
        with contextlib.suppress(OSError):
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\ncontent-type: application/json\r\n\r\n"
                if transport == "http"
                else b"HTTP/1.1 101"
            )
            while True:
                connection.sendall(b" ")
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            make_client(f"127.0.0.1:{listener.getsockname()[1]}", transport=transport, options=QUICK)
        assert time.monotonic() - start < 3


SERVER = """
import sys, time
from serving_fakes import FakeRunner, serving
from rlsvc.core.contract import Contract, Feature
contract = Contract({"observation.image": Feature((1000, 2000, 3), "uint8")}, Feature((2,), "float32"), 10.0, 1, 4)
class Zeros(FakeRunner):
    def act(self, observation, seeds, steps, carry=None):
        import numpy as np
        from rlsvc.core.types import ActionChunk
        return ActionChunk(np.zeros((len(seeds), 4, 2), np.float32), "zeros")
with serving(Zeros(contract)) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server_process():
    """A server in a process of its own, to be stopped and woken; its observation of 6 MB fills the sockets' buffers."""
    folder = Path(__file__).parent.parent / "serve"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent.parent)])}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_stopped_server_is_a_timeout_even_while_a_large_observation_is_being_sent(
    make_client, transport, server_process
):
    process, url = server_process
    image = {"observation.image": np.zeros((1000, 2000, 3), np.uint8)}
    with make_client(url, transport=transport, options=ClientOptions(timeout_s=2.0)) as client:
        client.act(image)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # on a busy machine it may answer once more before it stops
        start = time.monotonic()
        try:
            with pytest.raises(TimeoutError, match="did not"):
                client.act(image)
            assert time.monotonic() - start < 3
        finally:
            process.send_signal(signal.SIGCONT)
        assert client.act(image).action.shape == (4, 2)


def test_a_client_that_was_idle_for_long_is_still_answered(make_client):
    """uvicorn pings, and drops who does not pong: the blocking client, which has no thread, connects anew then."""
    with (
        serving(FakeRunner(), uvicorn_options={"ws_ping_interval": 0.1, "ws_ping_timeout": 0.1}) as url,
        make_client(url) as client,
    ):
        for pause in (0.0, 0.15, 0.8):
            time.sleep(pause)
            assert client.act(observation()).action.shape == (4, 2)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next(make_client, transport):
    runner = FakeRunner()
    with serving(runner) as url, make_client(url, transport=transport, options=QUICK) as client:
        runner.open.clear()
        with pytest.raises(TimeoutError):
            client.act(observation(1.0), step=1)
        runner.open.set()
        np.testing.assert_array_equal(
            client.act(observation(2.0), step=2).action, expected_action(np.full((2, 3), 2.0), 0, 2)
        )


def test_a_request_that_was_cancelled_leaves_no_answer_behind(transport):
    async def scenario(url):
        async with AsyncPolicyClient(url, transport=transport) as client:
            runner.open.clear()
            task = asyncio.ensure_future(client.act(observation(1.0), step=1))
            await asyncio.sleep(0.1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            runner.open.set()
            return await client.act(observation(2.0), step=2)

    runner = FakeRunner()
    with serving(runner) as url:
        reply = asyncio.run(scenario(url))
    np.testing.assert_array_equal(reply.action, expected_action(np.full((2, 3), 2.0), 0, 2))


def test_async_requests_on_one_client_take_turns():
    async def scenario(url):
        async with AsyncPolicyClient(url) as client:
            return await asyncio.gather(*(client.act(observation(i), step=i) for i in range(10)))

    with serving(FakeRunner()) as url:
        for i, reply in enumerate(asyncio.run(scenario(url))):
            np.testing.assert_array_equal(reply.action, expected_action(np.full((2, 3), i), 0, i))


def test_an_unconnected_async_client_says_what_to_do():
    with pytest.raises(RuntimeError, match="async with"):
        _ = AsyncPolicyClient("127.0.0.1:1").contract


def test_a_message_in_pieces_is_put_together(make_client):
    """300 KB of actions come in several frames' worth of reads."""
    wide = Contract(SMALL_CONTRACT.observation, Feature((20_000,), "float32"), 10.0, 1, 4)
    runner = FakeRunner(wide)
    want = np.arange(80_000, dtype=np.float32).reshape(4, 20_000)
    runner.act = lambda observation, seeds, steps, carry: ActionChunk(want[None], "wide")
    with serving(runner) as url, make_client(url) as client:
        np.testing.assert_array_equal(client.act(STATE).action, want)


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        ({"action": np.full((4, 2), np.nan, np.float32)}, ServerFaultError, "not finite"),
        ({"action": np.zeros((3, 2), np.float32)}, ServerFaultError, "the contract says"),
        ({"action": np.zeros((4, 2), np.int32)}, ServerFaultError, "the contract says"),
        ({"action": "x"}, ServerFaultError, "the contract says"),
        ({}, ServerFaultError, "the contract says"),
        ({"action": np.zeros((4, 2)), "expires_in_ms": float("nan")}, ServerFaultError, "expires_in_ms is nan"),
        ({"action": np.zeros((4, 2)), "expires_in_ms": "soon"}, ServerFaultError, "expires_in_ms is soon"),
        ({"action": np.zeros((4, 2)), "expires_in_ms": True}, ServerFaultError, "expires_in_ms is True"),
        ([], PolicyUnavailableError, "answered with a list"),
        ({"error": "busy", "status": 503}, PolicyUnavailableError, "busy"),
        ({"error": "no", "status": 422}, RefusedError, "no"),
        ({"error": "bug", "status": "x"}, ServerFaultError, "bug"),
    ],
)
def test_an_answer_that_is_no_action_is_never_returned(reply, error, text):
    with pytest.raises(error, match=text):
        decode_reply(pack(reply), SMALL_CONTRACT)
    with pytest.raises(PolicyUnavailableError, match="no message of this protocol"):
        decode_reply(b"\xc1", SMALL_CONTRACT)


def test_a_web_server_that_serves_no_policy_is_unavailable(make_client, transport):
    from http.server import HTTPServer, SimpleHTTPRequestHandler

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(PolicyUnavailableError):
            make_client(
                f"127.0.0.1:{server.server_address[1]}",
                transport=transport,
                options=ClientOptions(retries=1, backoff_s=0.01),
            )
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "url", ["", "ftp://x:1", "http://x:99999", "x:abc", "http://x:1/path", "http://user@x:1", "http://:80"]
)
def test_bad_addresses_are_refused(url):
    with pytest.raises(UserError, match="server address"):
        PolicyClient(url)


def test_addresses_of_every_scheme_reach_both_transports():
    assert Address.parse("robot:8000").websocket == "ws://robot:8000/"
    assert Address.parse("https://robot").websocket == "wss://robot/"
    assert Address.parse("wss://robot:1/").http == "https://robot:1"
    assert Address.parse("[::1]:8000").http == "http://[::1]:8000"


def test_an_unknown_transport_is_refused_with_the_list():
    with pytest.raises(NotFoundError, match="http, ws"):
        PolicyClient("127.0.0.1:1", transport="grpc")


def test_an_observation_too_large_for_a_message_is_refused_before_it_is_sent():
    contract = Contract({"observation.image": Feature((2400, 2400, 3), "uint8")}, Feature((2,), "float32"), 10.0, 1, 4)
    with (
        serving(FakeRunner(contract)) as url,
        PolicyClient(url) as client,
        pytest.raises(ContractError, match="send smaller images"),
    ):
        client.act({"observation.image": np.zeros((2400, 2400, 3), np.uint8)})


def test_the_client_imports_neither_jax_torch_ray_nor_the_server():
    heavy = ("jax", "torch", "ray", "fastapi", "pydantic", "rlsvc.serve")
    script = f"import sys, rlsvc.client; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout.strip() == "[]"


@pytest.fixture
def free_port():
    (port,) = free_ports(1)
    return port
