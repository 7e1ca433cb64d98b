"""The table of drivers, and of what people move robots with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost, Driver
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.kinematics import make_sites
from rlsvc.robots.operator import Jog, Operator
from rlsvc.robots.station import Station, Teleop
from rlsvc.spec.station import DriverSpec, JogSpec, StationSpec, TeleopSpec


def make_driver(spec: DriverSpec) -> Driver:
    """The driver of a specification; nothing is opened.

    Raises:
        UserError: what it needs is not installed, or its configuration does not fit.
    """
    try:
        return DRIVERS[spec.name](spec)
    except ImportError as error:
        raise UserError(
            f"driver '{spec.name}' needs a package that is not installed ({error}); install rlsvc[robot]"
        ) from error


def _lerobot(spec: Any) -> Driver:
    from rlsvc.robots.lerobot import LeRobotDriver

    return LeRobotDriver(spec)


def _dobot(spec: Any) -> Driver:
    from rlsvc.robots.dobot import DobotDriver

    return DobotDriver(spec)


DRIVERS: dict[str, Callable[[Any], Driver]] = {
    "so101": _lerobot,
    "so100": _lerobot,
    "lerobot": _lerobot,
    "dobot": _dobot,
}


def open_station(spec: StationSpec, driver: Driver, stack: ExitStack) -> Station:
    """A robot that is connected, behind its guard, with what people move it with.

    Args:
        spec: of it.
        driver: that `make_driver` made.
        stack: stops the robot and closes everything.

    Raises:
        BusyError: another process drives it.
        UserError, ConnectionLost: as `Driver.connect`, `make_sites` and `make_teleop`.
    """
    sites = make_sites(spec.guard.workspace, driver.action) if spec.guard.workspace else None
    teleop = make_teleop(spec.teleop, driver.action, stack)
    robot = stack.enter_context(GuardedRobot(spec.id, driver, spec.guard, spec.rate_hz, sites=sites))
    return Station(robot, Operator(robot), rate_hz=spec.rate_hz, max_skew_s=spec.max_skew_s, teleop=teleop)


class Leader:
    """A teleoperator that says where the robot is to be: a leader arm.

    One that was lost is connected anew when somebody takes over again.
    """

    def __init__(self, device: Any) -> None:
        """Takes a LeRobotTeleop that is connected."""
        self._device, self._lost = device, False

    def read(self, measured: np.ndarray, dt: float) -> np.ndarray:
        """See Teleop. Raises ConnectionLost."""
        try:
            return self._device.read()
        except ConnectionLost:
            self._lost = True
            raise

    def sent(self, command: np.ndarray) -> None:
        """See Teleop."""

    def reset(self) -> None:
        """See Teleop. Raises UserError, ConnectionLost."""
        if self._lost:
            self._device.connect()
            self._lost = False


def make_teleop(spec: TeleopSpec | None, action: Feature, stack: ExitStack) -> Teleop | None:
    """What a person moves the robot with, connected; None for nothing.

    Args:
        spec: which.
        action: of the robot, [A].
        stack: closes it.

    Raises:
        UserError: it is not there, or was made for another robot.
        ConnectionLost: it does not answer.
    """
    if spec is None:
        return None
    if isinstance(spec, JogSpec):
        return Jog(np.array(spec.speed))
    from rlsvc.robots.teleop_lerobot import LeRobotTeleop

    device = LeRobotTeleop(spec, action)
    device.connect()
    stack.callback(device.close)
    return Leader(device)
