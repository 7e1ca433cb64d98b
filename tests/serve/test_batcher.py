"""The batcher: batching is invisible in the answers, and one bad row is nobody else's problem."""

import asyncio
import threading

import numpy as np
import pytest
from serving_fakes import POISON, SMALL_CONTRACT, FakeRunner, expected_action

from rlsvc.core.types import MALFORMED, ActionChunk
from rlsvc.serve.batcher import QUICK_BATCHES, Batcher, NoActionError, OverloadedError


def row(value: float) -> dict[str, np.ndarray]:
    return {"observation.state": np.full((1, 3), value, np.float32)}


async def act_all(batcher, values):
    return await asyncio.gather(
        *(batcher.act(row(v), seed=i, step=i) for i, v in enumerate(values)), return_exceptions=True
    )


@pytest.fixture
def runner():
    return FakeRunner(SMALL_CONTRACT)


@pytest.fixture
def batcher(runner):
    batcher = Batcher(runner, max_batch=8, wait_s=0.05)
    yield batcher
    runner.open.set()
    batcher.close()


def test_rows_that_wait_go_together_and_each_gets_its_own_answer(runner, batcher):
    async def scenario():
        runner.open.clear()
        waiting = asyncio.ensure_future(act_all(batcher, range(20)))
        await asyncio.sleep(0.05)
        runner.open.set()
        return await waiting

    answers = asyncio.run(scenario())
    assert max(runner.batches) == 8
    assert sum(runner.batches) == 20
    for i, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.action, expected_action(np.full((1, 3), i), i, i))
        assert answer.version == "fake-1"


def test_one_client_alone_never_waits_for_others(runner, batcher):
    async def scenario():
        return [await batcher.act(row(1.0), 0, 0) for _ in range(5)]

    assert max(answer.queue_s for answer in asyncio.run(scenario())) < 0.04
    assert runner.batches == [1] * 5


def test_clients_that_act_in_step_are_kept_together(runner, batcher):
    async def client(i):
        for _ in range(10):
            await batcher.act(row(i), 0, 0)

    async def scenario():
        await asyncio.gather(*(client(i) for i in range(4)))

    asyncio.run(scenario())
    assert len(runner.batches) <= 15  # of the 40 that it would take one by one


def test_clients_that_took_turns_in_two_halves_come_together(runner):
    """Each asks again 5 ms after its answer, which is more than a row waits for others."""
    runner.seconds = 0.2
    batcher = Batcher(runner, max_batch=8, wait_s=0.001)

    async def client(i, begin_s):
        await asyncio.sleep(begin_s)
        for _ in range(6):
            await batcher.act(row(i), 0, 0)
            await asyncio.sleep(0.005)

    async def scenario():
        await asyncio.gather(*(client(i, 0.0 if i < 3 else 0.1) for i in range(8)))

    asyncio.run(scenario())
    batcher.close()
    assert runner.batches[0] < 8
    assert runner.batches.count(8) >= 4


def test_without_a_wait_nobody_is_waited_for(runner):
    runner.seconds = 0.1
    batcher = Batcher(runner, max_batch=8, wait_s=0.0)

    async def scenario():
        first = asyncio.ensure_future(batcher.act(row(1.0), 0, 0))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(batcher.act(row(2.0), 0, 0))
        await first
        await asyncio.sleep(0.005)
        again = asyncio.ensure_future(batcher.act(row(3.0), 0, 0))
        await asyncio.gather(late, again)

    asyncio.run(scenario())
    batcher.close()
    assert runner.batches == [1, 1, 1]


def test_a_row_that_breaks_the_policy_fails_alone(runner, batcher):
    async def scenario():
        runner.open.clear()
        waiting = asyncio.ensure_future(act_all(batcher, [1.0, 2.0, POISON, 4.0]))
        await asyncio.sleep(0.05)
        runner.open.set()
        return await waiting

    answers = asyncio.run(scenario())
    assert [isinstance(answer, RuntimeError) for answer in answers] == [False, False, True, False]
    assert batcher.alive


def test_too_many_waiting_rows_are_refused(runner):
    batcher = Batcher(runner, max_batch=1, max_waiting=2)

    async def scenario():
        runner.open.clear()
        waiting = asyncio.ensure_future(act_all(batcher, range(8)))
        await asyncio.sleep(0.05)
        runner.open.set()
        return await waiting

    answers = asyncio.run(scenario())
    batcher.close()
    refused = [answer for answer in answers if isinstance(answer, OverloadedError)]
    assert 5 <= len(refused) <= 6


def test_a_row_whose_caller_gave_up_costs_no_call(runner, batcher):
    async def scenario():
        runner.open.clear()
        first = asyncio.ensure_future(batcher.act(row(1.0), 0, 0))
        await asyncio.sleep(0.05)
        second = asyncio.ensure_future(batcher.act(row(2.0), 0, 0))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0)
        runner.open.set()
        await first
        return await batcher.act(row(3.0), 0, 0)

    asyncio.run(scenario())
    assert sum(runner.batches) == 2


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.full((1, 4, 2), np.nan), "not finite"),
        (np.zeros((1, 3, 2)), "contract says"),
        (np.zeros((4, 2)), "contract says"),
    ],
)
def test_actions_that_are_not_finite_or_of_a_wrong_shape_never_leave(runner, batcher, action, message):
    runner.act = lambda observation, seeds, steps, carry: ActionChunk(action, "x")
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(batcher.act(row(1.0), 0, 0))


def test_a_row_for_which_the_policy_said_no_action_fails_alone_and_by_name(runner, batcher):
    def act(observation, seeds, steps, carry):
        state = observation["observation.state"][:, 0, 0]
        action = np.zeros((len(state), 4, 2), np.float32)
        action[state == 1.0] = np.nan
        return ActionChunk(action, "x", extras={MALFORMED: np.array(["", "no_end", "wrong_length"])[state.astype(int)]})

    runner.act = act
    fine, nothing, held = asyncio.run(act_all(batcher, [0.0, 1.0, 2.0]))
    assert (fine.malformed, held.malformed) == ("", "wrong_length")
    assert isinstance(nothing, NoActionError)
    assert nothing.reason == "no_end"
    assert "(no_end)" in str(nothing)


def test_closing_answers_what_waits_and_refuses_what_comes(runner):
    batcher = Batcher(runner)
    assert asyncio.run(batcher.act(row(1.0), 0, 0)).batch_size == 1
    batcher.close()
    assert not batcher.alive
    with pytest.raises(OverloadedError, match="shutting down"):
        asyncio.run(batcher.act(row(1.0), 0, 0))


def test_busy_time_is_seen_while_a_batch_runs(runner, batcher):
    async def scenario():
        runner.open.clear()
        waiting = asyncio.ensure_future(batcher.act(row(1.0), 0, 0))
        await asyncio.sleep(0.1)
        busy = batcher.busy_s()
        runner.open.set()
        await waiting
        return busy

    assert asyncio.run(scenario()) > 0.05
    batcher.close()  # the answer leaves before the batch ends
    assert batcher.busy_s() == 0.0


class TimedRunner(FakeRunner):
    """Says which threads called it, fails when two of them are in it at once, and may hold one of its calls."""

    hold_at: int | None = None

    def __init__(self, contract):
        super().__init__(contract)
        self.threads: list[str] = []
        self.entered = threading.Lock()

    def act(self, *arguments):
        assert self.entered.acquire(blocking=False), "two threads act at once"
        try:
            self.threads.append(threading.current_thread().name)
            if len(self.threads) == self.hold_at:
                self.open.clear()
            return super().act(*arguments)
        finally:
            self.entered.release()


@pytest.fixture
def timed():
    """A runner, and a batcher for which half a second is quick."""
    runner = TimedRunner(SMALL_CONTRACT)
    batcher = Batcher(runner, max_batch=8, quick_s=0.5)
    yield runner, batcher
    batcher.close()


async def act_until_quick(batcher):
    for _ in range(QUICK_BATCHES):
        await batcher.act(row(1.0), 0, 0)
    await asyncio.sleep(0.05)  # the thread lets go a moment after its answer


def test_a_policy_that_has_been_quick_acts_on_the_event_loop_and_one_that_was_slow_on_its_thread_again(timed):
    runner, batcher = timed

    async def scenario():
        await act_until_quick(batcher)
        quick = await batcher.act(row(2.0), 3, 4)
        runner.seconds = 0.6
        await batcher.act(row(1.0), 0, 0)
        runner.seconds = 0.0
        await batcher.act(row(1.0), 0, 0)
        return quick

    answer = asyncio.run(scenario())
    assert runner.threads[:QUICK_BATCHES] == ["rlsvc-policy"] * QUICK_BATCHES
    assert runner.threads[QUICK_BATCHES:] == ["MainThread", "MainThread", "rlsvc-policy"]
    np.testing.assert_array_equal(answer.action, expected_action(np.full((1, 3), 2.0), 3, 4))


def test_rows_of_one_turn_of_the_event_loop_are_batches_there(timed):
    runner, batcher = timed

    async def scenario():
        await act_until_quick(batcher)
        return await act_all(batcher, range(20))

    answers = asyncio.run(scenario())
    assert runner.batches[QUICK_BATCHES:] == [8, 8, 4]
    for i, answer in enumerate(answers):
        np.testing.assert_array_equal(answer.action, expected_action(np.full((1, 3), i), i, i))


def test_a_row_that_breaks_the_policy_on_the_event_loop_fails_alone_and_ends_its_acting_there(timed):
    runner, batcher = timed

    async def scenario():
        await act_until_quick(batcher)
        answers = await act_all(batcher, [1.0, POISON, 3.0])
        await batcher.act(row(1.0), 0, 0)
        return answers

    answers = asyncio.run(scenario())
    assert [isinstance(answer, RuntimeError) for answer in answers] == [False, True, False]
    assert runner.threads[-1] == "rlsvc-policy"


def test_the_event_loop_and_the_thread_never_act_at_the_same_time(timed):
    runner, _ = timed
    batcher = Batcher(runner, max_batch=1, quick_s=0.5)
    runner.hold_at = QUICK_BATCHES + 1

    async def scenario():
        for _ in range(QUICK_BATCHES - 1):
            await batcher.act(row(1.0), 0, 0)
        # The last that has to be quick, and one that waits behind it and then holds the thread.
        waiting = asyncio.ensure_future(act_all(batcher, range(2)))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(act_all(batcher, [3.0]))
        await asyncio.sleep(0.05)
        runner.open.set()
        return [*await waiting, *await late]

    answers = asyncio.run(scenario())
    batcher.close()
    assert [answer.version for answer in answers] == ["fake-1"] * 3
    assert runner.threads == ["rlsvc-policy"] * (QUICK_BATCHES + 2)
