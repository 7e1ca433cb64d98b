"""What trials come to: configurations, their curves over seeds, which is best, the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.trial import Trial


@dataclass(frozen=True)
class Configuration:
    """Trials that differ in their seed alone.

    Attributes:
        number: 0, 1, ... in the order in which the search made them.
        values: of the space.
        trials: one a seed, those that began.
        curve: (step, mean, standard deviation) of the metric, at the steps that all seeds reported.
        step: of the best mean, -1 when there is none.
        scores: the best mean of the metric, and what the other objectives were then; None when it cannot be judged,
            since a seed failed or reported nothing.
        over: whether nothing more will come of it.
    """

    number: int
    values: dict[str, Any]
    trials: list[Trial]
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    step: int = -1
    scores: dict[str, float] | None = None
    over: bool = False

    @property
    def status(self) -> str:
        """Of its trials: the first of failed, running, paused, stopped, finished that one of them is."""
        found = {trial.status for trial in self.trials}
        return next(status for status in ("failed", "running", "paused", "stopped", "finished") if status in found)


def configurations(spec: SweepSpec, trials: Sequence[Trial]) -> list[Configuration]:
    """The configurations of these trials, by number."""
    groups: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.number // spec.seeds, []).append(trial)
    return [_judge(spec, number, group) for number, group in sorted(groups.items())]


def _judge(spec: SweepSpec, number: int, trials: list[Trial]) -> Configuration:
    whole = len(trials) == spec.seeds
    over = whole and all(trial.over for trial in trials)
    histories = [dict(trial.history) for trial in trials]
    steps = sorted(set.intersection(*map(set, histories))) if whole else []
    curve = [(step, *_mean_std([history[step] for history in histories])) for step in steps]
    failed = any(trial.status == "failed" for trial in trials)
    made: dict[str, Any] = {
        "number": number,
        "values": trials[0].values,
        "trials": trials,
        "curve": curve,
        "over": over,
    }
    if failed or not curve:
        return Configuration(**made)
    step, score, _ = (max if spec.mode == "max" else min)(curve, key=lambda point: point[1])
    scores = {spec.metric: score}
    for name in spec.objectives:
        found = [trial.objectives.get(step, {}).get(name) for trial in trials]
        known = [value for value in found if value is not None]
        if len(known) < len(found):
            return Configuration(**made)
        scores[name] = _mean_std(known)[0]
    return Configuration(**made, step=step, scores=scores)


def best_configuration(spec: SweepSpec, found: Sequence[Configuration]) -> Configuration | None:
    """The one with the best score; the earlier one of two that are equal."""
    best, score = None, 0.0
    for each in found:
        if each.scores and (best is None or spec.better(each.scores[spec.metric], score)):
            best, score = each, each.scores[spec.metric]
    return best


def pareto_front(spec: SweepSpec, found: Sequence[Configuration]) -> list[Configuration]:
    """Those that no other one beats in one goal without losing in another."""
    points = [(each, _signed(spec, each.scores)) for each in found if each.scores]
    return [
        each
        for each, mine in points
        if not any(all(b >= a for a, b in zip(mine, other, strict=True)) and other != mine for _, other in points)
    ]


def best_trial(spec: SweepSpec, trials: Sequence[Trial]) -> Trial | None:
    """Of the best configuration, the trial that is best by itself: its policy is the sweep's."""
    best = best_configuration(spec, configurations(spec, trials))
    if best is None:
        return None
    sign = 1.0 if spec.mode == "max" else -1.0
    return max(best.trials, key=lambda trial: (sign * (trial.best(spec) or (0, -math.inf))[1], -trial.number))


def _signed(spec: SweepSpec, scores: dict[str, float]) -> list[float]:
    """The scores of all goals, so that more is better."""
    return [scores[name] if mode == "max" else -scores[name] for name, mode in spec.goals.items()]


def _mean_std(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(spread)
