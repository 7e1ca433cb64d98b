"""Between the control loop, which must not wait, and the web page, which may be slow or gone.

The loop publishes its newest step; pages read whatever is newest. Nothing is queued, so that a page that is slow sees
fewer frames, not old ones.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import cv2  # here, since loading it in the middle of an episode would hold up the control loop
import numpy as np

from rlsvc.robots.guarded import STATE
from rlsvc.robots.operator import Jog
from rlsvc.robots.station import Station, Step

JPEG_QUALITY = 80


@dataclass
class Progress:
    """Where the session stands.

    Attributes:
        state: "waiting" for somebody to start an episode, "running", "resetting".
        episode: number of the present or next one, from 0.
        episodes: how many are wanted; None goes on until it is stopped.
        task: what the robot is to do.
        policy: version of the policy that acts; "" for none.
        said: the newest message for people: why an episode ended, what was saved.
    """

    state: str = "waiting"
    episode: int = 0
    episodes: int | None = None
    task: str = ""
    policy: str = ""
    said: str = ""


class ConsoleHub:
    """What pages show and say.

    Attributes:
        robot: guarded.
        operator: what people want.
        jog: hands on keys and sticks; None where the robot is moved by something else (a leader arm).
        progress: of the session.
        metrics: of the loop, by name.
    """

    def __init__(self, station: Station) -> None:
        self.robot, self.operator = station.robot, station.operator
        self.jog = station.teleop if isinstance(station.teleop, Jog) else None
        self.progress, self.metrics = Progress(), dict[str, float]()
        self._lock = threading.Lock()
        self._step: Step | None = None
        self._reward = math.nan
        self._images: dict[str, tuple[int, np.ndarray]] = {}
        self._frames = 0

    @property
    def cameras(self) -> list[str]:
        """Names of the cameras, without `observation.images.`."""
        return [name.rsplit(".", 1)[-1] for name, f in self.robot.driver.observation.items() if f.is_image]

    def publish(self, step: Step, reward: float = math.nan) -> None:
        """The loop's newest step; returns at once."""
        with self._lock:
            self._step, self._reward = step, reward
            self._frames += 1
            for name, value in step.reading.values.items():
                if value.dtype == np.uint8 and value.ndim == 3:
                    self._images[name.rsplit(".", 1)[-1]] = (self._frames, value)

    def frame(self, camera: str, after: int) -> tuple[int, bytes] | None:
        """A camera's newest frame as JPEG and its number, None when there is none newer than `after`."""
        with self._lock:
            number, image = self._images.get(camera, (0, None))
        if image is None or number <= after:
            return None
        done, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
        return (number, data.tobytes()) if done else None

    def snapshot(self) -> dict[str, Any]:
        """What a page shows, plain JSON types; NaN is null."""
        with self._lock:
            step, reward = self._step, self._reward
        grant, stopped = self.robot.lease.grant, self.robot.stopped
        action = self.robot.driver.action
        return {
            "type": "state",
            **vars(self.progress),
            "cameras": self.cameras,
            "names": list(action.names),
            "unit": action.unit,
            "low": list(self.robot.spec.low),
            "high": list(self.robot.spec.high),
            "measured": None if step is None else _plain(self.robot.positions(step.reading.values[STATE])),
            "sent": None if step is None else _plain(step.action),
            "commanded": None if step is None else _plain(step.commanded),
            "tick": -1 if step is None else step.tick,
            "actor": "" if step is None else step.actor,
            "intervention": step is not None and step.intervention,
            "verdict": "" if step is None or step.verdict is None else step.verdict.why,
            "reward": None if math.isnan(reward) else reward,
            "holder": None if grant is None else {"name": grant.holder, "is_person": grant.is_person},
            "stopped": None if stopped is None else {"why": stopped.why, "by": stopped.by},
            "jog": self.jog is not None,
            "metrics": {name: round(value, 3) for name, value in self.metrics.items()},
        }


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if not math.isfinite(x) else round(float(x), 5) for x in values]
