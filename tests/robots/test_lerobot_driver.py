"""The driver of LeRobot's robots, against the virtual SO-101."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from virtual_arm import angles, at_rest, let_go, patient_lerobot, spec

from rlsvc.core.errors import BusyError, NotFoundError, SpecError, UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.lerobot import LeRobotDriver
from rlsvc.robots.virtual.so101 import RemoteSO101, start
from rlsvc.robots.virtual.so101_sim import JOINTS
from rlsvc.spec.lerobot_robot import LeRobotSpec, SO101Spec

NAMES = tuple(f"{joint}.pos" for joint in JOINTS)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    with patient_lerobot():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[RemoteSO101]:
    with start("--cameras", "none", "--id", "arm", "--calibration-dir", str(folder)) as arm:
        yield arm


@pytest.fixture
def arm(running: RemoteSO101) -> RemoteSO101:
    running.faults(latency=0.0, drop_next=0, drop_reply=0.0, drop_byte=0.0, mute=[], error={})
    let_go(running)
    return running


@pytest.fixture
def driver(arm: RemoteSO101, folder: Path) -> Iterator[LeRobotDriver]:
    driver = LeRobotDriver(spec(arm, folder))
    driver.connect()
    try:
        yield driver
        arm.faults(latency=0.0, drop_reply=0.0, mute=[])
        driver.stop("release")
    finally:  # a port that stays claimed would fail the tests that follow
        driver.close()


def read(driver: LeRobotDriver) -> np.ndarray:
    return driver.read().values["observation.state"]


def test_its_contract_is_made_from_lerobots_features(tmp_path: Path) -> None:
    camera = {"type": "mjpeg", "url": "http://127.0.0.1:9/x.mjpg", "width": 320, "height": 240, "fps": 10}
    driver = LeRobotDriver(SO101Spec(port="/dev/none", id="x", calibration_dir=tmp_path, cameras={"top": camera}))
    assert driver.action.names == NAMES
    assert driver.observation["observation.state"].names == NAMES
    assert driver.observation["observation.images.top"].shape == (240, 320, 3)
    assert driver.grabbed == {"top"}
    assert set(driver.observation) == {"observation.state", "observation.images.top"}


def test_it_moves_the_arm_and_holds_and_releases_it(arm: RemoteSO101, driver: LeRobotDriver) -> None:
    before = time.monotonic()
    reading = driver.read()
    assert before < reading.stamps["observation.state"] < time.monotonic()
    goal = np.array([25, -30, 20, 10, 30, 40], np.float32)
    driver.send(goal)
    there = at_rest(arm)
    assert read(driver)[[0, 4, 5]] == pytest.approx(goal[[0, 4, 5]], abs=0.6)
    assert read(driver)[1:4] == pytest.approx(goal[1:4], abs=4)  # gravity
    driver.send(np.array([100, -30, 20, 10, 30, 40], np.float32))
    there = at_rest(arm)
    driver.send(np.array([-100, -30, 20, 10, 30, 40], np.float32))
    while read(driver)[0] > 80:
        pass
    driver.stop("hold")
    assert all(arm.state()["torque"].values())
    assert -60 < np.degrees(at_rest(arm)[0]) < 100  # on the way
    driver.stop("release")
    assert not any(arm.state()["torque"].values())
    assert np.abs(at_rest(arm) - there).max() > 0.15


def test_connecting_moves_nothing_though_the_arm_was_moved_by_hand(arm: RemoteSO101, folder: Path) -> None:
    driver = LeRobotDriver(spec(arm, folder))
    driver.connect()
    driver.send(np.array([40, -30, 20, 10, 30, 40], np.float32))
    at_rest(arm)
    driver.stop("release")
    driver.close()
    arm.hand({"shoulder_pan": -0.6})
    time.sleep(0.8)
    let_go(arm)
    before = at_rest(arm)
    driver.connect()
    try:
        assert at_rest(arm)[[0, 4, 5]] == pytest.approx(before[[0, 4, 5]], abs=0.02)
    finally:
        driver.stop("release")
        driver.close()


def test_closing_leaves_the_torque_as_it_is(arm: RemoteSO101, driver: LeRobotDriver) -> None:
    driver.stop("hold")
    driver.close()
    assert all(arm.state()["torque"].values())
    driver.connect()


def test_a_lost_answer_is_asked_for_again_and_a_dead_bus_is_a_lost_connection_that_comes_back(
    arm: RemoteSO101, driver: LeRobotDriver
) -> None:
    arm.faults(drop_next=1)
    read(driver)
    arm.faults(drop_reply=1.0)
    with pytest.raises(ConnectionLost, match="'arm'"):
        driver.read()
    with pytest.raises(ConnectionLost, match="does not stop"):
        driver.stop("hold")
    arm.faults(drop_reply=0.0)
    driver.connect()
    read(driver)


def test_an_answer_that_came_too_late_is_not_taken_for_the_next(arm: RemoteSO101, driver: LeRobotDriver) -> None:
    driver.stop("release")
    arm.faults(latency=0.7, mute=[2, 3, 4, 5, 6])
    with pytest.raises(ConnectionLost):
        driver.read()
    time.sleep(1.5)  # until all late answers, of shoulder_pan, have come
    arm.faults(latency=0.0, mute=[])
    arm.hand({"shoulder_pan": 0.9})
    time.sleep(1.0)
    assert read(driver)[0] == pytest.approx(np.degrees(angles(arm)[0]), abs=1)


def test_a_motor_that_does_not_answer_is_named(arm: RemoteSO101, folder: Path) -> None:
    arm.faults(mute=[3])
    with pytest.raises(ConnectionLost, match=r"no answer from 'elbow_flex' \(id 3\)"):
        LeRobotDriver(spec(arm, folder)).connect()
    arm.faults(mute=[1, 2, 3, 4, 5, 6])
    with pytest.raises(ConnectionLost, match="none of the motors answers"):
        LeRobotDriver(spec(arm, folder)).connect()


def test_a_robot_without_calibration_is_refused_with_the_command(
    arm: RemoteSO101, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the terminal was asked"))
    driver = LeRobotDriver(spec(arm, tmp_path))
    with pytest.raises(
        UserError, match=rf"lerobot-calibrate --robot.type=so101_follower --robot.port={arm.port} --robo"
    ):
        driver.connect()
    theirs = json.loads((folder / "arm.json").read_text())
    theirs["elbow_flex"]["homing_offset"] += 40
    (tmp_path / "arm.json").write_text(json.dumps(theirs))
    with pytest.raises(
        UserError, match="calibration of another arm: homing_offset of 'elbow_flex' is 65 in the motor, 105"
    ):
        driver.connect()
    assert not any(arm.state()["torque"].values())


def test_a_port_that_is_not_there_or_in_use_is_refused(arm: RemoteSO101, folder: Path, driver: LeRobotDriver) -> None:
    with pytest.raises(UserError, match="port /dev/ttyACM99 is not there"):
        LeRobotDriver(spec(arm, folder, port="/dev/ttyACM99")).connect()
    with pytest.raises(BusyError, match=f"port {arm.port} is in use"):
        LeRobotDriver(spec(arm, folder)).connect()
    read(driver)  # the one that has it goes on


def test_types_and_configurations_that_lerobot_does_not_know_are_named() -> None:
    with pytest.raises(NotFoundError, match=r"unknown robot type 'so101_folower'\. Did you mean 'so101_follower'"):
        LeRobotDriver(LeRobotSpec(type="so101_folower"))
    with pytest.raises(SpecError, match="prot"):
        LeRobotDriver(LeRobotSpec(type="so101_follower", config={"prot": "/dev/ttyACM0"}))
    with pytest.raises(ValueError, match=r"cameras\.top: width is missing"):
        SO101Spec(port="/dev/ttyACM0", id="x", cameras={"top": {"type": "opencv", "index_or_path": 0}})


DRIVING = """
import sys, time, serial
from rlsvc.robots.feetech import Packet
port = serial.Serial(sys.argv[1], 1_000_000)
for step in range(100000):
    goals = b"".join(bytes([id, *(2048 + (step * 3) % 600).to_bytes(2, "little")]) for id in (1, 5, 6))
    port.write(Packet(254, 0x83, bytes([42, 2]) + goals).encode())
    if not step:
        torque = b"".join(bytes([id, 1]) for id in range(1, 7))
        port.write(Packet(254, 0x83, bytes([40, 1]) + torque).encode())
        print("driving", flush=True)
    time.sleep(0.01)
"""


@pytest.mark.parametrize("torque", ["hold", "release"])
def test_the_stopper_stops_the_arm_while_the_process_that_drives_it_hangs(
    arm: RemoteSO101, driver: LeRobotDriver, torque: str
) -> None:
    stopper = driver.stopper()
    stop = stopper.load()
    driver.close()
    with subprocess.Popen([sys.executable, "-c", DRIVING, arm.port], stdout=subprocess.PIPE) as driving:
        try:
            assert driving.stdout is not None
            driving.stdout.readline()
            time.sleep(0.5)
            os.kill(driving.pid, signal.SIGSTOP)
            stop(**stopper.arguments, torque=torque)
            stopped = angles(arm)
            assert list(arm.state()["torque"].values()) == [torque == "hold"] * 6
            assert at_rest(arm)[[0, 4]] == pytest.approx(stopped[[0, 4]], abs=0.2)
        finally:
            driving.kill()
    driver.connect()


def test_the_stopper_says_which_motors_did_not_obey_and_stops_the_others(
    arm: RemoteSO101, driver: LeRobotDriver
) -> None:
    stopper = driver.stopper()
    arm.faults(mute=[4])
    with pytest.raises(ConnectionLost, match=f"{arm.port}: motors 4 do not answer"):
        stopper.load()(**stopper.arguments, torque="release")
    assert list(arm.state()["torque"].values()) == [False, False, False, True, False, False]
    arm.faults(mute=[])


def test_the_stopper_is_loaded_without_lerobot_or_torch() -> None:
    code = "import sys, rlsvc.robots.stop_feetech; print({'lerobot', 'torch', 'jax'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
