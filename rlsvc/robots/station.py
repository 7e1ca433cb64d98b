"""A robot, its rate, and the people at it: what happens in one tick.

`observe` waits for the tick and reads; `act` sends what a policy proposes, or what the person who took over wants, and
says what became of it. Both the environment of rollout workers (rlsvc/robots/env.py) and `rlsvc collect` are made of
these two.

Letters: A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlsvc.core.errors import BusyError
from rlsvc.robots.api import Reading
from rlsvc.robots.guard import Verdict
from rlsvc.robots.guarded import STATE, GuardedRobot
from rlsvc.robots.handover import Planned
from rlsvc.robots.loop import Pacer, Skew
from rlsvc.robots.operator import Operator


class Teleop(Protocol):
    """What a person moves the robot with."""

    def read(self, measured: np.ndarray, dt: float) -> np.ndarray:
        """The command that the person wants now, [A], absolute.

        Args:
            measured: [A] the robot's position.
            dt: s since the last one.
        """
        ...

    def sent(self, command: np.ndarray) -> None:
        """What was sent of it, [A]."""
        ...

    def reset(self) -> None:
        """The person takes over."""
        ...


@dataclass(frozen=True)
class Step:
    """What one tick did.

    Attributes:
        reading: what was measured before.
        commanded: [A] float32, what was asked for; NaN where nobody asked for anything.
        action: [A] float32, what was sent; where nothing was, the position that the robot was last sent to.
        verdict: of the guard; None where nobody asked for anything.
        intervention: whether a person acted.
        actor: their name, or the policy's version.
        tick: number in the episode.
    """

    reading: Reading
    commanded: np.ndarray
    action: np.ndarray
    verdict: Verdict | None
    intervention: bool
    actor: str
    tick: int


class Station:
    """See the module. One thread drives it."""

    def __init__(
        self,
        robot: GuardedRobot,
        operator: Operator,
        *,
        rate_hz: float,
        max_skew_s: float,
        teleop: Teleop | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """The robot is connected by whoever made it.

        Args:
            robot: guarded.
            operator: what people want of it.
            rate_hz: ticks a second.
            max_skew_s: largest time between the captures of joints and a camera, s.
            teleop: what a person who takes over moves it with; None holds it still then.
            clock: monotonic, s.
            sleep: takes s.
        """
        self.robot, self.operator, self.teleop = robot, operator, teleop
        self.pacer = Pacer(rate_hz, clock, sleep)
        self.skew = Skew(max_skew_s)
        self._person: int | None = None
        self._sent = np.zeros(0)

    def begin(self) -> None:
        """An episode begins: commands are let through.

        Raises:
            UserError: the robot is stopped, or stands outside its limits.
            ConnectionLost: it does not answer.
        """
        reading = self.robot.start()
        self._sent = self.robot.positions(reading.values[STATE])
        self._person = None
        self.operator.take_mark()
        self.pacer.restart()

    def end(self) -> None:
        """It is over: the robot holds still. Raises ConnectionLost."""
        self.robot.rest()

    def observe(self) -> Reading:
        """Wait for the tick, then read.

        Raises:
            ConnectionLost: the robot or a camera does not answer, or a camera's frame is too old.
        """
        self.pacer.wait()
        reading = self.robot.read()
        self.skew.check(reading.stamps, STATE)
        return reading

    def act(self, planned: Planned | None, reading: Reading, version: str) -> Step:
        """Send what the person in control wants, or else what the policy planned.

        Args:
            planned: of the policy, None when it has nothing for this tick.
            reading: what `observe` gave.
            version: of the policy.

        Raises:
            ConnectionLost: it could not be sent.
        """
        grant = self.operator.in_control
        measured = self.robot.positions(reading.values[STATE])
        if grant is None:
            self._person = None
            actor, commanded = version, None if planned is None else planned.action
            answers = 0.0 if planned is None else planned.answers
            if planned is not None:
                try:
                    grant = self.robot.lease.take(version or "policy", is_person=False)
                except BusyError:  # a person took over in this moment
                    commanded = None
        else:
            if self.teleop is not None and self._person != grant.token:
                self.teleop.reset()
            self._person, actor, answers = grant.token, grant.holder, reading.stamps[STATE]
            commanded = self._sent if self.teleop is None else self.teleop.read(measured, self.pacer.period)
        verdict = None
        if commanded is not None:
            assert grant is not None
            verdict = self.robot.command(commanded, answers=answers, token=grant.token)
            if verdict.sent is not None:
                self._sent = verdict.sent
            if self._person is not None and self.teleop is not None:
                self.teleop.sent(self._sent)
        return Step(
            reading=reading,
            commanded=np.full(len(self._sent), np.nan, np.float32)
            if commanded is None
            else np.asarray(commanded, np.float32),
            action=self._sent.astype(np.float32),
            verdict=verdict,
            intervention=self._person is not None,
            actor=actor,
            tick=self.pacer.tick,
        )

    def hold(self, reading: Reading) -> Planned:
        """A plan to stay where the robot was last sent."""
        return Planned(self._sent.astype(np.float32), reading.stamps[STATE])

    def metrics(self) -> dict[str, float]:
        """Rate, cameras and guard, by name."""
        guard = {name.replace(": ", "_"): float(count) for name, count in self.robot.guard.counts.items()}
        return {**self.pacer.metrics(), **self.skew.metrics(), **{f"guard_{k}": v for k, v in guard.items()}}
