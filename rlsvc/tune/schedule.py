"""Which trials are ended early, and when the sweep ends: Ray Tune's schedulers and stoppers, by the specification."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.stopper import ExperimentPlateauStopper, Stopper, TrialPlateauStopper

from rlsvc.spec.run import RunSpec
from rlsvc.spec.space import Choice, Range, Space
from rlsvc.spec.sweep import AshaSpec, FifoSpec, HyperBandSpec, MedianSpec, Pb2Spec, PbtSpec, SweepSpec
from rlsvc.tune.space import to_tune
from rlsvc.tune.stored import METER, load_meter


def make_scheduler(spec: SweepSpec, base: RunSpec) -> TrialScheduler:
    """Ray Tune's scheduler. Time is the run's clock (`step`); HyperBand's is in units of its `grace`."""
    match spec.scheduler:
        case AshaSpec() as asha:
            # One more than the run's last step: ASHA ends a trial at max_t, before it could write its last bundle.
            return ASHAScheduler(
                "step", max_t=asha.max_t or base.length + 1, grace_period=asha.grace, reduction_factor=asha.reduction
            )
        case HyperBandSpec() as band:
            return HyperBandScheduler(
                "units",
                max_t=max(base.length // band.grace, 1),
                reduction_factor=band.reduction,
                stop_last_trials=False,
            )
        case MedianSpec() as median:
            return MedianStoppingRule(
                "step", grace_period=median.grace, min_samples_required=median.min_trials, min_time_slice=sys.maxsize
            )
        case PbtSpec() as pbt:
            return PopulationBasedTraining(
                "step", perturbation_interval=pbt.interval, burn_in_period=pbt.burn_in,
                quantile_fraction=pbt.quantile, resample_probability=pbt.resample, log_config=False,
                hyperparam_mutations=mutations(spec.space), custom_explore_fn=partial(within, spec.space),
            )  # fmt: skip
        case Pb2Spec() as pb2:
            from ray.tune.schedulers.pb2 import PB2

            ranges = {key: domain for key, domain in spec.space.items() if isinstance(domain, Range)}
            bounds: dict[str, Any] = {key: list(domain.bounds[:2]) for key, domain in ranges.items()}
            return PB2(
                "step", perturbation_interval=pb2.interval, quantile_fraction=pb2.quantile, log_config=False,
                hyperparam_bounds=bounds,
            )  # fmt: skip
        case FifoSpec():
            return FIFOScheduler()


def mutations(space: Space) -> dict[str, Any]:
    """What PBT changes; options as a list, since it would take Tune's `choice` for a range."""
    return to_tune(space) | {key: list(each.choice) for key, each in space.items() if isinstance(each, Choice)}


def within(space: Space, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with its values brought back into their ranges, which PBT's factors of 0.8 and 1.2 leave."""
    ranges = {key: domain.bounds for key, domain in space.items() if isinstance(domain, Range)}
    return config | {key: min(max(config[key], low), high) for key, (low, high, _) in ranges.items()}


class Meter:
    """What the sweep has used over all its sessions, and why it ended, in `meter.json` of its folder."""

    def __init__(self, folder: Path, spec: SweepSpec) -> None:
        self._path, self._budget = folder / METER, spec.budget
        found = load_meter(folder)
        self.seconds: float = found.get("seconds", 0.0)
        self.gpu_seconds: float = found.get("gpu_seconds", 0.0)
        self.ended: str = found.get("ended", "")
        self._last = self._written = time.monotonic()

    def tick(self, gpus: float) -> None:
        """Time goes by, with so many GPUs held."""
        now = time.monotonic()
        self.seconds += now - self._last
        self.gpu_seconds += (now - self._last) * gpus
        self._last = now
        if now - self._written > 5:
            self.save()

    @property
    def spent(self) -> str:
        """Which budget is used up, "" for none."""
        hours, gpu_hours = self._budget.hours, self._budget.gpu_hours
        if hours is not None and self.seconds >= hours * 3600:
            return f"budget.hours: {hours:g}"
        if gpu_hours is not None and self.gpu_seconds >= gpu_hours * 3600:
            return f"budget.gpu_hours: {gpu_hours:g}"
        return ""

    def save(self) -> None:
        """Writes it, all or nothing."""
        temporary = self._path.with_suffix(".tmp")
        record = {"seconds": self.seconds, "gpu_seconds": self.gpu_seconds, "ended": self.ended}
        temporary.write_text(json.dumps(record) + "\n")
        temporary.replace(self._path)
        self._written = time.monotonic()


class StopRules(Stopper):
    """The rules of `stop` and the budget."""

    def __init__(self, spec: SweepSpec, meter: Meter) -> None:
        self._spec, self._meter = spec, meter
        stop, metric, mode = spec.stop, spec.metric, spec.mode
        self._plateau = stop.plateau and TrialPlateauStopper(
            metric, std=stop.plateau.std, num_results=stop.plateau.reports, grace_period=stop.plateau.reports
        )
        self._sweep_plateau = stop.sweep_plateau and ExperimentPlateauStopper(
            metric, std=stop.sweep_plateau.std, top=10, mode=mode, patience=stop.sweep_plateau.reports
        )

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether this trial is to end."""
        stop, value = self._spec.stop, result.get(self._spec.metric)
        if value is None or result.get("done"):  # the end of a trial repeats its last value
            return False
        if stop.sweep_reached is not None and not self._spec.better(stop.sweep_reached, value):
            self._meter.ended = f"stop.sweep_reached: {self._spec.metric} = {value:g}"
        if self._sweep_plateau and self._sweep_plateau(trial_id, result):
            self._meter.ended = "stop.sweep_plateau: the best trials stand still"
        return bool(
            (stop.steps is not None and result["step"] >= stop.steps)
            or (stop.reached is not None and not self._spec.better(stop.reached, value))
            or (self._plateau and self._plateau(trial_id, result))
        )

    def stop_all(self) -> bool:
        """Whether the sweep is to end."""
        return bool(self._meter.ended or self._meter.spent)
