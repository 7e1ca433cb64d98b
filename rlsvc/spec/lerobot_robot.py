"""Robots and teleoperators of LeRobot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.cameras import CameraWatchSpec


class SO101Spec(Spec):
    """An SO-101 or SO-100 arm, driven by LeRobot.

    Joints are in degrees, 0 in the middle of each joint's range; the gripper goes from 0 (closed) to 100.
    """

    name: Literal["so101", "so100"] = "so101"
    """Which of the two; LeRobot drives them alike."""
    port: str
    """Serial port of the arm, "/dev/ttyACM0"; `lerobot-find-port` finds it."""
    id: str = Field(min_length=1)
    """What LeRobot's calibration file is called: `lerobot-calibrate --robot.id=...`."""
    cameras: dict[str, dict[str, Any]] = Field(default={})
    """LeRobot's cameras by name: {type: opencv, index_or_path: 0, width: 640, height: 480, fps: 30}; or {type: mjpeg,
    url: "http://...", ...}."""
    calibration_dir: Path | None = None
    """Folder of calibration files; null is LeRobot's."""
    use_degrees: bool = True
    """False: joints in -100 to 100 of their range, as datasets of before LeRobot 0.5 have them."""
    watch: CameraWatchSpec = CameraWatchSpec()
    """When a camera counts as lost."""

    @model_validator(mode="after")
    def _cameras_have_types(self) -> Self:
        _check_cameras(self.cameras)
        return self

    @property
    def type(self) -> str:
        """LeRobot's name of it."""
        return f"{self.name}_follower"

    @property
    def config(self) -> dict[str, Any]:
        """LeRobot's configuration."""
        folder = {} if self.calibration_dir is None else {"calibration_dir": str(self.calibration_dir)}
        own = {"port": self.port, "id": self.id, "cameras": self.cameras, "use_degrees": self.use_degrees}
        return own | folder

    @property
    def allow_unstoppable(self) -> bool:
        """Its motors are on a Feetech bus."""
        return False


class LeRobotSpec(Spec):
    """Any robot that LeRobot knows, third-party `lerobot_robot_*` packages included. Units are the robot's own."""

    name: Literal["lerobot"] = "lerobot"
    type: str
    """LeRobot's name of it, as in `lerobot-record --robot.type=...`."""
    config: dict[str, Any] = Field(default={})
    """Its configuration, as in LeRobot's YAML files: {port: ..., id: ..., cameras: {...}}."""
    allow_unstoppable: bool = False
    """A robot whose motors are not on a Feetech bus can be stopped only by the process that drives it: when that one is
    killed or hangs, nothing stops the robot but its emergency stop. It is refused unless this is true."""
    watch: CameraWatchSpec = CameraWatchSpec()
    """When a camera counts as lost."""

    @model_validator(mode="after")
    def _torque_is_the_guards(self) -> Self:
        if self.config.get("disable_torque_on_disconnect"):
            raise ValueError("config.disable_torque_on_disconnect: the guard says what torque does; leave it out")
        _check_cameras(self.config.get("cameras", {}))
        return self


class LeRobotTeleopSpec(Spec):
    """Any teleoperator that LeRobot knows, third-party `lerobot_teleoperator_*` packages included."""

    name: Literal["lerobot"] = "lerobot"
    type: str
    """LeRobot's name of it, as in `lerobot-teleoperate --teleop.type=...`: so101_leader, ..."""
    config: dict[str, Any] = Field(default={})
    """Its configuration, as in LeRobot's YAML files: {port: ..., id: ...}."""


def _check_cameras(cameras: dict[str, Any]) -> None:
    for name, camera in cameras.items():
        missing = [
            key for key in ("type", "width", "height", "fps") if not isinstance(camera, dict) or key not in camera
        ]
        if missing:
            raise ValueError(
                f"cameras.{name}: {missing[0]} is missing; expected {{type: opencv, index_or_path: 0, width: 640, "
                "height: 480, fps: 30}"
            )
