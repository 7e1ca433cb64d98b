"""What the driver makes of cameras that are not there or see nothing, and of third-party robots."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from virtual_arm import patient_lerobot, spec

from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.lerobot import LeRobotDriver
from rlsvc.robots.virtual.so101 import RemoteSO101, start
from rlsvc.spec.lerobot_robot import LeRobotSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module")
def arm(folder: Path) -> Iterator[RemoteSO101]:
    options = ("--cameras", "front,wrist", "--size", "160x120", "--fps", "20", "--id", "arm")
    with patient_lerobot(), start(*options, "--calibration-dir", str(folder)) as arm:
        yield arm


def camera(url: str) -> dict[str, object]:
    return {"type": "mjpeg", "url": url, "width": 160, "height": 120, "fps": 20}


def read_on(driver: LeRobotDriver, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        driver.read()
        time.sleep(0.05)


@pytest.mark.render
def test_frames_are_stamped_when_they_were_captured(arm: RemoteSO101, folder: Path) -> None:
    driver = LeRobotDriver(spec(arm, folder, cameras={name: camera(url) for name, url in arm.cameras.items()}))
    driver.connect()
    try:
        time.sleep(0.5)
        reading = driver.read()
        for name in ("observation.images.front", "observation.images.wrist"):
            assert reading.values[name].shape == (120, 160, 3)
            assert 0.0 < time.monotonic() - reading.stamps[name] < 2.0
        arm.faults(camera={"front": "silent"})
        time.sleep(0.3)
        first = driver.read().stamps["observation.images.front"]
        time.sleep(0.2)
        again = driver.read()
        assert again.stamps["observation.images.front"] == pytest.approx(first, abs=1e-3)  # it grows older
        assert again.stamps["observation.images.wrist"] > first
        with pytest.raises(ConnectionLost, match=r"front\.mjpg.*ms old|front\.mjpg.*has ended"):
            read_on(driver)
    finally:
        arm.faults(camera={"front": None})
        driver.stop("release")
        driver.close()


@pytest.mark.slow
@pytest.mark.render
def test_a_frozen_camera_is_a_lost_connection_and_a_black_one_is_not_connected_to(
    arm: RemoteSO101, folder: Path
) -> None:
    driver = LeRobotDriver(spec(arm, folder, cameras={name: camera(url) for name, url in arm.cameras.items()}))
    driver.connect()
    try:
        arm.faults(camera={"front": "frozen"})
        with pytest.raises(ConnectionLost, match="camera 'front' is frozen"):
            read_on(driver)
        arm.faults(camera={"front": None, "wrist": "black"})
        time.sleep(0.5)
        with pytest.raises(UserError, match="camera 'wrist' gives black frames"):
            driver.connect()
        missing = arm.cameras["front"].replace("front", "side")
        with pytest.raises(UserError, match=r"camera 'side' of robot 'arm' is not there: .*Not Found"):
            LeRobotDriver(spec(arm, folder, cameras={"side": camera(missing)})).connect()
        other = camera(arm.cameras["front"]) | {"width": 320}
        with pytest.raises(UserError, match="sends 160x120, expected 320x120"):
            LeRobotDriver(spec(arm, folder, cameras={"front": other})).connect()
    finally:
        arm.faults(camera={"front": None, "wrist": None})
        driver.close()


PLUGIN = """
    from dataclasses import dataclass
    import numpy as np
    from lerobot.robots import Robot, RobotConfig

    @RobotConfig.register_subclass("toy_sled")
    @dataclass
    class ToySledConfig(RobotConfig):
        speed: float = 1.0

    class ToySled(Robot):
        config_class, name = ToySledConfig, "toy_sled"

        def __init__(self, config):
            super().__init__(config)
            self.config, self.x, self.there = config, 0.0, False

        observation_features = {"x.pos": float, "eye": (4, 6, 3)}
        action_features = {"x.pos": float}
        is_connected = property(lambda self: self.there)
        is_calibrated = True

        def connect(self, calibrate=True):
            self.there = True

        def disconnect(self):
            self.there = False

        def calibrate(self): ...
        def configure(self): ...

        def get_observation(self):
            return {"x.pos": self.x, "eye": np.full((4, 6, 3), 200, np.uint8)}

        def send_action(self, action):
            self.x = action["x.pos"]
            return action
"""


def test_a_third_party_robot_is_found_and_one_that_nothing_else_can_stop_is_taken_only_knowingly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, info = tmp_path / "lerobot_robot_toy_sled", tmp_path / "lerobot_robot_toy_sled-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("from .toy import ToySled, ToySledConfig\n")
    (package / "toy.py").write_text(textwrap.dedent(PLUGIN))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lerobot_robot_toy_sled\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"id": "sled", "calibration_dir": str(tmp_path)}
    with pytest.raises(UserError, match=r"'toy_sled': its motors are not on a Feetech bus.*allow_unstoppable: true"):
        LeRobotDriver(LeRobotSpec(type="toy_sled", config=config))
    driver = LeRobotDriver(LeRobotSpec(type="toy_sled", config=config, allow_unstoppable=True))
    driver.connect()
    assert driver.action.names == ("x.pos",)
    assert driver.grabbed == frozenset()
    driver.send(np.array([0.25], np.float32))
    reading = driver.read()
    assert reading.values["observation.state"].tolist() == [0.25]
    assert reading.values["observation.images.eye"].shape == (4, 6, 3)
    driver.stop("hold")
    with pytest.raises(UserError, match="no way to release"):
        driver.stop("release")
    stopper = driver.stopper()
    with pytest.raises(ConnectionLost, match=r"'sled' \(toy_sled\) can't be stopped"):
        stopper.load()(**stopper.arguments, torque="hold")
    driver.close()
