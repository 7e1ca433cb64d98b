"""The two simulated tasks of ALOHA (arXiv:2304.13705), as gym-aloha packages them, with its datasets' names.

`observation.images.top` is the camera above the table, [480, 640, 3]; `observation.state` the two arms, [14], left
before right: six joints (rad) and the gripper, 0 closed to 1 open; `task` the instruction. An action is the same 14 as
targets, at 50 Hz. The reward of a step is the stage that the task has reached, 0 to 4; 4 is success and terminates the
episode.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import STATE, TASK, Adapted
from rlsvc.envs.opengl import INSTALL, choose_opengl
from rlsvc.envs.options import apply_options
from rlsvc.spec.env import AlohaSpec

RATE_HZ = 50.0
TOP = "observation.images.top"
HEIGHT, WIDTH = 480, 640
SUCCESS = 4.0
PROMPTS = {"transfer_cube": "Transfer cube", "insertion": "Insert the peg into the socket"}
_GRIPPERS = (6, 13)


class Aloha(gymnasium.Env):
    """One task; the seed places the objects."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}  # noqa: RUF012

    def __init__(self, spec: AlohaSpec) -> None:
        choose_opengl()
        try:
            from dm_control.rl.control import Environment
            from gym_aloha.env import AlohaEnv  # pyright: ignore[reportMissingImports]
        except (ImportError, AttributeError, RuntimeError) as error:  # what OpenGL's bindings raise without a library
            if isinstance(error, ModuleNotFoundError):
                raise
            raise UserError(f"environment 'aloha' draws its camera with OpenGL ({error}): {INSTALL}") from error
        self.render_mode = "rgb_array"
        self._gym = AlohaEnv(spec.task, obs_type="pixels_agent_pos")
        self._sim: Environment = self._gym._env  # pyright: ignore[reportPrivateUsage]
        # gym-aloha draws three cameras a step, and shows one.
        self._sim.task.get_observation = self._draw
        self._prompt = spec.prompt or PROMPTS[spec.task]
        self._image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                TOP: spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8),
                STATE: spaces.Box(-np.inf, np.inf, (14,), np.float32),
                TASK: spaces.Text(1000),
            }
        )
        # gym-aloha declares [-1, 1], which the elbows' resting pose exceeds; these are the motors' own limits.
        low, high = self._sim.physics.model.actuator_ctrlrange[[*range(7), *range(8, 15)]].T.astype(np.float32)
        for gripper in _GRIPPERS:
            low[gripper], high[gripper] = 0.0, 1.0
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    @property
    def physics(self) -> Any:
        """dm_control's physics of the scene."""
        return self._sim.physics

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        observation, _ = self._gym.reset(seed=int(self.np_random.integers(2**32)) if seed is None else seed)
        return self._observation(observation), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step of 0.02 s."""
        observation, reward, *_ = self._gym.step(np.asarray(action, np.float64))
        success = reward == SUCCESS
        return self._observation(observation), float(reward), success, False, {"is_success": success}

    def render(self) -> np.ndarray:
        """[480, 640, 3] uint8, the newest image of the camera above the table."""
        return self._image

    def close(self) -> None:
        """Free the simulator."""
        self._sim.physics.free()

    def _draw(self, physics: Any) -> dict[str, Any]:
        self._image = physics.render(height=HEIGHT, width=WIDTH, camera_id="top")
        return {"qpos": self._sim.task.get_qpos(physics), "images": {"top": self._image}}

    def _observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        state = observation["agent_pos"].astype(np.float32)
        return {TOP: observation["pixels"]["top"], STATE: state, TASK: self._prompt}


def make_aloha(spec: AlohaSpec) -> Adapted:
    """A task of gym-aloha.

    Raises:
        UserError: there is no OpenGL.
    """
    # Without names of joints: converters of ALOHA data disagree on them, about the same 14 numbers.
    return apply_options(Aloha(spec), spec, RATE_HZ)
