"""What a driver expects of its cameras."""

from __future__ import annotations

from pydantic import Field

from rlsvc.spec.base import Spec


class CameraWatchSpec(Spec):
    """When a camera that delivers frames counts as lost all the same."""

    frozen_s: float = Field(default=1.0, gt=0)
    """The same frame, byte by byte, for longer than this while other cameras or joints change, s."""
    black_s: float = Field(default=1.0, gt=0)
    """Nothing but black for longer than this, s."""
