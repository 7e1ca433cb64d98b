"""The options that every environment takes, as gymnasium's wrappers where those exist."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.envs.adapter import Adapted
from rlsvc.spec.env import EnvBase


class ActionRepeat(gymnasium.Wrapper):
    """Holds an action for several steps: rewards are summed, and an end ends them."""

    def __init__(self, env: gymnasium.Env, repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Up to `repeat` steps; observation and info are the last one's."""
        total, succeeded = 0.0, False
        for _ in range(self._repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            succeeded = succeeded or bool(info.get("is_success", info.get("success", False)))
            if terminated or truncated:
                break
        if succeeded:
            info["is_success"] = True
        return observation, total, terminated, truncated, info


def apply_options(
    env: gymnasium.Env, spec: EnvBase, rate_hz: float, *, native: Contract | None = None, render: bool = False
) -> Adapted:
    """The environment with the options of its specification.

    Args:
        env: a simulator without a time limit of its own where the specification has one.
        spec: its options.
        rate_hz: rate of the simulator's steps.
        native: what is known of features that the environment names itself.
        render: observe what `env.render()` gives instead, once for each step of the policy.

    Raises:
        UserError: an option that the environment's spaces do not allow.
    """
    if spec.action_repeat > 1:
        env = ActionRepeat(env, spec.action_repeat)
    if spec.max_steps is not None:
        env = wrappers.TimeLimit(env, spec.max_steps)
    if spec.episode_statistics:
        env = wrappers.RecordEpisodeStatistics(env)
    if spec.reward_scale != 1.0:
        scale = spec.reward_scale
        env = wrappers.TransformReward(env, lambda reward: float(reward) * scale)
    if spec.rescale_action:
        space = env.action_space
        if not (isinstance(space, spaces.Box) and space.is_bounded()):
            raise UserError(f"env.rescale_action: needs bounded continuous actions, got {space}")
        env = wrappers.RescaleAction(env, np.float32(-1), np.float32(1))
    if render:
        env = wrappers.AddRenderObservation(env)
    if spec.flatten:
        try:
            env = wrappers.FlattenObservation(env)
        except NotImplementedError as error:
            raise UserError(f"env.flatten: {env.observation_space} cannot be one vector") from error
    if spec.image_size is not None:
        env = _resized(env, spec.image_size)
    if spec.frame_stack > 1:
        env = wrappers.FrameStackObservation(env, spec.frame_stack)
    return Adapted(env, rate_hz / spec.action_repeat, spec.frame_stack, native, spec.rename)


def _resized(env: gymnasium.Env, size: int) -> gymnasium.Env:
    """Every image of the observation as size x size."""
    space = env.observation_space
    if isinstance(space, spaces.Box) and _is_image(space):
        return env if space.shape[:2] == (size, size) else wrappers.ResizeObservation(env, (size, size))
    images = [key for key, inner in space.spaces.items() if _is_image(inner)] if isinstance(space, spaces.Dict) else []
    if not images or not isinstance(space, spaces.Dict):
        raise UserError(f"env.image_size: the observations have no image: {space}")
    if all((space[key].shape or ())[:2] == (size, size) for key in images):
        return env
    import cv2

    def resize(observation: dict[str, Any]) -> dict[str, Any]:
        small = {key: cv2.resize(observation[key], (size, size), interpolation=cv2.INTER_AREA) for key in images}
        return {**observation, **small}

    inner = {key: spaces.Box(0, 255, (size, size, *space[key].shape[2:]), np.uint8) for key in images}  # pyright: ignore[reportOptionalSubscript]
    return wrappers.TransformObservation(env, resize, spaces.Dict({**space.spaces, **inner}))


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
