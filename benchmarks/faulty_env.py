"""An environment for fault tests: cheap, and it writes down every step that it makes, so that others can be checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

EPISODE = 40
LEDGER = "RLSVC_LEDGER"
"""Environment variable with the ledger's folder; each simulator appends to a file of its own there."""


class FaultyEnv(gymnasium.Env):
    """Observation: a number that no other episode has, the step, and noise. Now and then a step raises or gives NaN."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, faults_per_step: float = 0.0) -> None:
        self._rate = faults_per_step
        folder = Path(os.environ[LEDGER])
        self._file = (folder / f"{os.getpid()}-{id(self)}.txt").open("a", buffering=1)
        self._faults = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._episode, self._step = int.from_bytes(os.urandom(6), "little"), 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Write the step down, then fail or not."""
        self._file.write(f"{self._episode} {self._step}\n")
        self._step += 1
        chance = self._faults.random()
        if chance < self._rate / 2:
            raise RuntimeError("a fault of the simulator, on purpose")
        reward = float("nan") if chance < self._rate else float(self._step)
        return self._observation(), reward, False, self._step >= EPISODE, {}

    def _observation(self) -> np.ndarray:
        # float32 holds integers up to 2^24 exactly.
        high, low = divmod(self._episode, 2**24)
        return np.array([high, low, self._step, self.np_random.normal()], np.float32)


gymnasium.register("rlsvc-faulty-v0", lambda **kwargs: FaultyEnv(**kwargs))
