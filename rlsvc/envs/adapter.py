"""A gymnasium environment by LeRobot's names, with a contract.

Letters: N environments, A action dimensions, F stacked frames, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import ContractError

STATE, IMAGE, TASK = "observation.state", "observation.image", "task"


@dataclass(frozen=True)
class Part:
    """Where one feature comes from.

    Attributes:
        path: keys into the simulator's nested observation; () is all of it.
        name: of the feature.
        feature: what it becomes.
        frames: F, when the simulator's array has them in front.
    """

    path: tuple[str, ...]
    name: str
    feature: Feature
    frames: int

    @property
    def is_plain(self) -> bool:
        """Whether assigning the simulator's observation to a row of the feature is all that is to do."""
        return not self.path and self.frames == 1 and self.feature.dtype != TEXT

    def read(self, observation: Any) -> Any:
        """The feature's value, a new array (or a text)."""
        for key in self.path:
            observation = observation[key]
        if self.feature.dtype == TEXT:
            return str(observation[-1] if self.frames > 1 else observation)
        if self.feature.is_image and self.frames > 1:
            observation = np.moveaxis(np.asarray(observation).reshape(self.frames, *self.feature.shape[:2], -1), 0, 2)
        return np.array(observation, self.feature.dtype).reshape(self.feature.shape)


class Adapted(gymnasium.Env):
    """Observations as a flat map of arrays by LeRobot's names; float32, images uint8 (H, W, C).

    A single vector is `observation.state`, a single image `observation.image`, an entry `x` of a dictionary
    `observation.x`, a text `task`. Stacked frames lie along an image's channels and end to end in a vector, oldest
    first. `truncated` is false where `terminated` is true, and info has `is_success` where the suite has success.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        rate_hz: float,
        frames: int = 1,
        native: Contract | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        """Wraps an environment whose options are applied.

        Args:
            env: the simulator within its wrappers.
            rate_hz: rate of its steps.
            frames: F, how many observations its outermost wrapper stacks.
            native: what is known of features that an environment names itself; units, names and bounds come from it.
            rename: other names of observations, by the names that they would have.

        Raises:
            ContractError: a space that has no place in a contract, by name, or a name to change that there is not.
        """
        self.env, self.rate_hz = env, rate_hz
        self.metadata = {**env.metadata, "render_fps": rate_hz}
        self.render_mode = env.render_mode
        self.parts = _renamed(_parts(env.observation_space, frames, native), rename or {})
        self.action_feature = _action(env.action_space, native)
        self.observation_space, self.action_space = contract_spaces(self.contract())

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """What the environment gives and takes."""
        features = {part.name: part.feature for part in self.parts}
        return Contract(features, self.action_feature, self.rate_hz, n_obs_steps, action_horizon)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self.read(observation), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One step; the action is [A] or a number."""
        observation, reward, terminated, truncated, info = self.env.step(self.raw_actions(np.asarray(action)[None])[0])
        if "is_success" not in info and "success" in info:
            info = {**info, "is_success": bool(info["success"])}
        terminated = bool(terminated)
        return self.read(observation), float(reward), terminated, bool(truncated) and not terminated, info

    def read(self, observation: Any) -> dict[str, Any]:
        """The simulator's observation by name."""
        return {part.name: part.read(observation) for part in self.parts}

    def raw_actions(self, actions: np.ndarray) -> Any:
        """Actions [N, ...] as N actions of the simulator's (copies).

        Raises:
            ContractError: another shape.
        """
        if actions.shape[1:] != self.action_feature.shape:
            raise ContractError(f"action: got shape {actions.shape[1:]}, expected {self.action_feature.shape}")
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            return (actions + space.start).tolist()
        return np.array(actions, space.dtype, order="C").reshape(-1, *(space.shape or ()))

    def render(self) -> Any:
        """[H, W, 3] uint8."""
        return self.env.render()

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()


def step_columns(env: Any) -> Mapping[str, Feature]:
    """What an environment tells of each step in its `info`, feature by name; most tell nothing.

    An environment says so with an attribute `step_columns`. `action` among them is what was executed, where that may
    differ from what was asked for; `intervention` is True where a person acted.
    """
    return getattr(env, "step_columns", None) or getattr(innermost(env), "step_columns", {})


def innermost(env: Any) -> Any:
    """The simulator within all wrappers."""
    inner = env.unwrapped
    return inner.env.unwrapped if isinstance(inner, Adapted) else inner


def contract_spaces(contract: Contract) -> tuple[spaces.Dict, spaces.Space]:
    """Observation and action space of a contract."""
    return spaces.Dict({name: _space(f) for name, f in contract.observation.items()}), _space(contract.action)


def _parts(space: spaces.Space, frames: int, native: Contract | None) -> tuple[Part, ...]:
    leaves = _leaves(space, ())
    parts = []
    for path, leaf in leaves:
        name = _name(path, leaf, frames)
        known = native.observation.get(name) if native else None
        parts.append(Part(path, name, _feature(path, leaf, frames, known), frames))
    twice = _twice(parts)
    if twice:
        raise ContractError(f"observations: two are called '{twice}'; set env.flatten=true")
    return tuple(parts)


def _twice(parts: Sequence[Part]) -> str | None:
    names = [part.name for part in parts]
    return next((name for name in names if names.count(name) > 1), None)


def _renamed(parts: tuple[Part, ...], names: Mapping[str, str]) -> tuple[Part, ...]:
    known = [part.name for part in parts]
    if lost := next((name for name in names if name not in known), None):
        raise ContractError(f"env.rename: the environment gives no '{lost}'; it gives: {', '.join(known)}")
    parts = tuple(replace(part, name=names.get(part.name, part.name)) for part in parts)
    if twice := _twice(parts):
        raise ContractError(f"env.rename: two observations would be called '{twice}'")
    return parts


def _leaves(space: spaces.Space, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], spaces.Space]]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, inner in space.spaces.items() for leaf in _leaves(inner, (*path, key))]
    return [(path, space)]


def _name(path: tuple[str, ...], leaf: spaces.Space, frames: int) -> str:
    if _is_text(leaf):
        return TASK
    if not path:
        return IMAGE if isinstance(leaf, spaces.Box) and _is_image(leaf, frames) else STATE
    if path[0].startswith("observation.") or path[0] == "block_pose":
        return ".".join(path)
    if path == ("observation",):
        return STATE
    return ".".join(("observation", *path))


def _is_text(leaf: spaces.Space) -> bool:
    return isinstance(leaf, spaces.Text) or (isinstance(leaf, spaces.Tuple) and isinstance(leaf[0], spaces.Text))


def _is_image(leaf: spaces.Box, frames: int) -> bool:
    return leaf.dtype == np.uint8 and len(leaf.shape) - (frames > 1) in (2, 3)


def _feature(path: tuple[str, ...], leaf: spaces.Space, frames: int, known: Feature | None) -> Feature:
    if _is_text(leaf):
        return Feature((), TEXT)
    if not isinstance(leaf, spaces.Box):
        where = f" '{'.'.join(path)}'" if path else ""
        raise ContractError(
            f"observation{where}: got {leaf}, expected arrays; env.flatten=true makes one vector of all"
        )
    shape = leaf.shape[1:] if frames > 1 else leaf.shape
    if _is_image(leaf, frames):
        height, width, channels = shape if len(shape) == 3 else (*shape, 1)
        return Feature((height, width, channels * frames), "uint8")
    if known is not None and known.shape == leaf.shape:
        return known
    size = int(np.prod(shape)) * frames
    if frames > 1 and known is not None:
        return replace(known, shape=(size,), names=known.names * frames)
    return Feature((size,), "float32", low=_bound(leaf.low), high=_bound(leaf.high))


def _action(space: spaces.Space, native: Contract | None) -> Feature:
    if isinstance(space, spaces.Discrete):
        return Feature((), "int64", low=(0.0,), high=(float(space.n - 1),))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        high = tuple(float(n - 1) for n in space.nvec)
        return Feature(space.shape, "int64", low=(0.0,) * len(high), high=high)
    if isinstance(space, spaces.Box):
        low, high = _bound(space.low), _bound(space.high)
        known = native.action if native else None
        if known is not None and known.shape == space.shape:
            same = low is not None and known.low is not None and set(low) == set(known.low)
            return known if same else replace(known, unit="", low=low, high=high)
        return Feature((int(np.prod(space.shape)),), "float32", low=low, high=high)
    raise ContractError(f"action space: got {space}, expected Box, Discrete or MultiDiscrete")


def _bound(limits: np.ndarray) -> tuple[float, ...] | None:
    return tuple(float(x) for x in limits.ravel()) if np.isfinite(limits).all() else None


def _space(feature: Feature) -> spaces.Space:
    if feature.dtype == TEXT:
        return spaces.Text(4096)
    if feature.is_image:
        return spaces.Box(0, 255, feature.shape, np.uint8)
    if feature.dtype == "int64" and feature.high is not None:
        high = np.array(feature.high, np.int64) + 1
        return spaces.MultiDiscrete(high) if feature.shape else spaces.Discrete(int(high[0]))
    low = -np.inf if feature.low is None else np.resize(np.asarray(feature.low, np.float32), feature.shape)
    high = np.inf if feature.high is None else np.resize(np.asarray(feature.high, np.float32), feature.shape)
    return spaces.Box(low, high, feature.shape, np.float32)
