"""A point that is told in words which of two discs to go to: the smallest environment in which the prompt decides.

`env: {name: gymnasium, id: rlsvc/TwoGoals-v0, import_module: rlsvc.envs.two_goals}`. Image and state alone do not say
which disc is meant, so a policy that does not read the prompt succeeds half of the time at best.

    python -m rlsvc.envs.two_goals datasets/two_goals.npz

writes demonstrations of an expert that walks there with noise.

Letters: N steps, S side of the image.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.envs.demonstrations import write_from_command_line

COLORS = {"red": (220, 40, 40), "blue": (40, 70, 230)}
AGENT, BACKGROUND = (20, 20, 20), (235, 235, 235)
RADIUS, REACHED, STEP, MAX_STEPS, RATE_HZ = 0.09, 0.09, 0.06, 40, 10
PROMPTS = tuple(f"go to the {color} disc" for color in COLORS)


class TwoGoals(gymnasium.Env):
    """Observation: `image` [S, S, 3] uint8, `state` [2] the point's place in [0, 1], `task` one of PROMPTS.

    Action: [2] in [-1, 1], moves the point by up to 0.06 a side and step. The episode terminates at either disc, with
    reward 1 and `is_success` at the right one, and is truncated after 40 steps.

    With `mislead` the prompt names the other disc, and everything else stays: a policy that follows the prompt fails.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}

    def __init__(self, size: int = 24, mislead: bool = False, render_mode: str | None = "rgb_array") -> None:
        self.size, self.mislead, self.render_mode = size, mislead, render_mode
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
                "state": spaces.Box(0, 1, (2,), np.float32),
                "task": spaces.Text(64),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        axis = (np.arange(size) + 0.5) / size
        self._grid = np.stack(np.meshgrid(axis, axis), axis=-1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict]:
        """New places and a new prompt; `options={"goal": 0 or 1}` chooses the disc."""
        super().reset(seed=seed)
        while True:
            places = self.np_random.uniform(0.12, 0.88, (3, 2))
            gaps = np.linalg.norm(places[[0, 0, 1]] - places[[1, 2, 2]], axis=-1)
            if gaps.min() > 0.3:
                break
        self.point, self.goals = places[0], places[1:]
        goal = int(self.np_random.integers(2))
        self.goal = goal if options is None else int(options.get("goal", goal))
        self.steps = 0
        return self._observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Move."""
        self.point = np.clip(self.point + STEP * np.clip(np.asarray(action, np.float64), -1, 1), 0, 1)
        self.steps += 1
        near = np.linalg.norm(self.goals - self.point, axis=-1) < REACHED
        success = bool(near[self.goal])
        done = bool(near.any())
        return self._observation(), float(success), done, not done and self.steps >= MAX_STEPS, {"is_success": success}

    def expert(self, rng: np.random.Generator, noise: float = 0.1) -> np.ndarray:
        """An action towards the disc that is meant, as fast as allowed, with noise."""
        way = self.goals[self.goal] - self.point
        return np.clip(way / max(np.abs(way).max(), STEP) + noise * rng.normal(size=2), -1, 1).astype(np.float32)

    def progress(self) -> float:
        """Minus the distance from the disc that is meant."""
        return -float(np.linalg.norm(self.goals[self.goal] - self.point))

    def render(self) -> np.ndarray:
        """[S, S, 3] uint8."""
        image = np.full((self.size, self.size, 3), BACKGROUND, np.uint8)
        discs = [*zip(self.goals, COLORS.values(), strict=True), (self.point, AGENT)]
        for (place, color), radius in zip(discs, (RADIUS, RADIUS, 0.05), strict=True):
            image[np.linalg.norm(self._grid - place, axis=-1) < radius] = color
        return image

    def _observation(self) -> dict[str, Any]:
        task = PROMPTS[self.goal ^ self.mislead]
        return {"image": self.render(), "state": self.point.astype(np.float32), "task": task}


def demonstrations(episodes: int, seed: int = 0, size: int = 24) -> dict[str, Any]:
    """A replay buffer of the expert: columns [N, ...] by LeRobot's names, `episode_ends` and `tasks` [E]."""
    env, rng = TwoGoals(size), np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {name: [] for name in ("observation.image", "observation.state", "action")}
    ends, tasks = [], []
    for episode in range(episodes):
        observation, _ = env.reset(seed=int(rng.integers(2**31)) if episode else seed, options={"goal": episode % 2})
        done = False
        while not done:
            action = env.expert(rng)
            for name, value in (
                ("observation.image", observation["image"]),
                ("observation.state", observation["state"]),
                ("action", action),
            ):
                columns[name].append(value)
            observation, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        ends.append(len(columns["action"]))
        tasks.append(observation["task"])
    arrays = {name: np.stack(values) for name, values in columns.items()}
    return {
        **arrays,
        "episode_ends": np.asarray(ends),
        "tasks": np.asarray(tasks),
        "fps": np.asarray(float(RATE_HZ)),
    }


gymnasium.register("rlsvc/TwoGoals-v0", "rlsvc.envs.two_goals:TwoGoals")

if __name__ == "__main__":
    write_from_command_line(__doc__, demonstrations, 1500)
