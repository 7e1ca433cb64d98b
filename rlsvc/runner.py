"""A bundle made ready to act: weights on the device, fixed batch shapes, compiled, warm.

Letters: B batch, T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.errors import BundleError
from rlsvc.core.types import ActionChunk
from rlsvc.store.bundle import Bundle, read_bundle

BASELINES = ("zero", "random")
"""Policies without weights: no motion target at all (zeros), and uniform over the contract's action range."""


class Runner(Protocol):
    """Anything that acts on batches of observation windows."""

    contract: Contract
    version: str

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """Actions for a batch.

        Args:
            observation: by the contract's names [B, T, ...], raw (not normalised).
            seeds: [B] integers; the randomness of a row follows from its (seed, step) alone.
            steps: [B] integers, the control step of each row.

        Returns:
            Actions [B, H, A] float32 in the contract's units.
        """
        ...

    def warm_up(self) -> None:
        """Compile whatever is compiled, so that the first `act` is as quick as the next."""
        ...


class BaselineRunner:
    """The policies "zero" and "random", in numpy: for baselines, dry runs, and measuring what is around a policy."""

    def __init__(self, name: str, contract: Contract, version: str = "") -> None:
        self.name, self.contract, self.version = name, contract, version or name
        low, high = contract.action.low, contract.action.high
        width = contract.action.shape
        self.low = np.broadcast_to(np.asarray(-1.0 if low is None else low, np.float32), width)
        self.high = np.broadcast_to(np.asarray(1.0 if high is None else high, np.float32), width)

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """See `Runner.act`."""
        shape = (self.contract.action_horizon, *self.contract.action.shape)
        if self.name == "zero":
            return ActionChunk(np.zeros((len(seeds), *shape), np.float32), self.version)
        rows = [
            np.random.default_rng((int(s), int(t))).uniform(self.low, self.high, shape)
            for s, t in zip(seeds, steps, strict=True)
        ]
        return ActionChunk(np.asarray(rows, np.float32), self.version)

    def warm_up(self) -> None:
        """Nothing is compiled."""


COMPILED = ("contract", "policy", "precision", "normalizer")
"""Parts of a bundle that are compiled in, and so cannot be replaced with the weights."""


def _compiled(bundle: Bundle, name: str) -> object:
    return bundle.normalizer.to_json() if name == "normalizer" else getattr(bundle, name)


class PolicyRunner:
    """A JAX policy at fixed batch sizes; a smaller batch is padded, a larger one split."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        batch_sizes: tuple[int, ...] = (1,),
        sample_steps: int | None = None,
        group: str | None = None,
        device: str = "auto",
    ) -> None:
        """Put the weights on the device.

        Args:
            bundle: verified.
            batch_sizes: shapes that are compiled, ascending.
            sample_steps: denoising steps; None takes the policy's own.
            group: the normaliser group of the robot or dataset; may be left out when there is one.
            device: auto, cpu or gpu.

        Raises:
            BundleError: the weights do not fit the policy (names the first that does not), or an unknown group.
        """
        import jax

        from rlsvc.nn.backend import setup_jax
        from rlsvc.nn.params import unflatten_params
        from rlsvc.policies import ActOptions, make_policy

        setup_jax(device)
        self.contract, self.version, self.name = bundle.contract, bundle.id, str(bundle.policy["name"])
        self._compiled = {name: _compiled(bundle, name) for name in COMPILED}
        self.batch_sizes = tuple(sorted(batch_sizes))
        policy = make_policy(bundle.policy, bundle.contract, bundle.precision)
        normalizer, which = bundle.normalizer, bundle.normalizer.group_index(group)
        options = ActOptions(sample_steps=sample_steps)
        self._like = jax.eval_shape(policy.init, jax.random.key(0))
        self._params = jax.device_put(unflatten_params(bundle.params, self._like))

        def act(params: Any, observation: dict[str, Any], seeds: Any, steps: Any) -> Any:
            keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(seeds, steps)
            normal = {key: normalizer.normalize(key, x, which) for key, x in observation.items()}
            action, _, _ = policy.act(params, normal, policy.initial_carry(seeds.shape[0]), keys, options)
            return normalizer.unnormalize("action", action, which)

        self._act = jax.jit(act)

    def set_weights(self, bundle: Bundle) -> None:
        """Act with another bundle of the same policy from now on, without compiling again.

        Raises:
            BundleError: weights, contract, normaliser or specification are those of another policy.
        """
        import jax

        from rlsvc.nn.params import unflatten_params

        for name in COMPILED:
            if _compiled(bundle, name) != self._compiled[name]:
                what = "normaliser" if name == "normalizer" else name
                raise BundleError(f"bundle {bundle.path}: its {what} is not that of {self.version[:12]}; load it anew")
        self._params = jax.device_put(unflatten_params(bundle.params, self._like))
        self.version = bundle.id

    @classmethod
    def load(cls, path: str | Path, **options: object) -> PolicyRunner | BaselineRunner:
        """Read, verify and make ready; `options` as in the constructor. Baselines need none."""
        bundle = read_bundle(path)
        if bundle.policy.get("name") in BASELINES:
            return BaselineRunner(str(bundle.policy["name"]), bundle.contract, bundle.id)
        return cls(bundle, **options)  # pyright: ignore[reportArgumentType]

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """See `Runner.act`."""
        count, largest = len(seeds), self.batch_sizes[-1]
        seeds, steps = np.asarray(seeds).astype(np.uint32), np.asarray(steps).astype(np.uint32)
        parts = []
        for start in range(0, count, largest):
            rows = slice(start, min(start + largest, count))
            parts.append(self._act_padded({key: x[rows] for key, x in observation.items()}, seeds[rows], steps[rows]))
        return ActionChunk(parts[0] if len(parts) == 1 else np.concatenate(parts), self.version)

    def _act_padded(self, observation: dict[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> np.ndarray:
        count = len(seeds)
        room = next(size for size in self.batch_sizes if size >= count) - count
        if room:
            observation = {key: np.concatenate([x, np.repeat(x[-1:], room, 0)]) for key, x in observation.items()}
            seeds, steps = np.pad(seeds, (0, room)), np.pad(steps, (0, room))
        return np.asarray(self._act(self._params, observation, seeds, steps))[:count]

    def warm_up(self) -> None:
        """Compile every batch size."""
        for size in self.batch_sizes:
            zeros = np.zeros(size, np.uint32)
            self._act_padded(self.contract.example_observation(size), zeros, zeros)
