"""An SO-101 arm in MuJoCo, moved by the control loops of its six virtual servos; no thread, no clock, no bus.

`rlsvc.robots.virtual.so101` runs it in real time behind a serial port; a learning benchmark steps it on its own.
Letters: J 6 joints, in the order of JOINTS, which is that of the motors' ids 1 to 6.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mujoco as _mujoco
import numpy as np

from rlsvc.core.errors import unknown_name
from rlsvc.robots.virtual.feetech_table import STEPS
from rlsvc.robots.virtual.sts3215 import NO_LOAD_SPEED, RAD, STALL_TORQUE, Servo

mujoco: Any = _mujoco  # its names are made at run time

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
FULL_TURN = "wrist_roll"
"""The joint whose range LeRobot's calibration takes for granted."""
MODEL = Path(__file__).with_name("so101.xml")
REST = (0.0, -1.745, 1.62, 1.159, 0.0, 0.0)
"""rad: folded, where the arm also lies without torque."""
ASSEMBLY = (37, -112, 64, 15, -20, 90)
"""Steps by which each horn was put on beside the middle: no two arms have the same calibration."""
COAST = 0.1
"""N m s/rad: drag of the gear of a motor that is switched off. An estimate."""
HAND = (40.0, 2.0)
"""N m/rad and N m s/rad: how firmly a hand holds a joint."""
HAND_SPEED = 4.0
"""rad/s, at which it moves one."""


class SO101Sim:
    """The arm, a table and a cube.

    Attributes:
        servos: J of them; torque is off at first.
        model: of MuJoCo.
        data: of MuJoCo; hold `lock` to read it while another thread steps.
        lock: held during a step.
    """

    def __init__(self, seed: int = 0, assembly: tuple[int, ...] = ASSEMBLY) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(MODEL))
        self.data = mujoco.MjData(self.model)
        self.lock = threading.RLock()
        self._range = self.model.jnt_range[: len(JOINTS)].copy()
        self._middle = self._range.mean(axis=1)
        self._assembly = np.asarray(assembly, float)
        self._hands: dict[int, tuple[float, float]] = {}  # by joint, where the hand is and where it goes
        self._random = np.random.default_rng(seed)
        self.servos = [Servo(id) for id in range(1, len(JOINTS) + 1)]
        self.reset()

    @property
    def dt(self) -> float:
        """Of one step, s."""
        return self.model.opt.timestep

    @property
    def angles(self) -> np.ndarray:
        """[J] rad, zero as in so101.xml."""
        return self.data.qpos[: len(JOINTS)].copy()

    @property
    def cube(self) -> np.ndarray:
        """[7]: position, m, and quaternion (w, x, y, z)."""
        return self.data.qpos[len(JOINTS) :].copy()

    def reset(self, angles: tuple[float, ...] = REST, random: np.random.Generator | None = None) -> None:
        """Put the arm to `angles` [J] rad with torque off, and the cube somewhere in front of it; nobody holds it.

        Args:
            angles: of the joints.
            random: draws the cube's place; None goes on with the simulation's own.
        """
        with self.lock:
            mujoco.mj_resetData(self.model, self.data)
            self._hands.clear()
            random = self._random if random is None else random
            distance, bearing, turn = random.uniform((0.17, -0.5, 0), (0.27, 0.5, math.pi / 2))
            self.data.qpos[: len(JOINTS)] = angles
            self.data.qpos[len(JOINTS) :] = (
                *(distance * math.cos(bearing), distance * math.sin(bearing), 0.0125),
                *(math.cos(turn / 2), 0, 0, math.sin(turn / 2)),
            )
            mujoco.mj_forward(self.model, self.data)
            for servo, encoder in zip(self.servos, self.encoders(self.angles), strict=True):
                servo.encoder = encoder
                servo.power_on()

    def encoders(self, angles: np.ndarray) -> np.ndarray:
        """What the encoders see at `angles` [J] rad: [J] steps, not wrapped."""
        return STEPS / 2 + self._assembly + (angles - self._middle) / RAD

    def command(self, angles: np.ndarray) -> None:
        """Switch torque on and set the goals, [J] rad, as without a bus."""
        for servo, encoder in zip(self.servos, self.encoders(angles), strict=True):
            servo.set("Goal_Position", round(encoder) - servo.get("Homing_Offset"))
            servo.set("Torque_Enable", 1)

    def hand(self, angles: Mapping[str, float | None]) -> None:
        """Take joints by hand and bring them to angles, rad; None lets go."""
        for joint, angle in angles.items():
            if joint not in JOINTS:
                raise unknown_name("joint", joint, JOINTS)
            if angle is None:
                self._hands.pop(JOINTS.index(joint), None)
            else:
                at = JOINTS.index(joint)
                held = self._hands.get(at, (float(self.data.qpos[at]), 0.0))
                self._hands[at] = (held[0], float(angle))

    def step(self, seconds: float | None = None) -> None:
        """Advance by `seconds` of simulated time, or by one step."""
        for _ in range(1 if seconds is None else max(1, round(seconds / self.dt))):
            with self.lock:
                self._step()

    def _step(self) -> None:
        velocity = self.data.qvel[: len(JOINTS)]
        encoders = self.encoders(self.data.qpos[: len(JOINTS)])
        for at, servo in enumerate(self.servos):
            speed = float(velocity[at])
            duty = servo.tick(float(encoders[at]), speed / RAD, self.dt)
            torque = -COAST * speed if duty is None else STALL_TORQUE * (duty - speed / NO_LOAD_SPEED)
            self.data.ctrl[at] = torque
        self.data.qfrc_applied[: len(JOINTS)] = 0
        for at, (hand, goal) in list(self._hands.items()):
            moved = hand + max(-HAND_SPEED * self.dt, min(HAND_SPEED * self.dt, goal - hand))
            self._hands[at] = (moved, goal)
            pull = HAND[0] * (moved - self.data.qpos[at]) - HAND[1] * velocity[at]
            self.data.qfrc_applied[at] = np.clip(pull, -8, 8)
        mujoco.mj_step(self.model, self.data)

    def calibrate(self) -> dict[str, dict[str, Any]]:
        """Write into the servos' EPROM what LeRobot's calibration would find, and return it as in LeRobot's files."""
        half = (self._range[:, 1] - self._range[:, 0]) / 2 / RAD
        calibration = {}
        for at, (joint, servo) in enumerate(zip(JOINTS, self.servos, strict=True)):
            low, high = (0, STEPS - 1) if joint == FULL_TURN else (2047 - int(half[at]), 2047 + int(half[at]))
            offset = round(STEPS / 2 + self._assembly[at]) - 2047
            for name, value in (("Homing_Offset", offset), ("Min_Position_Limit", low), ("Max_Position_Limit", high)):
                servo.set(name, value)
            servo.save()
            servo.power_on()
            calibration[joint] = {
                "id": servo.get("ID"),
                "drive_mode": 0,
                "homing_offset": offset,
                "range_min": low,
                "range_max": high,
            }
        return calibration


def write_calibration(path: Path, calibration: dict[str, dict[str, Any]]) -> None:
    """Write a calibration file as LeRobot reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(calibration, indent=4))
