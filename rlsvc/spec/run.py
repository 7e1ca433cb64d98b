"""RunSpec: everything that one training run is made of."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.data import DataSpec
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.env import PushTSpec
from rlsvc.spec.imitation import ImitationSpec
from rlsvc.spec.learner import CheckpointSpec, EvaluationSpec, LearnerSpec
from rlsvc.spec.tracking import TrackingSpec

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class RunSpec(Spec):
    """A run: policy, algorithm, data, environment, resources, cadence. Stored with the run, enough to run it again."""

    name: str = Field(default="run", pattern=NAME)
    """Of the run: its folder, its tracking run, and in the registered model's name."""
    project: str = Field(default="rlsvc", pattern=NAME)
    """Runs that belong together: a folder, an MLflow experiment, a W&B project."""
    group: str | None = None
    """A label by which trackers group runs; null has none."""
    root: str = "runs"
    """Runs live in `<root>/<project>/<name>/`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the weights, the batches and the noise; on a CPU the same seed gives the same run, bit for bit."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto takes a GPU where there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute precision of the nets; weights and optimizer state are fp32."""
    total_steps: int = Field(ge=1)
    """Gradient updates."""
    log_interval: int = Field(default=100, ge=1)
    """Updates between logged metrics, which are means over them."""
    policy: DiffusionSpec
    """What acts."""
    algo: ImitationSpec
    """How it learns."""
    data: DataSpec
    """What it learns from."""
    env: PushTSpec | None = None
    """Where the policy is evaluated; null trains without evaluation."""
    learner: LearnerSpec = LearnerSpec()
    """Which processes learn."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the training state is written, and how much of it is kept."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """How often the policy is tried in `env`."""
    tracking: TrackingSpec = TrackingSpec()
    """Where metrics and the bundle go."""
    resume: bool = False
    """Go on with the run in its folder; as `--resume`."""
    overwrite: bool = False
    """Delete the run in its folder first; as `--overwrite`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.algo.batch_size % (self.learner.ranks * self.algo.optimizer.accumulation):
            raise ValueError(
                f"algo.batch_size: {self.algo.batch_size} is not a multiple of "
                f"learner.ranks x algo.optimizer.accumulation = {self.learner.ranks * self.algo.optimizer.accumulation}"
            )
        groups = sorted({dataset.group for dataset in self.data.datasets})
        group = self.evaluation.group
        if self.env is not None and ((group is None and len(groups) > 1) or group not in (None, *groups)):
            raise ValueError(f"evaluation.group: got {group}, expected the environment's among {', '.join(groups)}")
        if self.resume and self.overwrite:
            raise ValueError("resume, overwrite: choose one; resume goes on with the run, overwrite deletes it first")
        return self
