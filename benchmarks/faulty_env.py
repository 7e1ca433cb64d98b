"""An environment for fault tests: cheap, writes down every step that it makes, and fails when it is told to.

A file named `next` in the ledger's folder holds the fault; the first simulator that sees it takes it away and obeys.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

EPISODE = 40
LEDGER = "RLSVC_LEDGER"
"""Environment variable with the ledger's folder; each simulator appends to a file of its own there."""
NEXT = "next"
LEAK_MB = 400
SIMULATOR_FAULTS = ("raise", "nan", "hang", "leak", "die")


class FaultyEnv(gymnasium.Env):
    """Observation: a number that no other episode has, the step, and noise."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self._folder = Path(os.environ[LEDGER])
        self._file = (self._folder / f"{os.getpid()}-{id(self)}.txt").open("a", buffering=1)
        self._next = self._folder / NEXT
        self._leaked: list[bytearray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._episode, self._step = int.from_bytes(os.urandom(6), "little"), 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Write the step down, then fail or not."""
        self._file.write(f"{self._episode} {self._step}\n")
        self._step += 1
        fault = self._told() if self._next.exists() else ""
        if fault == "raise":
            raise RuntimeError("a fault of the simulator, on purpose")
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os._exit(1)
        if fault == "leak":
            self._leaked.append(bytearray(os.urandom(1) * (LEAK_MB * 2**20)))
        reward = float("nan") if fault == "nan" else float(self._step)
        return self._observation(), reward, False, self._step >= EPISODE, {}

    def _told(self) -> str:
        mine = self._folder / f"taken-{os.getpid()}-{id(self)}"
        try:
            self._next.rename(mine)
        except FileNotFoundError:
            return ""  # another one was quicker
        fault = mine.read_text()
        mine.unlink()
        return fault

    def _observation(self) -> np.ndarray:
        # float32 holds integers up to 2^24 exactly.
        high, low = divmod(self._episode, 2**24)
        return np.array([high, low, self._step, self.np_random.normal()], np.float32)


gymnasium.register("rlsvc-faulty-v0", lambda **kwargs: FaultyEnv(**kwargs))
