"""LeRobot's own SO-101 driver and cameras, as they are, on the virtual arm; only its patience is made longer."""

from __future__ import annotations

import builtins
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lerobot.cameras.opencv import OpenCVCamera, OpenCVCameraConfig
from lerobot.motors import motors_bus
from lerobot.robots.so_follower import SO101Follower, SO101FollowerConfig
from virtual_arm import angles, at_rest, patient_lerobot, reached, take

from rlsvc.robots.lerobot_camera import StreamCameraConfig
from rlsvc.robots.virtual.so101 import RemoteSO101, start

POSES = (
    {"shoulder_pan": -1.92, "wrist_flex": -1.66, "gripper": -0.175, "shoulder_lift": 0.0, "elbow_flex": 0.0},
    {"shoulder_pan": 1.92, "wrist_flex": 1.66, "gripper": 1.75},
    {"shoulder_pan": 0.0, "wrist_flex": -1.6},
    {"elbow_flex": 1.69},
    {"elbow_flex": -1.69},
    {"shoulder_lift": -1.75, "elbow_flex": 0.0},
    {"shoulder_lift": 1.75, "elbow_flex": -1.69},
)
"""Which take every joint to both ends of its range without touching the table, rad."""


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with patient_lerobot():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def arm(folder: Path) -> Iterator[RemoteSO101]:
    with start("--cameras", "none", "--id", "arm", "--calibration-dir", str(folder)) as arm:
        yield arm


def follower(arm: RemoteSO101, folder: Path, id: str = "arm") -> SO101Follower:
    return SO101Follower(SO101FollowerConfig(port=arm.port, id=id, calibration_dir=folder, num_read_retries=5))


def test_it_connects_reads_moves_and_lets_go(arm: RemoteSO101, folder: Path) -> None:
    robot = follower(arm, folder)
    robot.connect()
    try:
        assert robot.is_calibrated
        seen = robot.get_observation()
        # Zero is the middle of each range: the arm is folded, its shoulder at -100 degrees.
        assert seen["shoulder_lift.pos"] == pytest.approx(-100, abs=1)
        assert seen["elbow_flex.pos"] == pytest.approx(math.degrees(1.62), abs=1)
        goal = {
            "shoulder_pan": 30.0,
            "shoulder_lift": -40.0,
            "elbow_flex": 30.0,
            "wrist_flex": 20.0,
            "wrist_roll": -25.0,
        }
        robot.send_action({f"{joint}.pos": value for joint, value in goal.items()} | {"gripper.pos": 60.0})
        there = at_rest(arm)
        # Gravity pulls a position servo from its goal: some degrees at the loaded joints, nothing at the others.
        assert np.degrees(there[[0, 4]]) == pytest.approx([30, -25], abs=0.5)
        assert np.degrees(there[1:4]) == pytest.approx([-40, 30, 20], abs=4)
        seen = robot.get_observation()
        assert [seen[f"{joint}.pos"] for joint in goal] == pytest.approx(np.degrees(there[:5]).tolist(), abs=0.5)
        assert seen["gripper.pos"] == pytest.approx(60, abs=1)
    finally:
        robot.disconnect()
    assert not any(arm.state()["torque"].values())
    assert np.abs(at_rest(arm) - there).max() > 0.15  # rad: it has sagged


def test_goals_beyond_the_calibrated_range_stop_at_its_end(arm: RemoteSO101, folder: Path) -> None:
    robot = follower(arm, folder)
    robot.connect()
    try:
        robot.send_action({"shoulder_pan.pos": 175.0})
        assert np.degrees(at_rest(arm)[0]) == pytest.approx(110, abs=1)
    finally:
        robot.disconnect()


@pytest.mark.slow
def test_it_calibrates_an_arm_that_is_moved_by_hand(
    tmp_path: Path, folder: Path, arm: RemoteSO101, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start("--cameras", "none", "--uncalibrated") as new:
        middle = {"shoulder_pan": 0.0, "shoulder_lift": 0.0, "elbow_flex": 0.0, "wrist_flex": 0.0, "wrist_roll": 0.0}
        poses = iter(POSES)

        def at_the_middle(question: str) -> str:
            assert "middle of its range" in question
            take(new, middle | {"gripper": math.radians(45)})
            return ""

        def moved_through_all() -> bool:
            """Called between LeRobot's looks at the positions."""
            nonlocal pose, since, looks
            looks = looks + 1 if reached(new, pose) else 0
            if looks < 10:
                assert time.monotonic() - since < 20, f"{pose} was not reached"
                return False
            if (then := next(poses, None)) is None:
                return True
            pose, since, looks = then, time.monotonic(), 0
            new.hand(pose)
            return False

        pose, since, looks = dict[str, float](), time.monotonic(), 0
        monkeypatch.setattr(builtins, "input", at_the_middle)
        monkeypatch.setattr(motors_bus, "enter_pressed", moved_through_all)
        robot = follower(new, tmp_path, "new")
        robot.bus.connect()
        try:
            robot.calibrate()
            assert robot.is_calibrated
        finally:
            robot.bus.disconnect()
    # The other arm was calibrated from the drawing: LeRobot's calibration finds the same, as exactly as a hand holds.
    found = json.loads((tmp_path / "new.json").read_text())
    drawn = json.loads((folder / "arm.json").read_text())
    for joint, expected in drawn.items():
        assert found[joint] == pytest.approx(expected, abs=30), joint  # steps, 2.6 degrees


@pytest.mark.render
def test_its_cameras_are_made_and_read_by_it(folder: Path) -> None:
    with start("--size", "160x120", "--fps", "20", "--id", "seeing", "--calibration-dir", str(folder)) as arm:
        camera = StreamCameraConfig(url=arm.cameras["front"], width=160, height=120, fps=20)
        config = SO101FollowerConfig(
            port=arm.port, id="seeing", calibration_dir=folder, cameras={"front": camera}, num_read_retries=5
        )
        robot = SO101Follower(config)
        robot.connect()
        try:
            first = robot.get_observation()["front"]
            assert first.shape == (120, 160, 3)
            robot.send_action({"shoulder_lift.pos": -20.0, "elbow_flex.pos": 0.0})
            at_rest(arm)
            time.sleep(0.3)
            later = robot.get_observation()["front"]
            # Where the arm was it no longer is.
            assert np.mean(np.abs(later.astype(int) - first).max(axis=2) > 60) > 0.01
        finally:
            robot.disconnect()

        # LeRobot's OpenCVCamera reads the same stream where no size is asked for.
        opencv = OpenCVCamera(OpenCVCameraConfig(index_or_path=arm.cameras["front"]))  # type: ignore[arg-type]
        opencv.connect()
        try:
            frame = opencv.read()
        finally:
            opencv.disconnect()
        assert frame.shape == (120, 160, 3)
        assert frame[..., 0].mean() > frame[..., 2].mean()  # the wooden table: red before blue
        assert np.all(np.isfinite(angles(arm)))
