"""The learner group, checkpoints and evaluation cadence."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class LearnerSpec(Spec):
    """The learner group: a Ray Train group of `ranks` processes, data parallel where not said otherwise."""

    ranks: int = Field(default=1, ge=1)
    """Processes; every one takes a share of each batch."""
    fsdp: int = Field(default=1, ge=1)
    """Devices that share one copy of the weights and of the optimizer's state, each with a part of them, for models
    that do not fit one device; divides the devices of all ranks. 1 has all of them on every device."""
    tensor: int = Field(default=1, ge=1)
    """Devices that share every product of the large layers; divides likewise."""
    cpus_per_rank: float = Field(default=1.0, gt=0)
    """That Ray holds for a rank."""
    gpus_per_rank: float | None = Field(default=None, ge=0)
    """Likewise; 0 learns on the CPU. null follows `device`: 0 on the CPU, else 1, or 0.75 where the evaluation shares
    the card."""
    updates_per_call: int = Field(default=50, ge=1)
    """K gradient steps in one compiled call."""
    max_failures: int = Field(default=2, ge=0)
    """Restarts of the group from the last checkpoint before the run fails; its controller's are counted apart."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Ranks that have not done an order for so long are taken for hung, killed, and so restarted. A first update
    compiles, which can take minutes."""


class CheckpointSpec(Spec):
    """Training state on disk."""

    interval: int = Field(default=1000, ge=1)
    """Updates between checkpoints; one is written at the end besides."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints and bundles that are kept."""
    keep_best: bool = True
    """Keeps the checkpoint and bundle of the best evaluation besides."""


class EvaluationSpec(Spec):
    """Episodes on rollout actors."""

    interval: int | None = Field(default=1000, ge=1)
    """Updates between evaluations; null evaluates only at the end."""
    episodes: int = Field(default=50, ge=1)
    """Of an evaluation in mid-run, one seed each."""
    final_episodes: int | None = Field(default=None, ge=1)
    """Episodes of the evaluation at the end; null means `episodes`."""
    workers: int = Field(default=1, ge=1)
    """Rollout actors; they share the episodes."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """That Ray holds for one of them."""
    parallel: int = Field(default=50, ge=1)
    """Episodes side by side over all workers, which is the policy's batch. The result does not depend on `workers`."""
    gpus: float | None = Field(default=None, ge=0)
    """GPUs (or a share of one) of the actor that acts for the workers; null: 0.25 where the ranks have GPUs, else 0.
    With --local the run's own device is used."""
    group: str | None = None
    """Normaliser group that the environment belongs to, where `data.datasets` has several."""
    first_seed: int = Field(default=100_000, ge=0)
    """Episode i uses first_seed + i."""
    videos: bool = True
    """Video of the best, median and worst episode of the final evaluation."""
    step_videos: bool = False
    """Video of the median episode of every evaluation, videos/step_<step>.mp4; `rlsvc timelapse` joins them."""
    metric: Literal["max_reward", "return", "success"] = "max_reward"
    """What "best" means."""
