"""LeRobot's own Torch policies, and how they learn (rlsvc/backends/torch_lerobot.py, torch_imitation.py)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.optim import EmaSpec, ScheduleSpec

OURS = {
    "type": "policy.type",
    "n_obs_steps": "policy.n_obs_steps",
    "n_action_steps": "policy.n_action_steps",
    "input_features": "data.observation",
    "output_features": "data.action",
    "device": "device",
    "use_amp": "precision",
    "pretrained_path": "policy.pretrained",
}
"""Fields of LeRobot's configurations that this specification says elsewhere, and where."""


class LeRobotPolicySpec(Spec):
    """A policy of LeRobot's factory: ACT, Diffusion, VQ-BeT, SmolVLA, PI0 and others, plug-ins included."""

    name: Literal["lerobot"] = "lerobot"
    type: str = Field(min_length=1)
    """LeRobot's name of the policy: act, diffusion, vqbet, smolvla, pi0, ..., or that of an installed plug-in
    (`lerobot_policy_*`)."""
    n_obs_steps: int = Field(default=1, ge=1)
    """Observations in a row that the policy sees, the newest included; LeRobot's defaults: 1 of act, 2 of diffusion, 5
    of vqbet."""
    n_action_steps: int = Field(default=8, ge=1)
    """Actions of a chunk that are executed before the next query."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of LeRobot's own configuration of this policy (`chunk_size`, `dim_model`, `down_dims`, `optimizer_lr`,
    `normalization_mapping`, ...) that differ from its defaults; an unknown one is refused."""
    pretrained: str | None = None
    """A folder that LeRobot's save_pretrained wrote, whose configuration and weights are begun with; null begins with
    fresh ones. The statistics are those of `data`."""

    @model_validator(mode="after")
    def _once(self) -> Self:
        for field in self.config:
            if field in OURS:
                raise ValueError(f"config.{field}: is {OURS[field]} here; leave it out of policy.config")
        return self


class TorchImitationSpec(Spec):
    """Gradient steps on a LeRobot policy's own loss. What is null is as LeRobot's preset of the policy has it."""

    name: Literal["torch_imitation"] = "torch_imitation"
    """Of the algorithm."""
    batch_size: int = Field(default=64, ge=1)
    """Windows in one update, over all ranks together."""
    learning_rate: float | None = Field(default=None, gt=0)
    """At the top of the schedule; groups of weights with a rate of their own (ACT's image encoder) keep it."""
    grad_clip: float | None = Field(default=None, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    schedule: ScheduleSpec | None = None
    """Of the learning rate."""
    accumulation: int = Field(default=1, ge=1)
    """Micro-batches that one update averages over; must divide the batch size."""
    ema: EmaSpec | None = None
    """Average of the weights that acts; null acts with the raw ones, as LeRobot does."""
    freeze: tuple[str, ...] = ()
    """Regular expressions of weights that are not trained ("model.backbone.*")."""
    compile: bool = False
    """torch.compile of the policy: the first update takes minutes. Noise and the count of padded actions are then a
    rank's own, so that results depend on the number of ranks."""
    fsdp_blocks: tuple[str, ...] = ()
    """Regular expressions of modules that are gathered one by one where learner.fsdp cuts the weights
    (".*layers\\\\.\\\\d+"); the rest is gathered together."""
