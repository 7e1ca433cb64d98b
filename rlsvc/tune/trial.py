"""One trial of a sweep: what runs in its process, and its record on disk.

A trial's record is `<sweep>/trials/<number>.json` (values, status, reason, bundle) and `.jsonl` (the metric by step),
written by the trial itself as it goes. So a finished trial is never lost or run again, whatever dies.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlsvc.core.errors import SpecError, UserError, nearest
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec, set_keys
from rlsvc.store.mlflow_store import store_uri
from rlsvc.store.tracking import JsonlTracker, read_metrics

OnMetrics = Callable[[int, Mapping[str, Any]], None]
Train = Callable[[RunSpec, OnMetrics], Path | None]
Status = Literal["running", "finished", "stopped", "failed"]


class TrialError(UserError):
    """A trial cannot be judged: its metric is not finite, or was never reported."""


@dataclass
class Trial:
    """A trial's record.

    Attributes:
        number: 0, 1, ... in the order in which the search made them.
        values: what was sampled, by the dotted key of the RunSpec.
        status: running; finished (to its end); stopped (early, by the scheduler); failed.
        reason: why it failed.
        bundle: the folder of the policy that it made, "" when there is none yet.
        history: (step, metric value), in order of steps.
    """

    number: int
    values: dict[str, Any]
    status: Status = "running"
    reason: str = ""
    bundle: str = ""
    history: list[tuple[int, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the trial's run and folder."""
        return f"trial_{self.number:05d}"

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
        record = {key: value for key, value in asdict(self).items() if key != "history"}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, folder: Path, number: int, metric: str) -> Trial | None:
        """The record on disk, None when the trial never began."""
        path = folder / "trials" / f"{number:05d}.json"
        if not path.exists():
            return None
        reports = path.with_suffix(".jsonl")
        records = read_metrics(reports) if reports.exists() else []
        return cls(**json.loads(path.read_text()), history=[(int(each["step"]), each[metric]) for each in records])


def load_trials(folder: Path, metric: str) -> list[Trial]:
    """All trials of a sweep that ever began, by number."""
    numbers = sorted(int(path.stem) for path in (folder / "trials").glob("*.json"))
    found = (Trial.load(folder, number, metric) for number in numbers)
    return [trial for trial in found if trial is not None]


def run_trial(
    folder: Path, number: int, values: Mapping[str, Any], spec: SweepSpec, base: RunSpec, train: Train,
    report: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Runs a trial, goes on with one that was killed, or repeats the reports of one that is over.

    Args:
        folder: of the sweep.
        number: of the trial.
        values: what was sampled.
        spec: of the sweep.
        base: the run that the values vary.
        train: runs a specification and returns the bundle.
        report: tells the scheduler {"step", metric}; it raises SystemExit when the trial is to stop.

    Raises:
        TrialError: the metric is NaN or infinite (which ASHA would never stop, ray#6659), or never came.
    """
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in values.items()}
    trial = Trial.load(folder, number, spec.metric) or Trial(number, plain)
    if trial.values != json.loads(json.dumps(plain)):
        raise TrialError(f"{folder}: trial {number} was begun with {trial.values}, and the search now gives {plain}")
    for step, value in trial.history:
        report({"step": step, spec.metric: value})
    if trial.status in ("finished", "stopped"):
        return
    trial.status, trial.reason = "running", ""
    trial.save(folder)
    reports = JsonlTracker(folder / "trials" / f"{number:05d}.jsonl")
    seen: set[str] = set()

    def on_metrics(step: int, metrics: Mapping[str, Any]) -> None:
        seen.update(metrics)
        if spec.metric not in metrics:
            return
        value = float(metrics[spec.metric])
        if not math.isfinite(value):
            raise TrialError(f"{spec.metric} is {value} at step {step}")
        reports.log(step, {spec.metric: value})
        trial.history.append((step, value))
        report({"step": step, spec.metric: value})

    try:
        bundle = train(trial_run(folder, trial.name, plain, spec, base), on_metrics)
        if not trial.history:
            guess = nearest(spec.metric, seen)
            hint = f" Did you mean '{guess}'?" if guess else ""
            raise TrialError(
                f"the run never reported '{spec.metric}'.{hint} It reported: {', '.join(sorted(seen)) or 'nothing'}"
            )
    except SystemExit:  # how Tune ends the thread of a trial that the scheduler stops
        trial.status = "stopped"
        trial.save(folder)
        raise
    except Exception as error:
        trial.status = "failed"
        trial.reason = f"{type(error).__name__}: {error}"
        trial.save(folder)
        (folder / "trials" / f"{number:05d}.log").write_text(traceback.format_exc())
        raise
    trial.status, trial.bundle = "finished", str(bundle) if bundle else ""
    trial.save(folder)


def trial_run(folder: Path, name: str, values: Mapping[str, Any], spec: SweepSpec, base: RunSpec) -> RunSpec:
    """A trial's run: under the sweep's folder, in the base run's MLflow store, its bundle not registered."""
    run_dir = folder / base.project / name
    resume = any(run_dir.glob("checkpoints/*"))
    tracking = base.tracking.replace(
        mlflow_uri=store_uri(base.root, base.tracking.mlflow_uri) if "mlflow" in base.tracking.trackers else None,
        register_bundle=False,
    )
    try:
        return set_keys(base, values).replace(
            name=name, root=str(folder), group=spec.name, tracking=tracking.model_dump(),
            resume=resume, overwrite=run_dir.exists() and not resume,
        )  # fmt: skip
    except SpecError as error:
        raise TrialError(str(error)) from error


def train_run(run: RunSpec, on_metrics: OnMetrics) -> Path | None:
    """Trains in this process; the trial's own learner needs no Ray."""
    from rlsvc.train.run import train

    return train(run, local=True, on_metrics=on_metrics).bundle
