"""Who acts in an evaluation: a runner in this process, or an actor that acts for all rollout workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.types import ActionChunk
from rlsvc.runner import PolicyRunner
from rlsvc.store.bundle import read_bundle


class LocalInference:
    """A PolicyRunner that is given one bundle after the other and compiles once."""

    def __init__(self, batch_sizes: tuple[int, ...], device: str, sample_steps: int | None = None) -> None:
        self._options: dict[str, Any] = {"batch_sizes": batch_sizes, "device": device, "sample_steps": sample_steps}
        self._runner: Any = None

    def load(self, path: str | Path) -> Contract:
        """Act with this bundle from now on. Raises BundleError."""
        if isinstance(self._runner, PolicyRunner):
            self._runner.set_weights(read_bundle(path))
        else:
            self._runner = PolicyRunner.load(path, **self._options)
        self.contract, self.version = self._runner.contract, self._runner.version
        return self.contract

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`."""
        return self._runner.act(observation, seeds, steps)

    def warm_up(self) -> None:
        """See `rlsvc.runner.Runner.warm_up`."""
        self._runner.warm_up()


class RayInference:
    """LocalInference in an actor of its own, on a GPU (or a share of one) where one is asked for.

    Consumes observation batches, produces action chunks; waits for nobody. When the actor dies, the next call raises
    and the evaluation with it; the training run is not touched.
    """

    def __init__(
        self, batch_sizes: tuple[int, ...], device: str, gpus: float = 0.0, sample_steps: int | None = None
    ) -> None:
        import ray

        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if gpus else {"JAX_PLATFORMS": "cpu"})
        actor = ray.remote(num_cpus=0, num_gpus=gpus, runtime_env={"env_vars": environment})(LocalInference)
        self._actor: Any = actor.remote(batch_sizes, device if gpus else "cpu", sample_steps)
        self.version = ""

    def load(self, path: str | Path) -> Contract:
        """See LocalInference."""
        import ray

        self.contract: Contract = ray.get(self._actor.load.remote(str(path)))  # pyright: ignore[reportAttributeAccessIssue]
        return self.contract

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`."""
        import ray

        return ray.get(self._actor.act.remote(dict(observation), seeds, steps))

    def warm_up(self) -> None:
        """See `rlsvc.runner.Runner.warm_up`."""
        import ray

        ray.get(self._actor.warm_up.remote())

    def close(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor)
