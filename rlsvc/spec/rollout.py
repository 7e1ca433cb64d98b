"""Rollout workers: who steps the environments, who acts in them, how far they may run ahead.

They are rlsvc/train/rollout_worker.py; the driver's side of them is rlsvc/train/rollout.py.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.spec.stand_in import StandInSpec


class ClientsSpec(Spec):
    """Where robots' computers that are no part of the cluster find a run: they ask it for actions, and send episodes.

    Each runs `rlsvc collect` with `policy: {url: HOST:PORT, key_file: ..., send_episodes: true}`.
    """

    host: str = "127.0.0.1"
    """Listens on this address; anything but loopback needs `keys`."""
    port: int = Field(default=8100, ge=1, le=65535)
    """Listens on this port, from the first online phase on."""
    keys: str | None = None
    """File of API keys (rlsvc keys add NAME --role read --role act --role record), by whose names the robots are told
    apart; null asks nobody for one."""
    robots: int = Field(default=1, ge=1, le=64)
    """Robots that are answered at once, in one batch; more wait for each other."""
    max_episode_mb: int = Field(default=1024, ge=1)
    """Largest episode that is taken, MiB."""

    @model_validator(mode="after")
    def _closed(self) -> Self:
        if self.keys is None and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(
                f"host: got {self.host} and no keys, expected loopback: whoever reaches it trains the policy. Make "
                "keys (rlsvc keys add ROBOT --role read --role act --role record) and name their file in `keys`"
            )
        return self


class RolloutSpec(Spec):
    """Rollout workers of online phases: Ray actors, or with --local this process."""

    workers: int = Field(default=1, ge=1)
    """Actors."""
    envs_per_worker: int = Field(default=1, ge=1)
    """Environments that one worker steps side by side, with one batch of actions."""
    cpus_per_worker: float = Field(default=1.0, ge=0)
    """That Ray holds for a worker."""
    mode: Literal["sync", "async"] = "sync"
    """sync: collect, then learn, in turn; the same seed gives the same run. async: workers step while the learner
    updates, and the updates per step that the phase names are held by a limiter."""
    chunk_steps: int = Field(default=1, ge=1)
    """Steps of each environment in one chunk. sync: the smallest amount that is collected at once."""
    inference: Literal["local", "central"] = "local"
    """local: the policy acts in the worker, on its CPU. central: one actor acts for all workers, on a GPU where there
    is one."""
    inference_gpus: float | None = Field(default=None, ge=0)
    """GPUs (or a share of one) of the central actor; null: 0.25 where the ranks have GPUs, else 0."""
    inference_wait_s: float = Field(default=0.002, ge=0)
    """Longest that an observation waits for others before the central actor acts on what there is."""
    max_inflight: int = Field(default=2, ge=1)
    """async: chunks that one worker may have on the way; it pauses when the driver has not taken them."""
    max_ahead: int = Field(default=2048, ge=1)
    """async: environment steps by which collecting may be ahead of the updates that the phase's ratio owes to them."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Most updates by which the weights that chose an action may be behind the learner's when the chunk arrives; older
    chunks are dropped and counted (rollout/stale_dropped). null only measures."""
    weights_interval: int = Field(default=1, ge=1)
    """Updates between two versions of the weights that workers are given."""
    stand_in: StandInSpec | None = None
    """A scripted stand-in for the person who watches a robot, in simulators that have a script; null has nobody watch.
    Evaluations are always the policy's alone."""
    reward: RewardSourceSpec | None = None
    """A reward classifier that rewards rollouts and ends them as successes, on the worker's CPU; null takes the
    environment's own rewards. Evaluations are scored by the environment."""
    clients: ClientsSpec | None = None
    """Robots' computers without Ray that collect in place of workers; the run has no `env` then. null has none."""
    timeout_s: float = Field(default=120.0, gt=0)
    """A worker that answers nothing for this long is killed and replaced."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Likewise for a new worker, up to its first chunk: it imports, makes its environments, and compiles. Counts where
    it is longer than timeout_s."""
    max_restarts: int = Field(default=100, ge=0)
    """Replacements of workers, all together, before the run fails."""

    @model_validator(mode="after")
    def _fresh_enough(self) -> Self:
        if self.max_staleness is not None and self.max_staleness < self.weights_interval - 1:
            raise ValueError(
                f"max_staleness: {self.max_staleness} updates, but with weights_interval = {self.weights_interval} the "
                f"newest weights are up to {self.weights_interval - 1} updates old, so chunks would be dropped for ever"
            )
        return self
