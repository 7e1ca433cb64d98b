"""Several environments stepped as one, with one meaning of the end of an episode.

SAME_STEP autoreset: in the step in which an episode ends, `observation` is already the next episode's first one, and
`final_observation` holds the one that the step led to. Termination stops bootstrapping, truncation does not, and both
are never set together. No step is a reset step, so every step is a transition, but for those marked `lost`.

Letters: N environments.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import ContractError, UserError
from rlsvc.envs.adapter import Adapted, innermost, step_columns
from rlsvc.envs.make import make_here
from rlsvc.spec.env import EnvBase, ManiSkillSpec

log = logging.getLogger(__name__)

# A simulator that fails this often without a step in between is broken, not unlucky.
MAX_FAILURES = 5


class VectorStep(NamedTuple):
    """What a step of all environments led to. New arrays in every step, but for `final_observation`.

    Attributes:
        observation: by name [N, ...], what the next actions answer to.
        reward: [N] float32.
        terminated: [N] bool, the episode ended in a state without a future.
        truncated: [N] bool, the episode was cut off; never set together with `terminated`.
        final_observation: by name [N, ...], what the step led to: the last observation of episodes that ended, and
            the same as `observation` elsewhere. The same arrays as `observation` where no episode ended.
        ended: [N] bool, terminated or truncated.
        lost: [N] bool, the simulator failed in this step and was made anew: the step is no transition, its reward is 0,
            and `observation` begins another episode.
        success: [N] bool, the suite says that the task is solved.
        episode_return: [N] float64, sum of the episode's rewards so far, this step's included (not scaled).
        episode_length: [N] int64, steps of the episode so far, this one included.
        columns: by name [N, ...], what the environments tell of the step besides, as their `step_columns` say.
    """

    observation: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_observation: dict[str, Any]
    ended: np.ndarray
    lost: np.ndarray
    success: np.ndarray
    episode_return: np.ndarray
    episode_length: np.ndarray
    columns: Mapping[str, np.ndarray] = MappingProxyType({})


class _Arrays(NamedTuple):
    """What slots write into, one row each."""

    observation: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    columns: dict[str, np.ndarray]


class Slots(Protocol):
    """N simulators. Each method goes over its slots side by side and returns the reason of each slot that failed."""

    contract: Contract
    metadata: dict[str, Any]

    @property
    def step_columns(self) -> Mapping[str, Feature]:
        """See `VectorEnv`."""
        ...

    def step(self, actions: np.ndarray, into: _Arrays) -> dict[int, str]:
        """Step all with actions [N, ...]."""
        ...

    def reset(self, seeds: Mapping[int, int], into: dict[str, Any]) -> dict[int, str]:
        """Begin an episode in these slots."""
        ...

    def rebuild(self, slots: Sequence[int]) -> dict[int, str]:
        """Make these simulators anew."""
        ...

    def close(self) -> None:
        """Free all."""
        ...


class LocalSlots:
    """Simulators in this process, one after the other. One that hangs hangs them all."""

    def __init__(self, spec: EnvBase, num_envs: int, wrap: Callable[[Any], Any] | None = None) -> None:
        self._spec, self._wrap = spec, wrap
        self._envs: list[Any] = [self._make() for _ in range(num_envs)]
        self.contract: Contract = self._envs[0].contract()
        self.metadata: dict[str, Any] = self._envs[0].metadata
        self.step_columns = step_columns(self._envs[0])
        self._bind()

    def _make(self) -> Any:
        env = make_here(self._spec)
        return env if self._wrap is None else self._wrap(env)

    def _bind(self) -> None:
        """Look up once what every step needs; a single plain array needs no dictionary on its way."""
        first = self._envs[0]
        self._plain = None
        if isinstance(first, Adapted):
            if len(first.parts) == 1 and first.parts[0].is_plain and _same_shape(first):
                self._plain = first.parts[0].name
            self._raw_actions = first.raw_actions
            self._steps = [env.env.step for env in self._envs]
            self._resets = [env.env.reset for env in self._envs]
        else:
            self._raw_actions = np.array
            self._steps = [env.step for env in self._envs]
            self._resets = [env.reset for env in self._envs]

    def step(self, actions: np.ndarray, into: _Arrays) -> dict[int, str]:
        """Step all with actions [N, ...]."""
        failed: dict[int, str] = {}
        rows = None if self._plain is None else into.observation[self._plain]
        rewards = into.reward
        for i, (step, action) in enumerate(zip(self._steps, self._raw_actions(actions), strict=True)):
            try:
                observation, rewards[i], terminated, truncated, info = step(action)
                if rows is not None:
                    rows[i] = observation
                else:
                    self._write(i, observation, into.observation)
            except Exception as error:
                failed[i] = f"{type(error).__name__}: {error}"
                continue
            if terminated or truncated:
                into.terminated[i], into.truncated[i] = terminated, truncated
            if info and info.get("is_success", info.get("success", False)):
                into.success[i] = True
            for name, rows_of in into.columns.items():
                rows_of[i] = info[name]
        return failed

    def _write(self, i: int, observation: Any, into: dict[str, Any]) -> None:
        env = self._envs[i]
        if self._plain is not None:
            into[self._plain][i] = observation
        elif isinstance(env, Adapted):
            for part in env.parts:
                into[part.name][i] = part.read(observation)
        else:
            for name, rows in into.items():
                rows[i] = observation[name]

    def reset(self, seeds: Mapping[int, int], into: dict[str, Any]) -> dict[int, str]:
        """Begin an episode in these slots."""
        failed: dict[int, str] = {}
        for i, seed in seeds.items():
            try:
                observation, _ = self._resets[i](seed=seed)
                self._write(i, observation, into)
            except Exception as error:
                failed[i] = f"{type(error).__name__}: {error}"
        return failed

    def rebuild(self, slots: Sequence[int]) -> dict[int, str]:
        """Make these simulators anew, but for environments that recover by themselves (`recovers`)."""
        failed: dict[int, str] = {}
        for i in slots:
            if getattr(innermost(self._envs[i]), "recovers", False):
                continue
            try:
                self._envs[i].close()
            except Exception as error:  # it is broken; whatever it says at the end is of no use
                log.debug("closing a failed simulator: %s", error)
            try:
                self._envs[i] = self._make()
            except Exception as error:
                failed[i] = f"{type(error).__name__}: {error}"
        self._bind()
        return failed

    def close(self) -> None:
        """Free all."""
        for env in self._envs:
            env.close()


def _same_shape(env: Adapted) -> bool:
    return env.env.observation_space.shape == env.parts[0].feature.shape


def make_vector(spec: EnvBase, num_envs: int) -> Any:
    """N environments with the interface of `VectorEnv`.

    A GPU-parallel simulator (`backend: gpu`) is one batched environment, whose arrays are JAX arrays on its device.

    Raises:
        UserError: as `make_env`.
    """
    if isinstance(spec, ManiSkillSpec) and spec.backend == "gpu":
        from rlsvc.envs.maniskill import BatchedManiSkill

        return BatchedManiSkill(spec, num_envs)
    return VectorEnv(spec, num_envs)


class VectorEnv:
    """N environments of one specification; see the module for what a step means.

    A simulator that raises, gives NaN or infinity, or (in a process of its own) hangs or dies is made anew alone; its
    episode is discarded, and the step says so in `lost`.

    Attributes:
        contract: of one environment.
        num_envs: N.
        step_columns: what its environments tell of each step, feature by name (see `step_columns`).
        restarts: simulators that were made anew so far.
        failures: why, by slot, the newest reason.
    """

    def __init__(self, spec: EnvBase, num_envs: int, wrap: Callable[[Any], Any] | None = None) -> None:
        """Makes the simulators.

        Args:
            spec: of every one of them.
            num_envs: N.
            wrap: what stands around each of them, in this process; None is nothing.

        Raises:
            UserError: as `make_env`, or what `wrap` refuses.
        """
        if num_envs < 1:
            raise UserError(f"num_envs: got {num_envs}, expected 1 or more")
        self.spec, self.num_envs = spec, num_envs
        if spec.own_process:
            from rlsvc.envs.process import ProcessSlots

            self._slots: Slots = ProcessSlots(spec, num_envs)
        else:
            self._slots = LocalSlots(spec, num_envs, wrap)
        self.contract: Contract = self._slots.contract
        self.metadata = self._slots.metadata
        self.step_columns = dict(self._slots.step_columns)
        self.restarts = 0
        self.failures: dict[int, str] = {}
        self._features = list(self.contract.observation.items())
        self._floats = [name for name, feature in self._features if feature.dtype.startswith("float")]
        self._seeds: list[int] = []
        self._episodes = [0] * num_envs
        self._in_a_row = np.zeros(num_envs, np.int64)
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._failing = False

    def reset(self, seeds: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Begin an episode everywhere.

        Args:
            seeds: [N], one a slot. The first episode of a slot has its seed itself, as `make_env(spec).reset(seed)`;
                the seeds of those after it follow from it and their number.

        Returns:
            Observations by name [N, ...].
        """
        if len(seeds) != self.num_envs:
            raise UserError(f"seeds: got {len(seeds)}, expected one for each of {self.num_envs} environments")
        self._seeds = [int(seed) for seed in seeds]
        self._episodes = [-1] * self.num_envs
        self._returns, self._lengths = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        observation = self._new_observation()
        self._begin(list(range(self.num_envs)), [], observation)
        return observation

    def step(self, actions: Any) -> VectorStep:
        """Step all.

        Args:
            actions: [N, ...] in the contract's units.

        Raises:
            ContractError: another shape, or values that are not finite.
            UserError: a simulator failed MAX_FAILURES times in a row.
        """
        n = self.num_envs
        if not self._seeds:
            raise UserError("step: reset the environments first")
        actions = np.asarray(actions)
        if actions.shape != (n, *self.contract.action.shape):
            raise ContractError(f"actions: got shape {actions.shape}, expected {(n, *self.contract.action.shape)}")
        if actions.dtype.kind == "f" and not _all_finite(actions):
            raise ContractError(f"actions: row {_first_bad(actions)} is not finite")
        observation = self._new_observation()
        # Slots write what is true; in most steps that is nothing, and nothing more is to do.
        terminated, truncated, ended = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        lost, success = np.zeros(n, bool), np.zeros(n, bool)
        reward = np.empty(n, np.float32)
        told = {name: np.zeros((n, *f.shape), f.dtype) for name, f in self.step_columns.items()}
        failed = self._slots.step(actions, _Arrays(observation, reward, terminated, truncated, success, told))
        self._find_not_finite(observation, reward, failed)
        for i in failed:
            lost[i], reward[i], terminated[i], truncated[i], success[i] = True, 0.0, False, False, False
        returns, lengths = self._returns + reward, self._lengths + 1
        self._returns, self._lengths = returns, lengths
        final = observation
        # On a few flags `in` a list takes a fifth of the time of numpy's any().
        if failed or True in terminated.tolist() or True in truncated.tolist():
            np.logical_or(terminated, truncated, out=ended)
            truncated &= ~terminated
            fresh = ended | lost
            observation = {name: rows.copy() for name, rows in final.items()}
            if failed:
                self._lose(failed)
            self._begin(np.flatnonzero(fresh).tolist(), list(failed), observation)
            for i in failed:  # what a failed simulator left behind is not to be seen
                for name, rows in final.items():
                    rows[i] = observation[name][i]
            self._returns, self._lengths = np.where(fresh, 0.0, returns), np.where(fresh, 0, lengths)
        if self._failing:
            self._in_a_row[~lost] = 0
            self._failing = bool(failed)
        if self.spec.reward_scale != 1.0:
            returns = returns / self.spec.reward_scale
        return VectorStep(
            observation, reward, terminated, truncated, final, ended, lost, success, returns, lengths, told
        )

    def random_actions(self, rng: np.random.Generator) -> np.ndarray:
        """[N, ...] uniform within the contract's bounds.

        Raises:
            ContractError: actions without bounds.
        """
        return random_actions(self.contract, self.num_envs, rng)

    def close(self) -> None:
        """Free the simulators."""
        self._slots.close()

    def _new_observation(self) -> dict[str, Any]:
        n = self.num_envs
        return {
            name: np.full(n, "", object) if feature.dtype == TEXT else np.empty((n, *feature.shape), feature.dtype)
            for name, feature in self._features
        }

    def _find_not_finite(self, observation: dict[str, Any], reward: np.ndarray, failed: dict[int, str]) -> None:
        """Adds the slots whose numbers are not finite to `failed`."""
        for name in ("reward", *self._floats):
            rows = reward if name == "reward" else observation[name]
            if math.isfinite(sum(rows.tolist())) if rows is reward else _all_finite(rows):
                continue
            good = np.isfinite(rows).reshape(self.num_envs, -1).all(axis=1)
            for i in np.flatnonzero(~good).tolist():
                failed.setdefault(i, f"{name} is not finite")

    def _lose(self, failed: dict[int, str]) -> None:
        self.failures |= failed
        self._failing = True
        for i, reason in failed.items():
            log.warning("environment %d failed and is made anew: %s", i, reason)
            self._in_a_row[i] += 1
            if self._in_a_row[i] >= MAX_FAILURES:
                raise UserError(f"environment {i} failed {MAX_FAILURES} times in a row; the last time: {reason}")

    def _begin(self, slots: list[int], broken: list[int], observation: dict[str, Any]) -> None:
        """Begin the next episode in these slots, those that are broken made anew before."""
        while True:
            if broken:
                self.restarts += len(broken)
                failed = self._slots.rebuild(broken)
            else:
                failed = {}
            for i in slots:
                self._episodes[i] += 1
            seeds = {i: episode_seed(self._seeds[i], self._episodes[i]) for i in slots if i not in failed}
            failed |= self._slots.reset(seeds, observation)
            for name in self._floats:
                rows = observation[name]
                if not np.isfinite(rows[slots]).all():
                    failed |= {i: f"{name} is not finite" for i in seeds if not np.isfinite(rows[i]).all()}
            if not failed:
                return
            self._lose(failed)
            slots = broken = list(failed)
            time.sleep(0.01)


def _all_finite(array: np.ndarray) -> bool:
    """Whether all numbers are finite: their sum of squares is, in one pass, unless they are huge."""
    return math.isfinite(np.vdot(array, array)) or bool(np.isfinite(array).all())


def _first_bad(array: np.ndarray) -> int:
    return int(np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))[0])


def random_actions(contract: Contract, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """[N, ...] uniform within the contract's bounds.

    Raises:
        ContractError: actions without bounds.
    """
    action = contract.action
    if action.low is None or action.high is None:
        raise ContractError("random actions: the environment's actions have no bounds; set env.rescale_action or act")
    shape = (num_envs, *action.shape)
    if action.dtype == "int64":
        high = np.asarray(action.high, np.int64) + 1
        return rng.integers(0, high if action.shape else high[0], shape)
    return rng.uniform(np.asarray(action.low), np.asarray(action.high), shape).astype(np.float32)


def episode_seed(seed: int, episode: int) -> int:
    """The seed of a slot's k-th episode, in [0, 2^31): the slot's own for the first, a hash of both after it.

    The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014): making a numpy SeedSequence would take longer
    than a step of a small simulator.
    """
    if episode == 0:
        return seed
    mask = 2**64 - 1
    z = (seed * 0x9E3779B97F4A7C15 + episode * 0xD1B54A32D192ED03) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 33
