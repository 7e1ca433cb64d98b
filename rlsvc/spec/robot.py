"""Robots as data: what a robot's runtime calls things, and how its numbers become those that a policy learns.

An observation comes to a policy in three stages, and the actions go back through them: *repack* (names, and the layout
and size of images) and *robot* (maps of single dimensions, actions relative to the state) are said here and done by
rlsvc/data/repack.py and rlsvc/data/transforms.py; *model* (normalisation, prompt tokens, padding) is the policy's own.
The bundle keeps what is said here, so that training, acting and serving do the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlsvc.spec.base import Spec


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Keys = dict[str, Annotated[tuple[str, ...], BeforeValidator(_names)]]
"""By the run's feature name one name elsewhere, or several vectors and scalars that are joined in this order."""


class AffineSpec(Spec):
    """y = x * scale + offset; a scale of -1 turns a joint's direction."""

    name: Literal["affine"] = "affine"
    scale: float = 1.0
    """Not 0."""
    offset: float = 0.0
    """Added after the scale."""

    @model_validator(mode="after")
    def _invertible(self) -> Self:
        if self.scale == 0:
            raise ValueError("scale: 0 cannot be undone")
        return self


class RangeSpec(Spec):
    """The straight line that takes one range to another; values outside go on along it."""

    name: Literal["range"] = "range"
    of: tuple[float, float]
    """The robot's two values."""
    to: tuple[float, float]
    """What they become."""

    @model_validator(mode="after")
    def _invertible(self) -> Self:
        if self.of[0] == self.of[1] or self.to[0] == self.to[1]:
            raise ValueError(f"range: {list(self.of)} to {list(self.to)} cannot be undone; the two ends must differ")
        return self


class SliderCrankSpec(Spec):
    """Way of a slider (m) to the angle of the motor that drives it by crank and rod (rad, pi/2 at full reach).

    A way beyond the linkage's reach counts as its end, since encoders read a little past it.
    """

    name: Literal["slider_crank"] = "slider_crank"
    crank: float = Field(gt=0)
    """Length of the motor's horn, m."""
    rod: float = Field(gt=0)
    """Length of the arm from the horn to the slider, m; longer than the crank."""

    @model_validator(mode="after")
    def _invertible(self) -> Self:
        if self.rod <= self.crank:
            raise ValueError(f"rod: got {self.rod:g}, expected more than crank = {self.crank:g}")
        return self


MapSpec = Annotated[AffineSpec | RangeSpec | SliderCrankSpec, Field(discriminator="name")]


class DimsSpec(Spec):
    """What is done to some dimensions of a feature."""

    dims: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Which, from 0."""
    by: tuple[MapSpec, ...] = Field(min_length=1)
    """Maps, one after the other, from the robot's numbers to the policy's."""


class DeltaSpec(Spec):
    """Absolute actions that the policy learns relative to the state in which it acts."""

    dims: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Dimensions of the action, which are also those of the state; the others (grippers) stay absolute."""
    of: str = "observation.state"
    """Name of the state."""


class RobotSpec(Spec):
    """A robot: the control loop of its runtime, its names and images, and its numbers."""

    name: str
    """Of the robot, for messages."""
    rate_hz: float | None = Field(default=None, gt=0)
    """Control rate, which the data must have; null for a simulator, which waits."""
    horizon: int | None = Field(default=None, ge=1)
    """Actions of a chunk that its runtime is published with, for `policy.horizon: ${robot.horizon}`."""
    execute: int | None = Field(default=None, ge=1)
    """Actions of a chunk that its runtime executes before it asks again; null executes all."""
    episode_steps: int | None = Field(default=None, ge=1)
    """Control steps after which its runtime ends an episode; null goes on."""
    keys: Keys = Field(default_factory=dict)
    """By the run's feature name what the runtime sends, with a slash between the keys of nested maps; empty for a
    runtime that knows the run's names."""
    unused: tuple[str, ...] = ()
    """What the runtime sends besides, which no policy reads."""
    image_layout: Literal["hwc", "chw"] = "hwc"
    """Order of an image's axes as the runtime sends it."""
    image_dtype: Literal["uint8", "float32"] = "uint8"
    """Of an image as the runtime sends it: uint8 in [0, 255] or float32 in [0, 1]."""
    image_size: tuple[int, int] | None = None
    """Height and width that images of datasets and of the runtime are brought to, their shape kept, in the middle of
    black bars; null takes them as they are."""
    maps: dict[str, tuple[DimsSpec, ...]] = Field(default_factory=dict)
    """By feature name (`action` for the actions) how the robot's numbers become the policy's."""
    delta: DeltaSpec | None = None
    """Which actions are learnt relative to the state; null learns all as they are."""
    prompt: str | None = Field(default=None, min_length=1)
    """What a runtime that sends no prompt wants; null refuses to act without one."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What the server tells the runtime when it connects, as the runtime expects it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.execute is not None and self.horizon is not None and self.execute > self.horizon:
            raise ValueError(f"execute: got {self.execute}, at most horizon = {self.horizon}")
        sent = [key for keys in self.keys.values() for key in keys] + list(self.unused)
        if double := next((key for key in sent if sent.count(key) > 1), None):
            raise ValueError(f"keys, unused: '{double}' stands there twice")
        for name, parts in self.maps.items():
            dims = [dim for part in parts for dim in part.dims]
            if double := next((dim for dim in dims if dims.count(dim) > 1), None):
                raise ValueError(f"maps.{name}: dimension {double} stands there twice; put its maps into one `by`")
        return self
