"""Who acts in an evaluation: a runner in this process, or an actor that acts for all rollout workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.core.types import ActionChunk
from rlsvc.runner import PolicyRunner
from rlsvc.store.bundle import read_bundle
from rlsvc.train.workers import WorkerLost

ANSWER_TIMEOUT_S = 900.0
"""An inference actor that does not answer for this long is taken for lost; a first answer also compiles."""


class LocalInference:
    """A PolicyRunner that is given one bundle after the other and compiles once; arguments are the runner's."""

    def __init__(
        self, batch_sizes: tuple[int, ...], device: str, sample_steps: int | None = None, group: str | None = None
    ) -> None:
        self._options: dict[str, Any] = {
            "batch_sizes": batch_sizes,
            "device": device,
            "sample_steps": sample_steps,
            "group": group,
        }
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

    def close(self) -> None:
        """Nothing runs that would have to end."""


class RayInference:
    """LocalInference in an actor of its own, on a GPU (or a share of one) where one is asked for.

    Consumes observation batches, produces action chunks; waits for nobody. When the actor dies, or gives no answer for
    ANSWER_TIMEOUT_S, it is replaced, with the bundle that it had, and WorkerLost tells the caller to ask again.
    """

    def __init__(
        self, batch_sizes: tuple[int, ...], gpus: float = 0.0, sample_steps: int | None = None, group: str | None = None
    ) -> None:
        import ray

        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if gpus else {"JAX_PLATFORMS": "cpu"})
        self._class = ray.remote(num_cpus=0, num_gpus=gpus, runtime_env={"env_vars": environment})(LocalInference)
        self._make = (batch_sizes, "gpu" if gpus else "cpu", sample_steps, group)
        self._actor: Any = self._class.remote(*self._make)
        self._path = ""
        self.version = ""

    def load(self, path: str | Path) -> Contract:
        """See LocalInference. Raises UserError when the actor dies over it twice."""
        self._path = str(path)
        try:
            self.contract: Contract = self._call("load", self._path)
        except WorkerLost:
            try:
                self.contract = self._call("load", self._path)
            except WorkerLost as again:
                raise UserError(
                    f"bundle {path}: {again} twice while loading it. Its log lies in Ray's session folder "
                    "(/tmp/ray/session_latest/logs); too little memory is the usual reason"
                ) from again
        return self.contract

    def act(self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`. Raises WorkerLost."""
        return self._call("act", dict(observation), seeds, steps)

    def warm_up(self) -> None:
        """See `rlsvc.runner.Runner.warm_up`. Raises WorkerLost."""
        self._call("warm_up")

    def close(self) -> None:
        """End the actor."""
        import ray

        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray
        import ray.exceptions

        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            ray.kill(self._actor)
            self._actor = self._class.remote(*self._make)
            if method != "load":
                self._actor.load.remote(self._path)
            raise WorkerLost("the inference actor died or hung") from error
