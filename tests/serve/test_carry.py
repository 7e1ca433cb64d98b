"""A policy's carry that the client keeps: handed back unread over every transport, refused where it does not fit."""

import base64
import time

import httpx
import numpy as np
import pytest
from serving_fakes import POISON, Counting, FakeRunner, serving, serving_app

from rlsvc.client import ChunkedPolicy, ClientOptions, PolicyClient, SessionLostError
from rlsvc.client.chunked import AsyncChunkedPolicy
from rlsvc.client.client import AsyncPolicyClient
from rlsvc.core.wire import pack, unpack
from rlsvc.serve.app import build_app
from rlsvc.serve.carry import decode_carry, encode_carry
from rlsvc.serve.codec import RequestError
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.version import CURRENT

WINDOW = {"x": np.array([1.0, 2.0], np.float32)}


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_what_a_policy_hands_on_comes_back_with_the_next_request(transport):
    with serving(Counting()) as url, PolicyClient(url, transport=transport) as client:
        assert client.act(WINDOW, step=1).carry is None
        carry, chunks = b"", []
        for number in range(1, 4):
            reply = client.act(WINDOW, step=number, carry=carry)
            chunks.append(reply.action[0, 0])
            carry = reply.carry
        assert chunks == [0.0, 1.0, 2.0]
        assert client.act(WINDOW, step=4, carry=b"").action[0, 0] == 0.0
        assert client.act(WINDOW, step=4).action[0, 0] == 0.0


def test_in_json_it_is_base64():
    with serving(Counting()) as url:
        body = {"observation": {"x": [1, 2]}, "step": 1, "carry": ""}
        first = httpx.post(f"http://{url}/v1/policies/fake/act", json=body).json()
        second = httpx.post(f"http://{url}/v1/policies/fake/act", json={**body, "carry": first["carry"]}).json()
        assert [answer["action"][0][0] for answer in (first, second)] == [0.0, 1.0]
        assert "carry" not in httpx.post(f"http://{url}/v1/policies/fake/act", json={**body, "carry": None}).json()
        assert unpack(base64.b64decode(second["carry"]))["version"] == "counting"


def test_a_policy_that_hands_on_nothing_has_an_empty_one():
    with serving(FakeRunner()) as url, PolicyClient(url) as client:
        observation = client.contract.example_observation(1)
        seen = {name: value[0] for name, value in observation.items()}
        assert client.act(seen, carry=b"").carry == b""


def leaves(*arrays: np.ndarray, version: str = "counting") -> bytes:
    return pack({"version": version, "leaves": list(arrays)})


@pytest.mark.parametrize(
    ("carry", "why"),
    [
        (b"\x93no", "it cannot be read"),
        (pack([1, 2]), "it is none"),
        (pack({"version": "counting"}), "it is none"),
        (leaves(np.ones((1, 1), np.float32), version="before"), "another version made it"),
        (pack({"version": np.arange(2), "leaves": []}), "another version made it"),
        (leaves(), "it has not the arrays"),
        (leaves(np.ones((2, 1), np.float32)), "it has not the arrays"),
        (leaves(np.ones((1, 1), np.float64)), "it has not the arrays"),
        (leaves(np.full((1, 1), np.nan, np.float32)), "numbers that are not finite"),
        (pack({"version": "counting", "leaves": 3}), "it has not the arrays"),
    ],
)
def test_one_that_does_not_fit_is_refused_and_the_client_is_told_to_begin_anew(carry, why):
    with pytest.raises(RequestError, match=why) as refused:
        decode_carry(carry, Counting())
    assert (refused.value.status, refused.value.reason) == (409, "session")
    with serving(Counting()) as url, PolicyClient(url) as client:
        with pytest.raises(SessionLostError, match="begin anew"):
            client.act(WINDOW, step=1, carry=carry)
        assert client.act(WINDOW, step=1, carry=b"").action[0, 0] == 0.0


def test_it_goes_out_and_comes_back_as_it_was():
    carry = np.arange(1, dtype=np.float32)[None]
    np.testing.assert_array_equal(decode_carry(encode_carry(carry, "counting"), Counting()), carry)
    assert decode_carry(b"", Counting()) is None


@pytest.mark.parametrize(
    ("message", "status", "says"),
    [
        ({"carry": 7}, 400, "'carry': got int"),
        ({"carry": "?"}, 409, "begin anew"),
        ({"carry": b"", "session": True, "step": 0}, 400, "leave one out"),
    ],
)
def test_what_is_no_carry_or_is_kept_twice_is_refused(message, status, says):
    with serving(Counting()) as url:
        body = pack({"observation": WINDOW, **message})
        answer = httpx.post(
            f"http://{url}/v1/policies/fake/act", content=body, headers={"content-type": "application/msgpack"}
        )
        assert answer.status_code == status
        assert says in unpack(answer.content)["error"]


def chunks_of(policy: ChunkedPolicy, count: int) -> list[float]:
    """The number of the chunk in its episode, of so many chunks of four."""
    return [policy.act({"x": np.float32(1)})[0] for _ in range(4 * count)][::4]


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_a_policy_in_chunks_keeps_it_until_its_episode_ends_or_another_version_takes_over(transport, caplog):
    service = PolicyService("fake", Counting(), ServeSettings(drain_s=0.0))
    options = ClientOptions(timeout_s=5.0)
    with serving_app(build_app(service)) as url, PolicyClient(url, transport=transport, options=options) as client:
        policy = ChunkedPolicy(client)
        assert chunks_of(policy, 3) == [0.0, 1.0, 2.0]
        policy.reset()
        assert chunks_of(policy, 2) == [0.0, 1.0]
        assert policy.restarts == 0
        service.assign(CURRENT, Counting("newer"))
        time.sleep(0.01)
        assert chunks_of(policy, 2) == [0.0, 1.0]
        assert policy.restarts == 1
        assert "the policy begins anew" in caplog.text
    service.close()


def test_the_asynchronous_one_does_the_same():
    import asyncio

    async def main(url: str) -> list[float]:
        async with AsyncPolicyClient(url) as client:
            policy = AsyncChunkedPolicy(client)
            return [(await policy.act({"x": np.float32(1)}))[0] for _ in range(12)][::4]

    with serving(Counting()) as url:
        assert asyncio.run(main(url)) == [0.0, 1.0, 2.0]


def test_a_chunk_that_failed_leaves_it_as_it_was():
    with serving(Counting()) as url, PolicyClient(url) as client:
        policy = ChunkedPolicy(client)
        assert chunks_of(policy, 2) == [0.0, 1.0]
        for x in (POISON, 1.0):  # the window has it twice
            with pytest.raises(RuntimeError, match="internal error"):
                policy.act({"x": np.float32(x)})
        assert policy.act({"x": np.float32(1)})[0] == 2.0
