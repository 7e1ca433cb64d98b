"""What a robot's driver is.

A driver turns one robot into numbers: it reads joints and cameras and takes absolute commands. It knows nothing of
rates, limits, people, episodes or policies. Nothing but the guard (rlsvc/robots/guarded.py) calls `send`.

Letters: A action dimensions, H height, W width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlsvc.core.contract import Feature

Torque = Literal["hold", "release"]
"""What a stopped robot's motors do: hold the position where it stopped, or let go."""


class ConnectionLost(Exception):  # noqa: N818 - a loss is what it is
    """The robot, or one of its cameras, does not answer. The episode is given up, and the connection made anew."""


@dataclass(frozen=True)
class Reading:
    """What a robot measured.

    Attributes:
        values: by LeRobot's names: `observation.state` [A] float32, `observation.images.<camera>` [H, W, 3] uint8.
        stamps: by the same names, `time.monotonic()` of this host when it was captured, s. A camera gives its newest
            frame, which may be older than the joints.
    """

    values: dict[str, np.ndarray]
    stamps: dict[str, float]


@dataclass(frozen=True)
class Stopper:
    """How another process stops the robot when the one that drives it is dead or hangs.

    Attributes:
        path: `module:function`; the function takes `arguments` and `torque`, opens a connection of its own, stops the
            robot and returns, within a fraction of a second. It imports little, since it is loaded ahead.
        arguments: plain values.
    """

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., None]:
        """The function."""
        module, name = self.path.split(":")
        return getattr(importlib.import_module(module), name)


class Driver(Protocol):
    """One robot's hardware. Calls come from one thread at a time.

    Attributes:
        observation: by name what `read` gives; `observation.state` has the same `names` and unit as `action` where
            joints are commanded by position.
        action: [A] float32, with `names` and `unit`; bounds only where the hardware itself has them.
    """

    observation: dict[str, Feature]
    action: Feature

    def connect(self) -> None:
        """Open the robot and its cameras. Nothing moves.

        Raises:
            UserError: a port that is not there or in use, a calibration of another arm, a camera that is not there, by
                name.
            ConnectionLost: it is there and does not answer.
        """
        ...

    def read(self) -> Reading:
        """The newest measurement. Raises ConnectionLost."""
        ...

    def send(self, command: np.ndarray) -> None:
        """Command [A] floats, absolute, in the unit of `action`. Raises ConnectionLost."""
        ...

    def stop(self, torque: Torque) -> None:
        """Stop where it is, and hold or release. Raises ConnectionLost."""
        ...

    def close(self) -> None:
        """Close the connection; motors stay as `stop` left them. Never raises."""
        ...

    def stopper(self) -> Stopper:
        """See Stopper; called after `connect`."""
        ...
