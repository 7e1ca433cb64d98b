"""Simulators that a test can compute in the head and that fail when told to; `import_module: toy_envs` has them."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """x starts at the seed and moves by the action; the observation is [x, t], the reward is the action's value.

    Args:
        length: steps of an episode.
        end: terminated, truncated, or both at once.
        fault: what happens in step `at` of the episode whose seed is `seed`: raise, nan, nan_reward, hang, exit, kill.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, render_mode=None, length=3, end="terminated", fault="", at=2, seed=0):
        self.render_mode, self.length, self.end = render_mode, length, end
        self.fault, self.at, self.faulty_seed = fault, at, seed
        self.ballast = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeded = seed
        self.x, self.t = float(seed or 0), 0
        if self.fault == "reset" and seed == self.faulty_seed:
            raise RuntimeError("reset failed on purpose")
        return self.observation(), {}

    def observation(self):
        return np.array([self.x, self.t], np.float32)

    def step(self, action):
        self.t += 1
        self.x += float(action[0])
        reward = float(action[0])
        if self.fault == "leak":
            self.ballast.append(np.ones(2_000_000))
        if self.t == self.at and (self.seeded == self.faulty_seed or self.faulty_seed == "any"):
            if self.fault == "raise":
                raise RuntimeError("failed on purpose")
            if self.fault == "nan":
                self.x = np.nan
            if self.fault == "nan_reward":
                reward = np.nan
            if self.fault == "hang":
                time.sleep(3600)
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGSEGV)
        over = self.t >= self.length
        terminated, truncated = over and self.end != "truncated", over and self.end != "terminated"
        return self.observation(), reward, terminated, truncated, {"success": over, "t": self.t}

    def render(self):
        return np.full((6, 8, 3), self.t, np.uint8)


class Camera(Walk):
    """Walk seen as an image of 6 x 8 px, each filled with t, besides the state and a text."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (6, 8, 3), np.uint8),
            "observation": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "mission": spaces.Text(100),
        }
    )

    def observation(self):
        state = super().observation().astype(np.float64)
        return {"camera": np.full((6, 8, 3), self.t, np.uint8), "observation": state, "mission": f"go to {self.x:g}"}


class Buttons(Walk):
    """Walk with discrete actions that start at 3, and a discrete observation."""

    action_space = spaces.Discrete(4, start=3)
    observation_space = spaces.Dict({"place": spaces.Discrete(5), "value": spaces.Box(0, 1, (2,), np.float32)})

    def observation(self):
        return {"place": int(self.t), "value": np.array([0.25, 0.5], np.float32)}

    def step(self, action):
        assert action in self.action_space
        return super().step([action])


class Sleeper(Walk):
    """Walk whose steps take 0.2 s."""

    def step(self, action):
        time.sleep(0.2)
        return super().step(action)


def register(name, entry):
    if f"toy/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"toy/{name}-v0", entry)


register("Walk", Walk)
register("Camera", Camera)
register("Buttons", Buttons)
register("Sleeper", Sleeper)
