"""What the person at a robot wants. Any thread says it (a web page, a gamepad, a key); the control loop reads it.

Letters: A action dimensions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlsvc.core.errors import BusyError, UserError
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.lease import Grant

Ending = Literal["success", "failure", "discard"]
"""How a person ends an episode: with reward 1, with reward 0, or as if it had not been."""
HAND_TIMEOUT_S = 0.25
"""A hand on the keys that says nothing for this long has let go: a browser that hangs does not keep an arm moving."""


@dataclass(frozen=True)
class Marked:
    """An episode's end, as a person said it.

    Attributes:
        ending: how.
        by: who.
    """

    ending: Ending
    by: str


class Operator:
    """The people at one robot; one of them commands it at a time (its lease)."""

    def __init__(self, robot: GuardedRobot) -> None:
        """Nobody has said anything."""
        self._robot = robot
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._marked: Marked | None = None

    @property
    def in_control(self) -> Grant | None:
        """The person's grant, None while a policy, or nobody, commands."""
        grant = self._robot.lease.grant
        return grant if grant is not None and grant.is_person else None

    def take_over(self, person: str) -> Grant:
        """Command the robot from the next tick on; what the policy still says is refused.

        Raises:
            BusyError: somebody else commands it.
            UserError: nobody is named.
        """
        return self._robot.lease.take(_named(person), is_person=True)

    def hand_back(self, person: str) -> None:
        """Let the policy command again; nothing to do for who does not command.

        Raises:
            BusyError: somebody else commands.
        """
        grant = self.in_control
        if grant is None:
            return
        self._refuse_others(person, "hand back")
        self._robot.lease.give_back(grant)

    def start(self, person: str) -> None:
        """Begin the next episode."""
        _named(person)
        self._started.set()

    def mark(self, person: str, ending: Ending) -> None:
        """End the episode.

        Raises:
            BusyError: somebody else commands.
        """
        self._refuse_others(person, f"call it a {ending}")
        with self._lock:
            self._marked = Marked(ending, _named(person))

    def stop(self, person: str) -> None:
        """Stop the robot; anybody may, at any time."""
        self._robot.stop("a person pressed STOP", person.strip() or "somebody")

    def resume(self, person: str) -> None:
        """End a stop.

        Raises:
            BusyError: somebody else commands.
            UserError: nobody is named.
        """
        self._refuse_others(person, "resume")
        self._robot.resume(person)

    def await_start(self, timeout_s: float) -> bool:
        """Whether somebody asked for an episode within this time; the wish is then fulfilled."""
        if not self._started.wait(timeout_s):
            return False
        self._started.clear()
        return True

    def take_mark(self) -> Marked | None:
        """How the episode was ended, once; None while it was not."""
        with self._lock:
            marked, self._marked = self._marked, None
        return marked

    def _refuse_others(self, person: str, what: str) -> None:
        grant = self.in_control
        if grant is not None and grant.holder != person.strip():
            raise BusyError(f"{grant.holder} commands the robot; {person} cannot {what}")


def _named(person: str) -> str:
    if not (name := person.strip()):
        raise UserError("person: a name is needed, which is recorded with what they do")
    return name


class Jog:
    """Joints moved by hand on keys, sticks or buttons: so much of a speed each.

    Attributes:
        latencies: s from a hand's movement to the first command that follows it, newest last.
    """

    def __init__(self, speed: np.ndarray, clock: Callable[[], float] = time.monotonic) -> None:
        """No hand is there.

        Args:
            speed: [A] at full deflection, per second, in the unit of the robot's action.
            clock: s.
        """
        self._speed, self._clock = np.asarray(speed, np.float64), clock
        self._axes = np.zeros(len(self._speed))
        self._moved_at: float | None = None
        self._heard_at = -np.inf
        self._goal: np.ndarray | None = None
        self.latencies: list[float] = []

    def set(self, axes: np.ndarray) -> None:
        """A hand's position now: [A] in [-1, 1]; has to be said again within HAND_TIMEOUT_S.

        Raises:
            UserError: another shape, or values that are no such numbers.
        """
        try:
            new = np.asarray(axes, np.float64)
        except (TypeError, ValueError):
            new = np.zeros(0)
        if new.shape != self._axes.shape or not (np.abs(new) <= 1).all():
            raise UserError(f"axes: got {axes}, expected {len(self._axes)} numbers in [-1, 1]")
        now = self._clock()
        if self._moved_at is None and not np.array_equal(new, self._axes):
            self._moved_at = now
        self._axes, self._heard_at = new, now

    def read(self, measured: np.ndarray, dt: float) -> np.ndarray:
        """The next command, [A].

        Args:
            measured: [A] position; where nobody's hand moves, the goal stays where it is.
            dt: s since the last one.
        """
        now = self._clock()
        axes = self._axes if now - self._heard_at <= HAND_TIMEOUT_S else np.zeros_like(self._axes)
        if self._goal is None:
            self._goal = np.array(measured, np.float64)
        self._goal = self._goal + axes * self._speed * dt
        if self._moved_at is not None:
            self.latencies.append(now - self._moved_at)
            self._moved_at = None
        return self._goal

    def sent(self, command: np.ndarray) -> None:
        """What the guard made of it, from which the next one goes on."""
        self._goal = np.array(command, np.float64)

    def reset(self) -> None:
        """Somebody takes over: begin where the robot is."""
        self._goal = None
