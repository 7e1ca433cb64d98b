"""An environment whose actions have no bounds."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Unbounded(gymnasium.Env):
    """Never ends."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


if "Unbounded-v0" not in gymnasium.registry:
    gymnasium.register("Unbounded-v0", Unbounded)
