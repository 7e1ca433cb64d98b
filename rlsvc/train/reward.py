"""A reward classifier's bundle made ready to judge, and an environment whose reward and success come from it.

Letters: B batch, n classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError
from rlsvc.core.types import REWARD_SOURCE, REWARD_SOURCES
from rlsvc.data.transforms import RobotTransforms
from rlsvc.envs.adapter import step_columns
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import unflatten_params
from rlsvc.policies import make_classifier
from rlsvc.policies.api import normalize_observation
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.train.calibration import CALIBRATION, from_bytes


class RewardRunner:
    """A bundle of a reward classifier: weights on the device, compiled for each number of rows.

    Attributes:
        contract: what it sees.
        calibration: as found on held-out episodes.
        version: the bundle's id.
    """

    def __init__(self, path: str | Path, *, device: str = "auto") -> None:
        """Read and verify.

        Raises:
            BundleError: not a bundle, or not of a reward classifier.
            ContractError: a bundle of a policy or value function.
        """
        setup_jax(device)
        bundle = read_bundle(path)
        net = make_classifier(bundle.policy, bundle.contract, bundle.precision)
        file = bundle.path / CALIBRATION
        if not file.exists():
            raise BundleError(f"{bundle.path}: it has no {CALIBRATION}; train it with held-out episodes")
        self.calibration = from_bytes(file.read_bytes(), file)
        self.version = bundle.id
        self.contract, self._transforms = bundle.contract, RobotTransforms(bundle.robot)
        self._params = jax.device_put(unflatten_params(bundle.params, jax.eval_shape(net.init, jax.random.key(0))))
        temperature, normalizer = self.calibration.temperature, bundle.normalizer

        def probabilities(params: Any, observation: dict[str, Any]) -> jax.Array:
            windows = {name: x[:, None] for name, x in observation.items()}
            normal = normalize_observation(windows, normalizer, 0)
            return jax.nn.softmax(net.logits(params, {"observation": normal}) / temperature)

        self._probabilities = jax.jit(probabilities)

    def probabilities(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """Calibrated probability of each class, [B, n] float32; the last one is that the task is done.

        Args:
            observation: by the contract's names [B, ...], raw; others are ignored.
        """
        seen = self._transforms.encode_observation({name: observation[name] for name in self.contract.observation})
        return np.asarray(self._probabilities(self._params, seen))

    def progress(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """[B] float32 in [0, 1]: the mean stage, as a share of the last one; the probability of success for two."""
        p = self.probabilities(observation)
        return p @ np.linspace(0, 1, p.shape[1], dtype=np.float32)

    def check(self, env: Contract, where: str = "rollout.reward") -> None:
        """Refuse an environment, or a robot, that does not give what it sees.

        Args:
            env: what is there.
            where: what asks for it, for the message.

        Raises:
            ContractError: names the observation.
        """
        given = self._transforms.seen(env).observation
        for name, feature in self.contract.observation.items():
            if name not in given:
                raise ContractError(f"{where}: the classifier sees '{name}', the environment gives: {', '.join(given)}")
            if (given[name].shape, given[name].dtype) != (feature.shape, feature.dtype):
                raise ContractError(
                    f"{where}: '{name}' is {given[name].dtype} {given[name].shape} in the environment, the "
                    f"classifier was trained on {feature.dtype} {feature.shape}"
                )


class ClassifierReward(gymnasium.Wrapper):
    """An environment that is rewarded, and ends as a success, when the classifier says that the task is done.

    The reward of a step is 1 then and else 0; the environment's own reward and success are not looked at, its ends are.
    """

    def __init__(self, env: Any, spec: RewardSourceSpec, runner: RewardRunner) -> None:
        """Wraps it.

        Raises:
            ContractError: it does not give what the classifier sees.
        """
        super().__init__(env)
        runner.check(env.contract())
        self._runner, self._consecutive = runner, spec.consecutive
        self._threshold = runner.calibration.threshold if spec.threshold is None else spec.threshold
        self.step_columns = {**step_columns(env), REWARD_SOURCE: Feature((), "int32")}

    def contract(self, n_obs_steps: int = 1, action_horizon: int = 1) -> Contract:
        """That of the environment."""
        return self.env.contract(n_obs_steps, action_horizon)  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._in_a_row = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, judged by where it led."""
        observation, _, terminated, truncated, info = self.env.step(action)
        p = float(self._runner.probabilities({k: np.asarray(x)[None] for k, x in observation.items()})[0, -1])
        self._in_a_row = self._in_a_row + 1 if p >= self._threshold else 0
        done = self._in_a_row >= self._consecutive
        info = {**info, "is_success": done, "success_probability": p}
        info[REWARD_SOURCE] = REWARD_SOURCES.index("classifier")
        return observation, float(done), bool(terminated) or done, bool(truncated) and not done, info
