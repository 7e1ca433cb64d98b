"""An SO-101 arm that lifts a cube, on a simulated clock and without the servo bus, with a script that can.

`env: {name: gymnasium, id: rlsvc/SO101Lift-v0, import_module: rlsvc.envs.so101_lift}`. The arm, its servos'
control loops and the cube are those of `rlsvc.robots.virtual.so101_sim`.

    python -m rlsvc.envs.so101_lift datasets/so101_lift.npz --episodes 20

writes demonstrations of the script.

Letters: N steps, J 6 joints in the order of JOINTS.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import mujoco as _mujoco
import numpy as np
from gymnasium import spaces

from rlsvc.envs.demonstrations import of_script, write_from_command_line
from rlsvc.robots.virtual.so101_sim import JOINTS, SO101Sim

mujoco: Any = _mujoco  # its names are made at run time

READY = (0.0, -0.6, 0.5, 1.5, 0.0, 0.8)
"""rad: the gripper open above the table, pointing down."""
MOST = np.array([0.15, 0.15, 0.15, 0.15, 0.3, 0.4])
"""rad by which an action moves the goal of each joint, at most."""
RATE_HZ, MAX_STEPS = 10, 80
LIFTED, HELD, HOLD_STEPS = 0.06, 0.03, 3
"""m: the cube's height at success (on the table it is 0.0125), and how near to the grip; for so many steps in a row, or
a policy would throw it."""
HALF = 0.0125
"""m: half a side of the cube."""
OPEN, SHUT = 0.8, -0.1
"""rad of the gripper that the script asks for."""
WIDE, GRASP = 0.5, 0.45
"""rad above which the gripper goes over the cube, and below which its jaws touch it."""
CLEAR = 0.004
"""m between the cube and the fixed jaw when the script goes down."""
NEAR = 0.012
"""m between the grip and the cube's middle, beside it or in height, at which the script shuts the gripper."""
HOVER = 0.05
"""m above the cube, from where the script goes down."""


class SO101Lift(gymnasium.Env):
    """A cube to be lifted by joints whose goals move.

    Observation: [17] float32: J angles and J goals of the joints, rad; 10 times the way from the grip to the cube, m;
    sine and cosine of four times the cube's turn about z, since a cube looks the same after a quarter of one.
    Action: [J] in [-1, 1], moves the goals by up to `MOST`. The episode terminates with reward 1 and `is_success` when
    the cube has been above 0.06 m in the grip for three steps, and is truncated after 80 steps of 0.1 s. All other
    rewards are 0.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": RATE_HZ}

    def __init__(self, size: int = 96, max_steps: int = MAX_STEPS, render_mode: str | None = "rgb_array") -> None:
        self.size, self.max_steps, self.render_mode = size, max_steps, render_mode
        self.observation_space = spaces.Box(-10, 10, (17,), np.float32)
        self.action_space = spaces.Box(-1, 1, (len(JOINTS),), np.float32)
        self.sim = SO101Sim()
        self._site, self._gripper = self.sim.model.site("grip").id, self.sim.model.body("gripper").id
        self._low, self._high = self.sim.model.jnt_range[: len(JOINTS)].T
        self._plan = mujoco.MjData(self.sim.model)
        self._renderer: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """The arm ready, the cube anywhere in front of it."""
        super().reset(seed=seed)
        self.sim.reset(READY, random=self.np_random)
        self.goals = np.array(READY)
        self.sim.command(self.goals)
        self.steps = self.held = 0
        return self._observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the goals, and let 0.1 s pass."""
        move = MOST * np.clip(np.asarray(action, np.float64), -1, 1)
        self.goals = np.clip(self.goals + move, self._low, self._high)
        self.sim.command(self.goals)
        self.sim.step(1 / RATE_HZ)
        self.steps += 1
        high = float(self.sim.cube[2]) > LIFTED and float(np.linalg.norm(self._way())) < HELD
        self.held = self.held + 1 if high else 0
        success = self.held >= HOLD_STEPS
        truncated = not success and self.steps >= self.max_steps
        return self._observation(), float(success), success, truncated, {"is_success": success}

    def progress(self) -> float:
        """How near the grip is to the cube, and how high the cube is: m."""
        return 4 * float(self.sim.cube[2]) - float(np.linalg.norm(self._way()))

    def expert(self, rng: np.random.Generator, noise: float = 0.1) -> np.ndarray:
        """An action of the script [J] float32: above the cube, down, shut, up."""
        cube, way = self.sim.cube[:3], self._way()
        beside = float(np.linalg.norm(way[:2]))
        between = beside < NEAR and abs(float(way[2])) < NEAR
        gripper = float(self.sim.angles[-1])
        held = between and gripper < GRASP and self.goals[-1] < GRASP
        if held:
            target, jaw = cube + np.array([0, 0, 0.05]), SHUT
        elif between:
            target, jaw = cube, SHUT
        elif beside < NEAR and gripper > WIDE:
            target, jaw = cube, OPEN
        else:
            target, jaw = np.array([cube[0], cube[1], HALF + HOVER]), OPEN
        goals = np.append(self._reach(target), jaw)
        action = np.clip((goals - self.goals) / MOST, -1, 1)
        return np.clip(action + noise * rng.normal(size=len(JOINTS)), -1, 1).astype(np.float32)

    def render(self) -> np.ndarray:
        """[S, S, 3] uint8, from the front."""
        if self._renderer is None:
            self._renderer = mujoco.Renderer(self.sim.model, self.size, self.size)
        self._renderer.update_scene(self.sim.data, camera="front")
        return self._renderer.render()

    def close(self) -> None:
        """Let go of the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _way(self) -> np.ndarray:
        """From the grip to the cube, [3] m."""
        return self.sim.cube[:3] - self._grip_of(self.sim.data)

    def _grip_of(self, data: Any) -> np.ndarray:
        """The middle of a cube that the fixed jaw touches, [3] m."""
        return data.site_xpos[self._site] + (HALF + CLEAR) * data.xmat[self._gripper].reshape(3, 3)[:, 2]

    def _turn(self) -> float:
        """Of the cube about z, rad."""
        w, x, y, z = self.sim.cube[3:]
        return float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))

    def _observation(self) -> np.ndarray:
        turn = 4 * self._turn()
        parts = (self.sim.angles, self.goals, 10 * self._way(), (np.sin(turn), np.cos(turn)))
        return np.concatenate(parts).astype(np.float32)

    def _reach(self, target: np.ndarray) -> np.ndarray:
        """Angles of the joints but the gripper's, [5] rad, that bring the grip to `target` [3] m, pointing down.

        Damped least squares over shoulder_lift, elbow_flex and wrist_flex; pan and roll follow from the place alone.
        """
        model, plan = self.sim.model, self._plan
        pan = -float(np.arctan2(target[1], target[0]))
        # Over a side of the cube, the nearer way round.
        roll = (self._turn() + pan + np.pi / 4) % (np.pi / 2) - np.pi / 4
        plan.qpos[:] = self.sim.data.qpos
        plan.qpos[:5] = (pan, *self.goals[1:4], roll)
        jacobian, turned = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        for _ in range(30):
            mujoco.mj_kinematics(model, plan)
            mujoco.mj_comPos(model, plan)
            grip = self._grip_of(plan)
            mujoco.mj_jac(model, plan, jacobian, turned, grip, self._gripper)
            away = target - grip
            forward = plan.xmat[self._gripper].reshape(3, 3)[:, 0]
            tilt = np.cross(forward, [0, 0, -1.0])
            error = np.concatenate([away, 0.1 * tilt])
            columns = np.concatenate([jacobian, 0.1 * turned])[:, 1:4]
            change = columns.T @ np.linalg.solve(columns @ columns.T + 1e-5 * np.eye(6), error)
            plan.qpos[1:4] = np.clip(plan.qpos[1:4] + np.clip(change, -0.2, 0.2), self._low[1:4], self._high[1:4])
        return plan.qpos[:5].copy()


def demonstrations(episodes: int, seed: int = 0, noise: float = 0.1) -> dict[str, np.ndarray]:
    """A replay buffer of the script's successes: columns [N, ...] by LeRobot's names, and `episode_ends`."""
    return of_script(SO101Lift(), RATE_HZ, episodes, seed, noise, only_successes=True)


gymnasium.register("rlsvc/SO101Lift-v0", "rlsvc.envs.so101_lift:SO101Lift")

if __name__ == "__main__":
    write_from_command_line(__doc__, demonstrations, 20)
