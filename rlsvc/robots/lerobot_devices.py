"""LeRobot's robots and teleoperators, found by the name of their type, and their motors looked at before they are used.

What LeRobot does when a device is not as expected is to ask the terminal. Here nothing asks: a device that is not ready
is refused, by name and with what to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Iterator
from typing import Any, Literal

import draccus
from lerobot.motors.feetech import FeetechMotorsBus
from lerobot.motors.motors_bus import MotorsBusBase, SerialMotorsBus
from lerobot.robots import Robot, RobotConfig, make_robot_from_config
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig, make_teleoperator_from_config
from lerobot.utils.errors import DeviceNotConnectedError
from lerobot.utils.import_utils import register_third_party_plugins

from rlsvc.core.errors import SpecError, UserError, unknown_name
from rlsvc.robots import lerobot_camera
from rlsvc.robots.api import ConnectionLost
from rlsvc.robots.port import PortClaim

Kind = Literal["robot", "teleop"]
"""As LeRobot's commands call them: `--robot.type=`, `--teleop.type=`."""
FAILURES = (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError, IndexError, DeviceNotConnectedError)
"""What LeRobot raises when hardware does not do what it should; IndexError comes from Feetech's library when an answer
is shorter than it expects."""
TRIES = 3
"""To connect, and to hear from the first motor that is silent."""

_ = lerobot_camera  # importing it makes its type of camera known


def configure(kind: Kind, type: str, config: dict[str, Any]) -> Any:
    """LeRobot's configuration of a device.

    Args:
        kind: what it is.
        type: its name in LeRobot, or in an installed `lerobot_robot_*` or `lerobot_teleoperator_*` package.
        config: the fields of its configuration, as in LeRobot's YAML files.

    Raises:
        NotFoundError: no such type.
        SpecError: the fields do not fit.
    """
    base = RobotConfig if kind == "robot" else TeleoperatorConfig
    _register("lerobot.robots" if kind == "robot" else "lerobot.teleoperators")
    _register("lerobot.cameras")
    register_third_party_plugins()
    choices = base.get_known_choices()
    if type not in choices:
        raise unknown_name(f"{kind} type", type, choices)
    try:
        return draccus.decode(base, {"type": type, **config})
    except (draccus.utils.DraccusException, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise SpecError(f"LeRobot does not take this configuration of a {kind} of type '{type}': {reason}") from error


def _register(package: str) -> None:
    """Import what LeRobot has, so that its types are known; those whose libraries are not installed stay unknown."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if module.ispkg:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{package}.{module.name}")


def keep_torque(config: Any) -> None:
    """Let a robot's motors stay as they are when it is disconnected: the guard says what torque does."""
    for field in dataclasses.fields(config):
        if field.name == "disable_torque_on_disconnect":
            config.disable_torque_on_disconnect = False
        elif dataclasses.is_dataclass(value := getattr(config, field.name)):
            keep_torque(value)


def make(kind: Kind, config: Any) -> Robot | Teleoperator:
    """The device; nothing is opened.

    Raises:
        UserError: it can't be made, most often because a library of its own is missing.
    """
    try:
        return make_robot_from_config(config) if kind == "robot" else make_teleoperator_from_config(config)
    except (ImportError, ValueError) as error:
        raise UserError(f"the {kind} of type '{config.type}' can't be made: {error}") from error


def features(what: str, given: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, tuple[int, int, int]]]:
    """Numbers and images of a device.

    Args:
        what: for messages.
        given: its `observation_features` or `action_features`: types and shapes by name, or names under "names".

    Returns:
        Names of the numbers, in order, and shapes (height, width, 3) of the images by name.

    Raises:
        UserError: a feature that is neither.
    """
    if set(given) == {"dtype", "shape", "names"}:
        names = given["names"]
        return tuple(names), {}
    numbers: list[str] = []
    images: dict[str, tuple[int, int, int]] = {}
    for name, value in given.items():
        if value in (float, int):
            numbers.append(name)
        elif isinstance(value, tuple) and len(value) == 3 and value[2] == 3:
            images[name] = (int(value[0]), int(value[1]), 3)
        else:
            raise UserError(f"{what}: '{name}' is {value}; expected a number or a colour image (height, width, 3)")
    return tuple(numbers), images


def buses(device: object) -> Iterator[MotorsBusBase]:
    """The motor buses of a device, those of its arms included."""
    for value in vars(device).values():
        if isinstance(value, MotorsBusBase):
            yield value
        elif isinstance(value, Robot | Teleoperator):
            yield from buses(value)


def claim(config: Any) -> list[PortClaim]:
    """Claim every serial port that a configuration names.

    Raises:
        UserError, BusyError: see PortClaim.
    """
    claims: list[PortClaim] = []
    try:
        claims.extend(PortClaim(path) for path in _paths(config))
    except UserError:
        for each in claims:
            each.free()
        raise
    return claims


def _paths(config: Any) -> Iterator[str]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _paths(value)
        elif "port" in field.name and isinstance(value, str) and value.startswith("/dev/"):
            yield value


class _SilentError(ConnectionLost):
    """Motors that were asked several times already."""


def start(kind: Kind, type: str, config: Any, hold: bool) -> Any:
    """A device, connected, without a question. What fails once on a bus that loses a packet now and then is done again.

    Args:
        kind: what it is.
        type: its name in LeRobot.
        config: from `configure`.
        hold: make the present positions of Feetech motors their goals, so that torque, when it comes, moves nothing.

    Raises:
        UserError: no calibration file or one of another arm; a camera that is not there.
        ConnectionLost: a motor that does not answer, or anything else that fails.
    """
    for tries_left in reversed(range(TRIES)):
        device = make(kind, config)
        try:
            _check(kind, type, device, hold)
            _connect(kind, type, device)
            return device
        except ConnectionLost as error:
            close(device)
            if not tries_left or isinstance(error, _SilentError):
                raise
        except BaseException:
            close(device)
            raise
    raise AssertionError("unreachable")


def _check(kind: Kind, type: str, device: Any, hold: bool) -> None:
    """Ask every motor whether it is there and calibrated as the device's file says; nothing moves."""
    for owner in [device, *(value for value in vars(device).values() if isinstance(value, Robot | Teleoperator))]:
        for bus in (value for value in vars(owner).values() if isinstance(value, SerialMotorsBus)):
            try:
                bus.connect(handshake=False)
                _check_bus(kind, type, device, owner, bus, hold)
            except FAILURES as error:
                if isinstance(error, UserError):
                    raise
                raise ConnectionLost(f"{kind} on {bus.port}: {error}") from error
            finally:
                if bus.is_connected:
                    bus.disconnect(disable_torque=False)


def _check_bus(kind: Kind, type: str, device: Any, owner: Any, bus: SerialMotorsBus, hold: bool) -> None:
    silent: list[str] = []
    for name in bus.motors:
        if not _answers(bus, name, 1 if silent else TRIES):
            silent.append(name)
    if silent:
        listed = ", ".join(f"'{name}' (id {bus.motors[name].id})" for name in silent)
        which = "none of the motors answers" if len(silent) == len(bus.motors) else f"no answer from {listed}"
        raise _SilentError(f"{kind} on {bus.port}: {which}; check power and cables")
    command = f"lerobot-calibrate --{kind}.type={type} --{kind}.port={bus.port} --{kind}.id={device.id}"
    if not owner.calibration:
        raise UserError(
            f"no calibration of {kind} '{owner.id}': {owner.calibration_fpath} is not there. Run: {command}"
        )
    there = bus.read_calibration()
    for name, expected in owner.calibration.items():
        found = there.get(name)
        for field in ("homing_offset", "range_min", "range_max"):
            if found is None or getattr(found, field) != getattr(expected, field):
                raise UserError(
                    f"the motors of {kind} '{owner.id}' on {bus.port} have a calibration of another arm: {field} of "
                    f"'{name}' is {getattr(found, field, 'not there')} in the motor, {getattr(expected, field)} in "
                    f"{owner.calibration_fpath}. Take the file of this arm, or run: {command}"
                )
    if hold and isinstance(bus, FeetechMotorsBus):
        bus.sync_write(
            "Goal_Position", bus.sync_read("Present_Position", normalize=False, num_retry=2), normalize=False
        )


def drain(bus: MotorsBusBase) -> None:
    """Forget what has come on a serial bus.

    Feetech's and Dynamixel's libraries do not: an answer that came too late would be taken for that to the next
    question, and every position after it would be one reading old.
    """
    if isinstance(bus, SerialMotorsBus) and bus.is_connected:
        bus.port_handler.ser.reset_input_buffer()


def _answers(bus: SerialMotorsBus, name: str, tries: int) -> bool:
    for _ in range(tries):
        drain(bus)
        with contextlib.suppress(IndexError):
            if bus.ping(name) is not None:
                return True
    return False


def _connect(kind: Kind, type: str, device: Any) -> None:
    takes = inspect.signature(device.connect).parameters
    try:
        device.connect(**({"calibrate": False} if "calibrate" in takes else {}))
    except FAILURES as error:
        if name := _camera_that_failed(device, error):
            raise UserError(f"camera '{name}' of {kind} '{device.id}' is not there: {error}") from error
        raise ConnectionLost(f"{kind} '{device.id}' ({type}) does not connect: {error}") from error
    # Some answer None where nothing is to be calibrated.
    if device.is_calibrated is False:
        raise UserError(
            f"{kind} '{device.id}' ({type}) is not calibrated. Run: "
            f"lerobot-calibrate --{kind}.type={type} --{kind}.id={device.id} ..."
        )


def _camera_that_failed(device: Any, error: BaseException) -> str | None:
    """The name of the camera in whose code an error arose."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for name, camera in getattr(device, "cameras", {}).items():
        if any(owner is camera for owner in owners):
            return name
    return None


def close(device: Any) -> None:
    """Close what is open of a device, half of it too; torque stays as it is. Never raises."""
    with contextlib.suppress(Exception):
        if device.is_connected:
            device.disconnect()
    for bus in buses(device):
        with contextlib.suppress(Exception):
            if bus.is_connected:
                bus.disconnect(disable_torque=False)
    for camera in getattr(device, "cameras", {}).values():
        with contextlib.suppress(Exception):
            camera.disconnect()
