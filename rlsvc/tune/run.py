"""The driver of a sweep: Ray Tune over trials that each train in a process of their own, or with a group of their own.

A sweep is resumed without Tune's snapshots, which are taken now and then and lacked trials after a SIGKILL (as in
ray#30861). Values come from the trials' records, or from the search anew; trials that are over repeat their reports
from their records, which brings the scheduler up to date too; the others go on from their checkpoints.

The sweep's folder, which every node must reach, is `<root>/sweeps/<name>/`:

    sweep.json        the sweep and its base run, as resolved
    trials/           one record a trial (rlsvc/tune/trial.py)
    meter.json        hours and GPU-hours used, and by which rule the sweep ended
    <project>/<trial> the run folder of a trial: checkpoints, bundles, metrics
    tune/             Ray Tune's own files, which nothing here reads
    processes/        which processes of this session are up
    report/, trials.csv, best.yaml, best_bundle/   the report (rlsvc/tune/report.py)
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from rlsvc.core.errors import BusyError, SpecError
from rlsvc.spec.rllib import RLlibSpec
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import PAUSING, POPULATION, SweepSpec, check_space, complete, set_keys, tried
from rlsvc.store.storage import is_url
from rlsvc.tune.report import Report, write_report
from rlsvc.tune.resources import Needs, check_fit, fit, needs_of
from rlsvc.tune.schedule import Meter, StopRules, make_scheduler
from rlsvc.tune.search import OptunaSearch, fixed_values
from rlsvc.tune.stored import STORED, missing, sweep_folder
from rlsvc.tune.sweep_run import finish_sweep_run, start_sweep_run
from rlsvc.tune.trial import Train, Trial, load_trials, run_trial, train_run

OnTrial = Callable[[Trial], None]
START_TIMEOUT_S = 60.0
FREE = ("budget", "concurrency", "resources", "retries")
"""Keys of a sweep that may change when it is resumed."""
TUNE_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in the spec are relative to where the sweep was started
    "RAY_AIR_NEW_OUTPUT": "0",  # its banner ignores verbose=0
    "RAY_TRAIN_V2_ENABLED": "1",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the trials' own records and trackers take their place
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # nothing reads its snapshots, which grow with the number of trials
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
        SpecError: the space does not fit the run, or a trial asks for more than the cluster has.
        BusyError: the sweep exists already (and resume is not set), or another process is running it.
        NotFoundError: there is no sweep to resume.
    """
    check_space(spec, base)
    if is_url(base.root):
        raise SpecError(f"root: got {base.root}; a sweep's root is a folder that all of its nodes reach, no URL yet")
    _check_rllib(spec, base)
    folder = sweep_folder(base.root, spec.name)
    _prepare(folder, spec, base, resume)
    with _locked(folder):
        _connect()
        place = _place(spec, base)
        meter = Meter(folder, spec)
        parent = start_sweep_run(folder, spec, base)
        shutil.rmtree(folder / "processes", ignore_errors=True)
        if not meter.ended:
            population = spec.scheduler.name in POPULATION
            watch = _Watch(folder, spec.metric, on_trial, meter, place.gpus, population)
            _tuner(folder, spec, base, train, watch, meter, place, parent).fit()
            watch.settle()
        meter.save()
        report = write_report(folder, spec, base, load_trials(folder, spec.metric), ended=meter.ended)
        return finish_sweep_run(report, spec, base, parent)


def has_begun(spec: SweepSpec, base: RunSpec) -> bool:
    """Whether there is a sweep of this name."""
    return (sweep_folder(base.root, spec.name) / STORED).exists()


def _check_rllib(spec: SweepSpec, base: RunSpec) -> None:
    """Refuse, before the first trial, keys and values that RLlib itself would (rlsvc/backends/rllib_config.py)."""
    if not isinstance(base.algo, RLlibSpec):
        return
    from rlsvc.backends.rllib import check_rllib

    for values in tried(spec):
        check_rllib(set_keys(base, complete(spec, base, values)))


def _prepare(folder: Path, spec: SweepSpec, base: RunSpec, resume: bool) -> None:
    path = folder / STORED
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
        raise missing(folder, " to resume")
    before = json.loads(path.read_text())
    changed = [
        f"{part}.{key}: was {before[part].get(key)!r}, got {value!r}"
        for part in now for key, value in now[part].items()
        if before[part].get(key) != value and not (part == "sweep" and key in FREE)
    ]  # fmt: skip
    if changed:
        raise SpecError(
            f"{folder} cannot be resumed with another sweep: {'; '.join(changed)}. Resume it unchanged but for "
            f"{', '.join(FREE)}, or choose another name=..."
        )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(now, indent=2) + "\n")
    temporary.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"sweep {folder} is being run by another process. Wait for it, or end it first") from None
        yield


def _connect() -> None:
    for name, value in TUNE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the result files that the records replace
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(address=address, include_dashboard=False if address == "local" else None, log_to_driver=False)
    except ConnectionError as error:
        raise SpecError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error


@dataclass(frozen=True)
class _Place:
    """What trials hold.

    Attributes:
        of: what a trial with these values holds.
        same: whether all trials hold the same.
        concurrency: trials at once, never more than fit with all that they need.
        gpus: of a trial, at most.
        one_process: whether each trial is one process.
    """

    of: Callable[[dict[str, Any]], Needs]
    same: Needs | None
    concurrency: int
    gpus: float
    one_process: bool


def _place(spec: SweepSpec, base: RunSpec) -> _Place:
    gpus = ray.cluster_resources().get("GPU", 0.0)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def of(values: dict[str, Any]) -> Needs:
        return needs_of(spec, set_keys(base, values), gpus)

    every = [of(complete(spec, base, values)) for values in tried(spec)]
    for needs in every:
        check_fit(needs, nodes)
    concurrency = min(fit(needs, nodes, spec.concurrency or spec.trials) for needs in every)
    if spec.scheduler.name in PAUSING and any(needs.ranks for needs in every) and concurrency < spec.trials:
        raise SpecError(
            f"scheduler.name: {spec.scheduler.name} interrupts trials, so all {spec.trials} trials with learner groups "
            f"or workers must fit at once, and the cluster holds {concurrency}. Take asha, or fewer samples"
        )
    same = every[0] if all(needs == every[0] for needs in every) else None
    one_process = not any(needs.ranks for needs in every)
    return _Place(of, same, concurrency, max(needs.total("GPU") for needs in every), one_process)


def _tuner(
    folder: Path, spec: SweepSpec, base: RunSpec, train: Train, watch: _Watch, meter: Meter, place: _Place,
    parent: str | None,
) -> tune.Tuner:  # fmt: skip
    session, population = uuid.uuid4().hex, spec.scheduler.name in POPULATION
    over = sum(trial.over for trial in load_trials(folder, spec.metric))
    at_once = min(place.concurrency, max(spec.trials - over, 1)) if place.one_process else 1

    def objective(config: dict[str, Any]) -> None:
        wait_for_others(folder / "processes" / session, at_once)
        if 0 < spec.resources.gpu < 1:  # JAX would take three quarters of a GPU that trials share
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        number, values, donor = config["number"], config["values"], None
        if population:  # a trial that follows another one has its whole configuration, number included
            number = _number(tune.get_context().get_trial_id())
            values, donor = {key: config[key] for key in values}, _donor()

        def report(metrics: dict[str, Any]) -> None:
            with _pointer(number) if population else nullcontext() as checkpoint:
                tune.report(metrics, checkpoint=checkpoint)

        run_trial(folder, number, values, spec, base, train, report, session=session, donor=donor, parent=parent)

    learns = spec.searcher.name in ("tpe", "bayes")
    space: dict[str, Any] = {}
    if learns:
        search: Any = OptunaSearch(folder, spec, base, place.concurrency)
    else:
        # Schedulers that interrupt trials need the others meanwhile.
        search = BasicVariantGenerator(max_concurrent=0 if spec.scheduler.name in PAUSING else place.concurrency)
        fresh = fixed_values(spec, base)
        recorded = {trial.number // spec.seeds: trial.values for trial in load_trials(folder, spec.metric)}

        def values_of(number: int) -> dict[str, Any]:
            configuration = number // spec.seeds
            return recorded.get(configuration) or fresh(configuration)

        space["number"] = tune.grid_search(list(range(spec.trials)))
        space["values"] = tune.sample_from(lambda config: values_of(config["number"]))
        if population:
            for key in spec.space:
                space[key] = tune.sample_from(lambda config, key=key: values_of(config["number"])[key])

    def held(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(place.of(config["values"]).own)

    return tune.Tuner(
        tune.with_resources(objective, held if place.same is None else tune.PlacementGroupFactory(place.same.own)),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=spec.metric,
            mode=spec.mode,
            num_samples=spec.trials if learns else 1,
            search_alg=search,
            scheduler=make_scheduler(spec, base),
            reuse_actors=True,  # a process costs seconds to start, and keeps what JAX compiled
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder),
            verbose=0,
            stop=StopRules(spec, meter),
            failure_config=tune.FailureConfig(max_failures=spec.retries),
            callbacks=[watch],
        ),
    )


class _Watch(tune.Callback):
    """Brings records up to date for what a trial's process cannot write itself: that it was stopped, or died."""

    def __init__(
        self, folder: Path, metric: str, on_trial: OnTrial, meter: Meter, gpus: float, population: bool
    ) -> None:
        self._folder, self._metric, self._on_trial = folder, metric, on_trial
        self._meter, self._gpus, self._population = meter, gpus, population
        self._stopped: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks into a snapshot that nothing reads; whoever listens (a console) cannot be pickled.
        return {**self.__dict__, "_on_trial": None}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        running = sum(trial.status == "RUNNING" for trial in trials) if self._gpus else 0
        self._meter.tick(running * self._gpus)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if record.status in ("running", "paused"):
            # What a budget ended goes on when there is more of it.
            record.status = "paused" if self._meter.spent else "stopped"
            record.save(self._folder)
            if record.status == "stopped":
                self._stopped.add(record.number)
        self._on_trial(record)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        record = self._record(trial)
        if record.status in ("running", "paused"):
            lines = [line for line in str(trial.get_error()).splitlines() if line.strip()]
            record.status, record.reason = "failed", f"its process died: {lines[-1].strip() if lines else 'no message'}"
            record.save(self._folder)
        self._on_trial(record)

    def settle(self) -> None:
        """Once all processes are done: a trial that was stopped may have written that it pauses, not knowing better."""
        for number in self._stopped:
            record = Trial.load(self._folder, number, self._metric)
            if record is not None and record.status == "paused":
                record.status = "stopped"
                record.save(self._folder)

    def _record(self, trial: Any) -> Trial:
        number = _number(trial.trial_id) if self._population else trial.config["number"]
        return Trial.load(self._folder, number, self._metric) or Trial(number, dict(trial.config["values"]))


def wait_for_others(folder: Path, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
    """In a process's first trial: waits until as many processes are up as trials run at once.

    Tune gives a trial whose process is still starting to one that became free, and ends the starting one. So trials
    that are shorter than a process's start would all run in the first one, one after the other.

    Args:
        folder: where the processes of this session say that they are up.
        count: of processes that are to come.
        timeout_s: after which the trial begins without them; another job may have their room.
    """
    mine = folder / f"{socket.gethostname()}-{os.getpid()}"
    if mine.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    mine.touch()
    deadline = time.monotonic() + timeout_s
    while sum(1 for _ in folder.iterdir()) < count and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def _pointer(number: int) -> Iterator[Any]:
    """What Tune keeps and hands on as a trial's checkpoint: its number; the state lies in its run folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "trial").write_text(str(number))
        yield tune.Checkpoint.from_directory(folder)


def _donor() -> int | None:
    """The trial whose checkpoint Tune gave to this one; None for a trial that begins."""
    found = tune.get_checkpoint()
    if found is None:
        return None
    with found.as_directory() as folder:
        return int((Path(folder) / "trial").read_text())


def _number(trial_id: str) -> int:
    """Of a trial, from the id that Tune's own generator gave it: `<random>_<number>`."""
    return int(trial_id.rsplit("_", 1)[-1])
