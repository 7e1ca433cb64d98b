"""One trial of a sweep: what runs in its process, and its record on disk.

A trial's record is `<sweep>/trials/<number>.json` (values, status, reason, bundle) and `.jsonl` (the metric by step),
written by the trial itself as it goes. So a finished trial is never lost or run again, whatever dies, and a search can
be asked to go on from the records alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlsvc.core.errors import BusyError, NotFoundError, SpecError, UserError, nearest
from rlsvc.spec.run import RunSpec
from rlsvc.spec.space import Values
from rlsvc.spec.sweep import PAUSING, POPULATION, SweepSpec, set_keys
from rlsvc.store.mlflow_store import store_uri
from rlsvc.store.tracking import JsonlTracker, read_metrics

OnMetrics = Callable[[int, Mapping[str, Any]], None]
Train = Callable[[RunSpec, OnMetrics], Path | None]
Status = Literal["running", "paused", "finished", "stopped", "failed"]
LOCK_TIMEOUT_S = 60.0


class TrialError(UserError):
    """A trial cannot be judged: its metric is not finite, or was never reported. It is not tried again."""


@dataclass
class Trial:
    """A trial's record.

    Attributes:
        number: 0, 1, ... in the order in which the search made them; the seeds of a configuration follow each other.
        values: what was sampled and computed, by the dotted key of the RunSpec.
        status: running; paused (it will go on: its bracket, population or budget had it wait); finished (to its end);
            stopped (early, by the scheduler or a rule); failed.
        reason: why it failed.
        bundle: the folder of the policy that it made, "" when there is none yet.
        final: whether trying a failed trial again would change nothing: what a person gave is wrong, or a value is NaN.
        attempts: how often it began in this session of the sweep.
        session: of the sweep's driver that it began under last.
        seconds: that it ran, over all attempts.
        history: (step, metric value), in order of steps.
        objectives: further metrics by step, where the sweep has objectives.
    """

    number: int
    values: dict[str, Any]
    status: Status = "running"
    reason: str = ""
    bundle: str = ""
    final: bool = False
    attempts: int = 0
    session: str = ""
    seconds: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)
    objectives: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the trial's run and folder."""
        return f"trial_{self.number:05d}"

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.status in ("finished", "stopped", "failed")

    def best(self, spec: SweepSpec) -> tuple[int, float] | None:
        """Step and value of the best metric, None before the first report."""
        if not self.history:
            return None
        choose = max if spec.mode == "max" else min
        return choose(self.history, key=lambda point: point[1])

    def save(self, folder: Path) -> None:
        """Writes the record, all or nothing; the history has been written as it came."""
        path = folder / "trials" / f"{self.number:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {key: value for key, value in asdict(self).items() if key not in ("history", "objectives")}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, folder: Path, number: int, metric: str) -> Trial | None:
        """The record on disk, None when the trial never began."""
        path = folder / "trials" / f"{number:05d}.json"
        if not path.exists():
            return None
        records = _reports(folder, number)
        others = {
            int(each["step"]): {key: value for key, value in each.items() if key not in ("step", "time", metric)}
            for each in records
        }
        return cls(
            **json.loads(path.read_text()),
            history=[(int(each["step"]), each[metric]) for each in records],
            objectives={step: values for step, values in others.items() if values},
        )


def _reports(folder: Path, number: int) -> list[dict[str, float]]:
    path = folder / "trials" / f"{number:05d}.jsonl"
    return read_metrics(path) if path.exists() else []


def load_trials(folder: Path, metric: str, of: Iterable[int] | None = None) -> list[Trial]:
    """The trials of a sweep that ever began, by number; `of`: these numbers alone."""
    numbers = sorted(int(path.stem) for path in (folder / "trials").glob("*.json")) if of is None else of
    found = (Trial.load(folder, number, metric) for number in numbers)
    return [trial for trial in found if trial is not None]


def run_trial(
    folder: Path, number: int, values: Mapping[str, Any], spec: SweepSpec, base: RunSpec, train: Train,
    report: Callable[[dict[str, Any]], None], *, session: str = "", donor: int | None = None, parent: str | None = None,
) -> None:  # fmt: skip
    """Runs a trial, goes on with one that was killed or paused, or repeats the reports of one that is over.

    Args:
        folder: of the sweep.
        number: of the trial.
        values: what was sampled.
        spec: of the sweep.
        base: the run that the values vary.
        train: runs a specification and returns the bundle.
        report: tells the scheduler {"step", "units", metric}, at the end with "done"; it raises SystemExit when the
            trial is to stop.
        session: of the driver. Another one than that of the record has not heard its reports yet.
        donor: trial of the population whose checkpoint this one is to go on from.
        parent: MLflow run of the sweep.

    Raises:
        TrialError: the metric is NaN or infinite (which ASHA would never stop, ray#6659), or never came; or it failed
            for good before, in this session.
    """
    with _alone(folder, number):
        _Running(folder, number, values, spec, base, report, session, parent).run(train, donor)


class _Running:
    """A trial under way."""

    def __init__(
        self, folder: Path, number: int, values: Mapping[str, Any], spec: SweepSpec, base: RunSpec,
        report: Callable[[dict[str, Any]], None], session: str, parent: str | None,
    ) -> None:  # fmt: skip
        self.folder, self.spec, self.base, self._tell, self.parent = folder, spec, base, report, parent
        plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
        recorded = Trial.load(folder, number, spec.metric)
        self.trial = trial = recorded or Trial(number, plain)
        population = spec.scheduler.name in POPULATION
        if population:
            trial.values = plain
        elif trial.values != json.loads(json.dumps(plain)):
            raise TrialError(
                f"{folder}: trial {number} was begun with {trial.values}, and the search now gives {plain}"
            )
        again = recorded is not None and trial.session == session
        if again and trial.status == "failed" and (trial.attempts > spec.retries or trial.final):
            raise TrialError(trial.reason)  # Tune tries every trial again; this one has been reported
        # A scheduler of this session has heard what is in the record; a new one has not.
        self._unheard = [] if again else trial.history[-1:] if population else list(trial.history)
        trial.attempts = trial.attempts + 1 if again else 1
        self.session = session
        self._held: list[tuple[int, float]] = []
        self._seen: set[str] = set()
        self._latest: dict[str, float] = {}
        self._reports = JsonlTracker(folder / "trials" / f"{number:05d}.jsonl")

    def run(self, train: Train, donor: int | None) -> None:
        trial, spec = self.trial, self.spec
        for step, value in self._unheard:
            self._report(step, value)
        if trial.status in ("finished", "stopped") and trial.session != self.session:
            self._report(*trial.history[-1], done=True)
            return
        trial.status, trial.reason, trial.final, trial.session = "running", "", False, self.session
        trial.save(self.folder)
        before, began = trial.seconds, time.monotonic()
        try:
            run = trial_run(self.folder, trial, spec, self.base, self.parent, donor)
            self._heard = max((step for step, _ in trial.history), default=-1)
            bundle = train(run, self.on_metrics)
            for step, value in self._held:
                self._report(step, value)
            self._check_reported()
        except SystemExit:  # how Tune ends the thread of a trial that is stopped or paused; the driver knows which
            now = Trial.load(self.folder, trial.number, spec.metric)
            trial.status = "stopped" if now is not None and now.status == "stopped" else "paused"
            raise
        except Exception as error:
            trial.status, trial.reason = "failed", f"{type(error).__name__}: {error}"
            trial.final = isinstance(error, UserError)
            (self.folder / "trials" / f"{trial.number:05d}.log").write_text(traceback.format_exc())
            raise
        else:
            trial.status, trial.bundle = "finished", str(bundle) if bundle else ""
        finally:
            trial.seconds = before + time.monotonic() - began
            trial.save(self.folder)
        # Tune would wait a fifth of a second for another report before it sees that the function has returned.
        self._report(*trial.history[-1], done=True)

    def on_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        spec, trial = self.spec, self.trial
        self._seen.update(metrics)
        self._latest |= {key: float(metrics[key]) for key in spec.objectives if key in metrics}
        while self._held and (step > self._held[0][0] or self._committed(self._held[0][0])):
            self._report(*self._held.pop(0))
        if spec.metric not in metrics:
            return
        value = float(metrics[spec.metric])
        for key, each in {spec.metric: value, **self._latest}.items():
            if not math.isfinite(each):
                raise TrialError(f"{key} is {each} at step {step}")
        self._reports.log(step, {spec.metric: value, **self._latest})
        trial.history = [*(point for point in trial.history if point[0] != step), (step, value)]
        if step <= self._heard:
            return  # done again since the last checkpoint; the scheduler has judged it
        if spec.scheduler.name in PAUSING:
            self._held.append((step, value))  # until the checkpoint that the trial would go on from
        else:
            self._report(step, value)

    def _committed(self, step: int) -> bool:
        return (self.folder / self.base.project / self.trial.name / "checkpoints" / str(step)).is_dir()

    def _report(self, step: int, value: float, done: bool = False) -> None:
        grace = getattr(self.spec.scheduler, "grace", 1)
        report = {"step": step, "units": step / grace, self.spec.metric: self._judged(step, value)}
        self._tell(report | ({"done": True} if done else {}))

    def _judged(self, step: int, value: float) -> float:
        """The mean over the seeds of this configuration that have come to this step."""
        if self.spec.seeds == 1:
            return value
        first = self.trial.number // self.spec.seeds * self.spec.seeds
        found = [value]
        for number in range(first, first + self.spec.seeds):
            if number != self.trial.number:
                found += [each[self.spec.metric] for each in _reports(self.folder, number) if each["step"] == step]
        return sum(found) / len(found)

    def _check_reported(self) -> None:
        for metric in self.spec.goals:
            if self.trial.history if metric == self.spec.metric else metric in self._seen:
                continue
            guess = nearest(metric, self._seen)
            hint = f" Did you mean '{guess}'?" if guess else ""
            raise TrialError(
                f"the run never reported '{metric}'.{hint} It reported: {', '.join(sorted(self._seen)) or 'nothing'}"
            )


@contextmanager
def _alone(folder: Path, number: int) -> Iterator[None]:
    """One process at a time is in a trial: that of a driver that was killed may live on for a moment."""
    path = folder / "trials" / f"{number:05d}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(f"{path}: another process is in this trial for {LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.2)
        yield


def trial_run(
    folder: Path, trial: Trial, spec: SweepSpec, base: RunSpec, parent: str | None = None, donor: int | None = None
) -> RunSpec:
    """A trial's run: under the sweep's folder, in the base run's MLflow store, its bundle not registered.

    Args:
        folder: of the sweep.
        trial: which.
        spec: of the sweep.
        base: the run that its values vary.
        parent: MLflow run of the sweep.
        donor: trial whose newest checkpoint, with its journal, takes the place of this one's.
    """
    run_dir = folder / base.project / trial.name
    tracked = "mlflow" in base.tracking.trackers
    tracking = base.tracking.replace(
        mlflow_uri=store_uri(base.root, base.tracking.mlflow_uri) if tracked else None,
        parent_run=parent if tracked else None,
        register_bundle=False,
    )
    try:
        run = set_keys(base, trial.values).replace(
            name=trial.name, root=str(folder), group=spec.name, tracking=tracking.model_dump(),
            resume=False, overwrite=False,
        )  # fmt: skip
        if spec.seeds > 1:
            run = run.replace(seed=base.seed + trial.number % spec.seeds)
    except SpecError as error:
        raise TrialError(str(error)) from error
    if donor is not None and donor != trial.number:
        _take_over(folder / base.project / f"trial_{donor:05d}", run_dir)
    resume = any(run_dir.glob("checkpoints/[0-9]*")) and (run_dir / "spec.yaml").exists()
    if resume and spec.scheduler.name in POPULATION:
        from rlsvc.spec.compose import to_yaml

        (run_dir / "spec.yaml").write_text(to_yaml(run))  # the values that the population changed
    return run.replace(resume=resume, overwrite=run_dir.exists() and not resume)


def _take_over(source: Path, target: Path) -> None:
    """Puts the newest checkpoint of a run, and its journal, in the place of another's.

    Checkpoints are never written again and so may be linked; a journal grows and is copied.
    """
    for name in ("checkpoints", "journal"):
        shutil.rmtree(target / name, ignore_errors=True)
    for _ in range(10):
        steps = sorted(int(path.name) for path in source.glob("checkpoints/*") if path.name.isdigit())
        if not steps:
            break
        partial = target / "checkpoints" / f".{steps[-1]}.tmp"
        try:
            from rlsvc.store.registry import link_tree

            link_tree(source / "checkpoints" / str(steps[-1]), partial)
            if (source / "journal").is_dir():
                shutil.copytree(source / "journal", target / "journal", dirs_exist_ok=True)
        except (FileNotFoundError, shutil.Error):  # the run goes on, and deleted it meanwhile
            shutil.rmtree(partial, ignore_errors=True)
            continue
        partial.rename(partial.with_name(str(steps[-1])))
        return
    raise NotFoundError(f"{source}: no checkpoint that another trial of the population could go on from")


def train_run(run: RunSpec, on_metrics: OnMetrics) -> Path | None:
    """Trains: in this process alone, or with a learner group and workers where the run has several."""
    from rlsvc.train.run import train
    from rlsvc.tune.resources import in_one_process

    return train(run, local=in_one_process(run), on_metrics=on_metrics).bundle


def values_of(trial: Trial) -> Values:
    """What a person would set: without the space's own variables."""
    return {key: value for key, value in trial.values.items() if not key.startswith("_")}
