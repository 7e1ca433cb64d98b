"""A bundle of RLlib's made ready to act: RLlib's own module, and no running Algorithm.

Letters: B rows, T observation steps (1), H actions of a chunk (1).
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from rlsvc.backends.rllib_module import (
    FILTER,
    build_module,
    choose,
    distribution_inputs,
    filtered,
    load_module,
)
from rlsvc.backends.rllib_spaces import ModuleSpaces
from rlsvc.backends.torch_device import choose_device
from rlsvc.core.errors import BundleError, ContractError, UserError
from rlsvc.core.types import ActionChunk
from rlsvc.data.normalize import Stats
from rlsvc.store.bundle import SAME, Bundle, parts, refuse_another


class RLlibRunner:
    """A policy of RLlib's for batches of any size; the `rlsvc.runner.Runner` of its bundles."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_sizes: tuple[int, ...] = (1,),
        sample_steps: int | None = None,
        group: str | None = None,
        device: str = "auto",
        explore: bool = False,
    ) -> None:
        """Build the module and put its weights on the device.

        Args:
            bundle: verified.
            batch_sizes: that `warm_up` tries; none is compiled.
            sample_steps: None; it does not denoise.
            group: the normaliser's, of which there is one.
            device: auto, cpu or gpu.
            explore: draw from the distribution, as in training; else its mean, or the most likely choice.

        Raises:
            BundleError: fields, weights or statistics that do not fit.
            UserError: denoising steps are asked for, or a GPU that there is not.
        """
        if sample_steps is not None:
            raise UserError(f"sample_steps: RLlib's {bundle.policy.get('type')} does not denoise")
        bundle.normalizer.group_index(group)
        self.batch_sizes = tuple(sorted(batch_sizes))
        self.contract, self.version, self.robot = bundle.contract, bundle.id, bundle.robot
        self.name, self._explore = str(bundle.policy.get("type")), explore
        self._same = parts(bundle, SAME)
        self._kind = str(bundle.policy.get("module"))
        self._device = torch.device(choose_device(device))
        self._load(bundle)

    def _load(self, bundle: Bundle) -> None:
        where, config = str(bundle.path), bundle.policy.get("model_config")
        if not isinstance(config, dict):
            raise BundleError(f"{where}: its policy has no model_config")
        try:
            self.spaces = ModuleSpaces(bundle.contract, bundle.normalizer)
        except ContractError as error:
            raise BundleError(f"{where}: {error}") from error
        module = build_module(self._kind, self.spaces, config, where)
        load_module(module, bundle.params, where)
        self._filter = {name: x for name, x in bundle.params.items() if name.startswith(FILTER)}
        for name, x in self._filter.items():
            if name not in (f"{FILTER}mean", f"{FILTER}std") or x.shape != self.spaces.observation.shape:
                raise BundleError(f"{where}: '{name}' {x.shape} is no statistic of {self.spaces.observation.shape}")
        if len(self._filter) == 1:
            raise BundleError(f"{where}: of its filter's mean and std one is missing")
        self.module: RLModule = module.to(self._device)  # pyright: ignore[reportAttributeAccessIssue]
        self._normalizer = bundle.normalizer

    def initial_carry(self, batch_size: int) -> tuple[()]:
        """There is none."""
        return ()

    def set_weights(self, bundle: Bundle) -> None:
        """Act with another bundle of the same policy from now on.

        Raises:
            BundleError: weights, contract or specification are those of another policy.
        """
        refuse_another(bundle, self._same, self.version)
        self._load(bundle)
        self.version = bundle.id

    def seen(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """What the module sees of raw observations by name [B, 1, ...]: normalised, joined, filtered."""
        newest = {name: np.asarray(observation[name])[:, -1] for name in self.spaces.names}
        return filtered(self.spaces.observe(newest), self._filter)

    @torch.inference_mode()
    def inputs(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        """The parameters of the action's distribution, [B, ...] float32; see `rllib_module.distribution_inputs`."""
        seen = torch.from_numpy(self.seen(observation)).to(self._device)
        return distribution_inputs(self.module, seen).float().cpu().numpy()

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`; there is no carry."""
        del carry
        rows = None
        if self._explore:
            rows = [np.random.default_rng((int(s), int(t))) for s, t in zip(seeds, steps, strict=True)]
        chosen = choose(self._kind, self.spaces.action, self.inputs(observation), rows)
        return ActionChunk(self.spaces.to_contract(chosen)[:, None], self.version)

    def training_statistics(self) -> dict[str, Stats]:
        """By observed feature the statistics of its training values; of a policy that learned from rollouts none."""
        return {
            name: self._normalizer.stats[name][0]
            for name in self.contract.observation
            if name in self._normalizer.stats and self._normalizer.stats[name][0].count > 0
        }

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        """The policy's numbers for a robot's: the same."""
        return x

    def warm_up(self) -> None:
        """Act once with every batch size."""
        for size in self.batch_sizes:
            zeros = np.zeros(size, np.int64)
            self.act(self.contract.example_observation(size), zeros, zeros)
