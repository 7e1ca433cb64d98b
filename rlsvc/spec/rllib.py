"""RLlib's algorithms as baselines: which one, its own configuration, and its module (rlsvc/backends/rllib.py)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import OneStepPolicySpec, Spec
from rlsvc.spec.learner import LearnerSpec

RECORDED = ("cql", "marwil", "bc")
"""Types that learn from `data`; the others step `env`."""
OURS = {
    "env": "env",
    "env_config": "env",
    "seed": "seed",
    "num_env_runners": "rollout.workers",
    "num_envs_per_env_runner": "rollout.envs_per_worker",
    "num_cpus_per_env_runner": "rollout.cpus_per_worker",
    "sample_timeout_s": "rollout.timeout_s",
    "max_num_env_runner_restarts": "rollout.max_restarts",
    "num_learners": "learner.ranks",
    "num_cpus_per_learner": "learner.cpus_per_rank",
    "num_gpus_per_learner": "learner.gpus_per_rank",
    "evaluation_interval": "evaluation.interval",
    "evaluation_duration": "evaluation.episodes",
    "evaluation_num_env_runners": "evaluation.workers",
    "input_": "data.datasets",
    "model": "policy.config",
    "model_config": "policy.config",
    "observation_filter": "algo.observation_filter",
    "train_batch_size": "algo.config.train_batch_size_per_learner",
    "normalize_actions": "always so: a module's actions in [-1, 1] are the contract's range",
    "clip_actions": "always so: actions are clipped to the contract's range",
}
"""Keys of RLlib's configurations that this specification says elsewhere, and where."""
OURS_RECORDED = dict.fromkeys(
    ("min_time_s_per_iteration", "min_train_timesteps_per_iteration", "min_sample_timesteps_per_iteration"),
    "learner.updates_per_call",
)
"""Besides, where it learns from recorded data."""


class RLlibPolicySpec(OneStepPolicySpec):
    """RLlib's default module of an algorithm: an encoder of vectors or of images, and a head for actions."""

    name: Literal["rllib"] = "rllib"
    observation: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Observations of `env` that it sees, such as the state and not the cameras; null sees all. With recorded data
    data.observation says so."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of RLlib's DefaultModelConfig (`fcnet_hiddens`, `fcnet_activation`, `head_fcnet_hiddens`, `conv_filters`,
    ...) that differ from its defaults; an unknown one is refused."""


class RLlibSpec(Spec):
    """An algorithm of RLlib, in RLlib's own code. `total_steps` counts environment steps, or updates on recorded data.

    What `config` leaves out is as RLlib has it, but for two things: failed environment runners and environments are
    made anew, and a replay buffer is part of checkpoints.
    """

    name: Literal["rllib"] = "rllib"
    """Of the algorithm."""
    type: Literal["ppo", "appo", "impala", "sac", "cql", "marwil", "bc"]
    """RLlib's: ppo, appo, impala and sac step `env`; cql, marwil and bc learn from `data`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of RLlib's AlgorithmConfig (`lr`, `gamma`, `train_batch_size_per_learner`, `minibatch_size`, ...), checked
    against its types; an unknown one is refused."""
    observation_filter: Literal["none", "mean_std"] = "none"
    """mean_std: observations less their running mean, over their running deviation, clipped to 10 (RLlib's
    MeanStdFilter); for types that step `env`. What it ends at is in the bundle."""
    reward_scale: float = Field(default=1.0, gt=0)
    """Recorded rewards are multiplied by this; RLlib's value functions learn returns of some hundreds slowly."""

    @property
    def recorded(self) -> bool:
        """Whether it learns from recorded data."""
        return self.type in RECORDED

    @model_validator(mode="after")
    def _once(self) -> Self:
        for key in self.config:
            if where := (OURS | (OURS_RECORDED if self.recorded else {})).get(key):
                raise ValueError(f"config.{key}: is {where} here; leave it out of algo.config")
        if self.recorded and self.observation_filter != "none":
            raise ValueError(
                f"observation_filter: got {self.observation_filter}, but {self.type} steps no environment; recorded "
                "observations are normalised by data.normalization"
            )
        if not self.recorded and self.reward_scale != 1:
            raise ValueError(f"reward_scale: got {self.reward_scale:g}, but {self.type} has no recorded rewards")
        return self


def remote_learners(learner: LearnerSpec) -> int:
    """Processes of RLlib's learner group besides the run's own, which learns where there is one rank without a GPU."""
    return learner.ranks if learner.ranks > 1 or learner.gpus_per_rank else 0
