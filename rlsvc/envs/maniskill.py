"""ManiSkill 3: one simulator on the processor, or many as one batched simulation on the GPU.

`observation.state` is ManiSkill's own vector (`observation: state`), or what the robot itself knows beside its cameras
`observation.images.<camera>` (`observation: rgb`). A task that is solved or failed terminates its episode.

Letters: N environments, A action dimensions, H height, W width.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from gymnasium import spaces

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, UserError
from rlsvc.envs.adapter import STATE, Adapted
from rlsvc.envs.options import apply_options
from rlsvc.envs.registered import unknown_id
from rlsvc.envs.vector import VectorStep, episode_seed, random_actions
from rlsvc.envs.vulkan import require_vulkan
from rlsvc.spec.env import ManiSkillSpec

UNLIMITED = 10**9


def _simulator(spec: ManiSkillSpec, num_envs: int) -> gymnasium.Env:
    """ManiSkill's environment: batches of torch tensors.

    Raises:
        NotFoundError: no such task.
        UserError: no Vulkan device, no GPU, assets that are not there, or arguments that the task refuses.
    """
    require_vulkan()
    with contextlib.redirect_stdout(None):  # it reports on optional packages
        importlib.import_module("mani_skill.envs")
        from mani_skill.utils import assets
        from mani_skill.utils.registration import REGISTERED_ENVS

    if spec.id not in REGISTERED_ENVS:
        raise unknown_id("ManiSkill task", spec.id, REGISTERED_ENVS)
    if spec.backend == "gpu" and not torch.cuda.is_available():
        raise UserError("env.backend: got gpu, but there is no CUDA device; use env.backend=cpu")
    absent = [name for name in REGISTERED_ENVS[spec.id].asset_download_ids or [] if not _downloaded(assets, name)]
    if absent:
        raise UserError(
            f"ManiSkill task {spec.id} needs assets that are not there: {', '.join(absent)}; "
            f"python -m mani_skill.utils.download_asset {spec.id}"
        )
    arguments: dict[str, Any] = {
        "num_envs": num_envs,
        "obs_mode": spec.observation,
        "sim_backend": "physx_cuda" if spec.backend == "gpu" else "physx_cpu",
        "render_backend": "gpu" if torch.cuda.is_available() else "cpu",
        "render_mode": "rgb_array",
        # Ours stands outside of the action repeat.
        "max_episode_steps": None if spec.max_steps is None else UNLIMITED,
    }
    if spec.control_mode is not None:
        arguments["control_mode"] = spec.control_mode
    if spec.observation == "rgb" and spec.image_size is not None:
        arguments["sensor_configs"] = {"width": spec.image_size, "height": spec.image_size}
    try:
        return gymnasium.make(spec.id, **{**arguments, **spec.kwargs})
    except Exception as error:
        raise UserError(
            f"ManiSkill task {spec.id} cannot be made with control_mode {spec.control_mode}, kwargs {spec.kwargs} "
            f"({type(error).__name__}: {error})"
        ) from error


def _downloaded(assets: Any, name: str) -> bool:
    members = assets.DATA_GROUPS.get(name, [name])
    return all(assets.is_data_source_downloaded(member) for member in members)


def _named(observation: Any, join: Any) -> Any:
    """ManiSkill's observation (arrays or tensors [..., n]) by our names; `join` concatenates along the last axis."""
    if not isinstance(observation, dict):
        return {STATE: observation}
    known = {"agent": observation.get("agent", {}), "extra": observation.get("extra", {})}
    cameras = observation.get("sensor_data", {})
    images = {f"observation.images.{name}": camera["rgb"] for name, camera in cameras.items() if "rgb" in camera}
    return {**images, STATE: join(_leaves(known))}


def _leaves(node: Any) -> list[Any]:
    return [leaf for inner in node.values() for leaf in _leaves(inner)] if isinstance(node, dict) else [node]


def _space(observation: dict[str, Any]) -> spaces.Dict:
    """The space of one named observation."""
    return spaces.Dict(
        {
            name: spaces.Box(0, 255, value.shape, np.uint8)
            if value.dtype == np.uint8
            else spaces.Box(-np.inf, np.inf, value.shape, np.float32)
            for name, value in observation.items()
        }
    )


def _joined(arrays: list[Any]) -> np.ndarray:
    """[D] float32 of numpy arrays, numbers and flags."""
    return np.concatenate([np.ravel(array).astype(np.float32) for array in arrays])


class ManiSkill(gymnasium.Wrapper):
    """One environment on the processor, observations by our names."""

    def __init__(self, spec: ManiSkillSpec) -> None:
        env = _simulator(spec, 1)
        from mani_skill.utils.wrappers import CPUGymWrapper

        super().__init__(CPUGymWrapper(env))
        self.rate_hz = float(self.unwrapped.control_freq)  # pyright: ignore[reportAttributeAccessIssue]
        observation, _ = self.reset(seed=0)
        self.observation_space = _space(observation)
        action = self.env.action_space
        if not isinstance(action, spaces.Box):
            raise ContractError(f"ManiSkill task {spec.id}: action space {action}, expected one arm's Box")
        self.action_space = spaces.Box(action.low, action.high, dtype=np.float32)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        observation, _ = self.env.reset(**kwargs)
        return _named(observation, _joined), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One control step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        known = {"is_success": bool(info["success"])} if "success" in info else {}
        return _named(observation, _joined), float(reward), bool(terminated), bool(truncated), known


def make_maniskill(spec: ManiSkillSpec) -> Adapted:
    """A task on the processor.

    Raises:
        NotFoundError: no such task.
        UserError: `backend: gpu`, which is many environments; or as `_simulator`.
    """
    if spec.backend == "gpu":
        raise UserError("env.backend: gpu is for many environments at once; one alone needs env.backend=cpu")
    env = ManiSkill(spec)
    return apply_options(env, spec, env.rate_hz)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The same numbers on the same device, without a way through the host.

    The memory is a copy's, since simulators write into their buffers again. 64 bit integers become 32 bit.
    """
    if tensor.dtype in (torch.int64, torch.float64):
        tensor = tensor.to(torch.int32 if tensor.dtype == torch.int64 else torch.float32)
    return jnp.from_dlpack(tensor.detach().clone(memory_format=torch.contiguous_format))


def to_torch(array: Any, device: torch.device) -> torch.Tensor:
    """A tensor on the device, by dlpack from a JAX array there, else through the host."""
    if isinstance(array, jax.Array) and next(iter(array.devices())).platform == (
        "gpu" if device.type == "cuda" else "cpu"
    ):
        return torch.from_dlpack(array).to(device)
    return torch.as_tensor(np.array(array), device=device)


class BatchedManiSkill:
    """N environments that one simulation steps; the interface of `VectorEnv`, with JAX arrays on its device.

    Rows that come out not finite are begun anew and marked `lost`; the simulation itself cannot be restarted in part.
    `ended.any()` is read by the host in each step, and nothing else.

    Attributes:
        contract: of one environment.
        num_envs: N.
        restarts: rows that were lost so far.
        failures: why, by slot.
    """

    def __init__(self, spec: ManiSkillSpec, num_envs: int) -> None:
        """Makes the simulation.

        Raises:
            NotFoundError: no such task.
            UserError: an option that is for single environments, or as `_simulator`.
        """
        if spec.episode_statistics or spec.flatten:
            raise UserError("env.episode_statistics, env.flatten: not for backend gpu, which tells return and length")
        self.spec, self.num_envs = spec, num_envs
        self._sim: Any = _simulator(spec, num_envs)
        base: Any = self._sim.unwrapped
        self._device: torch.device = base.device
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": base.control_freq / spec.action_repeat}
        self.restarts = 0
        self.failures: dict[int, str] = {}
        observation = self._named(self._sim.reset(seed=list(range(num_envs)))[0])
        space = base.single_action_space
        if not isinstance(space, spaces.Box):
            raise ContractError(f"ManiSkill task {spec.id}: action space {space}, expected one arm's Box")
        low, high = (torch.as_tensor(bound, device=self._device) for bound in (space.low, space.high))
        self._middle, self._half = (high + low) / 2, (high - low) / 2
        bounds = (
            (-np.ones_like(space.low), np.ones_like(space.high)) if spec.rescale_action else (space.low, space.high)
        )
        action = Feature(space.shape, "float32", low=tuple(bounds[0].tolist()), high=tuple(bounds[1].tolist()))
        self.contract = Contract(
            {name: Feature(tuple(v.shape[1:]), str(v.dtype).split(".")[1]) for name, v in observation.items()},
            action,
            self.metadata["render_fps"],
        )
        self._seed, self._resets = 0, 0
        self._returns = torch.zeros(num_envs, dtype=torch.float32, device=self._device)
        self._lengths = torch.zeros(num_envs, dtype=torch.int32, device=self._device)

    def reset(self, seeds: Any) -> dict[str, jax.Array]:
        """Begin an episode everywhere: observations by name [N, ...].

        The first episodes follow from the seeds [N]; those after them from the first seed and the resets before them,
        so that the same seeds and actions give the same trajectories of all environments together.
        """
        if len(seeds) != self.num_envs:
            raise UserError(f"seeds: got {len(seeds)}, expected one for each of {self.num_envs} environments")
        self._seed, self._resets = int(seeds[0]), 0
        self._returns.zero_()
        self._lengths.zero_()
        observation, _ = self._sim.reset(seed=[int(seed) for seed in seeds])
        return _handed_over(self._named(observation))

    def step(self, actions: Any) -> VectorStep:
        """Step all; actions [N, A] on any device, in the contract's units."""
        if tuple(actions.shape) != (self.num_envs, *self.contract.action.shape):
            expected = (self.num_envs, *self.contract.action.shape)
            raise ContractError(f"actions: got shape {tuple(actions.shape)}, expected {expected}")
        action = to_torch(actions, self._device).to(torch.float32)
        if self.spec.rescale_action:
            action = action * self._half + self._middle
        observation, reward, terminated, truncated, success = self._repeated(action)
        lost = ~torch.isfinite(reward)
        for rows in observation.values():
            if rows.is_floating_point():
                lost |= ~torch.isfinite(rows).flatten(1).all(dim=1)
        self._lengths += 1
        if self.spec.max_steps is not None:
            truncated = self._lengths >= self.spec.max_steps
        terminated, truncated = terminated & ~lost, truncated & ~terminated & ~lost
        reward = torch.where(lost, 0.0, reward)
        self._returns += reward
        ended, fresh = terminated | truncated, terminated | truncated | lost
        returns, lengths = to_jax(self._returns), to_jax(self._lengths)
        final = seen = _handed_over(observation)
        if bool(fresh.any()):
            first = self._begin(torch.nonzero(fresh).flatten())
            mixed = {name: _where(fresh, first[name], rows) for name, rows in observation.items()}
            seen = _handed_over(mixed)
            if bool(lost.any()):
                final = _handed_over({name: _where(lost, mixed[name], rows) for name, rows in observation.items()})
                for i in torch.nonzero(lost).flatten().tolist():
                    self.failures[i] = "observation or reward is not finite"
                    self.restarts += 1
            self._returns.masked_fill_(fresh, 0.0)
            self._lengths.masked_fill_(fresh, 0)
        flags = [to_jax(flag) for flag in (terminated, truncated, ended, lost, success & ~lost)]
        scaled = to_jax(reward * self.spec.reward_scale)
        return VectorStep(seen, scaled, flags[0], flags[1], final, flags[2], flags[3], flags[4], returns, lengths)  # pyright: ignore[reportArgumentType]

    def random_actions(self, rng: np.random.Generator) -> np.ndarray:
        """[N, A] uniform within the contract's bounds."""
        return random_actions(self.contract, self.num_envs, rng)

    def close(self) -> None:
        """Free the simulation."""
        self._sim.close()

    def _repeated(self, action: torch.Tensor) -> tuple[dict[str, torch.Tensor], *tuple[torch.Tensor, ...]]:
        """Hold the action; rows that have ended keep what they had then, though the simulation goes on with all."""
        observation, reward, terminated, truncated, success = self._once(action)
        for _ in range(self.spec.action_repeat - 1):
            over = terminated | truncated
            after, more, terminated_now, truncated_now, success_now = self._once(action)
            observation = {name: _where(over, rows, after[name]) for name, rows in observation.items()}
            reward = torch.where(over, reward, reward + more)
            terminated, truncated = terminated | (terminated_now & ~over), truncated | (truncated_now & ~over)
            success = success | (success_now & ~over)
        return observation, reward, terminated, truncated, success

    def _once(self, action: torch.Tensor) -> tuple[dict[str, torch.Tensor], *tuple[torch.Tensor, ...]]:
        observation, reward, terminated, truncated, info = self._sim.step(action)
        off = torch.zeros(self.num_envs, dtype=torch.bool, device=self._device)
        success = info["success"].bool() if "success" in info else off
        rows = {name: value.clone() for name, value in self._named(observation).items()}
        flags = [
            torch.as_tensor(flag, device=self._device).bool().expand(self.num_envs) for flag in (terminated, truncated)
        ]
        return rows, torch.as_tensor(reward, device=self._device).float().clone(), *flags, success

    def _begin(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Begin episodes in these rows; tasks draw from torch's generator, which is seeded for each such reset."""
        self._resets += 1
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(episode_seed(self._seed, self._resets))
            observation, _ = self._sim.reset(options={"env_idx": rows})
        return self._named(observation)

    def _named(self, observation: Any) -> dict[str, torch.Tensor]:
        return _named(observation, self._join)

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """[N, D] float32."""
        return torch.cat([tensor.reshape(self.num_envs, -1).float() for tensor in tensors], dim=1)


def _handed_over(rows: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
    return {name: to_jax(value) for name, value in rows.items()}


def _where(mask: torch.Tensor, yes: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    """Rows [N, ...] by a mask [N]."""
    return torch.where(mask.reshape(-1, *[1] * (yes.ndim - 1)), yes, no)
