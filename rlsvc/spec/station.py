"""A robot at its place: its driver, its limits, its rate, and what people move it with (rlsvc/robots/station.py).

Letters: A action dimensions.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.dobot import DobotSpec
from rlsvc.spec.guard import GuardSpec, Positive
from rlsvc.spec.lerobot_robot import LeRobotSpec, LeRobotTeleopSpec, SO101Spec

DriverSpec = Annotated[SO101Spec | LeRobotSpec | DobotSpec, Field(discriminator="name")]


class JogSpec(Spec):
    """Joints moved by keys and sticks: in the console, each by a share of its speed."""

    name: Literal["jog"] = "jog"
    speed: tuple[Positive, ...]
    """[A] at full deflection, per second, in the unit of the robot's action."""


TeleopSpec = Annotated[JogSpec | LeRobotTeleopSpec, Field(discriminator="name")]


class ConsoleSpec(Spec):
    """The web page for people."""

    host: str = "127.0.0.1"
    """Listens on this address; anything but loopback opens the robot to whoever has the key on that network."""
    port: int = Field(default=8765, ge=0, le=65535)
    """0 takes a free one."""


class StationSpec(Spec):
    """One robot, as a run or `rlsvc collect` drives it."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Of this robot and no other: one process at a time drives it, and on a cluster it is the resource `robot:<id>`."""
    driver: DriverSpec
    """Of its hardware."""
    guard: GuardSpec
    """Its limits."""
    rate_hz: float = Field(gt=0, le=1000)
    """Control rate."""
    max_skew_s: float = Field(default=0.15, gt=0)
    """Largest time between the captures of joints and a camera's frame; a camera that is later ends the episode."""
    teleop: TeleopSpec | None = None
    """What a person who takes over moves it with; null holds it still then."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.teleop, JogSpec) and len(self.teleop.speed) != self.guard.num_joints:
            raise ValueError(
                f"teleop.speed: got {len(self.teleop.speed)} numbers, the guard has {self.guard.num_joints} joints"
            )
        if self.guard.expiry_s < 1.5 / self.rate_hz:
            raise ValueError(
                f"guard.expiry_s: got {self.guard.expiry_s:g}, which stops the robot between two commands at "
                f"{self.rate_hz:g} Hz; expected {1.5 / self.rate_hz:.3g} or more"
            )
        return self
