"""An arm of two joints for tests: it stands where it was last sent, and writes down what reached it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.robots.api import ConnectionLost, Reading, Stopper

NAMES = ("shoulder.pos", "elbow.pos")
CAMERA = "observation.images.top"
GUARD = {
    "low": [-1, -1], "high": [1, 1], "velocity": [2, 2], "acceleration": [100, 100], "step": [1, 1], "workspace": None,
    "time_to_live_s": 1.0, "expiry_s": 1.0, "torque": "hold", "on_limit": "clip",
}  # fmt: skip
"""Limits for it, as a person writes them."""


class FakeArm:
    """Follows at once; `log` gets a line for each thing that reaches the hardware, from whichever process."""

    def __init__(self, log: Path, camera: bool = False) -> None:
        self.log = log
        self.position = np.zeros(2)
        self.observation = {"observation.state": Feature((2,), "float32", "rad", NAMES)}
        if camera:
            self.observation[CAMERA] = Feature((48, 64, 3), "uint8")
        self.frame = np.full((48, 64, 3), (200, 30, 30), np.uint8)
        self.action = Feature((2,), "float32", "rad", NAMES)
        self.lost = self.broken = False
        self.closed = False
        self.connects = 0

    def connect(self) -> None:
        self.closed = False
        self.connects += 1

    def read(self) -> Reading:
        if self.lost:
            raise ConnectionLost("the arm does not answer")
        now = time.monotonic()
        values = {"observation.state": self.position.astype(np.float32)}
        if CAMERA in self.observation:
            values[CAMERA] = self.frame
        return Reading(values, dict.fromkeys(values, now))

    def send(self, command: np.ndarray) -> None:
        if self.lost:
            raise ConnectionLost("the arm does not answer")
        self.position = np.array(command)
        write(self.log, "send", position=self.position.tolist())

    def stop(self, torque: str) -> None:
        if self.broken:
            raise ZeroDivisionError("a fault of the driver")
        if self.lost:
            raise ConnectionLost("the arm does not answer")
        write(self.log, "stop", torque=torque, by="driver")

    def close(self) -> None:
        self.closed = True

    def stopper(self) -> Stopper:
        return Stopper("fake_arm:stop_from_outside", {"log": str(self.log)})


def stop_from_outside(log: str, torque: str) -> None:
    write(Path(log), "stop", torque=torque, by="stopper")


def write(log: Path, what: str, **more: object) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}) + "\n"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)


def read_log(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
