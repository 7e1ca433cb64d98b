"""A Dobot CR arm by its TCP/IP protocol V3 (rlsvc/robots/dobot.py)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.cameras import CameraWatchSpec


class DobotGripperSpec(Spec):
    """A gripper on a digital output. It is open or closed; the action's last dimension says which."""

    output: Literal["controller", "tool"]
    """controller: outputs 1 to 16 of the control cabinet, whose level is read back; tool: outputs 1 and 2 at the
    flange, whose level is the one that was last sent, since the feedback does not tell it."""
    index: int = Field(ge=1, le=16)
    """Number of the output, from 1."""
    closed_level: Literal[0, 1] = 1
    """Level of the output at which the gripper is closed."""

    @model_validator(mode="after")
    def _there_is_one(self) -> Self:
        if self.output == "tool" and self.index > 2:
            raise ValueError(f"index: got {self.index}, expected 1 or 2 of the tool")
        return self


class DobotSpec(Spec):
    """A CR arm whose controller speaks protocol V3 (V3.5.2 or newer, not V4).

    Joints are `joint_0` to `joint_5` from the base, rad.
    """

    name: Literal["dobot"] = "dobot"
    host: str
    """Address of the controller: 192.168.5.1 at LAN1 as it is delivered."""
    dashboard_port: int = Field(default=29999, ge=1, le=65535)
    """Settings and stops."""
    motion_port: int = Field(default=30003, ge=1, le=65535)
    """Joint commands."""
    feedback_port: int = Field(default=30004, ge=1, le=65535)
    """Measurements, every 8 ms."""
    enable: bool = False
    """Enable the arm when connecting, which lets its brakes go. With false an arm that is not enabled is refused."""
    servo_time_s: float | None = Field(default=0.1, ge=0.02, le=3600)
    """Time in which ServoJ is to reach each command: about one to three control periods. Dobot advises at least 30 ms
    between commands. null sends ServoJ without options, for controllers older than V3.5.5."""
    lookahead_time: float = Field(default=50.0, ge=20, le=100)
    """ServoJ's damping, without a unit."""
    gain: float = Field(default=500.0, ge=200, le=1000)
    """ServoJ's stiffness, without a unit."""
    joint_low: tuple[float, float, float, float, float, float] = (-6.27, -6.27, -2.86, -6.27, -6.27, -6.27)
    """Smallest joint angles of the arm, rad: those of the CR5 by default."""
    joint_high: tuple[float, float, float, float, float, float] = (6.27, 6.27, 2.86, 6.27, 6.27, 6.27)
    """Largest joint angles, rad."""
    gripper: DobotGripperSpec | None = None
    """null: the action has the six joints alone."""
    cameras: dict[str, dict[str, Any]] = Field(default={})
    """LeRobot camera configurations by name, each with its `type`: {top: {type: opencv, index_or_path: 0, width: 640,
    height: 480, fps: 30}}."""
    camera_stale_after_s: float = Field(default=0.5, gt=0)
    """Age of a camera's newest frame at which it counts as lost."""
    watch: CameraWatchSpec = CameraWatchSpec()
    """When one that delivers frames counts as lost all the same."""
    timeout_s: float = Field(default=2.0, gt=0, le=60)
    """For connecting, and for every answer of the dashboard."""
    stop_timeout_s: float = Field(default=0.5, gt=0, le=60)
    """The same when stopping."""
    stale_after_s: float = Field(default=0.1, gt=0, le=10)
    """Age of the newest feedback at which the robot counts as gone; it comes every 8 ms."""
