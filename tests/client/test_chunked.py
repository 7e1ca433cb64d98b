"""ChunkedPolicy: n actions of a chunk are executed, then the policy is asked with the last T observations."""

import asyncio

import numpy as np
import pytest
from serving_fakes import CONTRACT

from rlsvc.client import AsyncChunkedPolicy, ChunkedPolicy, PolicyUnavailableError, Reply, chunked
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, UserError

WINDOWED = Contract(
    {"observation.state": Feature((1,), "float32")}, Feature((2,), "float32"), 10.0, n_obs_steps=3, action_horizon=4
)


class FakeClient:
    """Remembers what it was asked; action h of chunk k is [k, h]."""

    execute = None

    def __init__(self, contract):
        self.contract = contract
        self.asked = []
        self.down = False
        self.expires_in_ms = None

    def act(self, observation, *, seed, step, carry):
        assert carry == b""
        if self.down:
            raise PolicyUnavailableError("down")
        self.asked.append((observation["observation.state"].tolist(), seed, step))
        chunk = np.stack([[len(self.asked) - 1, h] for h in range(self.contract.action_horizon)])
        return Reply(chunk.astype(np.float32), "1", expires_in_ms=self.expires_in_ms)


class AsyncFakeClient(FakeClient):
    async def act(self, observation, *, seed, step, carry):
        return super().act(observation, seed=seed, step=step, carry=carry)


def run(client, steps, **options):
    policy = ChunkedPolicy(client, **options)
    return [policy.act({"observation.state": [float(i)]}).tolist() for i in range(steps)]


def test_a_chunk_is_executed_to_its_end_and_then_refreshed():
    client = FakeClient(WINDOWED)
    assert run(client, 6) == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]
    assert client.asked == [([[0], [0], [0]], 0, 0), ([[2], [3], [4]], 0, 4)]


def test_fewer_actions_can_be_executed_of_each_chunk():
    client = FakeClient(WINDOWED)
    assert run(client, 5, n_execute=2, seed=9) == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    assert [(seed, step) for _, seed, step in client.asked] == [(9, 0), (9, 2), (9, 4)]


def test_a_robots_policy_is_asked_as_often_as_its_runtime_asks_unless_another_number_is_given():
    client = FakeClient(WINDOWED)
    client.execute = 3
    assert [h for _, h in run(client, 5)] == [0, 1, 2, 0, 1]
    assert [h for _, h in run(client, 5, n_execute=2)] == [0, 1, 0, 1, 0]
    with pytest.raises(UserError, match="n_execute: got 0"):
        ChunkedPolicy(client, n_execute=0)


@pytest.fixture
def now(monkeypatch):
    """The client's clock, s, in a list of one."""
    time = [100.0]
    monkeypatch.setattr(chunked, "monotonic", lambda: time[0])
    return time


def test_a_chunk_that_got_too_old_is_dropped_and_the_policy_asked_anew(now):
    client = FakeClient(WINDOWED)
    client.expires_in_ms = 400.0
    policy, actions = ChunkedPolicy(client), []
    for wait_s in (0.1, 0.1, 0.5, 0.1, 0.1):
        actions.append(policy.act({"observation.state": [0.0]}).tolist())
        now[0] += wait_s
    assert actions == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert [step for _, _, step in client.asked] == [0, 3]


def test_a_loop_at_the_contracts_rate_executes_whole_chunks(now):
    client = FakeClient(WINDOWED)
    client.expires_in_ms = 400.0
    policy, actions = ChunkedPolicy(client), []
    for _ in range(5):
        actions.append(policy.act({"observation.state": [0.0]}).tolist())
        now[0] += 0.1
    assert actions == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]]


@pytest.mark.parametrize(("expires_in_ms", "expire"), [(400.0, False), (None, True)])
def test_a_chunk_does_not_expire_in_simulated_time_or_where_the_server_does_not_say_it(now, expires_in_ms, expire):
    client = FakeClient(WINDOWED)
    client.expires_in_ms = expires_in_ms
    policy = ChunkedPolicy(client, expire=expire)
    for h in range(4):
        assert policy.act({"observation.state": [0.0]}).tolist() == [0, h]
        now[0] += 1000.0


def test_a_policy_that_cannot_be_asked_anew_gives_no_action_of_the_old_chunk(now):
    client = FakeClient(WINDOWED)
    client.expires_in_ms = 400.0
    policy = ChunkedPolicy(client)
    policy.act({"observation.state": [0.0]})
    now[0], client.down = now[0] + 0.5, True
    for _ in range(2):
        with pytest.raises(PolicyUnavailableError):
            policy.act({"observation.state": [0.0]})


@pytest.mark.parametrize("n", [0, 5, -1])
def test_more_actions_than_the_horizon_are_refused(n):
    with pytest.raises(UserError, match="expected 1 to 4"):
        ChunkedPolicy(FakeClient(WINDOWED), n_execute=n)


def test_reset_begins_an_episode_anew():
    client = FakeClient(WINDOWED)
    policy = ChunkedPolicy(client)
    policy.act({"observation.state": [1.0]})
    policy.act({"observation.state": [2.0]})
    policy.reset(seed=7)
    assert policy.act({"observation.state": [5.0]}).tolist() == [1, 0]
    assert client.asked[-1] == ([[5], [5], [5]], 7, 0)


def test_a_dead_link_raises_instead_of_an_action_and_recovers():
    client = FakeClient(WINDOWED)
    policy = ChunkedPolicy(client, n_execute=1)
    policy.act({"observation.state": [0.0]})
    client.down = True
    for _ in range(3):
        with pytest.raises(PolicyUnavailableError):
            policy.act({"observation.state": [1.0]})
    client.down = False
    assert policy.act({"observation.state": [2.0]}).tolist() == [1, 0]


def test_a_bad_observation_is_refused_at_its_step_even_while_a_chunk_is_under_way():
    client = FakeClient(WINDOWED)
    policy = ChunkedPolicy(client)
    policy.act({"observation.state": [0.0]})
    with pytest.raises(ContractError, match="not finite"):
        policy.act({"observation.state": [np.nan]})
    with pytest.raises(ContractError, match="not in the contract"):
        policy.act({"state": [1.0]})
    for i in range(1, 5):
        policy.act({"observation.state": [float(i)]})
    assert client.asked[-1][0] == [[2], [3], [4]]


def test_the_asynchronous_one_does_the_same():
    async def scenario():
        client = AsyncFakeClient(WINDOWED)
        policy = AsyncChunkedPolicy(client, n_execute=3)
        actions = [(await policy.act({"observation.state": [float(i)]})).tolist() for i in range(4)]
        policy.reset()
        actions.append((await policy.act({"observation.state": [9.0]})).tolist())
        return actions, client.asked

    actions, asked = asyncio.run(scenario())
    assert actions == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]
    assert asked[-1] == ([[9], [9], [9]], 0, 0)


def test_images_and_texts_keep_their_types_in_the_window():
    client = FakeClient(CONTRACT)
    seen = {}
    client.act = lambda observation, **_: seen.update(observation) or Reply(np.zeros((4, 2), np.float32), "1")
    policy = ChunkedPolicy(client)
    policy.act({"observation.state": np.ones(3), "observation.image": np.full((4, 4, 3), 9, np.uint8), "task": "push"})
    CONTRACT.check_observation(seen)
    assert seen["observation.image"].dtype == np.uint8
    assert seen["task"].tolist() == ["push", "push"]
