"""LeRobot's cameras as drivers read them, with a camera of LeRobot's own interface that counts its frames."""

from __future__ import annotations

import sys
import time
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from lerobot.cameras import Camera, CameraConfig

from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.cameras import Cameras


@CameraConfig.register_subclass("counting")
@dataclass(kw_only=True)
class CountingCameraConfig(CameraConfig):
    broken: bool = False


class CountingCamera(Camera):
    """Frame n, all pixels n, is captured when `capture` is called."""

    def __init__(self, config: CountingCameraConfig) -> None:
        super().__init__(config)
        self.config, self.count, self.latest_timestamp, self.is_open = config, 0, None, False

    @property
    def is_connected(self) -> bool:
        return self.is_open

    @staticmethod
    def find_cameras() -> list[dict[str, Any]]:
        return []

    def connect(self, warmup: bool = True) -> None:
        if self.config.broken:
            raise RuntimeError("no such device")
        self.is_open = True
        self.capture()

    def capture(self) -> None:
        self.count, self.latest_timestamp = self.count + 1, time.perf_counter()

    def read(self) -> np.ndarray:
        return np.full((self.height, self.width, 3), self.count, np.uint8)

    def async_read(self, timeout_ms: float = 200) -> np.ndarray:
        return self.read()

    def read_latest(self, max_age_ms: int = 500) -> np.ndarray:
        assert self.latest_timestamp is not None
        if (time.perf_counter() - self.latest_timestamp) * 1e3 > max_age_ms:
            raise TimeoutError("latest frame is too old")
        return self.read()

    def disconnect(self) -> None:
        self.is_open = False


@pytest.fixture(autouse=True)
def plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeRobot looks for a camera in the package of its configuration, as a third-party plug-in lays them out."""
    package = types.ModuleType("lerobot_camera_counting")
    package.CountingCamera = CountingCamera  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(CountingCameraConfig, "__module__", "lerobot_camera_counting.config")


def cameras(**configs: dict[str, Any]) -> Cameras:
    return Cameras(
        {name: {"type": "counting", "width": 8, "height": 6, **config} for name, config in configs.items()}, 0.2
    )


def test_frames_come_by_name_with_the_moment_of_their_capture():
    group = cameras(top={}, wrist={})
    assert group.features["observation.images.top"].shape == (6, 8, 3)
    group.connect()
    captured = time.monotonic()
    time.sleep(0.03)
    group._cameras["wrist"].capture()
    frames, stamps = group.read()
    assert (frames["observation.images.top"] == 1).all()
    assert (frames["observation.images.wrist"] == 2).all()
    # The top camera's frame is as old as it is, whenever it is read.
    assert stamps["observation.images.top"] <= captured + 0.005
    assert stamps["observation.images.wrist"] >= captured + 0.025
    group.close()
    assert not group._cameras["top"].is_open


def test_a_frame_that_is_too_old_is_a_lost_camera_by_name():
    group = cameras(top={})
    group.connect()
    group._cameras["top"].latest_timestamp -= 1.0
    with pytest.raises(ConnectionLost, match="camera 'top': latest frame is too old"):
        group.read()


def test_a_frame_of_another_size_is_refused():
    group = cameras(top={})
    group.connect()
    group._cameras["top"].height = 12
    with pytest.raises(ConnectionLost, match=r"camera 'top': got a frame \(12, 8, 3\) uint8, expected \(6, 8, 3\)"):
        group.read()


def test_one_camera_that_does_not_open_closes_those_that_did():
    group = cameras(top={}, wrist={"broken": True})
    with pytest.raises(UserError, match=r"camera 'wrist' .CountingCamera. does not open: no such device"):
        group.connect()
    assert not group._cameras["top"].is_open
