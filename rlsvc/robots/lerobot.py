"""Any robot of LeRobot as a driver: SO-100 and SO-101 arms, and what `lerobot_robot_*` packages bring.

Its numbers become the vectors `observation.state` and `action`, in LeRobot's order, with LeRobot's names
("shoulder_pan.pos") and in LeRobot's units; its cameras become `observation.images.<name>`.

Letters: A action dimensions, H height, W width.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from lerobot.motors.feetech import FeetechMotorsBus
from lerobot.motors.motors_bus import SerialMotorsBus

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.robots import lerobot_devices as devices
from rlsvc.robots.api import ConnectionLost, Reading, Stopper, Torque
from rlsvc.robots.camera_watch import CameraWatch, is_black
from rlsvc.robots.port import PortClaim
from rlsvc.spec.lerobot_robot import LeRobotSpec, SO101Spec

IMAGE = "observation.images."
LIGHT_S = 1.0
"""A camera may take this long after `connect` to adjust to the light."""


class LeRobotDriver:
    """A robot of LeRobot; see Driver.

    Attributes:
        observation: `observation.state` and `observation.images.<camera>`.
        action: [A] float32.
        grabbed: cameras whose stamps say when LeRobot took the frame from the device (an OpenCV camera: after exposure
            and transfer; a stream of this host: when it was captured). The stamps of others say when they were read.
    """

    def __init__(self, spec: SO101Spec | LeRobotSpec) -> None:
        """Nothing is opened.

        Raises:
            UserError: LeRobot does not know the type or take the configuration, or the robot gives or takes something
                that is neither numbers nor colour images.
        """
        self.spec = spec
        self._config = devices.configure("robot", spec.type, spec.config)
        devices.keep_torque(self._config)
        self._robot: Any = devices.make("robot", self._config)
        what = f"robot of type '{spec.type}'"
        self._states, images = devices.features(f"{what}, observation", self._robot.observation_features)
        self._actions, wrong = devices.features(f"{what}, action", self._robot.action_features)
        if wrong or not self._actions:
            raise UserError(f"{what}: it takes no vector of numbers as its action: {self._robot.action_features}")
        self.observation = {"observation.state": Feature((len(self._states),), "float32", names=self._states)}
        self.observation |= {IMAGE + name: Feature(shape, "uint8") for name, shape in images.items()}
        self.action = Feature((len(self._actions),), "float32", names=self._actions)
        cameras = getattr(self._robot, "cameras", {})
        self.grabbed = frozenset(name for name in images if hasattr(cameras.get(name), "latest_timestamp"))
        if not spec.allow_unstoppable and self._stopper() is None:
            raise UserError(
                f"{what}: its motors are not on a Feetech bus, so only the process that drives it can stop it; when "
                "that one is killed or hangs, nothing but its emergency stop does. Set allow_unstoppable: true if you "
                "have one at hand"
            )
        self._claims: list[PortClaim] = []
        self._watch = CameraWatch(spec.watch.frozen_s, spec.watch.black_s)

    @property
    def _buses(self) -> list[Any]:
        return list(devices.buses(self._robot))

    def connect(self) -> None:
        """See Driver; never asks the terminal.

        Raises:
            UserError: a port that is not there or in use, a robot that is not calibrated or whose motors have the
                calibration of another arm, a camera that is not there or black; by name.
            ConnectionLost: a motor that does not answer.
        """
        self.close()
        self._watch = CameraWatch(self.spec.watch.frozen_s, self.spec.watch.black_s)
        self._claims = devices.claim(self._config)
        try:
            self._robot = devices.start("robot", self.spec.type, self._config, hold=True)
            self._check_light()
        except BaseException:
            self.close()
            raise

    def _check_light(self) -> None:
        until = time.monotonic() + LIGHT_S
        while True:
            values = self._measure().values
            black = [name for name, value in values.items() if name.startswith(IMAGE) and is_black(value)]
            if not black:
                return
            if time.monotonic() > until:
                raise UserError(f"camera '{black[0].removeprefix(IMAGE)}' gives black frames: is its cap on?")
            time.sleep(0.05)

    def read(self) -> Reading:
        """The newest measurement.

        Returns:
            `observation.state` is stamped with the middle of the time that its reading took.

        Raises:
            ConnectionLost: a motor or a camera does not answer, or a camera is black or frozen.
        """
        reading = self._measure()
        self._watch.check(reading.values, time.monotonic())
        return reading

    def _measure(self) -> Reading:
        before = time.monotonic()
        try:
            for bus in self._buses:
                devices.drain(bus)
            got = self._robot.get_observation()
        except devices.FAILURES as error:
            raise ConnectionLost(f"robot '{self._robot.id}': {error}") from error
        after = time.monotonic()
        state = np.array([got[name] for name in self._states], np.float32)
        values, stamps = {"observation.state": state}, {"observation.state": (before + after) / 2}
        for name in self.observation:
            if name.startswith(IMAGE):
                camera = name.removeprefix(IMAGE)
                values[name], stamps[name] = self._frame(camera, np.asarray(got[camera]), after)
        return Reading(values, stamps)

    def _frame(self, name: str, frame: np.ndarray, read: float) -> tuple[np.ndarray, float]:
        """A camera's frame and when it was captured."""
        stamp = read
        if name in self.grabbed:
            camera = self._robot.cameras[name]
            # The frame and its time are read together: a newer one may have come since.
            with getattr(camera, "frame_lock", contextlib.nullcontext()):
                newest = getattr(camera, "latest_color_frame", getattr(camera, "latest_frame", None))
                grabbed = camera.latest_timestamp
            if newest is None or grabbed is None:
                raise ConnectionLost(f"camera '{name}' of robot '{self._robot.id}' has stopped")
            # LeRobot stamps with perf_counter.
            frame, stamp = newest, grabbed + time.monotonic() - time.perf_counter()
        expected = self.observation[IMAGE + name].shape
        if frame.shape != expected or frame.dtype != np.uint8:
            raise ConnectionLost(f"camera '{name}' gives {frame.shape} {frame.dtype}, expected {expected} uint8")
        return frame, stamp

    def send(self, command: np.ndarray) -> None:
        """Command [A] float32 in LeRobot's units. Raises ConnectionLost."""
        try:
            self._robot.send_action(dict(zip(self._actions, map(float, command), strict=True)))
        except devices.FAILURES as error:
            raise ConnectionLost(f"robot '{self._robot.id}' does not take commands: {error}") from error

    def stop(self, torque: Torque) -> None:
        """Hold: the present position becomes the goal, with torque on. Release: torque off.

        An arm that is held sinks a little, some degrees for an SO-101 that is stretched out: a position servo makes
        torque from its error, which is none in that moment.

        Raises:
            ConnectionLost: the motors do not answer.
            UserError: "release" of a robot that LeRobot gives no way to release.
        """
        buses = self._buses
        try:
            for bus in buses:
                devices.drain(bus)
                if isinstance(bus, SerialMotorsBus):
                    bus.port_handler.is_using = False  # an exception in the middle of a packet leaves it set
                if torque == "release":
                    bus.disable_torque(num_retry=3)
                elif isinstance(bus, FeetechMotorsBus):
                    here = bus.sync_read("Present_Position", normalize=False, num_retry=3)
                    bus.sync_write("Goal_Position", here, normalize=False)
                    bus.enable_torque(num_retry=3)
            if torque == "hold" and not all(isinstance(bus, FeetechMotorsBus) for bus in buses or [None]):
                here = self._robot.get_observation()
                self._robot.send_action({name: float(here[name]) for name in self._actions if name in here})
        except devices.FAILURES as error:
            raise ConnectionLost(f"robot '{self._robot.id}' does not stop ({torque}): {error}") from error
        if torque == "release" and not buses:
            raise UserError(f"robot '{self._robot.id}' ({self.spec.type}): LeRobot gives no way to release its motors")

    def close(self) -> None:
        """See Driver."""
        devices.close(self._robot)
        for claim in self._claims:
            claim.free()
        self._claims = []

    def stopper(self) -> Stopper:
        """Of Feetech buses; for other robots (`allow_unstoppable`) one that says that it can't."""
        refusal = {"what": f"robot '{self._robot.id}' ({self.spec.type})"}
        return self._stopper() or Stopper("rlsvc.robots.stop_feetech:refuse", refusal)

    def _stopper(self) -> Stopper | None:
        buses = self._buses
        if not buses or not all(isinstance(bus, FeetechMotorsBus) and bus.protocol_version == 0 for bus in buses):
            return None
        told = [
            {"port": bus.port, "ids": [motor.id for motor in bus.motors.values()], "baudrate": 1_000_000}
            for bus in buses
        ]
        return Stopper("rlsvc.robots.stop_feetech:stop", {"buses": told})
