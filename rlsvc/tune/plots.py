"""The pictures of a sweep's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsvc.spec.space import Normal, Options, Range, Value
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.judge import Configuration, pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST, OTHER, FAILED = "tab:red", "tab:blue", "tab:gray"


def draw_all(
    folder: Path, spec: SweepSpec, found: Sequence[Configuration], best: Configuration | None
) -> dict[str, Path]:
    """Draws what there is to draw: curves, slices, parallel coordinates, importance, Pareto front; files by name."""
    judged = [each for each in found if each.scores]
    plots = {"curves": draw_curves(folder / "curves.png", spec, found, best)}
    if judged:
        plots["slices"] = draw_slices(folder / "slices.png", spec, judged, best)
        plots["parallel"] = draw_parallel(folder / "parallel.png", spec, judged, best)
    weights = importance(spec, judged)
    if weights:
        plots["importance"] = draw_importance(folder / "importance.png", spec, weights)
    if len(spec.goals) > 1 and judged:
        plots["pareto"] = draw_pareto(folder / "pareto.png", spec, judged)
    for stale in folder.glob("*.png"):
        if stale not in plots.values():
            stale.unlink()
    return plots


def importance(spec: SweepSpec, judged: Sequence[Configuration], seed: int = 0) -> dict[str, float]:
    """Share of the metric's variance that each key explains, by Optuna's fANOVA; empty where there is too little.

    Keys under conditions, which not every configuration has, are left out, and so are those that never change.
    """
    import optuna

    from rlsvc.tune.search import frozen

    usable = [each for each in judged if each.scores]
    scores = {each.scores[spec.metric] for each in usable if each.scores}
    keys = [
        key for key, domain in spec.space.items()
        if not isinstance(domain, Value) and all(key in each.values for each in usable)
        and len({json.dumps(each.values[key]) for each in usable}) > 1
    ]  # fmt: skip
    if len(usable) < 4 or len(scores) < 2 or not keys:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=[optuna.study.StudyDirection.MINIMIZE] * len(spec.goals))
    for each in usable:
        study.add_trial(frozen(spec.space, each))
    found = optuna.importance.get_param_importances(
        study,
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=seed),
        params=keys,
        target=(lambda trial: trial.values[0]) if len(spec.goals) > 1 else None,
    )
    return {key: float(value) for key, value in found.items()}


def draw_curves(path: Path, spec: SweepSpec, found: Sequence[Configuration], best: Configuration | None) -> Path:
    """The metric against the run's clock; with seeds their mean, and a band of one standard deviation."""
    figure, axis = _figure()
    for each in found:
        style: dict[str, Any] = (
            {"color": BEST, "lw": 2, "zorder": 3} if each is best else {"color": OTHER, "lw": 0.8, "alpha": 0.6}
        )
        if each.curve:
            steps, means, stds = zip(*each.curve, strict=True)
            axis.plot(steps, means, marker=".", **style)
            if spec.seeds > 1:
                low = [mean - std for mean, std in zip(means, stds, strict=True)]
                high = [mean + std for mean, std in zip(means, stds, strict=True)]
                axis.fill_between(steps, low, high, color=style["color"], alpha=0.3 if each is best else 0.08, lw=0)
    count = f"{len(found)} configurations" + (f" of {spec.seeds} seeds" if spec.seeds > 1 else "")
    axis.set(xlabel="step", ylabel=spec.metric, title=f"{count}, best in red")
    figure.savefig(path, dpi=120)
    return path


def draw_slices(path: Path, spec: SweepSpec, judged: Sequence[Configuration], best: Configuration | None) -> Path:
    """The metric's best value against every key."""
    from matplotlib.figure import Figure

    keys = [key for key in spec.space if any(key in each.values for each in judged)]
    columns = min(3, len(keys))
    lines = -(-len(keys) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, key in zip(axes, keys, strict=False):
        having = [each for each in judged if key in each.values]
        places = _place(axis, spec, key, [each.values[key] for each in having], "x")
        colors = [BEST if each is best else OTHER for each in having]
        axis.scatter(places, [(each.scores or {})[spec.metric] for each in having], c=colors)
        axis.set(xlabel=key, ylabel=spec.metric)
    for axis in axes[len(keys) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=120)
    return path


def draw_parallel(path: Path, spec: SweepSpec, judged: Sequence[Configuration], best: Configuration | None) -> Path:
    """Parallel coordinates: one axis a key, in its quantiles, and the metric on the last one; one line a configuration.

    A line has a gap at a key that its configuration does not have.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    keys = [key for key, domain in spec.space.items() if not isinstance(domain, Value)]
    figure = Figure(figsize=(max(6.0, 1.6 * (len(keys) + 1)), 4.2), layout="constrained")
    axis = figure.subplots()
    scores = [(each.scores or {})[spec.metric] for each in judged]
    low, high = min(scores), max(scores)
    for each, score in zip(judged, scores, strict=True):
        share = 0.5 if high == low else (score - low) / (high - low)
        heights = [quantile(spec, key, each.values[key]) if key in each.values else float("nan") for key in keys]
        good = share if spec.mode == "max" else 1 - share
        style = {"color": BEST, "lw": 2, "zorder": 3} if each is best else {"color": colormaps["viridis"](good)}
        axis.plot(range(len(keys) + 1), [*heights, share], **{"lw": 0.9, "alpha": 0.8, **style})
    for place, key in enumerate(keys):
        axis.axvline(place, color="black", lw=0.8)
        ends = [_shown(each) for each in (spec.space[key].at(0.0), spec.space[key].at(1.0))]
        axis.annotate(ends[0], (place, 0), (2, -12), textcoords="offset points", fontsize=6, annotation_clip=False)
        axis.annotate(ends[1], (place, 1), (2, 6), textcoords="offset points", fontsize=6, annotation_clip=False)
    axis.axvline(len(keys), color="black", lw=0.8)
    axis.annotate(f"{low:.4g}", (len(keys), 0), (2, -12), textcoords="offset points", fontsize=6, annotation_clip=False)
    axis.annotate(f"{high:.4g}", (len(keys), 1), (2, 6), textcoords="offset points", fontsize=6, annotation_clip=False)
    axis.set_xticks(range(len(keys) + 1), [*keys, spec.metric], fontsize=7, rotation=20, ha="right")
    axis.set_yticks([])
    axis.set_ylim(-0.08, 1.08)
    figure.savefig(path, dpi=120)
    return path


def quantile(spec: SweepSpec, key: str, value: Any) -> float:
    """Where a value stands in its distribution, from 0 to 1."""
    import math
    from statistics import NormalDist

    match spec.space[key]:
        case Options() as options:
            names = [json.dumps(option) for option in options.options]
            return (names.index(json.dumps(value)) + 0.5) / len(names)
        case Normal() as normal:
            return NormalDist(*normal.bounds[:2]).cdf(value)
        case Range() as numbers:
            low, last = numbers.bounds[0], numbers.last
            if low == last:
                return 0.5
            return math.log(value / low) / math.log(last / low) if numbers.LOG else (value - low) / (last - low)
        case domain:
            raise AssertionError(f"{key}: {domain} has no quantiles")


def draw_importance(path: Path, spec: SweepSpec, weights: dict[str, float]) -> Path:
    """A bar for each key."""
    figure, axis = _figure(height=1.2 + 0.4 * len(weights))
    names = sorted(weights, key=lambda key: weights[key])
    bars = axis.barh(names, [weights[name] for name in names], color=OTHER)
    axis.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axis.set(xlabel=f"share of the variance of {spec.metric} (fANOVA)", xlim=(0, 1.08))
    figure.savefig(path, dpi=120)
    return path


def draw_pareto(path: Path, spec: SweepSpec, judged: Sequence[Configuration]) -> Path:
    """The metric against every other objective; what nothing beats in all of them is red."""
    from matplotlib.figure import Figure

    others = list(spec.objectives)
    figure = Figure(figsize=(4.8 * len(others), 3.8), layout="constrained")
    front = {each.number for each in pareto_front(spec, judged)}
    for axis, other in zip(figure.subplots(1, len(others), squeeze=False).flat, others, strict=True):
        for each in sorted(judged, key=lambda each: each.number in front):
            scores = each.scores or {}
            axis.scatter(scores[other], scores[spec.metric], c=BEST if each.number in front else OTHER)
        axis.set(xlabel=f"{other} ({spec.objectives[other]})", ylabel=f"{spec.metric} ({spec.mode})")
    figure.suptitle("Pareto front in red")
    figure.savefig(path, dpi=120)
    return path


def _figure(height: float = 4.2) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, height), layout="constrained")
    return figure, figure.subplots()


def _place(axis: Axes, spec: SweepSpec, key: str, values: Sequence[Any], along: str) -> list[float]:
    """Positions of values on an axis, whose scale or names it sets."""
    domain = spec.space[key]
    if isinstance(domain, Options) or any(isinstance(value, str | list | dict) for value in values):
        options = domain.options if isinstance(domain, Options) else sorted({_shown(value) for value in values})
        names = [_shown(option) for option in options]
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_xlim(-0.5, len(names) - 0.5)
        return [float(names.index(_shown(value))) for value in values]
    if isinstance(domain, Range) and domain.LOG:
        axis.set_xscale("log")
    return list(values)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
