"""A CR5 without its sockets: joints that follow a reference, modes, alarms and outputs.

Kinematic: each joint follows its reference with a first-order lag and its top speed; there are no masses. All angles
are degrees, as on the wire. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from rlsvc.robots.dobot_feedback import FEEDBACK, PACKET_BYTES, TEST_VALUE
from rlsvc.robots.dobot_wire import DISABLED, ERROR, IDLE, RUNNING
from rlsvc.robots.virtual.cr5_kinematics import Vector, forward, inverse

JOINT_LIMIT = np.rad2deg([6.27, 6.27, 2.86, 6.27, 6.27, 6.27])
"""Both ways, deg; from Dobot's model of the arm (rlsvc/robots/virtual/cr5_kinematics.py)."""
JOINT_SPEED = 180.0
"""Top speed of every joint, deg/s: the CR5's data sheet."""
LAG_S = 0.02
"""Time constant of a joint behind its reference; chosen, Dobot does not publish one."""
STILL_DEG = 0.01
NO_SOLUTION, EMERGENCY_STOP, LIMIT = 17, 49154, 64
"""Alarms by Dobot's numbers (github.com/Dobot-Arm/TCP-IP-Python-V3 : files/alarm_controller.json): inverse kinematics
without a solution; software emergency stop; 64 + 2 j the positive, 65 + 2 j the negative limit of joint j = 0 .. 5."""


@dataclass
class Move:
    """A way to a target [6], deg, that takes so many seconds, or longer where that is too fast."""

    target: Vector
    seconds: float


class CR5Arm:
    """The arm's state, and what commands do to it. Methods that may refuse return whether they did what was asked.

    Attributes:
        q: joints [6], deg. qd: their speeds, deg/s. reference: where they are sent at this moment.
        alarms: numbers of the alarms that are on.
        outputs, tool_outputs: digital outputs by index, from 1.
        speed_factor: percent of the speed of MovJ, JointMovJ and MovL.
    """

    def __init__(self, q: Vector | None = None, *, enabled: bool = False) -> None:
        """`q`: joints where it stands, deg; zeros without."""
        self.q = np.zeros(6) if q is None else np.array(q, np.float64)
        self.qd, self.reference = np.zeros(6), self.q.copy()
        self.enabled, self.speed_factor, self.time_s = enabled, 100, 0.0
        self.alarms: list[int] = []
        self.outputs, self.tool_outputs = dict.fromkeys(range(1, 17), 0), dict.fromkeys((1, 2), 0)
        self._move: Move | None = None
        self._queue: deque[Move] = deque()

    @property
    def moving(self) -> bool:
        """Whether a move is under way or waits."""
        return self._move is not None or bool(self._queue) or bool(np.abs(self.reference - self.q).max() > STILL_DEG)

    @property
    def mode(self) -> int:
        """RobotMode; an alarm comes before all others."""
        if self.alarms:
            return ERROR
        if not self.enabled:
            return DISABLED
        return RUNNING if self.moving else IDLE

    @property
    def may_move(self) -> bool:
        """Whether motion commands are taken."""
        return self.enabled and not self.alarms

    @property
    def pose(self) -> Vector:
        """[6], mm and deg, of the flange."""
        return forward(self.q)

    def enable(self) -> bool:
        """Refused while an alarm is on."""
        if not self.alarms:
            self.enabled = True
            self.halt()
        return not self.alarms

    def disable(self) -> None:
        """Motors off, brakes on."""
        self.enabled = False
        self.halt()

    def halt(self) -> None:
        """Stay where it is; moves that wait are forgotten."""
        self._move = None
        self._queue.clear()
        self.reference = self.q.copy()

    def alarm(self, number: int) -> None:
        """Halt with an alarm."""
        self.halt()
        self.alarms.append(number)

    def emergency_stop(self) -> None:
        """Halt, disabled, with an alarm."""
        self.disable()
        self.alarm(EMERGENCY_STOP)

    def servo(self, target: Vector, seconds: float) -> bool:
        """Follow a target at once. Refused when disabled or in error; beyond a joint's limit is an alarm."""
        if not self.may_move:
            return False
        if self._allowed(target):
            self._queue.clear()
            self._move = Move(target, seconds)
        return True

    def queue(self, target: Vector, speed: int) -> bool:
        """Move from point to point after the moves before it, with a percentage of the top speed; else as `servo`."""
        if not self.may_move:
            return False
        if self._allowed(target):
            begin = self._queue[-1].target if self._queue else self._move.target if self._move else self.reference
            rate = JOINT_SPEED * speed / 100 * self.speed_factor / 100
            self._queue.append(Move(target, float(np.abs(target - begin).max()) / rate))
        return True

    def solve(self, pose: Vector) -> Vector | None:
        """Joints of a pose [6], near those of now; an alarm and None when there are none."""
        joints = inverse(pose, self.q)
        if joints is None:
            self.alarm(NO_SOLUTION)
        return joints

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.time_s += seconds
        if self._move is None and self._queue:
            self._move = self._queue.popleft()
        if self._move is not None:
            way = self._move.target - self.reference
            share = min(1.0, seconds / self._move.seconds) if self._move.seconds > 0 else 1.0
            self.reference += np.clip(way * share, -JOINT_SPEED * seconds, JOINT_SPEED * seconds)
            self._move.seconds = max(self._move.seconds - seconds, 0.0)
            if np.array_equal(self.reference, self._move.target) or np.abs(way).max() < 1e-9:
                self._move = None
        step = (self.reference - self.q) * (1 - np.exp(-seconds / LAG_S))
        self.q = self.q + np.clip(step, -JOINT_SPEED * seconds, JOINT_SPEED * seconds)
        self.qd = step / seconds

    def packet(self) -> bytes:
        """The feedback of this moment, 1440 bytes."""
        record = np.zeros((), FEEDBACK)
        pose = self.pose
        values = {
            "message_size": PACKET_BYTES,
            "digital_outputs": sum(level << (index - 1) for index, level in self.outputs.items()),
            "robot_mode": self.mode,
            "time_stamp": round(self.time_s * 1e3),
            "test_value": TEST_VALUE,
            "speed_scaling": float(self.speed_factor),
            "q_target": self.reference,
            "q_actual": self.q,
            "qd_actual": self.qd,
            "tool_vector_actual": pose,
            "tool_vector_target": pose if np.array_equal(self.reference, self.q) else forward(self.reference),
            "joint_modes": 8.0,
            "velocity_ratio": self.speed_factor,
            "run_queued_cmd": bool(self._queue),
            "enable_status": self.enabled,
            "running_status": self.mode == RUNNING,
            "error_status": bool(self.alarms),
            "robot_type": 5,
        }
        for name, value in values.items():
            record[name] = value
        return record.tobytes()

    def _allowed(self, target: Vector) -> bool:
        for joint in np.flatnonzero(np.abs(target) > JOINT_LIMIT):
            self.alarm(LIMIT + 2 * int(joint) + int(target[joint] < 0))
            return False
        return True
