"""The limits of a robot (rlsvc/robots/guard.py).

None of them has a default: an arm whose limits nobody wrote down does not move.

Letters: A action dimensions.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec

Positive = Annotated[float, Field(gt=0)]


class WorkspaceSpec(Spec):
    """A box that points of the arm must stay in, by its forward kinematics."""

    model: str
    """File of a MuJoCo model (MJCF or URDF), whose joints have the names of the action's dimensions without a suffix
    such as ".pos"; or one that comes with rlsvc: so101, cr5."""
    sites: tuple[str, ...] = Field(min_length=1)
    """Sites or bodies of the model that must stay inside: the tool, the elbow. cr5 has `flange` alone."""
    low: tuple[float, float, float]
    """Smallest x, y, z in the frame of the arm's base, m."""
    high: tuple[float, float, float]
    """Largest x, y, z, m."""
    unit: Literal["deg", "rad"]
    """Of the joints in the robot's action."""
    without: tuple[str, ...] = ()
    """Dimensions of the action that move none of these points: the gripper."""

    @model_validator(mode="after")
    def _a_box(self) -> Self:
        if any(low >= high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low, high: got {list(self.low)} and {list(self.high)}, expected low below high")
        return self


class GuardSpec(Spec):
    """What is allowed to reach a robot. Every vector has A numbers, in the unit of the robot's action."""

    low: tuple[float, ...]
    """Smallest position of each joint."""
    high: tuple[float, ...]
    """Largest position of each joint."""
    velocity: tuple[Positive, ...]
    """Largest speed of the commands, per second."""
    acceleration: tuple[Positive, ...]
    """Largest change of that speed, per second squared. Commands also keep the way that braking takes away from `low`
    and `high`."""
    step: tuple[Positive, ...]
    """Largest distance of a command from the joint's measured position: how hard an arm that is held up is pushed."""
    workspace: WorkspaceSpec | None
    """Where points of the arm must stay; null has to be written, and leaves the joints' limits alone."""
    time_to_live_s: float = Field(gt=0, le=10)
    """Age of the observation that a command answers, at which the command is refused; by the robot's own clock."""
    expiry_s: float = Field(gt=0, le=2)
    """Time without a command after which the robot is stopped."""
    torque: Literal["hold", "release"]
    """What the motors of a stopped robot do. hold: keep the position; release: let go, for arms that may fall."""
    on_limit: Literal["clip", "refuse"]
    """What becomes of a command beyond the limits of joints, velocity, acceleration and step. clip: the nearest one
    that is allowed is sent; refuse: none is. Beyond the workspace every command is refused."""

    @property
    def num_joints(self) -> int:
        """A."""
        return len(self.low)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("high", "velocity", "acceleration", "step"):
            if len(getattr(self, name)) != self.num_joints:
                raise ValueError(f"{name}: got {len(getattr(self, name))} numbers, low has {self.num_joints}")
        bad = next((i for i in range(self.num_joints) if self.low[i] >= self.high[i]), None)
        if bad is not None:
            raise ValueError(
                f"low, high: joint {bad} got {self.low[bad]:g} and {self.high[bad]:g}, expected low < high"
            )
        return self
