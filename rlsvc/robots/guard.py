"""What may reach a robot: every command is checked here, whoever it is from.

In this order: shape and dtype; finite; fresh; lease; position, velocity, acceleration, step; workspace. Only then is it
sent. The guard is arithmetic on one thread: it reads no clock, and holds nothing but what was sent before.

Time is the robot's own monotonic clock. A command says which observation it answers, by the time at which this host
captured it, so that clocks of two hosts are never compared.

The limits hold for the time that really passed between two commands, up to two periods: after a longer pause the arm
stands at its last command, and its speed counts from zero. The allowed speed towards a joint's limit is what braking at
the allowed acceleration takes away before it, so that commands never have to choose between the two.

Letters: A action dimensions.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.spec.guard import GuardSpec

Sites = Callable[[np.ndarray], np.ndarray]
"""Forward kinematics: joints [A] to points [P, 3], m."""
MIN_PERIOD = 0.25
"""Commands that follow each other within this share of a period are refused."""
PAUSE = 2.0
"""Periods after which the arm counts as standing."""
LIMITS = ("position", "velocity", "acceleration", "step")
CHECKS = ("shape", "finite", "fresh", "lease", "soon", *LIMITS, "workspace")
"""What a command can be refused for, in the order in which it is looked at."""


@dataclass(frozen=True)
class Verdict:
    """What became of a command.

    Attributes:
        sent: [A] float64, what may be sent; None when it was refused.
        refused: one of CHECKS, "" when it was not.
        clipped: which of LIMITS changed it.
        why: for a person; "" when nothing was changed.
    """

    sent: np.ndarray | None
    refused: str = ""
    clipped: tuple[str, ...] = ()
    why: str = ""


class Guard:
    """Checks commands against the limits of one robot.

    Attributes:
        counts: commands by what became of them: "sent", "clipped: <limit>", "refused: <check>".
    """

    def __init__(self, spec: GuardSpec, action: Feature, rate_hz: float, sites: Sites | None = None) -> None:
        """A guard that lets nothing through until `begin`.

        Args:
            spec: the limits.
            action: of the robot, [A].
            rate_hz: at which commands are meant to come.
            sites: forward kinematics, needed where the specification has a workspace.

        Raises:
            UserError: limits of another number of joints; a workspace without kinematics.
        """
        joints = action.shape[0] if len(action.shape) == 1 else 0
        if spec.num_joints != joints:
            raise UserError(
                f"guard: got limits of {spec.num_joints} joints, the robot has {joints}: {', '.join(action.names)}"
            )
        if (spec.workspace is None) != (sites is None):
            raise UserError("guard.workspace: got a box, and no kinematics of this robot to check it with")
        self.spec, self.action = spec, action
        self.period = 1.0 / rate_hz
        self._low, self._high = np.array(spec.low), np.array(spec.high)
        self._velocity, self._acceleration = np.array(spec.velocity), np.array(spec.acceleration)
        self._step = np.array(spec.step)
        self._sites = sites
        self._names = action.names or tuple(str(i) for i in range(joints))
        self._last: np.ndarray | None = None
        self._speed = np.zeros(joints)
        self._sent_at = 0.0
        self.counts: collections.Counter[str] = collections.Counter()

    def begin(self, measured: np.ndarray, now: float) -> None:
        """Let commands through from here on: the arm stands at `measured` [A].

        Raises:
            UserError: it stands outside its limits, from where no command may lead; names the joint.
        """
        measured = np.asarray(measured, np.float64)
        if measured.shape != self._low.shape or not np.isfinite(measured).all():
            raise UserError(f"the robot measured {measured.tolist()}, expected {len(self._low)} finite positions")
        bad = np.flatnonzero((measured < self._low) | (measured > self._high))
        if bad.size:
            i = int(bad[0])
            raise UserError(
                f"joint '{self._names[i]}' stands at {measured[i]:.4g} {self.action.unit}, outside its limits of "
                f"{self._low[i]:g} to {self._high[i]:g} (guard.low, guard.high); let go of the torque and move it by "
                "hand, or mend the limits"
            )
        if self._sites is not None and (where := self._outside(measured)):
            raise UserError(f"the arm stands outside its workspace: {where}; let go of the torque and move it by hand")
        self._last, self._speed, self._sent_at = measured, np.zeros(len(measured)), now - 2 * PAUSE * self.period

    def end(self) -> None:
        """Let nothing through until the next `begin`."""
        self._last = None

    def check(
        self, command: object, *, now: float, answers: float, measured: np.ndarray, holds_lease: bool = True
    ) -> Verdict:
        """What of a command may be sent now; what it says counts as sent.

        Args:
            command: [A] numbers, in the unit of the robot's action; anything else is refused.
            now: s, on the robot's clock.
            answers: when the observation was captured that the command answers, s, on the same clock.
            measured: [A] newest measured position.
            holds_lease: whether who commands is the one that may.
        """
        verdict = self._judge(command, now, answers, measured, holds_lease)
        if verdict.sent is None:
            self.counts[f"refused: {verdict.refused}"] += 1
        else:
            self.counts["sent"] += 1
            for limit in verdict.clipped:
                self.counts[f"clipped: {limit}"] += 1
        return verdict

    def _judge(self, command: object, now: float, answers: float, measured: np.ndarray, holds_lease: bool) -> Verdict:
        array = _numbers(command)
        if array is None or array.shape != self._low.shape:
            got = type(command).__name__ if array is None else f"shape {array.shape}"
            return Verdict(None, "shape", why=f"got {got}, expected {len(self._low)} numbers")
        if not np.isfinite(array).all():
            return Verdict(None, "finite", why=f"got {array.tolist()}")
        age = now - answers
        if not 0.0 <= age <= self.spec.time_to_live_s:  # false for NaN too
            return Verdict(
                None, "fresh", why=f"it answers an observation {age:.3f} s old, at most {self.spec.time_to_live_s:g} s"
            )
        if not holds_lease or self._last is None:
            return Verdict(None, "lease", why="somebody else commands" if not holds_lease else "nobody may command now")
        elapsed = now - self._sent_at
        if elapsed < MIN_PERIOD * self.period:
            return Verdict(None, "soon", why=f"it comes {elapsed * 1e3:.1f} ms after the last one")
        return self._limit(array, now, elapsed, measured)

    def _limit(self, command: np.ndarray, now: float, elapsed: float, measured: np.ndarray) -> Verdict:
        assert self._last is not None
        longest = PAUSE * self.period
        dt, speed = (elapsed, self._speed) if elapsed <= longest else (longest, np.zeros_like(self._speed))
        bounds = {
            "position": (self._low, self._high),
            "velocity": (self._last - self._velocity * dt, self._last + self._velocity * dt),
            "acceleration": self._reachable(speed, dt, longest),
            "step": (measured - self._step, measured + self._step),
        }
        low = np.max([low for low, _ in bounds.values()], axis=0)
        high = np.min([high for _, high in bounds.values()], axis=0)
        if not (low <= high).all():  # also where what was measured is not finite
            i = int(np.flatnonzero(~(low <= high))[0])
            away = abs(measured[i] - self._last[i])
            return Verdict(None, "step", why=f"joint '{self._names[i]}' is {away:.4g} from where it was sent")
        limited = np.clip(command, low, high)
        clipped = tuple(name for name, (least, most) in bounds.items() if ((command < least) | (command > most)).any())
        if clipped and self.spec.on_limit == "refuse":
            return Verdict(None, clipped[0], why=self._beyond(command, bounds[clipped[0]]))
        if self._sites is not None and (where := self._outside(limited)):
            return Verdict(None, "workspace", why=where)
        self._speed = (limited - self._last) / dt
        self._last, self._sent_at = limited, now
        return Verdict(limited, clipped=clipped, why=self._beyond(command, bounds[clipped[0]]) if clipped else "")

    def _reachable(self, speed: np.ndarray, dt: float, longest: float) -> tuple[np.ndarray, np.ndarray]:
        """What the allowed acceleration can reach, braking before a joint's limit included."""
        assert self._last is not None
        change = self._acceleration * dt
        # The speed v from which braking ends before the limit, whenever the next command within a pause comes:
        # v dt + v longest + v^2 / 2a <= room.
        up = _braking_speed(self._high - self._last, self._acceleration, dt + longest)
        down = _braking_speed(self._last - self._low, self._acceleration, dt + longest)
        least, most = np.maximum(speed - change, -down), np.minimum(speed + change, up)
        least = np.minimum(least, most)  # they cross by rounding alone
        return self._last + least * dt, self._last + most * dt

    def _outside(self, joints: np.ndarray) -> str:
        """Which point is outside the workspace, "" for none."""
        assert self._sites is not None
        assert self.spec.workspace is not None
        box = self.spec.workspace
        points = self._sites(joints)
        bad = np.flatnonzero(~((points >= box.low) & (points <= box.high)).all(axis=1))
        if not bad.size:
            return ""
        i = int(bad[0])
        return f"'{box.sites[i]}' would be at {np.round(points[i], 3).tolist()} m, outside the workspace"

    def _beyond(self, command: np.ndarray, bounds: tuple[np.ndarray, np.ndarray]) -> str:
        low, high = bounds
        i = int(np.flatnonzero((command < low) | (command > high))[0])
        return f"joint '{self._names[i]}': got {command[i]:.5g}, allowed {low[i]:.5g} to {high[i]:.5g}"


def _numbers(command: object) -> np.ndarray | None:
    """[...] float64, or None for what is not numbers: texts, objects, complex ones, Booleans."""
    try:
        array = np.asarray(command)
    except (ValueError, TypeError):
        return None
    return array.astype(np.float64) if array.dtype.kind in "fiu" else None


def _braking_speed(room: np.ndarray, acceleration: np.ndarray, delay: float) -> np.ndarray:
    """Largest v with v * delay + v^2 / (2 acceleration) <= room."""
    room = np.maximum(room, 0.0)
    return acceleration * (np.sqrt(delay * delay + 2 * room / acceleration) - delay)
