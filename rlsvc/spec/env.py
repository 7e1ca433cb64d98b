"""Environments (rlsvc/envs)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class PushTSpec(Spec):
    """gym_pusht, scored as in Diffusion Policy: reward = clip(coverage / 0.95, 0, 1), success = coverage >= 0.95."""

    name: Literal["pusht"] = "pusht"
    observation: Literal["keypoints", "pixels", "state"] = "keypoints"
    max_steps: int = Field(default=300, ge=1)
