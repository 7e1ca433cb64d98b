"""A simulator that keeps a ledger of all that it did, outside of whatever is tested, and fails when it is told to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.spec.env import GymnasiumSpec

ID = "toy/Ledger-v0"


@dataclass
class Ledger:
    """What all simulators of one specification did.

    Attributes:
        steps: (episode, t) to (action, reward) of every step that did not fail; t is that of the observation before.
        ends: episode to its length, of those that ended.
        lost: episodes whose simulator failed.
        starts: seed-dependent number of each episode, by its number.
        total: steps of all simulators, failed ones too.
    """

    steps: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    starts: list[float] = field(default_factory=list)
    total: int = 0


LEDGERS: dict[int, Ledger] = {}
_NUMBERS = itertools.count()


class LedgerEnv(gymnasium.Env):
    """The observation is [episode, t, a number of the seed]; the reward is the action's first number.

    Args:
        ledger: number of the ledger.
        length: steps of an episode.
        end: terminated or truncated.
        fail_at: the step fails which is the k-th of all that simulators with this ledger made, counted from 1.
        discrete: actions 3 .. 6.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, render_mode=None, *, ledger, length=3, end="terminated", fail_at=(), discrete=False):
        self.render_mode, self.ledger = render_mode, LEDGERS[ledger]
        self.length, self.end, self.fail_at = length, end, set(fail_at)
        low, high = np.array([-2.0, 1.0], np.float32), np.array([2.0, 3.0], np.float32)
        self.action_space = spaces.Discrete(4, start=3) if discrete else spaces.Box(low, high)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t, self.start = len(self.ledger.starts), 0, float(np.float32(self.np_random.random()))
        self.ledger.starts.append(self.start)
        return self._observation(), {}

    def _observation(self):
        return np.array([self.episode, self.t, self.start], np.float32)

    def step(self, action):
        self.ledger.total += 1
        if self.ledger.total in self.fail_at:
            self.ledger.lost.add(self.episode)
            raise RuntimeError("failed on purpose")
        reward = float(np.asarray(action).reshape(-1)[0])
        self.ledger.steps[self.episode, self.t] = (reward, reward)
        self.t += 1
        over = self.t >= self.length
        if over:
            self.ledger.ends[self.episode] = self.t
        terminated = over and self.end == "terminated"
        return self._observation(), reward, terminated, over and not terminated, {"success": over and reward > 0}


if ID not in gymnasium.registry:
    gymnasium.register(ID, LedgerEnv)


def ledger_env(**kwargs: Any) -> tuple[GymnasiumSpec, Ledger]:
    """A specification with a ledger of its own."""
    number = next(_NUMBERS)
    LEDGERS[number] = Ledger()
    return GymnasiumSpec(id=ID, kwargs={"ledger": number, **kwargs}), LEDGERS[number]
