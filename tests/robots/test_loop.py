"""Ticks on a clock of one's own, and chunks that are handed over while the next one is being made."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.handover import Handover, Plan
from rlsvc.robots.loop import Pacer, Skew


class Time:
    """A clock that stands still until somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def pacer(oversleep: float = 0.0) -> tuple[Pacer, Time]:
    time = Time()
    return Pacer(10.0, time, lambda s: time.pass_by(s + oversleep)), time


def test_ticks_lie_a_period_apart_however_long_the_work_between_them_takes():
    pace, time = pacer()
    ticks = []
    for work in (0.01, 0.09, 0.05, 0.0):
        ticks.append(pace.wait())
        time.pass_by(work)
    assert ticks == pytest.approx([100.0, 100.1, 100.2, 100.3])
    assert pace.overruns == 0
    assert pace.metrics()["busy_max_ms"] == pytest.approx(90.0)


def test_lateness_does_not_add_up():
    pace, _ = pacer(oversleep=0.004)
    ticks = [pace.wait() for _ in range(50)]
    assert ticks[-1] == pytest.approx(104.9)
    assert pace.metrics()["jitter_p99_ms"] == pytest.approx(4.0)


def test_missed_ticks_are_counted_and_not_caught_up_with():
    pace, time = pacer()
    pace.wait()
    time.pass_by(0.35)
    assert pace.wait() == pytest.approx(100.4)
    assert pace.tick == 4
    assert pace.overruns == 3
    assert pace.wait() == pytest.approx(100.5)


def test_a_pause_between_episodes_is_no_overrun():
    pace, time = pacer()
    pace.wait()
    time.pass_by(60.0)
    pace.restart()
    assert pace.wait() == pytest.approx(160.0)
    assert pace.overruns == 0
    assert pace.tick == 0


def test_a_camera_frame_that_is_too_old_for_the_joints_is_refused_by_name():
    skew = Skew(0.05)
    skew.check({"observation.state": 10.0, "observation.images.top": 9.97})
    assert skew.metrics()["skew_max_ms"] == pytest.approx(30.0)
    with pytest.raises(ConnectionLost, match=r"'observation\.images\.top' was captured 0\.060 s from"):
        skew.check({"observation.state": 10.0, "observation.images.top": 9.94})


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]


def values(plan: Plan, *ticks: int) -> list[float | None]:
    planned = [plan.at(tick) for tick in ticks]
    return [None if p is None else round(float(p.action[0]), 5) for p in planned]


def test_of_a_chunk_that_comes_late_the_actions_of_ticks_gone_by_are_left_out():
    plan = Plan(blend=False)
    assert plan.put(rows(10, 11, 12, 13), tick=5, answers=1.0, now=7) == 2
    assert values(plan, 6, 7, 8, 9) == [None, 12.0, 13.0, None]
    assert plan.at(7).answers == 1.0


def test_a_chunk_that_comes_after_all_its_ticks_is_of_no_use():
    plan = Plan(blend=True)
    assert plan.put(rows(1, 2), tick=0, answers=1.0, now=2) == 0
    assert values(plan, 2) == [None]


def test_where_two_chunks_overlap_the_new_ones_share_grows_along_the_overlap():
    plan = Plan(blend=True)
    plan.put(rows(0, 0, 0, 0, 0), tick=0, answers=1.0, now=0)
    plan.put(rows(9, 8, 8, 8, 8, 8), tick=1, answers=2.0, now=2)
    # Ticks 2, 3 and 4 are in both: shares of 1/4, 2/4, 3/4 of the new one's 8.
    assert values(plan, 2, 3, 4, 5, 6, 7) == [2.0, 4.0, 6.0, 8.0, 8.0, None]
    assert plan.at(2).answers == 2.0


class Policy:
    """Its chunk for tick t is t, t + 1, ...; it answers when it is let."""

    def __init__(self, horizon: int = 8) -> None:
        self.horizon, self.asked = horizon, []
        self.free, self.done = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, observation, tick: int) -> np.ndarray:
        self.asked.append(tick)
        self.free.acquire()
        return rows(*range(tick, tick + self.horizon))

    def answer(self, handover: Handover) -> None:
        thread = handover._thread
        self.free.release()
        thread.join()


def test_asking_ahead_never_waits_for_the_policy():
    policy = Policy()
    handover = Handover(policy, execute=4, ahead=2)
    assert handover.command(None, 0.0, 0) is None
    assert handover.command(None, 0.1, 1) is None
    policy.answer(handover)
    assert [handover.command(None, t / 10, t).action[0] for t in (2, 3)] == [2.0, 3.0]
    # Asked for tick 0, so two before the fourth: at tick 2.
    assert policy.asked == [0, 2]
    assert [handover.command(None, t / 10, t).action[0] for t in (4, 5, 6, 7)] == [4.0, 5.0, 6.0, 7.0]
    assert handover.command(None, 0.8, 8) is None
    assert handover.empty == 3
    policy.answer(handover)
    planned = handover.command(None, 0.9, 9)
    assert planned.action[0] == 9.0
    assert planned.answers == 0.2
    policy.answer(handover)


def test_waiting_asks_again_when_so_many_actions_are_executed():
    policy = Policy()
    for _ in range(3):
        policy.free.release()
    handover = Handover(policy, "sync", execute=3)
    assert [handover.command(None, 0.0, t).action[0] for t in range(7)] == [0, 1, 2, 3, 4, 5, 6]
    assert policy.asked == [0, 3, 6]


def test_what_was_being_made_for_another_episode_does_not_count():
    policy = Policy()
    handover = Handover(policy, execute=4)
    handover.command(None, 0.0, 0)
    thread = handover._thread
    handover.reset()
    policy.free.release()
    thread.join()
    assert handover.command(None, 0.0, 0) is None
    policy.answer(handover)
    assert handover.command(None, 0.1, 1).action[0] == 1.0
    policy.answer(handover)


def test_an_error_of_the_policy_is_raised_at_the_next_tick():
    def fails(observation, tick):
        raise ConnectionError("the server is gone")

    handover = Handover(fails, execute=4)
    handover.command(None, 0.0, 0)
    handover._thread.join()
    with pytest.raises(ConnectionError, match="the server is gone"):
        handover.command(None, 0.1, 1)


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="expected execute >= 1"):
        Handover(Policy(), execute=0)
    with pytest.raises(UserError, match="ahead within it"):
        Handover(Policy(), execute=2, ahead=3)
