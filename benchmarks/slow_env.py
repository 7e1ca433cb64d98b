"""A pendulum whose steps take time, as those of a robot or of a heavy simulator do: a lognormal latency, slept."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv

EPISODE = 200


class SlowPendulum(PendulumEnv):
    """Pendulum-v1; each step sleeps for a lognormal time of this mean and sigma, and takes no core meanwhile."""

    def __init__(self, latency_ms: float = 0.0, sigma: float = 1.0, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self._mean_s, self._sigma = latency_ms / 1000, sigma
        # Of its own: the same seed is to give the same trajectory, however long it takes.
        self._latency = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))

    def step(self, u: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """See PendulumEnv."""
        if self._mean_s:
            time.sleep(self._mean_s * self._latency.lognormal(-(self._sigma**2) / 2, self._sigma))
        return super().step(u)


gymnasium.register("rlsvc-slow-pendulum-v0", lambda **kwargs: SlowPendulum(**kwargs), max_episode_steps=EPISODE)
