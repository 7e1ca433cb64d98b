"""One tick after the other with a policy and a person: who acts, what is recorded, and what people may do."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
from fake_arm import FakeArm

from rlsvc.core.errors import BusyError, UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.drivers import Leader
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.handover import Planned
from rlsvc.robots.operator import HAND_TIMEOUT_S, Jog, Operator
from rlsvc.robots.station import Station
from rlsvc.spec.guard import GuardSpec

SPEC = GuardSpec(
    low=(-1.0, -1.0), high=(1.0, 1.0), velocity=(2.0, 2.0), acceleration=(100.0, 100.0), step=(1.0, 1.0),
    workspace=None, time_to_live_s=0.5, expiry_s=0.5, torque="hold", on_limit="clip",
)  # fmt: skip


@pytest.fixture
def station(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.getcwd()]))
    arm = FakeArm(tmp_path / "log")
    with GuardedRobot(f"station-{os.getpid()}", arm, SPEC, rate_hz=50.0) as robot:
        made = Station(robot, Operator(robot), rate_hz=50.0, max_skew_s=0.1, teleop=Jog(np.array([1.0, 0.5])))
        made.begin()
        yield made


def tick(station: Station, action=(0.0, 0.0), age: float = 0.0):
    reading = station.observe()
    planned = None if action is None else Planned(np.array(action, np.float32), time.monotonic() - age)
    return station.act(planned, reading, "bundle 3")


def test_a_step_of_the_policy_records_what_it_asked_for_and_what_was_sent(station):
    step = tick(station, (0.01, 3.0))
    assert step.commanded.tolist() == pytest.approx([0.01, 3.0])
    assert step.action[0] == pytest.approx(0.01)
    assert 0 < step.action[1] < 0.2
    assert (step.actor, step.intervention) == ("bundle 3", False)
    assert "velocity" in step.verdict.clipped


def test_a_tick_for_which_the_policy_has_nothing_sends_nothing(station):
    tick(station, (0.01, 0.0))
    step = tick(station, None)
    assert step.verdict is None
    assert np.isnan(step.commanded).all()
    assert step.action.tolist() == pytest.approx([0.01, 0.0])


def test_a_stale_plan_is_refused_and_the_record_says_what_the_arm_was_last_sent(station):
    step = tick(station, (0.01, 0.0), age=0.6)
    assert step.verdict.refused == "fresh"
    assert step.action.tolist() == [0.0, 0.0]


def test_a_person_takes_over_in_the_middle_and_hands_back(station):
    tick(station, (0.02, 0.0))
    station.operator.take_over("Ada")
    station.teleop.set([0.0, 1.0])
    first, second = tick(station, (0.9, 0.9)), tick(station, (0.9, 0.9))
    assert (first.actor, first.intervention) == ("Ada", True)
    # Half a rad/s for a fiftieth of a second each, from where the arm was.
    assert first.action.tolist() == pytest.approx([0.02, 0.01])
    assert second.action.tolist() == pytest.approx([0.02, 0.02])
    station.operator.hand_back("Ada")
    step = tick(station, (0.03, 0.02))
    assert (step.actor, step.intervention) == ("bundle 3", False)
    assert step.action.tolist() == pytest.approx([0.03, 0.02])
    assert len(station.teleop.latencies) == 1


def test_nobody_else_may_command_mark_or_resume_while_a_person_does_but_anybody_may_stop(station):
    operator = station.operator
    operator.take_over("Ada")
    with pytest.raises(BusyError, match="Ada commands the robot; Ben can take over"):
        operator.take_over("Ben")
    with pytest.raises(BusyError, match="Ben cannot hand back"):
        operator.hand_back("Ben")
    with pytest.raises(BusyError, match="Ben cannot call it a success"):
        operator.mark("Ben", "success")
    operator.stop("Ben")
    assert station.robot.stopped.by == "Ben"
    with pytest.raises(BusyError, match="Ben cannot resume"):
        operator.resume("Ben")
    operator.resume("Ada")
    assert station.robot.stopped is None


def test_who_gives_no_name_may_stop_and_nothing_else(station):
    with pytest.raises(UserError, match="a name is needed"):
        station.operator.take_over("  ")
    station.operator.stop("")
    assert station.robot.stopped.by == "somebody"


def test_an_episode_is_marked_once(station):
    station.operator.mark("Ada", "failure")
    assert station.operator.take_mark().ending == "failure"
    assert station.operator.take_mark() is None


def test_a_hand_that_says_nothing_for_a_while_has_let_go():
    now = [0.0]
    jog = Jog(np.array([1.0]), clock=lambda: now[0])
    jog.set([1.0])
    assert jog.read(np.zeros(1), 0.1).tolist() == pytest.approx([0.1])
    now[0] = HAND_TIMEOUT_S + 0.01
    assert jog.read(np.zeros(1), 0.1).tolist() == pytest.approx([0.1])


def test_a_jog_goes_on_from_what_the_guard_sent_and_does_not_wind_up():
    jog = Jog(np.array([1.0]), clock=lambda: 0.0)
    jog.set([1.0])
    for _ in range(10):
        jog.read(np.zeros(1), 0.1)
        jog.sent(np.array([0.05]))
    assert jog.read(np.zeros(1), 0.1).tolist() == pytest.approx([0.15])


@pytest.mark.parametrize("axes", [[0.0, 0.0, 0.0], [math.nan, 0.0], [1.1, 0.0], "left", None, [[0.0], [0.0]]])
def test_axes_that_are_none_are_refused(axes):
    with pytest.raises(UserError, match=r"axes: got .* expected 2 numbers in \[-1, 1\]"):
        Jog(np.ones(2)).set(axes)


def test_a_leader_arm_that_was_lost_is_connected_anew_when_somebody_takes_over_again():
    class Device:
        connects, there = 0, True

        def connect(self):
            self.connects, self.there = self.connects + 1, True

        def read(self):
            if not self.there:
                raise ConnectionLost("the leader does not answer")
            return np.array([0.1, 0.2])

    leader = Leader(device := Device())
    leader.reset()
    assert device.connects == 0
    device.there = False
    with pytest.raises(ConnectionLost, match="the leader does not answer"):
        leader.read(np.zeros(2), 0.03)
    leader.reset()
    assert device.connects == 1
    assert leader.read(np.zeros(2), 0.03).tolist() == [0.1, 0.2]
