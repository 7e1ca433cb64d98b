"""Who acts: for evaluations a runner here or in an actor of its own, for rollouts the central actor.

Letters: B rows of a batch, T observation steps, A action dimensions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.core.types import ActionChunk
from rlsvc.runner import BaselineRunner, PolicyRunner
from rlsvc.store.bundle import read_bundle
from rlsvc.train.workers import WorkerLost

ANSWER_TIMEOUT_S = 900.0
"""An inference actor that does not answer for this long is taken for lost; a first answer also compiles."""


class LocalInference:
    """A runner that is given one bundle after the other and compiles once; arguments are the runner's."""

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
        if self._runner is None or isinstance(self._runner, BaselineRunner):
            self._runner = PolicyRunner.load(path, **self._options)
        else:
            self._runner.set_weights(read_bundle(path))
        self.contract, self.version = self._runner.contract, self._runner.version
        return self.contract

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`; the carry comes back as host arrays."""
        import jax

        chunk = self._runner.act(observation, seeds, steps, carry)
        return replace(chunk, carry=jax.device_get(chunk.carry))

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
        self,
        batch_sizes: tuple[int, ...],
        gpus: float = 0.0,
        sample_steps: int | None = None,
        group: str | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        import ray

        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if gpus else {"JAX_PLATFORMS": "cpu"})
        self._class = ray.remote(
            num_cpus=0, num_gpus=gpus, resources=dict(resources or {}), runtime_env={"env_vars": environment}
        )(LocalInference)
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

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`. Raises WorkerLost."""
        return self._call("act", dict(observation), seeds, steps, carry)

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


@dataclass
class _Asked:
    """One worker's observations that wait for their batch."""

    observation: dict[str, np.ndarray]
    seeds: np.ndarray
    steps: np.ndarray
    carry: Any
    answer: asyncio.Future[ActionChunk]


class CentralInference:
    """Async actor that acts for all rollout workers.

    Consumes the workers' observations and the driver's weights, produces their actions. Observations that come while a
    batch is computed go together into the next one; when nothing is computed, the first waits at most `wait_s` for
    others. Batch shapes are fixed, so that nothing is compiled again. It waits for nobody: an observation that comes
    before the first weights is refused. When it dies, the workers' calls fail, they are replaced, and so is it.
    """

    def __init__(self, acting: Any, batch_sizes: tuple[int, ...], wait_s: float, device: str) -> None:
        self._runner = acting.runner(batch_sizes, device)
        self._largest, self._wait_s = batch_sizes[-1], wait_s
        self._asked: list[_Asked] = []
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._batches, self._rows = 0, 0
        self._ready = False

    async def set_weights(self, params: Any, version: int) -> None:
        """Act with these weights (host arrays by name) from the next batch on."""
        self._runner.set_params(params, str(version))
        self._ready = True

    async def act(
        self, observation: dict[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`."""
        if not self._ready:
            raise RuntimeError("the central actor was asked to act before it was given weights")
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        loop = asyncio.get_running_loop()
        asked = _Asked(observation, seeds, steps, carry, loop.create_future())
        self._asked.append(asked)
        self._more.set()
        return await asked.answer

    async def metrics(self) -> dict[str, float]:
        """Batches so far, and their mean number of rows."""
        return {"batches": float(self._batches), "batch_rows": self._rows / max(self._batches, 1)}

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._more.wait()
            if sum(len(asked.seeds) for asked in self._asked) < self._largest:
                await asyncio.sleep(self._wait_s)
            self._more.clear()
            batch, self._asked = self._asked, []
            try:
                answers = await loop.run_in_executor(None, self._act, batch)
            except Exception as error:  # every worker of the batch learns why
                for asked in batch:
                    asked.answer.set_exception(error)
                continue
            for asked, answer in zip(batch, answers, strict=True):
                if not asked.answer.done():
                    asked.answer.set_result(answer)

    def _act(self, batch: list[_Asked]) -> list[ActionChunk]:
        import jax

        observation = {key: np.concatenate([a.observation[key] for a in batch]) for key in batch[0].observation}
        seeds = np.concatenate([a.seeds for a in batch])
        steps = np.concatenate([a.steps for a in batch])
        initial = self._runner.initial_carry
        carries = [initial(len(a.seeds)) if a.carry is None else a.carry for a in batch]
        carry = jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *carries)
        chunk = self._runner.act(observation, seeds, steps, carry)
        chunk = replace(chunk, carry=jax.device_get(chunk.carry))
        self._batches, self._rows = self._batches + 1, self._rows + len(seeds)
        answers, start = [], 0
        for asked in batch:
            rows = slice(start, start + len(asked.seeds))
            start = rows.stop
            answers.append(
                ActionChunk(
                    chunk.action[rows],
                    chunk.version,
                    jax.tree.map(lambda x, rows=rows: x[rows], chunk.carry),
                    {name: x[rows] for name, x in chunk.extras.items()},
                )
            )
        return answers


class CentralRunner:
    """The central actor as a runner, for one rollout worker. Raises what Ray raises when the actor is gone."""

    version = ""

    def __init__(self, actor: Any, contract: Contract, rows: int) -> None:
        """`rows`: that this worker asks for at once."""
        self._actor, self.contract, self._rows = actor, contract, rows

    def act(
        self, observation: Mapping[str, np.ndarray], seeds: np.ndarray, steps: np.ndarray, carry: Any = None
    ) -> ActionChunk:
        """See `rlsvc.runner.Runner.act`."""
        import ray

        return ray.get(self._actor.act.remote(dict(observation), seeds, steps, carry), timeout=ANSWER_TIMEOUT_S)

    def warm_up(self) -> None:
        """See `rlsvc.runner.Runner.warm_up`; the actor compiles for this worker's rows. Raises as `act`."""
        zeros = np.zeros(self._rows, np.int64)
        self.act(self.contract.example_observation(self._rows), zeros, zeros)


def make_central(acting: Any, rows: int, wait_s: float, gpus: float) -> Any:
    """Start the central actor.

    Args:
        acting: a `rlsvc.train.rollout_worker.Acting`.
        rows: observations of all workers together, the largest batch.
        wait_s: see CentralInference.
        gpus: that Ray holds for it.
    """
    import ray

    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | ({} if gpus else {"JAX_PLATFORMS": "cpu"})
    sizes = tuple(sorted({rows, max(1, rows // 2), max(1, rows // 4)}))
    options: Any = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 256, "runtime_env": {"env_vars": environment}}
    actor = ray.remote(**options)(CentralInference)
    return actor.remote(acting, sizes, wait_s, "gpu" if gpus else "cpu")
