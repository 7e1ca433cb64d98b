"""The virtual arm's mechanics and cameras, without LeRobot."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import urllib.error

import cv2
import numpy as np
import psutil
import pytest

from rlsvc.core.errors import NotFoundError
from rlsvc.robots.virtual.so101 import start
from rlsvc.robots.virtual.so101_sim import JOINTS, REST, SO101Sim

READY = np.array([0.3, -0.4, 0.5, 0.6, 0.2, 0.5])


def test_links_are_as_long_as_published() -> None:
    sim = SO101Sim()
    sim.reset((0.0,) * 6)
    height = {name: sim.data.body(name).xpos for name in ("upper_arm", "lower_arm", "wrist", "gripper")}
    assert height["upper_arm"] == pytest.approx([0.0304, 0, 0.1166], abs=1e-4)
    assert np.linalg.norm(height["lower_arm"] - height["upper_arm"]) == pytest.approx(0.116, abs=5e-4)
    assert np.linalg.norm(height["wrist"] - height["lower_arm"]) == pytest.approx(0.135, abs=5e-4)
    assert sim.model.body_mass[2:9].sum() == pytest.approx(
        0.147 + 0.100 + 0.103 + 0.104 + 0.079 + 0.087 + 0.012, abs=1e-3
    )


def test_it_rests_folded_without_torque() -> None:
    sim = SO101Sim()
    sim.step(1.0)
    assert sim.angles == pytest.approx(np.array(REST), abs=0.02)


def test_it_goes_where_it_is_told_and_sags_when_let_go() -> None:
    sim = SO101Sim()
    sim.command(READY)
    sim.step(2.0)
    assert sim.angles[[0, 4, 5]] == pytest.approx(READY[[0, 4, 5]], abs=0.01)
    # A position servo gives way to gravity in proportion to the load: about 3 degrees at the factory's gain.
    assert sim.angles[1:4] == pytest.approx(READY[1:4], abs=0.06)
    assert sim.angles[1] > READY[1] + 0.005
    before = sim.angles
    for servo in sim.servos:
        servo.write(40, b"\x00")
    sim.step(2.0)
    assert np.abs(sim.angles - before).max() > 0.15


def test_it_is_no_faster_than_its_motors() -> None:
    sim = SO101Sim()
    sim.reset((-1.9, -1.0, 1.0, 0.5, 0, 0))
    sim.command(np.array([1.9, -1.0, 1.0, 0.5, 0, 0]))
    fastest = 0.0
    for _ in range(750):
        sim.step()
        fastest = max(fastest, abs(sim.data.qvel[0]))
    assert 3.5 < fastest < 5.45  # rad/s: 52 turns a minute without load
    assert sim.angles[0] == pytest.approx(1.9, abs=0.02)


def test_the_same_seed_is_the_same_episode() -> None:
    def play(seed: int) -> np.ndarray:
        sim = SO101Sim(seed)
        sim.command(READY)
        sim.step(0.5)
        return sim.data.qpos.copy()

    assert np.array_equal(play(3), play(3))
    assert not np.array_equal(play(3), play(4))


def test_a_hand_moves_a_joint_against_the_motor_and_lets_go() -> None:
    sim = SO101Sim()
    sim.command(READY)
    sim.hand({"shoulder_pan": -0.5})
    sim.step(1.0)
    assert sim.angles[0] < 0.0
    sim.hand({"shoulder_pan": None})
    sim.step(1.0)
    assert sim.angles[0] == pytest.approx(0.3, abs=0.01)
    with pytest.raises(NotFoundError, match="'shoulder_pen'"):
        sim.hand({"shoulder_pen": 0.0})


def test_its_calibration_makes_the_middle_of_each_range_the_middle_of_the_encoder() -> None:
    sim = SO101Sim()
    calibration = sim.calibrate()
    sim.reset(tuple(sim.model.jnt_range[:6].mean(axis=1)))
    sim.step()
    assert [servo.get("Present_Position") for servo in sim.servos] == pytest.approx([2047] * 6, abs=2)
    assert list(calibration) == list(JOINTS)
    # 110 degrees to each side of the middle.
    assert calibration["shoulder_pan"]["range_max"] == 2047 + math.floor(110 / 360 * 4096)


def test_the_gripper_holds_the_cube_and_lifts_it() -> None:
    sim = SO101Sim()
    grip = sim.model.site("grip").id
    sim.reset((0.0, 0.0, 0.0, 0.0, 0.0, 0.9))
    sim.data.qpos[6:9] = (0.22, 0.0, 0.0125)
    sim.data.qpos[9:13] = (1, 0, 0, 0)

    def down_to(x: float, z: float) -> np.ndarray:
        """Angles that point the open gripper down with its tip at (x, 0, z)."""
        upper, fore = math.hypot(0.028, 0.1126), math.hypot(0.1349, 0.0052)
        wrist = np.array([x - 0.0304 + 0.0079, z - 0.1166 + 0.0611 + 0.0855])
        reach = np.linalg.norm(wrist)
        inner = math.acos((upper**2 + fore**2 - reach**2) / (2 * upper * fore))
        lift = math.atan2(wrist[0], wrist[1]) - math.acos((upper**2 + reach**2 - fore**2) / (2 * upper * reach))
        lift -= math.atan2(0.028, 0.1126)
        elbow = math.pi / 2 - inner + math.atan2(0.028, 0.1126) + math.atan2(0.0052, 0.1349)
        return np.array([0.0, lift, elbow, math.pi / 2 - lift - elbow, 0.0, 0.9])

    for servo in sim.servos:
        servo.set("P_Coefficient", 64)  # stiff enough to be where it is told
    for z in (0.12, 0.06, 0.012):
        sim.command(down_to(0.22, z))
        sim.step(1.0)
    assert sim.data.site_xpos[grip] == pytest.approx([0.22, 0, 0.015], abs=0.02)
    closed = down_to(0.22, 0.012)
    closed[5] = 0.0
    sim.command(closed)
    sim.step(1.0)
    lifted = down_to(0.22, 0.12)
    lifted[5] = 0.0
    sim.command(lifted)
    sim.step(1.5)
    assert sim.cube[2] > 0.05


def test_the_command_prints_what_to_type_and_ends_with_its_owner() -> None:
    command = [sys.executable, "-m", "rlsvc.robots.virtual.so101", "--cameras", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as told:
        assert told.stdout is not None
        lines = [told.stdout.readline() for _ in range(4)]
        told.send_signal(signal.SIGINT)
        assert told.wait(10) == 0
    assert lines[0].startswith("port     /dev/pts/")
    assert "lerobot-calibrate --robot.type=so101_follower --robot.port=/dev/pts/" in lines[3]

    # An owner that is killed takes the arm with it.
    owner = (
        "from rlsvc.robots.virtual.so101 import start\n"
        "with start('--cameras', 'none') as arm:\n"
        "    print(arm.pid, flush=True)\n"
        "    input()"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        until = time.monotonic() + 20
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.mark.render
def test_cameras_show_the_arm_move_and_go_wrong_on_request() -> None:
    with start("--cameras", "front,wrist", "--size", "160x120", "--fps", "20") as arm:
        shown = cv2.VideoCapture(arm.cameras["front"])

        def frame(seconds: float = 0.7) -> np.ndarray:
            """What comes once all has been read that had come before."""
            image, until = np.zeros(0), time.monotonic() + seconds
            while time.monotonic() < until:
                ok, image = shown.read()
                assert ok
            return image.astype(int)

        before = frame()
        assert np.abs(frame(0.2) - before).max() > 0  # noise
        arm.hand({"shoulder_pan": 1.2, "shoulder_lift": -0.5})
        assert np.mean(np.abs(frame(2.0) - before).max(axis=2) > 60) > 0.01
        arm.faults(camera={"front": "black"})
        assert frame().max() < 16
        arm.faults(camera={"front": "frozen"})
        assert np.array_equal(frame(), frame(0.5))
        with pytest.raises(urllib.error.HTTPError, match="400"):
            arm.faults(camera={"back": "black"})
        shown.release()


def test_physics_needs_no_opengl() -> None:
    code = "import rlsvc.robots.virtual.so101_sim as s; s.SO101Sim().step(0.1)"
    environment = {name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
