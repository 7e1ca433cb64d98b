"""The driver of a sweep: Ray Tune over trials that each train in a process of their own.

A sweep is resumed without Tune's snapshots, which are taken now and then and lacked trials after a SIGKILL (as in
ray#30861). The seeded search makes the same trials again; those that are over repeat their reports from their records,
which brings the scheduler up to date too; the others go on from their checkpoints.

The sweep's folder, which every node must reach, is `<root>/sweeps/<name>/`:

    sweep.json        the sweep and its base run, as resolved
    trials/           one record a trial (rlsvc/tune/trial.py)
    <project>/<trial> the run folder of a trial: checkpoints, bundles, metrics
    tune/             Ray Tune's own files, which nothing here reads
    trials.csv, sweep.png, best.yaml, best_bundle/   the report (rlsvc/tune/report.py)
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from rlsvc.core.errors import BusyError, NotFoundError, SpecError
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import AshaSpec, SweepSpec, check_space
from rlsvc.tune.report import Report, write_report
from rlsvc.tune.space import to_tune
from rlsvc.tune.trial import Train, Trial, load_trials, run_trial, train_run

OnTrial = Callable[[Trial], None]
TUNE_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in the spec are relative to where the sweep was started
    "RAY_AIR_NEW_OUTPUT": "0",  # its banner ignores verbose=0
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the trials' own records and trackers take their place
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "30",  # a stopped trial closes its trackers before its process takes the next one
}


def run_sweep(
    spec: SweepSpec,
    base: RunSpec,
    *,
    resume: bool = False,
    train: Train = train_run,
    on_trial: OnTrial = lambda trial: None,
) -> Report:
    """Runs a sweep to its end and writes its report. A trial that fails is reported; the sweep goes on without it.

    Args:
        spec: of the sweep.
        base: the run that the trials vary.
        resume: go on with the sweep of this name: finished trials stay, unfinished and failed ones go on from their
            checkpoints.
        train: what a trial runs.
        on_trial: called with every trial that is over.

    Raises:
        SpecError: the space does not fit the run, or a trial asks for more than this machine has.
        BusyError: the sweep exists already (and resume is not set), or another process is running it.
        NotFoundError: there is no sweep to resume.
    """
    check_space(spec, base)
    folder = Path(base.root).absolute() / "sweeps" / spec.name
    _prepare(folder, spec, base, resume)
    with _locked(folder):
        _connect(spec)
        tuner = _tuner(folder, spec, base, train, on_trial)
        tuner.fit()
        return write_report(folder, spec, base, load_trials(folder, spec.metric))


def _prepare(folder: Path, spec: SweepSpec, base: RunSpec, resume: bool) -> None:
    path = folder / "sweep.json"
    now = {"sweep": spec.model_dump(mode="json"), "base": base.model_dump(mode="json")}
    if not resume:
        if any((folder / "trials").glob("*.json")):
            raise BusyError(
                f"sweep '{spec.name}' exists already in {folder}. Go on with it by --resume, or choose another name=..."
            )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n")
        return
    if not path.exists():
        others = sorted(each.parent.name for each in folder.parent.glob("*/sweep.json"))
        raise NotFoundError(
            f"no sweep '{spec.name}' to resume in {folder.parent}. There are: {', '.join(others) or 'none'}."
        )
    before = json.loads(path.read_text())
    changed = [
        f"{part}.{key}: was {before[part].get(key)!r}, got {value!r}"
        for part in now for key, value in now[part].items() if before[part].get(key) != value
    ]  # fmt: skip
    if changed:
        raise SpecError(
            f"{folder} cannot be resumed with another sweep: {'; '.join(changed)}. Resume it "
            "unchanged, or choose another name=..."
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"sweep {folder} is being run by another process. Wait for it, or end it first") from None
        yield


def _connect(spec: SweepSpec) -> None:
    for name, value in TUNE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that the records replace
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    ray.init(address=address, include_dashboard=False if address == "local" else None, log_to_driver=False)
    if address == "local":  # a cluster may still grow, this machine will not
        have = ray.cluster_resources()
        for name, need in (("CPU", spec.resources.cpu), ("GPU", spec.resources.gpu)):
            if need > have.get(name, 0):
                raise SpecError(
                    f"resources.{name.lower()}: a trial asks for {need:g}, this machine has {have.get(name, 0):g}. Ask "
                    "for less, or set RAY_ADDRESS to a cluster that has them"
                )


def _tuner(folder: Path, spec: SweepSpec, base: RunSpec, train: Train, on_trial: OnTrial) -> tune.Tuner:
    def objective(values: dict[str, Any]) -> None:
        if 0 < spec.resources.gpu < 1:  # JAX would take three quarters of a GPU that trials share
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        number = int(tune.get_context().get_trial_id().rsplit("_", 1)[-1])
        run_trial(folder, number, values, spec, base, train, tune.report)

    trainable = tune.with_resources(objective, {"CPU": spec.resources.cpu, "GPU": spec.resources.gpu})
    return tune.Tuner(
        trainable,
        param_space=to_tune(spec.space),
        tune_config=tune.TuneConfig(
            metric=spec.metric,
            mode=spec.mode,
            num_samples=spec.samples,
            # The same seed makes the same trials again when the sweep is resumed.
            search_alg=BasicVariantGenerator(max_concurrent=spec.concurrency, random_state=spec.seed),
            scheduler=_scheduler(spec, base),
            reuse_actors=True,  # a process costs seconds to start, and keeps what JAX compiled
        ),
        run_config=tune.RunConfig(
            name="tune", storage_path=str(folder), verbose=0, callbacks=[_Watch(folder, spec.metric, on_trial)]
        ),
    )


def _scheduler(spec: SweepSpec, base: RunSpec) -> TrialScheduler:
    if isinstance(spec.scheduler, AshaSpec):
        # One more than the run's last step: ASHA ends a trial at max_t, before it could write its last bundle.
        limit = spec.scheduler.max_t or base.length + 1
        return ASHAScheduler(
            "step", max_t=limit, grace_period=spec.scheduler.grace, reduction_factor=spec.scheduler.reduction
        )
    return FIFOScheduler()


class _Watch(tune.Callback):
    """Brings records up to date for what a trial's process cannot write itself: that it was stopped, or died."""

    def __init__(self, folder: Path, metric: str, on_trial: OnTrial) -> None:
        self._folder, self._metric, self._on_trial = folder, metric, on_trial

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks into a snapshot that nothing reads; whoever listens (a console) cannot be pickled.
        return {**self.__dict__, "_on_trial": None}

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if record.status == "running":
            record.status = "stopped"
            record.save(self._folder)
        self._on_trial(record)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if record.status == "running":
            lines = [line for line in str(trial.get_error()).splitlines() if line.strip()]
            record.status, record.reason = "failed", f"its process died: {lines[-1].strip() if lines else 'no message'}"
            record.save(self._folder)
        self._on_trial(record)

    def _record(self, trial: Any) -> Trial:
        number = int(trial.trial_id.rsplit("_", 1)[-1])
        return Trial.load(self._folder, number, self._metric) or Trial(number, dict(trial.config))
