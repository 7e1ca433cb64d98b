"""What tests with a virtual SO-101 in a process of its own share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot.motors.feetech import feetech

from rlsvc.robots.virtual.so101 import RemoteSO101
from rlsvc.robots.virtual.so101_sim import JOINTS
from rlsvc.spec.lerobot_robot import SO101Spec

PATIENCE_MS = 400


@contextmanager
def patient_lerobot() -> Iterator[None]:
    """Let LeRobot wait longer for a servo than its 50 ms: the process of the virtual one gets its turn when it does."""
    wait = feetech.patch_setPacketTimeout

    def longer(self: Any, length: int) -> None:
        wait(self, length)
        self.packet_timeout += PATIENCE_MS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feetech, "patch_setPacketTimeout", longer)
        yield


def spec(arm: RemoteSO101, folder: Path, **changes: object) -> SO101Spec:
    return SO101Spec.model_validate({"port": arm.port, "id": "arm", "calibration_dir": folder, **changes})


def angles(arm: RemoteSO101) -> np.ndarray:
    """[6] rad."""
    told = arm.state()["angles"]
    return np.array([told[joint] for joint in JOINTS])


def at_rest(arm: RemoteSO101, timeout: float = 5.0) -> np.ndarray:
    """The angles once nothing moves any more, rad."""
    until = time.monotonic() + timeout
    # On a busy machine the simulation lags: an arm that has had no time to begin is not at rest.
    begun = arm.state()["time"] + 0.1
    while time.monotonic() < until:
        time.sleep(0.1)
        state = arm.state()
        if state["time"] > begun and max(abs(value) for value in state["velocities"].values()) < 0.01:
            break
    return angles(arm)


def reached(arm: RemoteSO101, pose: dict[str, float]) -> bool:
    """Whether all joints of the pose are where it says, to a degree."""
    told = arm.state()["angles"]
    return all(abs(told[joint] - angle) < 0.0175 for joint, angle in pose.items())


def take(arm: RemoteSO101, pose: dict[str, float], timeout: float = 20.0) -> None:
    """Bring joints somewhere by hand, and keep them there."""
    arm.hand(pose)
    until = time.monotonic() + timeout
    while not reached(arm, pose):
        assert time.monotonic() < until, f"{pose} was not reached: {arm.state()['angles']}"
        time.sleep(0.05)


def let_go(arm: RemoteSO101) -> None:
    arm.hand(dict.fromkeys(JOINTS))
