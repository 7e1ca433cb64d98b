"""Dobot CR arms by joint position: ServoJ on the motion port, measurements from the feedback port.

The protocol is Dobot's V3 (rlsvc/robots/dobot_wire.py). On the wire angles are degrees, here they are radians, as in
the recordings of real CR5 arms. The motion port stays open and holds the arm for this driver, since it takes one
client; the dashboard is opened for each question, so that another process can stop the arm.

Letters: A action dimensions, 6, or 7 with a gripper; H height, W width; T steps.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import BusyError, ContractError, UserError
from rlsvc.robots.api import ConnectionLost, Reading, Stopper, Torque
from rlsvc.robots.camera_watch import CameraWatch
from rlsvc.robots.cameras import Cameras
from rlsvc.robots.dobot_feedback import Feedback, FeedbackStream
from rlsvc.robots.dobot_wire import (
    DISABLED,
    ERROR,
    IDLE,
    MAX_REPLY,
    MODES,
    RUNNING,
    ask,
    call,
    connect_free,
    dashboard,
    split_replies,
)
from rlsvc.robots.stop_dobot import stop
from rlsvc.spec.dobot import DobotSpec

JOINTS = tuple(f"joint_{i}" for i in range(6))
GRIPPER = "gripper"
STATE = "observation.state"
CLOSED_ABOVE = 0.5
ENABLE_S = 5.0
"""Time that enabling may take."""
SETTLE_S = 1.0
"""Time in which an arm whose connection was lost finishes its last command."""


class DobotDriver:
    """The driver of `rlsvc.robots.api`. A gripper's dimension is 0 open, 1 closed; commands above 0.5 close it."""

    def __init__(self, spec: DobotSpec) -> None:
        """Nothing is opened yet.

        Raises:
            UserError: a camera's configuration.
        """
        self.spec = spec
        self._cameras = Cameras(spec.cameras, spec.camera_stale_after_s)
        self._watch = CameraWatch(spec.watch.frozen_s, spec.watch.black_s)
        gripper = spec.gripper is not None
        names, unit = (*JOINTS, GRIPPER) if gripper else JOINTS, "" if gripper else "rad"
        low, high = (*spec.joint_low, 0.0) if gripper else spec.joint_low, (*spec.joint_high, 1.0)
        self.action = Feature((len(names),), "float32", unit, names, low, high[: len(names)])
        self.observation = {STATE: Feature((len(names),), "float32", unit, names), **self._cameras.features}
        self._motion: socket.socket | None = None
        self._feedback: FeedbackStream | None = None
        self._replies, self._closed = "", False

    def connect(self) -> None:
        """See `Driver.connect`. An arm that is not enabled is enabled where the specification says so.

        Raises:
            BusyError: another client has it.
            UserError: nobody is there, it speaks another protocol, it is in error, not enabled, or not idle; a camera.
            ConnectionLost: it is there and does not answer.
        """
        try:
            self._make_ready()
            self._open()
            self._cameras.connect()
            self._watch = CameraWatch(self.spec.watch.frozen_s, self.spec.watch.black_s)
            self._closed = self._measured_gripper(self._newest()) > CLOSED_ABOVE
        except BaseException:
            self.close()
            raise

    def read(self) -> Reading:
        """See `Driver.read`. The arm may be in error; it can be seen then, and not moved."""
        newest = self._newest()
        state = np.deg2rad(newest.record["q_actual"]).astype(np.float32)
        if self.spec.gripper is not None:
            state = np.append(state, np.float32(self._measured_gripper(newest)))
        frames, stamps = self._cameras.read()
        self._watch.check({STATE: state, **frames}, time.monotonic())
        return Reading({STATE: state, **frames}, {STATE: newest.stamp, **stamps})

    def send(self, command: np.ndarray) -> None:
        """See `Driver.send`.

        Raises:
            ContractError: the command is not A finite numbers.
            ConnectionLost: the feedback stopped, the arm is in error or not enabled, or the controller refused.
        """
        if np.shape(command) != self.action.shape or not np.isfinite(command).all():
            raise ContractError(f"command: got {command}, expected {self.action.shape[0]} finite numbers")
        newest = self._newest()
        if newest.mode in (ERROR, DISABLED):
            raise ConnectionLost(f"Dobot at {self.spec.host} is {MODES[newest.mode]} and takes no commands")
        if self.spec.gripper is not None:
            self._grip(float(command[6]) > CLOSED_ABOVE)
        options: dict[str, float] = {}
        if self.spec.servo_time_s is not None:
            options = {"t": self.spec.servo_time_s, "lookahead_time": self.spec.lookahead_time, "gain": self.spec.gain}
        degrees = np.rad2deg(np.asarray(command[:6], np.float64))
        self._move(call("ServoJ", *map(float, degrees), **options))

    def stop(self, torque: Torque) -> None:
        """See `Driver.stop`; of "release" see `rlsvc.robots.stop_dobot.stop`."""
        stop(**self.stopper().arguments, torque=torque)

    def close(self) -> None:
        """See `Driver.close`."""
        if self._feedback is not None:
            self._feedback.close()
        if self._motion is not None:
            self._motion.close()
        self._motion, self._feedback, self._replies = None, None, ""
        self._cameras.close()

    def stopper(self) -> Stopper:
        """See `Driver.stopper`."""
        spec = self.spec
        arguments = {"host": spec.host, "port": spec.dashboard_port, "timeout_s": spec.stop_timeout_s}
        return Stopper("rlsvc.robots.stop_dobot:stop", arguments)

    def _make_ready(self) -> None:
        """Refuse an arm that cannot be commanded now."""
        spec = self.spec
        where = f"Dobot at {spec.host}:{spec.dashboard_port}"
        with dashboard(spec.host, spec.dashboard_port, spec.timeout_s) as connection:
            mode = self._mode(connection, RUNNING, SETTLE_S)
            if mode == ERROR:
                alarms = ask(connection, "GetErrorID()").values
                raise UserError(
                    f"{where}: the robot is in error, alarms {alarms} (controller, then six servos; "
                    "DobotStudio Pro says what they mean). Remove the cause, clear them there, then connect again"
                )
            if mode == DISABLED and spec.enable:
                reply = ask(connection, "EnableRobot()")
                if reply.error:
                    raise UserError(f"{where}: {reply}")
                mode = self._mode(connection, DISABLED, ENABLE_S)
            if mode != IDLE:
                text = MODES.get(mode, "unknown")
                how = (
                    "enable it in DobotStudio Pro or set driver.enable: true" if mode == DISABLED else "end that first"
                )
                raise UserError(f"{where}: the robot is {text} (mode {mode}), expected enabled and idle (5); {how}")

    @staticmethod
    def _mode(connection: socket.socket, passing: int, wait_s: float) -> int:
        """RobotMode, as soon as it is no longer `passing`, or after so long."""
        until = time.monotonic() + wait_s
        while (mode := int(ask(connection, "RobotMode()").values)) == passing and time.monotonic() < until:
            time.sleep(0.02)
        return mode

    def _open(self) -> None:
        """Take the motion and the feedback port."""
        spec = self.spec
        self._motion, greeting = connect_free(spec.host, spec.motion_port, spec.timeout_s, "motion")
        if greeting:
            raise UserError(
                f"{spec.host}:{spec.motion_port} (motion) greets with {greeting[:40]!r}, which no Dobot does; check "
                "driver.motion_port"
            )
        connection, greeting = connect_free(spec.host, spec.feedback_port, spec.timeout_s, "feedback")
        self._feedback = FeedbackStream(connection, spec.stale_after_s)
        if self._feedback.first(spec.timeout_s):
            return
        where = self._feedback.where
        if not greeting:
            raise ConnectionLost(f"Dobot at {where} (feedback): nothing came within {spec.timeout_s:g} s")
        raise UserError(
            f"{where} (feedback) sends {greeting[:20]!r}, which is not one of Dobot's packets of 1440 bytes; check "
            "driver.feedback_port"
        )

    def _newest(self) -> Feedback:
        if self._feedback is None:
            raise ConnectionLost(f"Dobot at {self.spec.host}: not connected")
        return self._feedback.newest()

    def _move(self, text: str) -> None:
        """Send one motion command, and look at the replies that came meanwhile; older controllers send none."""
        if self._motion is None:
            raise ConnectionLost(f"Dobot at {self.spec.host}: not connected")
        where = f"Dobot at {self.spec.host}:{self.spec.motion_port} (motion)"
        try:
            self._motion.sendall(text.encode())
            self._motion.settimeout(0.0)
            while True:
                chunk = self._motion.recv(MAX_REPLY)
                if not chunk:
                    raise ConnectionLost(f"{where}: the controller hung up")
                self._replies += chunk.decode("latin-1")
        except BlockingIOError:
            pass
        except OSError as error:
            raise ConnectionLost(f"{where}: {error.strerror or error}") from error
        finally:
            self._motion.settimeout(self.spec.stop_timeout_s)
        replies, rest = split_replies(self._replies)
        self._replies = rest[-MAX_REPLY:]
        if bad := next((reply for reply in replies if reply.error), None):
            raise ConnectionLost(f"{where}: {bad}")

    def _grip(self, closed: bool) -> None:
        gripper = self.spec.gripper
        if gripper is None or closed == self._closed:
            return
        level = gripper.closed_level if closed else 1 - gripper.closed_level
        name = "DOExecute" if gripper.output == "controller" else "ToolDOExecute"
        try:
            with dashboard(self.spec.host, self.spec.dashboard_port, self.spec.stop_timeout_s) as connection:
                reply = ask(connection, call(name, gripper.index, level))
        except (BusyError, UserError) as error:
            raise ConnectionLost(str(error)) from error
        if reply.error:
            raise ConnectionLost(f"Dobot at {self.spec.host}: {reply}")
        self._closed = closed

    def _measured_gripper(self, newest: Feedback) -> float:
        gripper = self.spec.gripper
        if gripper is None or gripper.output == "tool":
            return float(self._closed)
        level = int(newest.record["digital_outputs"]) >> (gripper.index - 1) & 1
        return float(level == gripper.closed_level)


def positions_from_velocities(start: Sequence[float], velocity: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Joint positions from recorded joint velocities, by the trapezoidal rule.

    The CR5 recordings of HuangJunkai2023/CR5_TCP_test (tests/data/cr5_v21) were made by hand, with the arm dragged:
    their `observation.state` is the feedback's q_actual and their `action` its qd_actual at the same moment, both in
    radians, then the gripper, 0 open and 1 closed. So the actions are rad/s that were measured, not commands, and
    cannot be sent as they are. Integrated over the recorded (wall clock) timestamps they give the recorded positions
    back to 0.017 rad and 0.045 rad in episodes 0 and 2, and in half of all 81 episodes to 0.016 rad; over
    frame_index / fps, which runs evenly, half of them only to 0.05 rad. In a few episodes single frames jump by up to
    0.68 rad in one joint, which no velocity tells of.

    Args:
        start: [6] position at the first step, rad.
        velocity: [T, 6], rad/s.
        seconds: [T] time of each step, s.

    Returns:
        [T, 6] rad.
    """
    way = 0.5 * (velocity[:-1] + velocity[1:]) * np.diff(seconds)[:, None]
    return np.asarray(start) + np.concatenate([np.zeros((1, 6)), np.cumsum(way, 0)])
