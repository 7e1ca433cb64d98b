"""The DeepMind Control Suite.

An episode ends by truncation where the suite's own time runs out (discount 1) and by termination where a task fails
(discount 0). The state is all observations end to end, in the suite's order.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import STATE, Adapted
from rlsvc.envs.opengl import INSTALL, choose_opengl
from rlsvc.envs.options import apply_options
from rlsvc.envs.registered import unknown_id
from rlsvc.spec.env import DMControlSpec

DEFAULT_PIXELS = 64
VIDEO_SIZE = 240


class DMControl(gymnasium.Env):
    """One task; observation [D] float32, action [A] float32 within the actuators' bounds."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, spec: DMControlSpec) -> None:
        suite = _suite(spec.observation == "pixels")
        names = {f"{domain}-{task}": (domain, task) for domain, task in suite.ALL_TASKS}
        if spec.task not in names:
            raise unknown_id("dm_control task", spec.task, names)
        arguments = dict(spec.kwargs)
        if spec.max_steps is not None:
            arguments.setdefault("time_limit", float("inf"))  # ours stands outside of the action repeat
        # A seed at construction too: some tasks build their model from it.
        arguments.setdefault("random", np.random.RandomState(0))
        self._sim = suite.load(*names[spec.task], task_kwargs=arguments)
        self._camera, self.render_mode = spec.camera, "rgb_array"
        self._size = (spec.image_size or DEFAULT_PIXELS) if spec.observation == "pixels" else VIDEO_SIZE
        self.rate_hz = 1.0 / self._sim.control_timestep()
        action = self._sim.action_spec()
        self.action_space = spaces.Box(action.minimum.astype(np.float32), action.maximum.astype(np.float32))
        sizes = {key: int(np.prod(value.shape)) for key, value in self._sim.observation_spec().items()}
        self.names = tuple(f"{key}_{i}" if size > 1 else key for key, size in sizes.items() for i in range(size))
        self.observation_space = spaces.Box(-np.inf, np.inf, (len(self.names),), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; without a seed the task's own random state goes on."""
        super().reset(seed=seed)
        if seed is not None:
            self._sim.task._random = np.random.RandomState(seed)  # pyright: ignore[reportPrivateUsage]
        return self._state(self._sim.reset().observation), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step."""
        now = self._sim.step(action)
        terminated = now.last() and now.discount == 0.0
        return self._state(now.observation), float(now.reward), terminated, now.last() and not terminated, {}

    def render(self) -> np.ndarray:
        """[H, W, 3] uint8."""
        return self._sim.physics.render(self._size, self._size, self._camera)

    def close(self) -> None:
        """Free the simulator."""
        self._sim.close()

    def _state(self, observation: Any) -> np.ndarray:
        return np.concatenate([np.ravel(value) for value in observation.values()], dtype=np.float32)


def _suite(pixels: bool) -> Any:
    """dm_control.suite; without a display its cameras draw through EGL."""
    chosen = choose_opengl()
    try:
        from dm_control import suite
    except (ImportError, AttributeError, RuntimeError) as error:  # what OpenGL's bindings raise without a library
        if isinstance(error, ModuleNotFoundError) or chosen or pixels:
            raise UserError(
                f"environment 'dm_control' cannot be imported ({error}); install rlsvc[sim], and for cameras OpenGL: "
                f"{INSTALL}"
            ) from error
        os.environ["MUJOCO_GL"] = "disabled"
        from dm_control import suite
    return suite


_NO_ACTION = Feature((0,), "float32")


def make_dm_control(spec: DMControlSpec) -> Adapted:
    """A task of the suite.

    Raises:
        NotFoundError: no such task.
        UserError: pixels are wanted, and there is no OpenGL.
    """
    env = DMControl(spec)
    native = Contract({STATE: Feature((len(env.names),), "float32", names=env.names)}, _NO_ACTION, env.rate_hz)
    return apply_options(env, spec, env.rate_hz, native=native, render=spec.observation == "pixels")
