"""What tests with a virtual SO-101 in a process of its own share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlsvc.robots.virtual.so101 import RemoteSO101
from rlsvc.robots.virtual.so101_sim import JOINTS
from rlsvc.spec.lerobot_robot import SO101Spec

HOME = {"shoulder_pan": 0.0, "shoulder_lift": -0.6, "elbow_flex": 0.6, "wrist_flex": 0.4, "wrist_roll": 0.0}


def patiently[T](attempt: Callable[[], T], tries: int = 6) -> T:
    """LeRobot waits 50 ms for a servo, once; the process of the virtual one may be kept longer on a busy machine."""
    for _ in range(tries - 1):
        try:
            return attempt()
        except ConnectionError:
            time.sleep(0.2)
    return attempt()


def spec(arm: RemoteSO101, folder: Path, **changes: object) -> SO101Spec:
    return SO101Spec.model_validate({"port": arm.port, "id": "arm", "calibration_dir": folder, **changes})


def angles(arm: RemoteSO101) -> np.ndarray:
    """[6] rad."""
    told = arm.state()["angles"]
    return np.array([told[joint] for joint in JOINTS])


def at_rest(arm: RemoteSO101, timeout: float = 5.0) -> np.ndarray:
    """The angles once nothing moves any more, rad."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        time.sleep(0.1)
        if max(abs(value) for value in arm.state()["velocities"].values()) < 0.01:
            break
    return angles(arm)


def take(arm: RemoteSO101, pose: dict[str, float] | None = None, seconds: float = 0.4) -> None:
    """Bring joints somewhere by hand, and keep them there."""
    arm.hand(pose or HOME)
    time.sleep(seconds)


def let_go(arm: RemoteSO101) -> None:
    arm.hand(dict.fromkeys(JOINTS))
