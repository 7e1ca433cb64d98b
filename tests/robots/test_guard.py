"""What the guard lets through, by numbers worked out by hand, and what it never does, whatever it is given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.robots.guard import Guard
from rlsvc.spec.guard import GuardSpec

ACTION = Feature((2,), "float32", "rad", ("shoulder.pos", "elbow.pos"))
LIMITS = {
    "low": (-1.0, -2.0), "high": (1.0, 2.0), "velocity": (1.0, 1.0), "acceleration": (5.0, 5.0), "step": (0.5, 0.5),
    "workspace": None, "time_to_live_s": 0.2, "expiry_s": 0.1, "torque": "hold", "on_limit": "clip",
}  # fmt: skip
RATE = 10.0
STANDS = np.zeros(2)


def spec(**changes) -> GuardSpec:
    return GuardSpec(**{**LIMITS, **changes})


@pytest.fixture
def guard() -> Guard:
    return begun(Guard(spec(), ACTION, RATE))


def begun(guard: Guard, measured=STANDS, now: float = 0.0) -> Guard:
    guard.begin(measured, now)
    return guard


def check(guard: Guard, command, *, now: float = 0.05, age: float = 0.0, measured=STANDS, holds: bool = True):
    return guard.check(command, now=now, answers=now - age, measured=np.asarray(measured, float), holds_lease=holds)


@pytest.mark.parametrize(
    "command",
    [
        [0.0],
        [0.0, 0.0, 0.0],
        [[0.0, 0.0]],
        0.0,
        "left",
        None,
        [None, 0.0],
        ["0", "0"],
        [True, False],
        {"shoulder.pos": 0.0},
        [1j, 0],
        [[0.0], [0.0, 1.0]],
    ],
)
def test_a_command_of_another_shape_or_of_no_numbers_is_refused(guard, command):
    assert check(guard, command).refused == "shape"
    assert guard.counts == {"refused: shape": 1}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_command_that_is_not_finite_is_refused(guard, value):
    assert check(guard, [0.0, value]).refused == "finite"


@pytest.mark.parametrize("age", [0.2001, 5.0, -0.001, math.nan, math.inf])
def test_a_command_that_answers_an_old_observation_or_one_of_the_future_is_refused(guard, age):
    assert check(guard, [0.0, 0.0], age=age).refused == "fresh"


def test_an_observation_as_old_as_allowed_may_be_answered(guard):
    assert check(guard, [0.0, 0.0], age=0.1999).refused == ""


def test_who_does_not_hold_the_lease_is_refused(guard):
    assert check(guard, [0.0, 0.0], holds=False).refused == "lease"


def test_nothing_is_let_through_before_the_beginning_and_after_the_end():
    guard = Guard(spec(), ACTION, RATE)
    assert check(guard, [0.0, 0.0]).refused == "lease"
    begun(guard)
    assert check(guard, [0.0, 0.0]).sent is not None
    guard.end()
    assert check(guard, [0.0, 0.0], now=0.15).refused == "lease"


def test_checks_come_in_the_order_in_which_they_are_named(guard):
    worst = {"age": 9.0, "holds": False, "now": -10.0}
    assert check(guard, [math.nan], **worst).refused == "shape"
    assert check(guard, [math.nan, 9.0], **worst).refused == "finite"
    assert check(guard, [9.0, 9.0], **worst).refused == "fresh"
    assert check(guard, [9.0, 9.0], **{**worst, "age": 0.0}).refused == "lease"


def test_a_command_within_all_limits_is_sent_as_it_is(guard):
    verdict = check(guard, [0.01, -0.02])
    assert verdict.sent is not None
    assert verdict.sent.tolist() == [0.01, -0.02]
    assert verdict.clipped == ()
    assert verdict.why == ""


def test_the_first_command_may_go_as_far_as_acceleration_allows_from_rest(guard):
    # After a pause the time counts as two periods, 0.2 s: a speed of 5 * 0.2 = 1 rad/s, so 0.2 rad.
    verdict = check(guard, [0.4, 0.0])
    assert verdict.sent == pytest.approx([0.2, 0.0])
    assert verdict.clipped == ("velocity", "acceleration")
    assert "shoulder.pos" in verdict.why


def test_velocity_counts_the_time_that_passed_since_the_last_command():
    guard = begun(Guard(spec(acceleration=(1e6, 1e6)), ACTION, RATE))
    check(guard, [0.0, 0.0], now=1.0)
    assert check(guard, [0.4, -0.4], now=1.07).sent == pytest.approx([0.07, -0.07])
    # 0.15 s later, 1 rad/s is 0.15 rad more.
    assert check(guard, [0.4, -0.4], now=1.22).sent == pytest.approx([0.22, -0.22])


def test_acceleration_bounds_the_change_of_speed_from_command_to_command():
    guard = begun(Guard(spec(acceleration=(2.0, 2.0)), ACTION, RATE))
    check(guard, [0.0, 0.0], now=1.0)
    # From rest 0.1 s at 2 rad/s^2: 0.2 rad/s, so 0.02 rad; then 0.4 rad/s, 0.04 rad more; then braking by 0.2 rad/s.
    assert check(guard, [0.5, 0.0], now=1.1).sent == pytest.approx([0.02, 0.0])
    assert check(guard, [0.5, 0.0], now=1.2).sent == pytest.approx([0.06, 0.0])
    assert check(guard, [-0.5, 0.0], now=1.3).sent == pytest.approx([0.08, 0.0])


def test_a_joint_that_is_held_up_is_pushed_by_no_more_than_a_step():
    guard = begun(Guard(spec(step=(0.05, 0.05)), ACTION, RATE))
    assert check(guard, [0.5, 0.0], now=1.0).sent == pytest.approx([0.05, 0.0])
    assert check(guard, [0.5, 0.0], now=1.1).sent == pytest.approx([0.05, 0.0])


def test_a_joint_that_was_pushed_away_farther_than_any_allowed_command_refuses_them_all():
    guard = begun(Guard(spec(step=(0.05, 0.05)), ACTION, RATE))
    check(guard, [0.0, 0.0], now=1.0)
    verdict = check(guard, [0.0, 0.0], now=1.1, measured=[0.9, 0.0])
    assert verdict.refused == "step"
    assert "'shoulder.pos' is 0.9 from" in verdict.why


def test_a_measurement_that_is_not_a_number_refuses_every_command(guard):
    assert check(guard, [0.0, 0.0], measured=[math.nan, 0.0]).refused == "step"


def test_braking_begins_in_time_for_the_joint_limit():
    guard, now = begun(Guard(spec(acceleration=(1.0, 1.0), step=(9.0, 9.0)), ACTION, RATE)), 0.0
    positions = []
    for _ in range(60):
        now += 0.1
        sent = check(guard, [5.0, 0.0], now=now, measured=STANDS).sent
        assert sent is not None
        positions.append(sent[0])
    speed = np.diff([0.0, *positions]) / 0.1
    assert max(positions) <= 1.0
    assert positions[-1] > 0.98
    assert np.abs(np.diff(speed)).max() <= 0.1 + 1e-9  # 1 rad/s^2 for 0.1 s


def test_commands_that_follow_each_other_too_soon_are_refused(guard):
    assert check(guard, [0.01, 0.0], now=1.0).sent is not None
    assert check(guard, [0.02, 0.0], now=1.02).refused == "soon"
    assert check(guard, [0.02, 0.0], now=1.026).sent is not None


def test_a_guard_that_refuses_sends_no_nearest_command():
    guard = begun(Guard(spec(on_limit="refuse"), ACTION, RATE))
    verdict = check(guard, [0.0, 2.5])
    assert verdict.refused == "position"
    assert verdict.sent is None
    assert "'elbow.pos': got 2.5, allowed -2 to 2" in verdict.why


def test_a_point_beyond_the_workspace_is_refused_by_name():
    box = {"model": "arm.xml", "sites": ("tool",), "low": (-1.0, -1.0, 0.1), "high": (1.0, 1.0, 2.0), "unit": "rad"}

    def sites(joints: np.ndarray) -> np.ndarray:
        return np.array([[0.0, 0.0, 1.0 + 5 * joints[0]]])

    guard = begun(Guard(spec(workspace=box), ACTION, RATE, sites))
    verdict = check(guard, [-0.19, 0.0])
    assert verdict.refused == "workspace"
    assert "'tool' would be at [0.0, 0.0, 0.05] m" in verdict.why
    assert check(guard, [-0.1, 0.0], now=0.1).sent is not None


def test_an_arm_that_stands_outside_its_limits_is_not_begun():
    with pytest.raises(UserError, match=r"'elbow.pos' stands at 2.1 rad, outside its limits of -2 to 2"):
        Guard(spec(), ACTION, RATE).begin(np.array([0.0, 2.1]), 0.0)


def test_limits_of_another_number_of_joints_are_refused():
    with pytest.raises(UserError, match="limits of 2 joints, the robot has 3"):
        Guard(spec(), Feature((3,), "float32"), RATE)


def test_a_workspace_without_kinematics_is_refused():
    box = {"model": "arm.xml", "sites": ("tool",), "low": (-1.0, -1.0, 0.1), "high": (1.0, 1.0, 2.0), "unit": "rad"}
    with pytest.raises(UserError, match="no kinematics"):
        Guard(spec(workspace=box), ACTION, RATE)


@pytest.mark.parametrize("name", [*LIMITS])
def test_no_limit_has_a_default(name):
    with pytest.raises(ValueError, match=name):
        GuardSpec(**{key: value for key, value in LIMITS.items() if key != name})


def test_limits_of_unequal_length_and_empty_ranges_are_refused():
    with pytest.raises(ValueError, match="velocity: got 1 numbers, low has 2"):
        spec(velocity=(1.0,))
    with pytest.raises(ValueError, match="joint 0 got 1 and -1, expected low < high"):
        spec(low=(1.0, -2.0), high=(-1.0, 2.0))


NUMBER = st.floats(-4, 4) | st.sampled_from([math.nan, math.inf, -math.inf, 1e300, 0.0, 1.0, -1.0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(NUMBER, min_size=1, max_size=3),  # the command
            st.floats(0.0, 0.5) | st.sampled_from([0.025, 0.1, 0.2]),  # time since the last one
            st.floats(-0.1, 0.4),  # age of what it answers
            st.booleans(),  # whether who sends it holds the lease
            st.floats(-0.3, 0.3),  # how far the arm is from where it was sent
        ),
        max_size=40,
    )
)
def test_whatever_comes_what_is_sent_obeys_every_limit(steps):
    guard, now, last, speed, last_at = begun(Guard(spec(), ACTION, RATE)), 10.0, np.zeros(2), np.zeros(2), -10.0
    for command, wait, age, holds, lag in steps:
        now += wait
        measured = last + lag
        sent = guard.check(command, now=now, answers=now - age, measured=measured, holds_lease=holds).sent
        if sent is None:
            continue
        assert len(command) == 2
        assert np.isfinite(command).all()
        assert holds
        assert -1e-9 <= age <= 0.2 + 1e-9
        passed = now - last_at
        dt = min(passed, 0.2)
        before = speed if passed <= 0.2 else np.zeros(2)
        assert (sent >= [-1, -2]).all()
        assert (sent <= [1, 2]).all()
        assert (np.abs(sent - measured) <= 0.5 + 1e-9).all()
        speed = (sent - last) / dt
        assert (np.abs(speed) <= 1 + 1e-9).all()
        assert (np.abs(speed - before) <= 5 * dt + 1e-6).all()
        last, last_at = sent, now
