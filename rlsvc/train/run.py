"""One training run: folder, learner group, orchestrator, evaluation, tracking, registered bundle."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.data.journal import Journal
from rlsvc.envs.make import make_env
from rlsvc.spec.compose import to_yaml
from rlsvc.spec.rllib import RLlibSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.mlflow_store import on_storage, store_uri
from rlsvc.store.registry import register
from rlsvc.store.run_store import RunStore, work_root
from rlsvc.store.runs import SCORES, best_step
from rlsvc.store.storage import is_url
from rlsvc.store.tracking import RunTracker, Status, make_tracker
from rlsvc.train.cluster import check_own_node, check_resources, cluster_gpus, ensure_ray, own_node, place_on_gpus
from rlsvc.train.evaluate import Evaluation, batch_sizes, evaluate, write_video
from rlsvc.train.group import LocalGroup, RayGroup
from rlsvc.train.inference import LocalInference, RayInference
from rlsvc.train.orchestrator import LearnerGroup, Orchestrator, Order
from rlsvc.train.plots import write_learning_curve
from rlsvc.train.rollout import make_rollouts
from rlsvc.train.run_checks import check_folder, check_rllib, check_robot, check_store, check_torch
from rlsvc.train.workers import Workers, make_workers

log = logging.getLogger(__name__)
OnMetrics = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class RunResult:
    """What a run made.

    Attributes:
        run_dir: its folder.
        bundle: the best bundle by the evaluation metric, or the last one without evaluation.
        metrics: the last value of every metric.
        step: updates done.
        interrupted: stopped by Ctrl-C (or the caller's event) after a checkpoint.
        registered: `models:/name/version`, None when it was not registered.
        plot: learning curve, None before the first log.
        videos: by "best", "median", "worst".
    """

    run_dir: Path
    bundle: Path | None
    metrics: dict[str, float]
    step: int
    interrupted: bool
    registered: str | None
    plot: Path | None
    videos: dict[str, Path]


def run_dir(spec: RunSpec) -> Path:
    """`<root>/<project>/<name>`; for a root that is a URL, the folder on this machine in which the run is worked on."""
    root = work_root(spec.root) if is_url(spec.root) else Path(spec.root)
    return root / spec.project / spec.name


def has_begun(spec: RunSpec) -> bool:
    """Whether there is a run in its folder, or on its storage."""
    store = _store_of(spec)
    return (run_dir(spec) / "spec.yaml").exists() or (store is not None and store.manifest() is not None)


def _store_of(spec: RunSpec) -> RunStore | None:
    return RunStore(spec.root, spec.project, spec.name) if is_url(spec.root) else None


def train(
    spec: RunSpec,
    *,
    local: bool = False,
    on_metrics: OnMetrics | None = None,
    stop: threading.Event | None = None,
    profile: Path | None = None,
) -> RunResult:
    """Train, evaluate and register a policy.

    Args:
        spec: validated.
        local: one rank and all rollouts on this machine without Ray.
        on_metrics: called with (step, metrics) whenever metrics are logged, and with "progress/checkpoint" alone when a
            checkpoint of this step is on disk.
        stop: when set, the run writes a checkpoint and ends early.
        profile: folder for a JAX profiler trace of the run (local only).

    Raises:
        UserError: anything in the specification, data or machine that does not fit; nothing already saved is lost.
    """
    store = _store_of(spec)
    check_store(spec, store)
    check_folder(spec, run_dir(spec))
    check_torch(spec, profile)
    check_rllib(spec, profile, local)
    check_robot(spec, local)
    contract = _env_contract(spec)
    placed = spec
    if not local:
        ensure_ray(spec.env)
        placed = place_on_gpus(spec, cluster_gpus())
        check_resources(placed)
        if store is not None:
            check_own_node(placed)
    if store is not None and spec.overwrite:
        store.delete()
    folder = _prepare_folder(spec)
    spec = placed
    stop = stop or threading.Event()
    status: Status = "failed"
    with contextlib.ExitStack() as stack:
        if not spec.resume:
            stack.enter_context(_begun(folder))
        tracker = make_tracker(spec, folder, resume=spec.resume)
        stack.callback(lambda: tracker.close(status))
        run = _Run(spec, folder, tracker, on_metrics, local, store)
        stack.callback(run.close)
        if isinstance(spec.algo, RLlibSpec):
            from rlsvc.train.rllib import run_rllib

            tracker.log_params(spec)
            with _interrupts(stop):
                step = run_rllib(spec, folder, contract, run, stop)
        else:
            group: LearnerGroup = (LocalGroup if local else RayGroup)(spec, folder, contract)
            stack.callback(group.close)
            journal = rollouts = None
            if spec.online:
                journal = stack.enter_context(Journal(folder / "journal"))
                rollouts = make_rollouts(spec, contract, journal, local, folder)
                stack.callback(rollouts.close)
            tracker.log_params(spec)
            with _interrupts(stop), _profiler(profile):
                step = Orchestrator(
                    spec, group, run, stop, rollouts=rollouts, journal=journal,
                    read_meta=partial(checkpoint.load_meta, folder / "checkpoints"),
                ).run()  # fmt: skip
        result = run.finish(step, interrupted=stop.is_set())
        status = "finished"
    return result


class _Run:
    """Listens to the orchestrator: logs, evaluates exported bundles, keeps the best, prunes the rest."""

    def __init__(
        self,
        spec: RunSpec,
        folder: Path,
        tracker: RunTracker,
        on_metrics: OnMetrics | None,
        local: bool,
        store: RunStore | None = None,
    ) -> None:
        self.spec, self.folder, self.tracker, self._tell, self.local = spec, folder, tracker, on_metrics, local
        self.store = store
        self.evaluator = Evaluator(spec, local) if spec.evaluates else None
        self.metrics: dict[str, float] = {}
        self.last_evaluation: Evaluation | None = None
        self._scores_file = folder / SCORES
        found = json.loads(self._scores_file.read_text()) if self._scores_file.exists() else {}
        self.scores: dict[int, float] = {int(step): score for step, score in found.items()}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self._log(step, metrics)

    def on_result(self, order: Order, result: dict[str, Any]) -> None:
        if order.kind == "validate" and result:
            self._log(order.step, {f"validation/{name}": value for name, value in result.items()})
        elif order.kind == "export":
            self._exported(order.step, Path(result["bundle"]))
        elif order.kind == "checkpoint":
            self._prune()
            if self.store is not None:
                self.store.commit(order.step)
            if self._tell is not None:
                self._tell(order.step, {"progress/checkpoint": float(order.step)})

    def _exported(self, step: int, bundle: Path) -> None:
        if self.evaluator is None:
            return
        final = step >= self.spec.length
        self.last_evaluation = self.evaluator.run(bundle, final=final)
        metrics = self.last_evaluation.metrics()
        self.scores[step] = metrics[self.spec.evaluation.metric]
        partial = self._scores_file.with_suffix(".tmp")
        partial.write_text(json.dumps(self.scores))
        partial.replace(self._scores_file)
        self._log(step, {f"eval/{name}": value for name, value in metrics.items()})
        if self.spec.env and self.spec.evaluation.step_videos:
            episode = self.last_evaluation.extremes(self.spec.evaluation.metric)["median"]
            write_video(episode, self.spec.env, self.folder / "videos" / f"step_{step:09d}.mp4")

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics |= metrics
        self.tracker.log(step, metrics)
        if self._tell is not None:
            self._tell(step, metrics)

    def best_step(self) -> int | None:
        """Step of the best bundle that is still there, the later of equals; without evaluation the last one's."""
        return best_step(self.folder / "bundles", self.scores)

    def _prune(self) -> None:
        best = self.best_step()
        keep = {best} if self.spec.checkpoint.keep_best and best is not None else set()
        checkpoint.prune(self.folder / "checkpoints", self.spec.checkpoint.keep_last, keep)
        bundles = self.folder / "bundles"
        steps = sorted(int(b.name) for b in bundles.iterdir() if b.name.isdigit()) if bundles.is_dir() else []
        for step in steps[: -self.spec.checkpoint.keep_last]:
            if step not in keep:
                shutil.rmtree(bundles / str(step))

    def finish(self, step: int, interrupted: bool) -> RunResult:
        """Plots, videos, registration."""
        best = self.best_step()
        bundle = None if best is None else self.folder / "bundles" / str(best)
        plot = write_learning_curve(
            self.folder / "metrics.jsonl",
            self.folder / "plots" / "learning_curve.png",
            self.spec.name,
            returns=self.spec.evaluation.metric == "return",
            online=self.spec.collects,
        )
        videos: dict[str, Path] = {}
        if self.spec.env and self.last_evaluation and self.spec.evaluation.videos and not interrupted:
            for name, episode in self.last_evaluation.extremes(self.spec.evaluation.metric).items():
                videos[name] = write_video(
                    episode, self.spec.env, self.folder / "videos" / f"{name}_seed{episode.seed}.mp4"
                )
        for path in [plot, *videos.values()]:
            if path is not None:
                self.tracker.artifact(path)
        if self.store is not None:
            self.store.commit(step)
        registered = None
        tracking = self.spec.tracking
        kept = "mlflow" in tracking.trackers or on_storage(store_uri(self.spec.root, tracking.mlflow_uri))
        if bundle is not None and not interrupted and tracking.register_bundle and kept:
            name = tracking.register_as or f"{self.spec.project}-{self.spec.name}"
            version = register(bundle, name, self.tracker.run_id, tracking.mlflow_uri, root=self.spec.root)
            registered = f"models:/{name}/{version}"
        return RunResult(self.folder, bundle, self.metrics, step, interrupted, registered, plot, videos)

    def close(self) -> None:
        if self.evaluator is not None:
            self.evaluator.close()


class Evaluator:
    """Rollout workers and the policy that acts for them, kept between evaluations."""

    def __init__(self, spec: RunSpec, local: bool) -> None:
        assert spec.env is not None
        self.spec, self.local = spec, local
        self._workers: Workers | None = None
        sizes = batch_sizes(spec.evaluation.parallel)
        self.inference = (
            LocalInference(sizes, spec.device, group=spec.evaluation.group)
            if local
            else RayInference(
                sizes,
                spec.evaluation.gpus or 0.0,
                group=spec.evaluation.group,
                resources=own_node() if is_url(spec.root) else None,
            )
        )

    def run(self, bundle: Path, final: bool) -> Evaluation:
        """Evaluate a bundle on the seeds of the specification."""
        settings = self.spec.evaluation
        count = settings.final_episodes or settings.episodes if final else settings.episodes
        contract = self.inference.load(bundle)
        workers = self._start(contract.n_obs_steps)
        seeds = range(settings.first_seed, settings.first_seed + count)
        return evaluate(self.inference, workers, list(seeds), settings.parallel)

    def _start(self, n_obs_steps: int) -> Workers:
        if self._workers is None:
            assert self.spec.env is not None
            self._workers = make_workers(
                self.spec.env,
                n_obs_steps,
                self.spec.evaluation.workers,
                self.local,
                self.spec.evaluation.cpus_per_worker,
            )
        return self._workers

    def close(self) -> None:
        """End workers and policy."""
        if self._workers is not None:
            self._workers.close()
        self.inference.close()


def _env_contract(spec: RunSpec) -> Contract | None:
    if spec.rollout.clients is not None:
        from rlsvc.train.clients import far_contract

        return far_contract(spec)
    if spec.env is None:
        return None
    env = make_env(spec.env)
    try:
        return env.contract(spec.policy.n_obs_steps, spec.policy.n_action_steps)
    finally:
        env.close()


def _prepare_folder(spec: RunSpec) -> Path:
    """The run's folder with spec.yaml."""
    folder = run_dir(spec)
    if spec.overwrite and (folder / "spec.yaml").exists():
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".spec.{os.getpid()}.tmp"
        partial.write_text(to_yaml(spec.replace(resume=False, overwrite=False)))
        partial.replace(folder / "spec.yaml")
    except OSError as error:
        raise UserError(
            f"{folder}: the run folder cannot be written ({error.strerror}); choose another root=... or free some space"
        ) from error
    return folder


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[None]:
    """What is refused before anything was saved is no run: its folder is free for the mended specification.

    Not for a run that is resumed, which another process may be in.
    """
    try:
        yield
    except UserError:
        if not any((folder / "checkpoints").glob("*")) and not any((folder / "journal").glob("*.journal")):
            (folder / "spec.yaml").unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _interrupts(stop: threading.Event) -> Iterator[None]:
    """First Ctrl-C (or SIGTERM): finish the work at hand, write a checkpoint, end. Second: end at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        log.warning("%s: writing a checkpoint, then stopping (again to stop at once)", signal.Signals(number).name)

    old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _profiler(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    import jax

    with jax.profiler.trace(str(folder)):
        yield
