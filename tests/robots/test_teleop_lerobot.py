"""Leader arms of LeRobot, with a second virtual SO-101."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
from virtual_arm import patient_lerobot

from rlsvc.core.contract import Feature
from rlsvc.core.errors import ContractError, NotFoundError, UserError
from rlsvc.robots.teleop_lerobot import LeRobotTeleop
from rlsvc.robots.virtual.so101 import start
from rlsvc.robots.virtual.so101_sim import JOINTS
from rlsvc.spec.lerobot_robot import LeRobotTeleopSpec

ACTION = Feature((6,), "float32", names=tuple(f"{joint}.pos" for joint in JOINTS))


def test_a_leader_arm_says_where_a_hand_has_brought_it(tmp_path: Path) -> None:
    options = ("--cameras", "none", "--leader", "--id", "lead", "--calibration-dir", str(tmp_path))
    with patient_lerobot(), start(*options) as arm:
        config = {"port": arm.port, "id": "lead", "calibration_dir": str(tmp_path), "num_read_retries": 5}
        backwards = Feature((6,), "float32", names=ACTION.names[::-1])
        teleop = LeRobotTeleop(LeRobotTeleopSpec(type="so101_leader", config=config), backwards)
        teleop.connect()
        try:
            arm.hand({"shoulder_pan": 0.5, "shoulder_lift": -0.3, "elbow_flex": 0.2, "wrist_flex": 0.1, "gripper": 0.8})
            time.sleep(1.5)
            got = teleop.read()
        finally:
            teleop.close()
        assert got.dtype == np.float32
        assert got[::-1][:4] == pytest.approx(np.degrees([0.5, -0.3, 0.2, 0.1]).tolist(), abs=3)
        # The gripper's range is -10 to 100 degrees, and it is at 45.8.
        assert got[0] == pytest.approx(100 * (math.degrees(0.8) + 10) / 110, abs=3)

        with pytest.raises(UserError, match=r"lerobot-calibrate --teleop\.type=so101_leader"):
            LeRobotTeleop(LeRobotTeleopSpec(type="so101_leader", config=config | {"id": "new"}), ACTION).connect()


def test_a_teleoperator_of_another_kind_of_action_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match=r"'gamepad' gives delta_x, delta_y.*the robot takes shoulder_pan.pos"):
        LeRobotTeleop(LeRobotTeleopSpec(type="gamepad"), ACTION)
    with pytest.raises(NotFoundError, match=r"unknown teleop type 'so101_lead'\. Did you mean 'so101_leader'"):
        LeRobotTeleop(LeRobotTeleopSpec(type="so101_lead"), ACTION)
