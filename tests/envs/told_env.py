"""An environment that tells what was executed, and that somebody else acted where it was asked for less than 0."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import Feature

ID = "toy/Told-v0"


class Told(gymnasium.Env):
    """Executes the size of the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    step_columns = {"action": Feature((1,), "float32"), "intervention": Feature((), "bool")}  # noqa: RUF012

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {"action": np.abs(action), "intervention": action[0] < 0}


if ID not in gymnasium.registry:
    gymnasium.register(ID, Told)
