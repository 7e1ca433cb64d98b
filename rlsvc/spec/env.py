"""Environments (rlsvc/envs)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class PushTSpec(Spec):
    """gym_pusht, scored as in Diffusion Policy: reward = clip(coverage / 0.95, 0, 1), success = coverage >= 0.95."""

    name: Literal["pusht"] = "pusht"
    observation: Literal["keypoints", "pixels", "state"] = "keypoints"
    """keypoints: agent and 9 points of the block; pixels: a 96x96 camera and the agent; state: agent and block pose."""
    max_steps: int = Field(default=300, ge=1)
    """Control steps (10 Hz) after which an episode is cut off."""
