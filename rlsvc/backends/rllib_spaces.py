"""What an RLModule sees and does, for a contract: one array in, one action out, and an environment that speaks so.

Training, recorded data and serving go through the same pair of maps. Vectors are joined end to end in the contract's
order, each normalised; images of one size lie along their channels, 0..255 as -1..1. Continuous actions are those of
the contract's range as [-1, 1]; a discrete one counts from 0.

Letters: B rows, D numbers of an observation, H W C height, width and channels, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsvc.core.contract import TEXT, Contract
from rlsvc.core.errors import ContractError
from rlsvc.data.normalize import Normalizer
from rlsvc.envs.make import make_env
from rlsvc.spec.env import EnvBase

ACTION = "action"
LEAVE_OUT = "name what it is to see in policy.observation, or of recorded data in data.observation"


class ModuleSpaces:
    """The maps between a contract and a module.

    Attributes:
        observation: Box of the module, [D] or [H, W, C] float32.
        action: Box [-1, 1] of [A], Discrete or MultiDiscrete.
    """

    def __init__(self, contract: Contract, normalizer: Normalizer) -> None:
        """Work out the module's spaces.

        Raises:
            ContractError: an observation or action that RLlib's default modules have no place for, by name.
        """
        self.contract, self.normalizer = contract, normalizer
        self.names = tuple(contract.observation)
        self.observation = self._observation_space()
        self.action = self._action_space()

    def _observation_space(self) -> spaces.Box:
        features = self.contract.observation
        if texts := [name for name, feature in features.items() if feature.dtype == TEXT]:
            raise ContractError(f"observation '{texts[0]}' is a text, which RLlib's modules do not read; {LEAVE_OUT}")
        images = [name for name, feature in features.items() if feature.is_image]
        vectors = [name for name in features if name not in images]
        if images and vectors:
            raise ContractError(
                f"observation: RLlib's default modules read vectors or images, not both; got the images "
                f"{', '.join(images)} and the vectors {', '.join(vectors)}; {LEAVE_OUT}"
            )
        if not images:
            size = sum(math.prod(features[name].shape) for name in vectors)
            return spaces.Box(-np.inf, np.inf, (size,), np.float32)
        sizes = {features[name].shape[:2] for name in images}
        if len(sizes) > 1:
            raise ContractError(f"observation: the images have several sizes, {sorted(sizes)}; set env.image_size")
        channels = sum(features[name].shape[2] for name in images)
        return spaces.Box(-1.0, 1.0, (*sizes.pop(), channels), np.float32)

    def _action_space(self) -> spaces.Space:
        action = self.contract.action
        if action.dtype.startswith("int"):
            if action.low is None or action.high is None:
                raise ContractError("action: it is discrete and has no bounds, so that RLlib cannot count its choices")
            low, high = (np.resize(np.asarray(x, np.int64), action.shape) for x in (action.low, action.high))
            self._first = low
            count = high - low + 1
            return spaces.MultiDiscrete(count) if action.shape else spaces.Discrete(int(count))
        if self.normalizer.modes[ACTION] == "identity":
            raise ContractError(
                "action: it has no bounds on every side, so that RLlib's actions in [-1, 1] say nothing; take an "
                "environment with bounded actions"
            )
        return spaces.Box(-1.0, 1.0, action.shape, np.float32)

    def observe(self, observation: Mapping[str, Any]) -> np.ndarray:
        """What the module sees of observations by name, [B, ...]: [B, D] or [B, H, W, C] float32."""
        parts = [self.normalizer.normalize(name, np.asarray(observation[name])) for name in self.names]
        if len(self.observation.shape) == 1:
            parts = [np.reshape(part, (len(part), -1)) for part in parts]
        return np.concatenate(parts, -1, dtype=np.float32) if len(parts) > 1 else parts[0].astype(np.float32)

    def to_contract(self, action: np.ndarray) -> np.ndarray:
        """Actions of the module, [B, ...], in the contract's units, clipped to its range."""
        if isinstance(self.action, spaces.Box):
            clipped = np.clip(np.asarray(action, np.float32), -1.0, 1.0)
            feature = self.contract.action
            assert feature.low is not None
            assert feature.high is not None
            low, high = np.asarray(feature.low, np.float32), np.asarray(feature.high, np.float32)
            return np.clip(self.normalizer.unnormalize(ACTION, clipped), low, high).astype(np.float32)
        return (np.asarray(action, np.int64) + self._first).astype(self.contract.action.dtype)

    def to_module(self, action: np.ndarray) -> np.ndarray:
        """Inverse of `to_contract`, for recorded actions."""
        if isinstance(self.action, spaces.Box):
            return np.clip(self.normalizer.normalize(ACTION, action), -1.0, 1.0).astype(np.float32)
        return np.asarray(action, np.int64) - self._first


class ModuleEnv(gymnasium.Env):
    """An environment of this project's as RLlib's runners step it; what ends an episode means what it means elsewhere.

    A number that is not finite is an error, so that the runner makes the environment anew.
    """

    def __init__(self, env: Any, module: ModuleSpaces) -> None:
        self._env, self._module = env, module
        self.observation_space, self.action_space = module.observation, module.action
        self.metadata, self.render_mode = env.metadata, env.render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; what the simulator tells besides is left out."""
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._observe(observation), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step with an action of the module's.

        Raises:
            FloatingPointError: the simulator gave a number that is not finite.
        """
        done = self._module.to_contract(np.asarray(action)[None])[0]
        observation, reward, terminated, truncated, _ = self._env.step(done)
        if not math.isfinite(reward):
            raise FloatingPointError(f"reward is {reward}")
        return self._observe(observation), float(reward), bool(terminated), bool(truncated), {}

    def _observe(self, observation: Mapping[str, Any]) -> np.ndarray:
        seen = self._module.observe({name: np.asarray(observation[name])[None] for name in self._module.names})[0]
        if not np.isfinite(seen).all():
            raise FloatingPointError("observation is not finite")
        return seen

    def render(self) -> Any:
        """The simulator's picture."""
        return self._env.render()

    def close(self) -> None:
        """Free the simulator."""
        self._env.close()


class EnvMaker:
    """Makes the environment of a run, in whatever process RLlib calls it."""

    def __init__(self, env: EnvBase, module: ModuleSpaces) -> None:
        self._env, self._module = env, module

    def __call__(self, context: Any) -> ModuleEnv:
        """See the class; RLlib's context says nothing that the specification does not."""
        del context
        return ModuleEnv(make_env(self._env), self._module)
