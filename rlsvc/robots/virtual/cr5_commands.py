"""What the virtual CR5 understands on its dashboard and motion ports: one table, and how a command is taken apart.

Names, parameters, ranges and ErrorIDs are those of Dobot's guide (rlsvc/robots/dobot_wire.py), the options of ServoJ
those of github.com/Dobot-Arm/TCP-IP-Python-V3 : dobot_api.py. User and tool frames are the base and the flange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rlsvc.robots.virtual.cr5_arm import CR5Arm

OK, FAILED, UNKNOWN, COUNT, TYPE, RANGE = 0, -1, -10000, -20000, -30000, -40000
Values = str | None
"""What stands between the braces of a reply; None refuses with FAILED."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: a whole number or not, and its range, both ends allowed."""

    integer: bool
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Command:
    """One command of the table.

    Attributes:
        do: what it does, with the parameters as numbers and the options by name.
        parameters: that it must have.
        optional: how many of the last ones may be missing.
        options: by name, with their defaults; written `name=value`.
        motion: whether it belongs to the motion port.
    """

    do: Callable[..., Values]
    parameters: tuple[Parameter, ...] = ()
    optional: int = 0
    options: tuple[tuple[str, Parameter, float], ...] = ()
    motion: bool = False


class CommandError(Exception):
    """A command that is refused, with its ErrorID."""

    def __init__(self, error: int) -> None:
        super().__init__(error)
        self.error = error


def numbers(values: Sequence[float] | np.ndarray) -> str:
    """Values as the controller writes them."""
    return ",".join(f"{value:.6f}" for value in values)


def done(did: bool | None) -> Values:
    """No values, or a refusal."""
    return None if did is False else ""


def set_output(outputs: dict[int, int], index: int, level: int) -> Values:
    """Set one digital output; refused when there is no such one."""
    if index not in outputs:
        raise CommandError(RANGE - 1)
    outputs[index] = level
    return ""


def to_pose(arm: CR5Arm, pose: Sequence[float], speed: int) -> Values:
    """MovJ and MovL; the way of MovL is straight in the joints here, not in space."""
    joints = arm.solve(np.array(pose)) if arm.may_move else None
    return done(arm.may_move if joints is None else arm.queue(joints, speed))


def servo_pose(arm: CR5Arm, pose: Sequence[float]) -> Values:
    """ServoP, with the time of ServoJ."""
    joints = arm.solve(np.array(pose)) if arm.may_move else None
    return done(arm.may_move if joints is None else arm.servo(joints, 0.1))


def clear_error(arm: CR5Arm) -> Values:
    """Alarms off; the arm stays disabled if it was."""
    arm.alarms.clear()
    return ""


def speed_factor(arm: CR5Arm, percent: int) -> Values:
    """The speed of moves from point to point."""
    arm.speed_factor = percent
    return ""


def error_ids(arm: CR5Arm) -> Values:
    """The controller's alarms, then those of six servos, which have none."""
    return f"[[{','.join(map(str, arm.alarms))}],[],[],[],[],[],[]]"


_INDEX, _BIT, _PERCENT, _ANY = (
    Parameter(True, 1, 1000),
    Parameter(True, 0, 1),
    Parameter(True, 1, 100),
    Parameter(False),
)
_SIX = (_ANY,) * 6
_SPEEDS = tuple((name, _PERCENT, 100.0) for name in ("SpeedJ", "AccJ", "SpeedL", "AccL"))
_FRAMES = tuple((name, Parameter(True, 0, 9), 0.0) for name in ("User", "Tool"))
_SERVO = (
    ("t", Parameter(False, 0.02, 3600), 0.1),
    ("lookahead_time", Parameter(False, 20, 100), 50.0),
    ("gain", Parameter(False, 200, 1000), 500.0),
)
COMMANDS: dict[str, Command] = {
    # EnableRobot may tell the load, kg, and its centre, mm, which a kinematic arm does not feel.
    "EnableRobot": Command(lambda arm, *_: done(arm.enable()), (Parameter(False, 0, 5), *(_ANY,) * 3), 4),
    "DisableRobot": Command(lambda arm: done(arm.disable())),
    "ClearError": Command(clear_error),
    "ResetRobot": Command(lambda arm: done(arm.halt())),
    "StopScript": Command(lambda arm: done(arm.halt())),
    "EmergencyStop": Command(lambda arm: done(arm.emergency_stop())),
    "RobotMode": Command(lambda arm: str(arm.mode)),
    "GetErrorID": Command(error_ids),
    "SpeedFactor": Command(speed_factor, (_PERCENT,)),
    "GetAngle": Command(lambda arm: numbers(arm.q)),
    "GetPose": Command(lambda arm, *_: numbers(arm.pose), (Parameter(True, 0, 9),) * 2, 2),
    "DO": Command(lambda arm, i, level: set_output(arm.outputs, i, level), (_INDEX, _BIT)),
    "DOExecute": Command(lambda arm, i, level: set_output(arm.outputs, i, level), (_INDEX, _BIT)),
    "ToolDO": Command(lambda arm, i, level: set_output(arm.tool_outputs, i, level), (_INDEX, _BIT)),
    "ToolDOExecute": Command(lambda arm, i, level: set_output(arm.tool_outputs, i, level), (_INDEX, _BIT)),
    "ServoJ": Command(
        lambda arm, *q, t, lookahead_time, gain: done(arm.servo(np.array(q), t)), _SIX, 0, _SERVO, motion=True
    ),
    "ServoP": Command(lambda arm, *pose: servo_pose(arm, pose), _SIX, motion=True),
    "JointMovJ": Command(
        lambda arm, *q, SpeedJ, AccJ: done(arm.queue(np.array(q), int(SpeedJ))),  # noqa: N803 - Dobot's names
        _SIX,
        0,
        _SPEEDS[:2],
        motion=True,
    ),
    "MovJ": Command(
        lambda arm, *pose, SpeedJ, **_: to_pose(arm, pose, int(SpeedJ)),  # noqa: N803
        _SIX,
        0,
        _SPEEDS[:2] + _FRAMES,
        motion=True,
    ),
    "MovL": Command(
        lambda arm, *pose, SpeedL, **_: to_pose(arm, pose, int(SpeedL)),  # noqa: N803
        _SIX,
        0,
        _SPEEDS[2:] + _FRAMES,
        motion=True,
    ),
    # The port waits until the queue is done before it answers (rlsvc/robots/virtual/cr5.py).
    "Sync": Command(lambda arm: "", motion=True),
}
_BY_LOWER = {name.lower(): command for name, command in COMMANDS.items()}


def execute(arm: CR5Arm, text: str, *, motion: bool) -> str:
    """Carry out one command; the reply. Names are not case sensitive."""
    text = text.strip()
    try:
        error, values = OK, _run(arm, text, motion)
        if values is None:
            error, values = FAILED, ""
    except CommandError as refusal:
        error, values = refusal.error, ""
    return f"{error},{{{values}}},{text};"


def _run(arm: CR5Arm, text: str, motion: bool) -> Values:
    name, opened, rest = text.partition("(")
    command = _BY_LOWER.get(name.strip().lower())
    if command is None or not opened or not rest.endswith(")") or command.motion is not motion:
        raise CommandError(UNKNOWN)
    parts = [part.strip() for part in rest[:-1].split(",")] if rest[:-1].strip() else []
    plain = [part for part in parts if "=" not in part]
    if not len(command.parameters) - command.optional <= len(plain) <= len(command.parameters):
        raise CommandError(COUNT)
    arguments = [_number(part, command.parameters[i], i + 1) for i, part in enumerate(plain)]
    options = {key: default for key, _, default in command.options}
    known = {key.lower(): (key, parameter) for key, parameter, _ in command.options}
    for i, part in enumerate(parts):
        if "=" in part:
            key, _, value = part.partition("=")
            if key.strip().lower() not in known:
                raise CommandError(COUNT)
            key, parameter = known[key.strip().lower()]
            options[key] = _number(value, parameter, i + 1)
    return command.do(arm, *arguments, **options)


def _number(text: str, parameter: Parameter, place: int) -> float:
    try:
        value = int(text) if parameter.integer else float(text)
    except ValueError as error:
        raise CommandError(TYPE - place) from error
    if not (math.isfinite(value) and parameter.low <= value <= parameter.high):
        raise CommandError(RANGE - place)
    return value
