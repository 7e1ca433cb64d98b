"""All rollout workers of a run, in this process or as Ray actors, as the driver sees them.

The driver asks workers (rlsvc/train/rollout_worker.py) for chunks of so many steps, gives them weights by version, and
owns what they return, so that a chunk outlives its worker.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.core.types import Chunk
from rlsvc.data.journal import Journal
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.env import EnvSpec
from rlsvc.spec.rollout import RolloutSpec
from rlsvc.spec.run import RunSpec
from rlsvc.train.cluster import robot_resources
from rlsvc.train.inference import CentralRunner, make_central
from rlsvc.train.rollout_worker import Acting, RolloutWorker, make_acting

MAX_FAILED_STARTS = 3
PROBE_TIMEOUT_S = 10.0
"""A central actor that does not say how it is within this time is taken for lost."""


def make_rollouts(spec: RunSpec, contract: Contract | None, journal: Journal, local: bool, run_dir: Path) -> Rollouts:
    """The rollout workers of a run, and the central actor if it has one; started when they are first needed.

    Args:
        spec: of the run, with numbers for GPUs.
        contract: of the environment, or of robots' computers without Ray; None where the learner says it.
        journal: of the run; a worker that sent chunks into it before begins with a new incarnation.
        local: without Ray.
        run_dir: of the run.
    """
    if spec.rollout.clients is not None:
        return LaterRollouts(partial(_open_to_clients, spec, contract, journal, local, run_dir))
    assert contract is not None
    if ALGORITHMS[spec.algo.name].episodes is None:
        return _start(spec, contract, journal, local, run_dir)
    # What acts is known once the learner has read the demonstrations.
    return LaterRollouts(partial(_start, spec, contract, journal, local, run_dir))


def _open_to_clients(
    spec: RunSpec, contract: Contract | None, journal: Journal, local: bool, run_dir: Path
) -> Rollouts:
    from rlsvc.train.clients import ClientRollouts

    device = spec.device if local else "cpu"
    return ClientRollouts(spec, make_acting(spec, contract, run_dir), journal, run_dir, device)


def _start(spec: RunSpec, contract: Contract, journal: Journal, local: bool, run_dir: Path) -> Rollouts:
    assert spec.env is not None
    acting, rollout = make_acting(spec, contract, run_dir), spec.rollout
    begins = next_incarnations(journal, rollout.workers)
    if local:
        return LocalRollouts(spec.env, rollout, acting, seed=spec.seed, device=spec.device, incarnations=begins)
    central = None
    if rollout.inference == "central":
        rows = rollout.workers * rollout.envs_per_worker
        central = partial(make_central, acting, rows, rollout.inference_wait_s, rollout.inference_gpus or 0.0)
    return RayRollouts(spec.env, rollout, acting, seed=spec.seed, incarnations=begins, make_inference=central)


def next_incarnations(journal: Journal, workers: int) -> list[int]:
    """By worker, an incarnation that none of the journal's chunks is of."""
    begins = [0] * workers
    for worker, incarnation, _ in journal.ids():
        if worker < workers:
            begins[worker] = max(begins[worker], incarnation + 1)
    return begins


@dataclass(frozen=True)
class Arrived:
    """A chunk at the driver; `ref` is its place in the object store, None without Ray."""

    chunk: Chunk
    ref: Any = None


class Rollouts(Protocol):
    """All rollout workers of a run, as the orchestrator sees them."""

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """Have every worker step each environment `num_steps` times; one chunk each, in the order of workers."""
        ...

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """Ask free workers for chunks, as long as what was asked for and has not arrived is at most `budget` steps.

        With `needed`, one chunk is on the way in any case.
        """
        ...

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Chunks that have arrived, in that order; waits at most so long for the first."""
        ...

    def set_weights(self, params: Any, version: int) -> None:
        """What workers act with from their next chunk on."""
        ...

    def metrics(self) -> dict[str, float]:
        """Counters: restarts, chunks on the way."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class LaterRollouts:
    """Rollouts that are made when they are first asked for anything."""

    def __init__(self, make: Callable[[], Rollouts]) -> None:
        self._make = make
        self._made: Rollouts | None = None

    @property
    def _rollouts(self) -> Rollouts:
        if self._made is None:
            self._made = self._make()
        return self._made

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """See Rollouts."""
        return self._rollouts.collect(num_steps, acting)

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """See Rollouts."""
        self._rollouts.pump(budget, acting, needed)

    def poll(self, timeout_s: float) -> list[Arrived]:
        """See Rollouts."""
        return self._rollouts.poll(timeout_s)

    def set_weights(self, params: Any, version: int) -> None:
        """See Rollouts."""
        self._rollouts.set_weights(params, version)

    def metrics(self) -> dict[str, float]:
        """See Rollouts; none before they were made."""
        return {} if self._made is None else self._made.metrics()

    def close(self) -> None:
        """See Rollouts."""
        if self._made is not None:
            self._made.close()


class LocalRollouts:
    """Workers in this process, stepped one after the other, with one runner; for --local and for tests of logic."""

    def __init__(
        self, env: EnvSpec, spec: RolloutSpec, acting: Acting, *, seed: int, device: str, incarnations: Sequence[int]
    ) -> None:
        self._spec = spec
        self._runner = acting.runner((spec.envs_per_worker,), device)
        self._workers = [
            RolloutWorker(
                env,
                acting,
                worker=worker,
                num_envs=spec.envs_per_worker,
                seed=seed,
                incarnation=incarnations[worker],
                runner=self._runner,
            )
            for worker in range(spec.workers)
        ]
        self._asked: deque[str] = deque()

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """See Rollouts."""
        return [Arrived(worker.collect(num_steps, acting)) for worker in self._workers]

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """See Rollouts; nothing happens before `poll` asks."""
        steps = self._spec.chunk_steps * self._spec.envs_per_worker * self._spec.workers
        if not self._asked and (budget >= steps or needed):
            self._asked.append(acting)

    def poll(self, timeout_s: float) -> list[Arrived]:
        """See Rollouts; the collecting itself happens here."""
        return self.collect(self._spec.chunk_steps, self._asked.popleft()) if self._asked else []

    def set_weights(self, params: Any, version: int) -> None:
        """See Rollouts."""
        for worker in self._workers:
            worker.set_weights(params, version)

    def metrics(self) -> dict[str, float]:
        """See Rollouts."""
        return {"restarts": 0.0}

    def close(self) -> None:
        """See Rollouts."""
        for worker in self._workers:
            worker.close()


@dataclass
class _Slot:
    """One worker as the driver knows it."""

    worker: int
    incarnation: int
    actor: Any = None
    pending: deque[Any] = field(default_factory=deque)
    heard: float = 0.0
    arrived: int = 0
    failures: int = 0
    version: int = -1


class RayRollouts:
    """Workers as Ray actors.

    Consumes the orchestrator's requests; produces chunks, which the driver owns. A worker that dies or answers nothing
    for `timeout_s` (a new one: `start_timeout_s`) is killed and replaced, and loses the chunks it had under way, which
    nobody has acknowledged. When the driver dies, its actors do.
    """

    def __init__(
        self,
        env: EnvSpec,
        spec: RolloutSpec,
        acting: Acting,
        *,
        seed: int,
        incarnations: Sequence[int],
        make_inference: Callable[[], Any] | None = None,
    ) -> None:
        """Start the workers; `make_inference`: starts the central actor, None acts in the workers."""
        import ray

        self._spec, self._make_inference = spec, make_inference
        self._inference: Any = None if make_inference is None else make_inference()
        self._make = (env, acting, spec, seed)
        environment = {
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        }
        self._class = ray.remote(
            num_cpus=spec.cpus_per_worker,
            resources=robot_resources(env),
            max_restarts=0,
            runtime_env={"env_vars": environment},
        )(_RayWorker)
        self._slots = [_Slot(worker, incarnations[worker]) for worker in range(spec.workers)]
        self._weights: Any = None
        self._version = -1
        self.restarts, self.inference_restarts = 0, 0
        for slot in self._slots:
            self._start(slot)

    def collect(self, num_steps: int, acting: str) -> list[Arrived]:
        """See Rollouts. A worker that is lost meanwhile is replaced and asked again."""
        for slot in self._slots:
            self._ask(slot, num_steps, acting)
        out: list[Arrived] = []
        for slot in self._slots:
            while (arrived := self._take(slot, 1.0)) is None:
                if not slot.pending:
                    self._ask(slot, num_steps, acting)
            out.append(arrived)
        return out

    def pump(self, budget: int, acting: str, needed: bool = False) -> None:
        """See Rollouts."""
        size = self._spec.chunk_steps * self._spec.envs_per_worker
        under_way = sum(len(slot.pending) for slot in self._slots) * size
        for slot in sorted(self._slots, key=lambda slot: len(slot.pending)):
            while len(slot.pending) < self._spec.max_inflight and (
                under_way + size <= budget or (needed and not under_way)
            ):
                self._ask(slot, self._spec.chunk_steps, acting)
                under_way += size

    def poll(self, timeout_s: float) -> list[Arrived]:
        """See Rollouts."""
        import ray

        first = {slot.pending[0]: slot for slot in self._slots if slot.pending}
        if not first:
            return []
        ray.wait(list(first), num_returns=1, timeout=timeout_s, fetch_local=False)
        out = []
        for slot in first.values():
            while slot.pending and (arrived := self._take(slot, 0.0)) is not None:
                out.append(arrived)
        return out

    def set_weights(self, params: Any, version: int) -> None:
        """See Rollouts; one copy lies in the object store for all workers."""
        import ray

        if version == self._version:
            return
        self._version = version
        self._weights = ray.put(params)
        if self._inference is not None:
            self._inference.set_weights.remote(self._weights, version)

    def metrics(self) -> dict[str, float]:
        """See Rollouts."""
        return {
            "restarts": float(self.restarts),
            "inference_restarts": float(self.inference_restarts),
            "inflight": float(sum(len(slot.pending) for slot in self._slots)),
        }

    @property
    def inference(self) -> Any:
        """Handle of the central actor, None when workers act for themselves."""
        return self._inference

    @property
    def actors(self) -> list[Any]:
        """Handles of the workers, for tests and tools that look after them."""
        return [slot.actor for slot in self._slots]

    def close(self) -> None:
        """See Rollouts."""
        import ray

        for slot in self._slots:
            ray.kill(slot.actor)
        if self._inference is not None:
            ray.kill(self._inference)

    def _start(self, slot: _Slot) -> None:
        env, acting, spec, seed = self._make
        slot.actor = self._class.remote(
            env, acting, slot.worker, spec.envs_per_worker, seed, slot.incarnation, self._inference
        )
        slot.pending.clear()
        slot.arrived, slot.version, slot.heard = 0, -1, time.monotonic()

    def _ask(self, slot: _Slot, num_steps: int, acting: str) -> None:
        if not slot.pending:
            slot.heard = time.monotonic()
        newer = self._version >= 0 and self._inference is None and slot.version != self._version
        slot.pending.append(
            slot.actor.collect.remote(num_steps, acting, self._weights if newer else None, self._version)
        )
        if newer:
            slot.version = self._version

    def _take(self, slot: _Slot, timeout_s: float) -> Arrived | None:
        """The worker's next chunk; None when there is none yet, or when the worker was lost and replaced."""
        import ray
        import ray.exceptions

        ref = slot.pending[0]
        try:
            chunk: Any = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            limit = self._spec.timeout_s
            if not slot.arrived:
                limit = max(limit, self._spec.start_timeout_s)
            if time.monotonic() - slot.heard > limit:
                self._replace(slot, f"answered nothing for {limit:g} s")
            return None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            self._replace(slot, f"raised {type(error.cause).__name__}: {error.cause}")
            return None
        except ray.exceptions.RayError as error:
            self._replace(slot, type(error).__name__)
            return None
        slot.pending.popleft()
        slot.heard, slot.failures = time.monotonic(), 0
        slot.arrived += 1
        return Arrived(chunk, ref)

    def _replace(self, slot: _Slot, why: str) -> None:
        import ray

        if self._inference is not None and self._replace_inference():
            return
        self.restarts += 1
        slot.failures += 1
        if self.restarts > self._spec.max_restarts or slot.failures > MAX_FAILED_STARTS:
            raise UserError(
                f"rollout worker {slot.worker} {why}; it was replaced {slot.failures} times in a row without a chunk, "
                f"and {self.restarts} workers were replaced in all (rollout.max_restarts is "
                f"{self._spec.max_restarts}). Its log lies in Ray's session folder (/tmp/ray/session_latest/logs)"
            )
        ray.kill(slot.actor)
        slot.incarnation += 1
        self._start(slot)

    def _replace_inference(self) -> bool:
        """Whether the central actor was gone: then it is replaced, and so are all workers, which wait for answers."""
        import ray
        import ray.exceptions

        try:
            ray.get(self._inference.metrics.remote(), timeout=PROBE_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError):
            assert self._make_inference is not None
            self.inference_restarts += 1
            if self.inference_restarts > self._spec.max_restarts:
                raise UserError(
                    f"the central actor was replaced {self._spec.max_restarts} times (rollout.max_restarts); its "
                    "log lies in Ray's session folder (/tmp/ray/session_latest/logs)"
                ) from None
            ray.kill(self._inference)
            self._inference = self._make_inference()
            if self._weights is not None:
                self._inference.set_weights.remote(self._weights, self._version)
            for slot in self._slots:
                ray.kill(slot.actor)
                slot.incarnation += 1
                self._start(slot)
            return True
        return False


class _RayWorker:
    """A RolloutWorker as an actor: its weights come by reference, its runner may be the central one."""

    def __init__(
        self, env: EnvSpec, acting: Acting, worker: int, num_envs: int, seed: int, incarnation: int, inference: Any
    ) -> None:
        runner = None if inference is None else CentralRunner(inference, acting.contract, num_envs)
        self._worker = RolloutWorker(
            env, acting, worker=worker, num_envs=num_envs, seed=seed, incarnation=incarnation, runner=runner
        )

    def collect(self, num_steps: int, acting: str, weights: Any, version: int) -> Chunk:
        """See RolloutWorker."""
        return self._worker.collect(num_steps, acting, weights, version)

    def pid(self) -> int:
        """Of the worker's process."""
        return os.getpid()
