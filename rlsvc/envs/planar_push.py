"""A point that pushes a disc to a mark, with a script that can: the smallest task of contact with an expert.

`env: {name: gymnasium, id: rlsvc/PlanarPush-v0, import_module: rlsvc.envs.planar_push}`. The disc slips off a point
that does not push through its centre, so that small errors grow and a policy has to go round it and push again.

    python -m rlsvc.envs.planar_push datasets/planar_push.npz --episodes 20

writes demonstrations of the script.

Letters: N steps, S side of the image.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.envs.demonstrations import of_script, write_from_command_line

DISC, POINT, REACHED, STEP, MAX_STEPS, RATE_HZ = 0.07, 0.03, 0.06, 0.05, 80, 10
TOUCH = DISC + POINT
SUBSTEPS = 5


class PlanarPush(gymnasium.Env):
    """Observation [6] float32: the point's place in [0, 1], the way from it to the disc, and from the disc to the mark.

    Action: [2] in [-1, 1], moves the point by up to 0.05 a side and step; the disc gives way along the line between
    their centres. The episode terminates with reward 1 and `is_success` when the disc is within 0.06 of the mark, and
    is truncated after 80 steps. All other rewards are 0.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}

    def __init__(self, size: int = 96, max_steps: int = MAX_STEPS, render_mode: str | None = "rgb_array") -> None:
        self.size, self.max_steps, self.render_mode = size, max_steps, render_mode
        self.observation_space = spaces.Box(-1, 1, (6,), np.float32)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        axis = (np.arange(size) + 0.5) / size
        self._grid = np.stack(np.meshgrid(axis, axis), axis=-1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """New places, the disc away from the walls and from the mark."""
        super().reset(seed=seed)
        while True:
            self.point = self.np_random.uniform(0.05, 0.95, 2)
            self.disc, self.mark = self.np_random.uniform(0.25, 0.75, (2, 2))
            if np.linalg.norm(self.disc - self.mark) > 0.25 and np.linalg.norm(self.disc - self.point) > TOUCH + 0.05:
                break
        self.steps = 0
        return self._observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move, and push."""
        move = STEP * np.clip(np.asarray(action, np.float64), -1, 1) / SUBSTEPS
        for _ in range(SUBSTEPS):
            self.point = np.clip(self.point + move, 0, 1)
            way = self.disc - self.point
            distance = float(np.linalg.norm(way))
            if distance < TOUCH:
                self.disc = np.clip(self.point + TOUCH * way / max(distance, 1e-9), 0, 1)
        self.steps += 1
        success = -self.progress() < REACHED
        truncated = not success and self.steps >= self.max_steps
        return self._observation(), float(success), success, truncated, {"is_success": success}

    def progress(self) -> float:
        """Minus the disc's distance from the mark."""
        return -float(np.linalg.norm(self.disc - self.mark))

    def expert(self, rng: np.random.Generator, noise: float = 0.1) -> np.ndarray:
        """An action of the script [2] float32: go round the disc to where it is pushed from, then push."""
        line = self.mark - self.disc
        line = line / max(float(np.linalg.norm(line)), 1e-9)
        away = self.disc - self.point
        distance = float(np.linalg.norm(away))
        aligned = float(away @ line) / max(distance, 1e-9)
        if aligned > 0.9 and distance < TOUCH + 0.06:
            # Aim beside the centre, on the side that turns the disc's way back to the line.
            target = self.disc - line * 0.6 * TOUCH
        elif aligned > 0.5:
            target = self.disc - line * (TOUCH + 0.02)
        else:
            side = np.array([-line[1], line[0]])
            side = side if float(away @ side) < 0 else -side
            target = self.disc + (side - 0.6 * line) * (TOUCH + 0.06)
        move = (target - self.point) / STEP
        move = move / max(1.0, float(np.abs(move).max()))
        return np.clip(move + noise * rng.normal(size=2), -1, 1).astype(np.float32)

    def render(self) -> np.ndarray:
        """[S, S, 3] uint8."""
        image = np.full((self.size, self.size, 3), 235, np.uint8)
        discs = ((self.mark, REACHED, (70, 170, 80)), (self.disc, DISC, (40, 70, 230)), (self.point, POINT, (20,) * 3))
        for place, radius, color in discs:
            image[np.linalg.norm(self._grid - place, axis=-1) < radius] = color
        return image

    def _observation(self) -> np.ndarray:
        return np.concatenate([self.point, self.disc - self.point, self.mark - self.disc]).astype(np.float32)


def demonstrations(episodes: int, seed: int = 0, noise: float = 0.1) -> dict[str, np.ndarray]:
    """A replay buffer of the script: columns [N, ...] by LeRobot's names, and `episode_ends`."""
    return of_script(PlanarPush(), RATE_HZ, episodes, seed, noise)


gymnasium.register("rlsvc/PlanarPush-v0", "rlsvc.envs.planar_push:PlanarPush")

if __name__ == "__main__":
    write_from_command_line(__doc__, demonstrations, 20)
