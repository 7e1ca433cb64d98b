"""Who steps the simulators: this process, processes beside it, or Ray actors.

A worker steps the episodes of its share in lockstep with the others; the policy acts for all of them in one batch
elsewhere (rlsvc/train/evaluate.py).

Letters: E episodes of a worker, T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlsvc.core.errors import UserError
from rlsvc.core.history import ObservationHistory
from rlsvc.envs.make import make_env
from rlsvc.spec.env import EnvSpec
from rlsvc.train.cluster import robot_resources

STEP_TIMEOUT_S = 120.0
"""A worker that does not answer for this long is taken for lost."""
WATCHED_TIMEOUT_S = 3600.0
"""Likewise where simulators have processes of their own: the worker itself notices one that hangs, and steps and resets
many slow ones one after the other."""


@dataclass
class EpisodeResult:
    """One episode of an evaluation.

    Attributes:
        seed: of the environment and of the policy's noise.
        rewards: [length] float32.
        actions: [length, A] float32, what was executed; replaying them from `seed` gives the episode again.
        success: whether the environment said so at the end.
        task: name of the task where the environment has several, else "".
        malformed: chunks for which the policy gave tokens that are no actions; None for a policy that gives no tokens.
            The last of them ended the episode, unless the policy has an action that holds the robot still.
    """

    seed: int
    rewards: list[float] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    success: bool = False
    task: str = ""
    malformed: int | None = None

    @property
    def length(self) -> int:
        """Control steps."""
        return len(self.rewards)


class WorkerLost(Exception):  # noqa: N818 - an event that the evaluation handles, not an error
    """A worker died or hung, or a simulator failed; the episodes have to be run again."""


class EpisodeWorker:
    """Episodes stepped side by side; one that ended stays ended (no autoreset).

    Consumes seeds and action chunks, produces observation windows; waits for nobody.
    """

    def __init__(self, spec: EnvSpec, n_obs_steps: int) -> None:
        self.spec, self.n_obs_steps = spec, n_obs_steps
        self._envs: list[Any] = []
        self._histories: list[ObservationHistory] = []
        self._results: list[EpisodeResult] = []
        self._done: list[bool] = []

    def reset(self, seeds: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Begin an episode for each seed; the first window [T, ...] of each."""
        while len(self._envs) < len(seeds):
            self._envs.append(make_env(self.spec))
        self._results = [EpisodeResult(int(seed)) for seed in seeds]
        self._done = [False] * len(seeds)
        self._histories = [ObservationHistory(self.n_obs_steps) for _ in seeds]
        windows = []
        for env, history, result in zip(self._envs, self._histories, self._results, strict=False):
            observation, info = env.reset(seed=result.seed)
            result.task = str(info.get("task", ""))
            windows.append(history.append(observation))
        return windows

    def step(self, chunks: dict[int, np.ndarray]) -> dict[int, tuple[dict[str, np.ndarray], bool]]:
        """Execute chunks [H, A] by episode number, until their episodes end; window and whether it ended by number."""
        out = {}
        for i, chunk in chunks.items():
            result, window = self._results[i], None
            for action in chunk:
                observation, reward, terminated, truncated, info = self._envs[i].step(action)
                window = self._histories[i].append(observation)
                result.rewards.append(float(reward))
                result.actions.append(np.asarray(action, np.float32))
                if terminated or truncated:
                    result.success = bool(info.get("is_success", False))
                    self._done[i] = True
                    break
            assert window is not None
            out[i] = (window, self._done[i])
        return out

    def results(self) -> list[EpisodeResult]:
        """What the episodes came to, in the order of the seeds."""
        return self._results

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
        self._envs = []


def answer_timeout_s(spec: EnvSpec) -> float:
    """How long a worker of this environment may take for one call."""
    return WATCHED_TIMEOUT_S if spec.own_process else STEP_TIMEOUT_S


def _what(error: object) -> str:
    return f"{type(error).__name__}: {error}"


class Workers(Protocol):
    """Several episode workers; `call` runs one method on each, in parallel."""

    count: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Results by worker. Raises WorkerLost after replacing a worker that died."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class InProcess:
    """One worker, in this process."""

    count = 1

    def __init__(self, spec: EnvSpec, n_obs_steps: int) -> None:
        self._make = (spec, n_obs_steps)
        self._worker = EpisodeWorker(*self._make)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See Workers."""
        try:
            return [getattr(self._worker, method)(*arguments[0])]
        except UserError:
            raise
        except Exception as error:
            with contextlib.suppress(Exception):  # it is broken; whatever it says at the end is of no use
                self._worker.close()
            self._worker = EpisodeWorker(*self._make)
            raise WorkerLost(f"the simulator raised {_what(error)}") from error

    def close(self) -> None:
        """See Workers."""
        self._worker.close()


def _serve(pipe: Any, spec: EnvSpec, n_obs_steps: int) -> None:
    worker = EpisodeWorker(spec, n_obs_steps)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(worker, method)(*arguments))


class Processes:
    """Workers in spawned processes of this machine, for runs without Ray. They end when this process does."""

    def __init__(self, spec: EnvSpec, n_obs_steps: int, count: int) -> None:
        self.count = count
        self._make = (spec, n_obs_steps)
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(count)]

    def _start(self) -> tuple[Any, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, *self._make), daemon=True)
        process.start()
        theirs.close()
        return process, mine

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See Workers."""
        lost = []
        for i, ((_, pipe), argument) in enumerate(zip(self._workers, arguments, strict=True)):
            try:
                pipe.send((method, argument))
            except OSError:
                lost.append(i)
        out = []
        for i, (_, pipe) in enumerate(self._workers):  # of each, so that no answer waits for the next call
            if i in lost:
                continue
            try:
                if not pipe.poll(answer_timeout_s(self._make[0])):
                    raise EOFError
                out.append(pipe.recv())
            except (EOFError, OSError):
                lost.append(i)
        for i in lost:
            self._workers[i][0].kill()
            self._workers[i] = self._start()
        if lost:
            raise WorkerLost(", ".join(f"rollout process {i} died or hung" for i in sorted(lost)))
        return out

    def close(self) -> None:
        """See Workers."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            process.kill()
            process.join()


class RayWorkers:
    """Workers as Ray actors. One that dies or hangs is replaced; WorkerLost tells the caller to run the wave again."""

    def __init__(self, spec: EnvSpec, n_obs_steps: int, count: int, cpus: float = 1.0) -> None:
        import ray

        self.count = count
        self._make = (spec, n_obs_steps)
        self._class = ray.remote(num_cpus=cpus, resources=robot_resources(spec), max_restarts=0)(EpisodeWorker)
        self._actors: list[Any] = [self._class.remote(*self._make) for _ in range(count)]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """See Workers."""
        import ray
        import ray.exceptions

        refs = [
            getattr(actor, method).remote(*argument) for actor, argument in zip(self._actors, arguments, strict=True)
        ]
        out: list[Any] = []
        lost: dict[int, str] = {}
        for i, ref in enumerate(refs):
            try:
                out.append(ray.get(ref, timeout=answer_timeout_s(self._make[0])))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from error
                lost[i] = f"raised {_what(error.cause)}"
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                lost[i] = "died or hung"
        for i in lost:
            ray.kill(self._actors[i])
            self._actors[i] = self._class.remote(*self._make)
        if lost:
            raise WorkerLost(", ".join(f"rollout actor {i} {why}" for i, why in lost.items()))
        return out

    def close(self) -> None:
        """See Workers."""
        import ray

        for actor in self._actors:
            ray.kill(actor)


def make_workers(spec: EnvSpec, n_obs_steps: int, count: int, local: bool, cpus: float = 1.0) -> Workers:
    """Ray actors of so many CPUs; without Ray this process, or `count` processes."""
    if not local:
        return RayWorkers(spec, n_obs_steps, count, cpus)
    return Processes(spec, n_obs_steps, count) if count > 1 else InProcess(spec, n_obs_steps)
