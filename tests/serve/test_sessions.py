"""Episodes that the server keeps: history, chunk and carry; and that none is ever gone on with wrongly."""

import asyncio
import time

import jax
import numpy as np
import pytest
import websockets.sync.client
from serving_fakes import POISON, Counting, FakeRunner, observation, service_of, serving

from rlsvc.client import ClientOptions, PolicyClient, SessionLostError, SessionPolicy
from rlsvc.client.client import AsyncPolicyClient
from rlsvc.client.session import AsyncSessionPolicy
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.core.wire import pack, unpack
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.params import flatten_params
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.runner import PolicyRunner
from rlsvc.serve.codec import ActRequest, RequestError
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec
from rlsvc.store.bundle import read_bundle, write_bundle

URL_OPTIONS = ClientOptions(timeout_s=5.0)


async def step(service, session, number: int, x: float | None = None, seed: int = 0) -> list[float]:
    """The action of one control step."""
    value = np.float32(number if x is None else x)
    request = ActRequest({"x": value}, seed=seed, step=number, session=True)
    return (await service.act(request, read=time.perf_counter(), session=session)).action.tolist()


def run(steps, runner=None, **settings):
    """`steps(service, session)` with a service."""

    async def inner():
        with service_of(runner or Counting(), **settings) as service:
            await steps(service, service.open())

    asyncio.run(inner())


def test_the_server_keeps_the_history_the_chunk_and_the_carry():
    async def steps(service, session):
        actions = [await step(service, session, number) for number in range(9)]
        # A chunk is executed to its end; the next one is asked for with the last two observations and the carry.
        assert actions == [[0, 0, 0]] * 4 + [[1, 3, 4]] * 4 + [[2, 7, 8]]

    run(steps)


def test_two_episodes_in_one_batch_keep_their_own_carries():
    async def steps(service, first):
        second = service.open()
        for number in range(4):
            await step(service, first, number)
        both = await asyncio.gather(step(service, first, 4), step(service, second, 0, x=9.0), ask_alone(service))
        assert both == [[1, 3, 4], [0, 9, 9], [0, 1, 2]]

    async def ask_alone(service):
        request = ActRequest({"x": np.array([1, 2], np.float32)}, step=12)
        return (await service.act(request, read=time.perf_counter())).action[0].tolist()

    run(steps, max_batch=4, batch_wait_s=0.05)


def test_step_0_begins_an_episode_anew():
    async def steps(service, session):
        for number in range(5):
            await step(service, session, number)
        assert await step(service, session, 0, x=7.0) == [0, 7, 7]
        assert await step(service, session, 0, x=8.0) == [0, 8, 8]

    run(steps)


@pytest.mark.parametrize(
    ("number", "seed", "text"),
    [(3, 0, "got step 3, expected 2"), (1, 0, "got step 1, expected 2"), (2, 5, "step 2 of an episode that is not")],
)
def test_a_step_that_does_not_follow_is_refused_and_the_episode_stays(number, seed, text):
    async def steps(service, session):
        for early in range(2):
            await step(service, session, early)
        with pytest.raises(RequestError, match=text) as refused:
            await step(service, session, number, seed=seed)
        assert (refused.value.status, refused.value.reason) == (409, "session")
        assert await step(service, session, 2) == [0, 0, 0]

    run(steps)


def test_an_episode_that_another_connection_began_is_refused():
    async def steps(service, session):
        await step(service, session, 0)
        with pytest.raises(RequestError, match="its replica was lost, it expired, or its version was replaced"):
            await step(service, service.open(), 1)

    run(steps)


def test_an_episode_expires_after_its_last_request():
    async def steps(service, session):
        await step(service, session, 0)
        await asyncio.sleep(0.03)
        await step(service, session, 1)
        await asyncio.sleep(0.03)
        await step(service, session, 2)
        await asyncio.sleep(0.06)
        with pytest.raises(RequestError, match="it expired"):
            await step(service, session, 3)

    run(steps, session_expiry_s=0.05)


def test_an_expired_episode_is_let_go_without_a_request():
    async def steps(service, session):
        await step(service, session, 0)
        await asyncio.sleep(0.03)
        service.tidy()
        assert session.episode is None

    run(steps, session_expiry_s=0.02)


def test_a_chunk_that_is_too_old_is_not_executed_further():
    async def steps(service, session):
        assert await step(service, session, 0) == [0, 0, 0]
        await asyncio.sleep(0.06)
        assert await step(service, session, 1) == [1, 0, 1]

    run(steps, chunk_expiry_ms=50.0)


def test_a_step_that_failed_may_be_asked_for_again_and_its_observation_was_not_seen():
    async def steps(service, session):
        for number in range(4):
            await step(service, session, number)
        with pytest.raises(RequestError, match="internal error"):
            await step(service, session, 4, x=POISON)
        assert await step(service, session, 4) == [1, 3, 4]

    run(steps)


def test_windows_of_texts_and_images_are_what_a_client_would_send():
    seen = []

    class Sees(FakeRunner):
        def act(self, observation, seeds, steps, carry=None):
            seen.append({name: (x.dtype, x[0].tolist()) for name, x in observation.items()})
            return super().act(observation, seeds, steps, carry)

    async def steps(service, session):
        texts = ("push", "push the T")
        for number, text in enumerate(texts):
            now = {name: value if name == "task" else value[0] for name, value in observation(number).items()}
            request = ActRequest({**now, "task": text}, step=number, session=True)
            await service.act(request, read=time.perf_counter(), session=session)
            await asyncio.sleep(0.02)  # the chunk expires: the policy is asked at each step
        both = {name: np.stack([observation(i)[name][0] for i in range(2)]) for name in observation() if name != "task"}
        await service.act(ActRequest({**both, "task": list(texts)}, step=9), read=time.perf_counter())

    run(steps, Sees(), chunk_expiry_ms=10.0)
    assert seen[1] == seen[2]
    assert seen[1]["task"][1] == ["push", "push the T"]


@pytest.mark.parametrize("kept_by", ["the server", "the client"])
def test_a_planner_acts_over_a_session_as_with_its_own_carry_and_nothing_is_compiled_anew(tmp_path, kept_by):
    contract = Contract({"observation.state": Feature((3,), "float32")}, Feature((2,), "float32"), 20.0, 1, 1)
    tiny = {"encoder_dim": 8, "hidden_dim": 8, "latent_dim": 8, "simnorm_dim": 4, "bins": 11, "num_q": 3,
            "samples": 16, "policy_samples": 4, "elites": 4, "iterations": 2}  # fmt: skip
    spec = TDMPC2PolicySpec.model_validate(tiny)
    leaves, tree = jax.tree.flatten(jax.jit(TDMPC2Policy(spec, contract).init)(jax.random.key(1)))
    rng = np.random.default_rng(1)  # not where training starts, where all plans are worth the same
    params = jax.tree.unflatten(tree, [x + 0.3 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])
    path = write_bundle(
        tmp_path / "bundle",
        policy=spec.model_dump(mode="json"),
        contract=contract,
        normalizer=Normalizer.identity({**contract.observation, "action": contract.action}),
        params=flatten_params(params),
    )
    runner = PolicyRunner(read_bundle(path), batch_sizes=(1, 2))
    runner.warm_up()
    states = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    expected, carry = [], None
    for number, state in enumerate(states):
        chunk = runner.act({"observation.state": state[None, None]}, np.array([3]), np.array([number]), carry)
        carry = chunk.carry
        expected.append(chunk.action[0, 0])
    alone = runner.act({"observation.state": states[4][None, None]}, np.array([3]), np.array([4])).action[0, 0]
    assert np.abs(alone - expected[4]).max() > 1e-3  # the warm start matters
    compilations = []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    async def steps(service, session):
        carry = b""
        for number, state in enumerate(states):
            request = ActRequest({"observation.state": state}, seed=3, step=number, session=True)
            if kept_by == "the client":
                request = ActRequest({"observation.state": state[None]}, seed=3, step=number, carry=carry)
            answer = await service.act(request, read=time.perf_counter(), session=session)
            np.testing.assert_allclose(answer.action.reshape(2), expected[number], atol=1e-5)
            carry = answer.carry

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(steps, runner, max_batch=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compilations


def test_over_http_no_episode_is_kept():
    with (
        serving(Counting()) as url,
        PolicyClient(url, transport="http") as client,
        pytest.raises(UserError, match="use the transport 'ws'"),
    ):
        client.act_in_session({"x": 1.0}, step=0)


def test_a_session_needs_a_step():
    with serving(Counting()) as url, websockets.sync.client.connect(f"ws://{url}") as socket:
        socket.recv()
        socket.send(pack({"observation": {"x": np.float32(1)}, "session": True}))
        answer = unpack(socket.recv())
        assert (answer["status"], answer["error"]) == (
            400,
            "'step': got none, expected the control step, counted from 0",
        )
        socket.send(pack({"observation": {"x": np.float32(1)}, "step": 0, "session": "yes"}))
        assert unpack(socket.recv())["error"] == "'session': got yes, expected true or false"


def test_a_thin_client_executes_an_episode_and_begins_anew_where_the_server_lost_it(caplog):
    with serving(Counting()) as url, PolicyClient(url, options=URL_OPTIONS) as client:
        policy = SessionPolicy(client)
        assert [policy.act({"x": x}).tolist() for x in range(5)][3:] == [[0, 0, 0], [1, 3, 4]]
        client.close()  # as when its replica is lost: the next request comes over another connection
        with pytest.raises(SessionLostError, match="begin anew with step 0"):
            client.act_in_session({"x": 5.0}, step=5)
        client.close()
        assert policy.act({"x": 5.0}).tolist() == [0, 5, 5]
        assert (policy.restarts, policy.step) == (1, 1)
        assert "the episode begins anew" in caplog.text
        policy.reset(seed=1)
        assert policy.act({"x": 6.0}).tolist() == [0, 6, 6]
        assert policy.restarts == 1


def test_the_asynchronous_thin_client_does_the_same():
    async def drive(url):
        async with AsyncPolicyClient(url, options=URL_OPTIONS) as client:
            policy = AsyncSessionPolicy(client)
            first = [(await policy.act({"x": x})).tolist() for x in range(5)]
            await client.close()
            return first, (await policy.act({"x": 5.0})).tolist(), policy.restarts

    with serving(Counting()) as url:
        first, after, restarts = asyncio.run(drive(url))
    assert (first[3:], after, restarts) == ([[0, 0, 0], [1, 3, 4]], [0, 5, 5], 1)


def test_an_episode_goes_on_over_its_connection_when_the_version_changes():
    """Of a learner that acts with its newest weights; connecting anew for a version would lose the episode."""
    runner = Counting()
    with serving(runner) as url, PolicyClient(url, options=URL_OPTIONS) as client:
        policy = SessionPolicy(client)
        assert policy.act({"x": 0.0}).tolist() == [0, 0, 0]
        runner.version = "newer"
        assert [policy.act({"x": x}).tolist() for x in range(1, 5)][-1] == [1, 3, 4]
        assert (policy.restarts, client.version) == (0, "newer")


@pytest.mark.parametrize("session", ["", "a b", "x" * 65, "ü"])
def test_a_session_that_is_no_name_is_refused_before_it_is_sent(session):
    with pytest.raises(UserError, match="expected at most 64 letters"):
        ClientOptions(session=session)
