"""gym_pusht with the observations and the score of Diffusion Policy (arXiv:2303.04137, section V).

An action is the target position of the agent, [2] float32, pixels, in [0, 512], at 10 Hz. The reward of a step is
clip(coverage / 0.95, 0, 1); an episode ends when coverage reaches 0.95 (terminated, success) or after max_steps
(truncated).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import gymnasium
import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.envs.adapter import Adapted
from rlsvc.envs.options import apply_options
from rlsvc.spec.env import EnvBase, PushTSpec

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
with warnings.catch_warnings():
    # pygame asks for its own files through pkg_resources, which warns of itself at every start.
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    import gym_pusht.envs.pusht as gym_pusht

SIZE = 512.0
IMAGE = 96
RATE_HZ = 10.0
# Nine points fixed to the block, pixels in its own frame: the medians that the human demonstrations' keypoints have
# there, which reproduce the recorded ones with a median error of 1.5e-5 pixel.
KEYPOINTS = np.array(
    [
        [9.2698, 90.041], [-60.9835, -1.1867], [60.9128, -1.3934], [-0.2705, 25.5436], [-14.0649, 122.8159],
        [39.0027, 32.8574], [-39.9664, 32.7297], [-16.8243, 62.8632], [23.5415, -1.7003],
    ]
)  # fmt: skip
_POSITION = Feature((2,), "float32", "px", ("agent_x", "agent_y"), (0.0,), (SIZE,))
FEATURES: dict[str, dict[str, Feature]] = {
    "keypoints": {"observation.state": _POSITION, "observation.environment_state": Feature((18,), "float32", "px")},
    "pixels": {"observation.image": Feature((IMAGE, IMAGE, 3), "uint8"), "observation.state": _POSITION},
    "state": {
        "observation.state": _POSITION,
        "block_pose": Feature((3,), "float32", "", ("x", "y", "angle")),
    },
}
ACTION = Feature((2,), "float32", "px", ("x", "y"), (0.0,), (SIZE,))


def keypoints(position: np.ndarray, angle: float) -> np.ndarray:
    """KEYPOINTS in the world, [9, 2] pixels, for a block at `position` [2] turned by `angle` rad."""
    c, s = np.cos(angle), np.sin(angle)
    return KEYPOINTS @ np.array([[c, s], [-s, c]]) + position


class PushT(gymnasium.Env):
    """Observations by LeRobot's names; see the module for action, reward and end."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, spec: PushTSpec) -> None:
        self._spec, self.render_mode = spec, "rgb_array"
        kind = "pixels" if spec.observation == "pixels" else "state"
        self._sim = gym_pusht.PushTEnv(obs_type=kind, visualization_width=256, visualization_height=256)
        spaces = gymnasium.spaces
        self.action_space = spaces.Box(0.0, SIZE, (2,), np.float32)
        self.observation_space = spaces.Dict(
            {
                key: spaces.Box(0, 255, f.shape, np.uint8)
                if f.is_image
                else spaces.Box(-np.inf, np.inf, f.shape, np.float32)
                for key, f in FEATURES[spec.observation].items()
            }
        )
        self._steps = 0

    @staticmethod
    def with_options(spec: PushTSpec) -> PushT | Adapted:
        """The environment, within wrappers only where an option asks for one."""
        plain = PushTSpec(observation=spec.observation, max_steps=spec.max_steps)
        options = set(EnvBase.model_fields) - {"max_steps", "isolation", "step_timeout_s", "max_memory_mb", "runtime"}
        if all(getattr(spec, name) == getattr(plain, name) for name in options):
            return PushT(plain)
        env = PushT(plain.replace(max_steps=None))
        return apply_options(env, spec, RATE_HZ, native=env.contract())

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """What the environment gives and takes."""
        return Contract(dict(FEATURES[self._spec.observation]), ACTION, RATE_HZ, n_obs_steps, action_horizon)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode.

        `options={"state": [agent x, agent y, block x, block y, block angle]}` (px, px, px, px, rad) starts where a
        recorded episode starts: the block's angle is set before its position, since turning moves it.
        """
        super().reset(seed=seed)
        observation, _ = self._sim.reset(seed=seed)
        self._steps = 0
        if options and "state" in options:
            state = np.asarray(options["state"], np.float64)
            self._sim.agent.position = tuple(state[:2])
            self._sim.block.angle = float(state[4])
            self._sim.block.position = tuple(state[2:4])
            self._sim.space.step(self._sim.dt)
            observation = self._sim.get_obs()
        return self._observation(observation), {"coverage": self._sim._get_coverage()}  # pyright: ignore[reportPrivateUsage]

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """One control step of 0.1 s."""
        observation, reward, _, _, info = self._sim.step(np.asarray(action, np.float64))
        self._steps += 1
        success = bool(info["coverage"] >= self._sim.success_threshold)
        truncated = not success and self._spec.max_steps is not None and self._steps >= self._spec.max_steps
        return (self._observation(observation), float(reward), success, truncated,
                {"coverage": float(info["coverage"]), "is_success": success})  # fmt: skip

    def state(self) -> np.ndarray:
        """Agent x, y, block x, y (px), block angle (rad, in [0, 2 pi)); [5] float64."""
        block = self._sim.block
        return np.array([*self._sim.agent.position, *block.position, block.angle % (2 * np.pi)])

    def render(self) -> np.ndarray:
        """[256, 256, 3] uint8."""
        return np.asarray(self._sim.render())

    def close(self) -> None:
        """Free the simulator."""
        self._sim.close()

    def _observation(self, observation: Any) -> dict[str, np.ndarray]:
        state = self.state()
        agent = state[:2].astype(np.float32)
        if self._spec.observation == "pixels":
            return {"observation.image": observation, "observation.state": agent}
        if self._spec.observation == "state":
            return {"observation.state": agent, "block_pose": state[2:].astype(np.float32)}
        points = keypoints(state[2:4], float(state[4])).reshape(18).astype(np.float32)
        return {"observation.state": agent, "observation.environment_state": points}
