"""What a sweep leaves behind: a table, a plot, the best run's specification and its bundle."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import Choice, Grid, LogUniform, SweepSpec, set_keys
from rlsvc.store.registry import link_tree
from rlsvc.tune.trial import Trial


@dataclass(frozen=True)
class Report:
    """A sweep's outcome.

    Attributes:
        folder: of the sweep.
        trials: all that began, by number.
        best: the trial with the best metric; None when none reported any.
        complete: whether every trial is over.
        table: `trials.csv`.
        plot: `sweep.png`.
        best_yaml: the best run, for `rlsvc train`; None without a best trial.
        best_bundle: its policy; None when it wrote no bundle.
    """

    folder: Path
    trials: list[Trial]
    best: Trial | None
    complete: bool
    table: Path
    plot: Path
    best_yaml: Path | None
    best_bundle: Path | None


def write_report(folder: Path, spec: SweepSpec, base: RunSpec, trials: list[Trial]) -> Report:
    """Writes the report of a sweep, also of one that was interrupted."""
    best = best_trial(spec, trials)
    table, plot = folder / "trials.csv", folder / "sweep.png"
    write_table(table, spec, trials)
    draw(plot, spec, trials, best)
    return Report(
        folder=folder,
        trials=trials,
        best=best,
        complete=len(trials) >= spec.trials and all(trial.status != "running" for trial in trials),
        table=table,
        plot=plot,
        best_yaml=_write_best_yaml(folder, spec, base, best) if best else None,
        best_bundle=_link_best_bundle(folder, spec, base, best) if best else None,
    )


def best_trial(spec: SweepSpec, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best metric value; the earlier one of two that are equal. Failed trials do not count."""
    best, score = None, None
    for trial in trials:
        point = trial.best(spec)
        if trial.status != "failed" and point and (score is None or spec.better(point[1], score)):
            best, score = trial, point[1]
    return best


def rows(spec: SweepSpec, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One row a trial, the best first: number, status, metric, step of the best value, updates done, values, reason."""

    def order(trial: Trial) -> tuple[bool, float]:
        point = trial.best(spec)
        return (point is None, 0.0 if point is None else -point[1] if spec.mode == "max" else point[1])

    found = []
    for trial in sorted(trials, key=order):
        step, value = trial.best(spec) or ("", "")
        found.append({
            "trial": trial.number, "status": trial.status, spec.metric: value, "best_step": step,
            "steps": trial.history[-1][0] if trial.history else 0, **trial.values, "reason": trial.reason,
        })  # fmt: skip
    return found


def write_table(path: Path, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Writes `rows` as CSV."""
    columns = ["trial", "status", spec.metric, "best_step", "steps", *spec.space, "reason"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows(spec, trials))


def draw(path: Path, spec: SweepSpec, trials: Sequence[Trial], best: Trial | None) -> None:
    """Draws the metric against the updates, and its best value against every key of the space."""
    from matplotlib.figure import Figure

    panels = 1 + len(spec.space)
    columns = min(3, panels)
    lines = -(-panels // columns)
    figure = Figure(figsize=(4.5 * columns, 3.4 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    curves = next(axes)
    for trial in trials:
        if trial.history:
            style: dict[str, Any] = (
                {"color": "tab:red", "lw": 2, "zorder": 3}
                if trial is best
                else {"color": "tab:blue", "lw": 0.8, "alpha": 0.6}
            )
            curves.plot(*zip(*trial.history, strict=True), marker=".", **style)
    curves.set(xlabel="updates", ylabel=spec.metric, title=f"{len(trials)} trials, best in red")
    judged = [(trial, point[1]) for trial in trials if (point := trial.best(spec))]
    for key, distribution in spec.space.items():
        axis = next(axes)
        values = [trial.values[key] for trial, _ in judged]
        scores = [score for _, score in judged]
        colors = ["tab:red" if trial is best else "tab:blue" for trial, _ in judged]
        if isinstance(distribution, Choice | Grid):
            names = [str(option) for option in distribution.corners()]
            axis.scatter([names.index(str(value)) for value in values], scores, c=colors)
            axis.set_xticks(range(len(names)), names, fontsize=7)
            axis.set_xlim(-0.5, len(names) - 0.5)
        else:
            axis.scatter(values, scores, c=colors)
        if isinstance(distribution, LogUniform):
            axis.set_xscale("log")
        axis.set(xlabel=key, ylabel=spec.metric)
    for axis in axes:
        axis.set_visible(False)
    figure.savefig(path, dpi=120)


def _write_best_yaml(folder: Path, spec: SweepSpec, base: RunSpec, best: Trial) -> Path:
    from rlsvc.spec.compose import to_yaml

    run = set_keys(base, best.values).replace(name=f"{spec.name}-best"[:100], resume=False, overwrite=False)
    step, value = best.best(spec) or (0, float("nan"))
    path = folder / "best.yaml"
    path.write_text(f"# {best.name} of sweep {spec.name}: {spec.metric} = {value:.6g} at step {step}\n{to_yaml(run)}")
    return path


def _link_best_bundle(folder: Path, spec: SweepSpec, base: RunSpec, best: Trial) -> Path | None:
    source = Path(best.bundle) if best.bundle else _bundle_of_stopped(folder / base.project / best.name, spec, best)
    if source is None or not source.is_dir():
        return None
    target = folder / "best_bundle"
    shutil.rmtree(target, ignore_errors=True)
    link_tree(source, target)
    return target


def _bundle_of_stopped(run_dir: Path, spec: SweepSpec, trial: Trial) -> Path | None:
    """The bundle nearest in steps to the best metric, of a trial that did not come to name one."""
    best = trial.best(spec)
    bundles = [path for path in run_dir.glob("bundles/*") if path.name.isdigit()]
    return min(bundles, key=lambda path: abs(int(path.name) - best[0]), default=None) if best else None
