"""What a sweep leaves behind: tables, a page with plots, the best run's specification and its bundle."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec, set_keys
from rlsvc.store.registry import link_tree
from rlsvc.tune.judge import Configuration, best_configuration, best_trial, configurations, pareto_front
from rlsvc.tune.page import write_page
from rlsvc.tune.plots import draw_all
from rlsvc.tune.trial import Trial


@dataclass(frozen=True)
class Report:
    """A sweep's outcome.

    Attributes:
        folder: of the sweep.
        trials: all that began, by number.
        found: their configurations, by number.
        best: the trial of the best configuration that is best itself; None when none could be judged.
        complete: whether every trial is over, or a rule ended the sweep.
        table: `trials.csv`.
        page: `report/index.html`.
        plots: the pictures of the page.
        best_yaml: the best run, for `rlsvc train`; None without a best trial.
        best_bundle: its policy; None when it wrote no bundle.
        registered: `models:/name/version`, None when it was not registered.
    """

    folder: Path
    trials: list[Trial]
    found: list[Configuration]
    best: Trial | None
    complete: bool
    table: Path
    page: Path
    plots: list[Path]
    best_yaml: Path | None
    best_bundle: Path | None
    registered: str | None = None


def write_report(folder: Path, spec: SweepSpec, base: RunSpec, trials: list[Trial], *, ended: str = "") -> Report:
    """Writes the report of a sweep, also of one that was interrupted or is under way.

    Args:
        folder: of the sweep.
        spec: of the sweep.
        base: the run that its trials vary.
        trials: those that began.
        ended: the rule that ended the sweep early, "" for none.
    """
    found = configurations(spec, trials)
    best, winner = best_trial(spec, trials), best_configuration(spec, found)
    table = folder / "trials.csv"
    write_table(table, spec, trials)
    pictures = folder / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    plots = draw_all(pictures, spec, found, winner)
    best_yaml = best_bundle = None
    if best is not None and winner is not None:
        best_yaml = _write_best_yaml(folder, spec, base, best, winner)
        best_bundle = _link_best_bundle(folder, spec, base, best)
    page = write_page(pictures / "index.html", spec, found, winner, plots, ended)
    return Report(
        folder=folder,
        trials=trials,
        found=found,
        best=best,
        complete=bool(ended) or (len(trials) >= spec.trials and all(trial.over for trial in trials)),
        table=table,
        page=page,
        plots=list(plots.values()),
        best_yaml=best_yaml,
        best_bundle=best_bundle,
    )


def rows(spec: SweepSpec, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """One row a configuration, the best first.

    Columns: configuration, trials, status, metric, its standard deviation over seeds, objectives, best_step, steps,
    pareto, the keys of the space, reason.
    """
    found = configurations(spec, trials)
    front = {each.number for each in pareto_front(spec, found)} if spec.objectives else set()
    sign = -1.0 if spec.mode == "max" else 1.0

    def order(each: Configuration) -> tuple[bool, float]:
        return (each.scores is None, 0.0 if each.scores is None else sign * each.scores[spec.metric])

    table = []
    for each in sorted(found, key=order):
        spread = {step: std for step, _, std in each.curve}
        scores = each.scores or dict.fromkeys(spec.goals, "")
        table.append({
            "configuration": each.number, "trials": " ".join(str(trial.number) for trial in each.trials),
            "status": each.status, **scores, "std": spread.get(each.step, "") if spec.seeds > 1 else "",
            "best_step": each.step if each.scores else "",
            "steps": max((trial.history[-1][0] for trial in each.trials if trial.history), default=0),
            "pareto": "yes" if each.number in front else "",
            **each.values, "reason": next((trial.reason for trial in each.trials if trial.reason), ""),
        })  # fmt: skip
    return table


def write_table(path: Path, spec: SweepSpec, trials: Sequence[Trial]) -> None:
    """Writes `rows` as CSV."""
    columns = ["configuration", "trials", "status", *spec.goals, "std", "best_step", "steps", "pareto", *spec.space]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "reason"])
        writer.writeheader()
        writer.writerows(rows(spec, trials))


def _write_best_yaml(folder: Path, spec: SweepSpec, base: RunSpec, best: Trial, winner: Configuration) -> Path:
    from rlsvc.spec.compose import to_yaml

    changes: dict[str, Any] = {"name": f"{spec.name}-best"[:100], "resume": False, "overwrite": False}
    if spec.seeds > 1:
        changes["seed"] = base.seed + best.number % spec.seeds
    run = set_keys(base, best.values).replace(**changes)
    scores = ", ".join(f"{name} = {value:.6g}" for name, value in (winner.scores or {}).items())
    mean = f", the mean of {spec.seeds} seeds" if spec.seeds > 1 else ""
    path = folder / "best.yaml"
    path.write_text(f"# {best.name} of sweep {spec.name}: {scores} at step {winner.step}{mean}\n{to_yaml(run)}")
    (folder / "best.json").write_text(
        json.dumps({"trial": best.name, "values": best.values, "scores": winner.scores}, indent=2) + "\n"
    )
    return path


def _link_best_bundle(folder: Path, spec: SweepSpec, base: RunSpec, best: Trial) -> Path | None:
    source = Path(best.bundle) if best.bundle else _bundle_of_stopped(folder / base.project / best.name, spec, best)
    if source is None or not source.is_dir():
        return None
    target = folder / "best_bundle"
    partial = folder / ".best_bundle.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    link_tree(source, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _bundle_of_stopped(run_dir: Path, spec: SweepSpec, trial: Trial) -> Path | None:
    """The bundle nearest in steps to the best metric, of a trial that did not come to name one."""
    best = trial.best(spec)
    bundles = [path for path in run_dir.glob("bundles/*") if path.name.isdigit()]
    return min(bundles, key=lambda path: abs(int(path.name) - best[0]), default=None) if best else None
