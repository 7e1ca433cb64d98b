"""Any teleoperator of LeRobot (leader arms, and what `lerobot_teleoperator_*` packages bring) as a source of commands.

Letters: A action dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import ContractError
from rlsvc.robots import lerobot_devices as devices
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.port import PortClaim
from rlsvc.spec.lerobot_robot import LeRobotTeleopSpec


class LeRobotTeleop:
    """A teleoperator whose numbers are those of the robot's action."""

    def __init__(self, spec: LeRobotTeleopSpec, action: Feature) -> None:
        """Nothing is opened.

        Args:
            spec: which one.
            action: of the robot's driver: [A] float32 with names.

        Raises:
            UserError: LeRobot does not know the type, or take the configuration.
            ContractError: it gives other numbers than the robot takes.
        """
        self.spec = spec
        self._action = action
        self._config = devices.configure("teleop", spec.type, spec.config)
        self._teleop: Any = devices.make("teleop", self._config)
        self._claims: list[PortClaim] = []
        given, _ = devices.features(f"teleop of type '{spec.type}', action", self._teleop.action_features)
        if set(given) != set(action.names):
            raise ContractError(
                f"teleop of type '{spec.type}' gives {', '.join(given)}; the robot takes {', '.join(action.names)}. "
                "Take one that was made for this robot"
            )

    def connect(self) -> None:
        """Open it; never asks the terminal.

        Raises:
            UserError: a port that is not there or in use, no calibration or one of another arm.
            ConnectionLost: it does not answer.
        """
        self.close()
        self._claims = devices.claim(self._config)
        try:
            self._teleop = devices.start("teleop", self.spec.type, self._config, hold=False)
        except BaseException:
            self.close()
            raise

    def read(self) -> np.ndarray:
        """What the person asks for: [A] float32, in the order, names and unit of the robot's action.

        Raises:
            ConnectionLost: it does not answer.
        """
        try:
            for bus in devices.buses(self._teleop):
                devices.drain(bus)
            got = self._teleop.get_action()
            return np.array([got[name] for name in self._action.names], np.float32)
        except (*devices.FAILURES, KeyError) as error:
            raise ConnectionLost(f"teleop '{self._teleop.id}' ({self.spec.type}): {error}") from error

    def close(self) -> None:
        """Close it. Never raises."""
        devices.close(self._teleop)
        for claim in self._claims:
            claim.free()
        self._claims = []
