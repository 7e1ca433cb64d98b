"""`rlsvc sweep`: hyperparameters from a YAML search space."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError


class SweepError(UserError):
    """A sweep in which no trial could be judged."""


def sweep(
    space: Annotated[Path, typer.Argument(help="Search space, such as tune_spaces/pusht_diffusion.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value: the sweep's own keys (samples=8, scheduler.grace=500), or any of the run's."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this sweep; finished trials stay.")] = False,
    samples: Annotated[int | None, typer.Option(help="Number of trials; the same as samples=N.")] = None,
) -> None:
    """Search hyperparameters: run trials, print the best one, write a table, a plot, best.yaml and the best bundle."""
    from rlsvc.spec.compose import compose
    from rlsvc.spec.sweep import check_space
    from rlsvc.tune.space import load_sweep

    console = Console()
    spec = load_sweep(space, [*(overrides or []), *([f"samples={samples}"] if samples is not None else [])])
    base = compose(list(spec.run))
    check_space(spec, base)

    try:
        from rlsvc.tune.report import rows
        from rlsvc.tune.run import run_sweep
        from rlsvc.tune.trial import Trial
    except ImportError as error:
        raise UserError(
            f"a sweep needs {error.name}, which is not installed: pip install 'rlsvc[all]', or send it to a cluster: "
            f"rlsvc submit -- sweep {space}"
        ) from error

    over = 0

    def on_trial(trial: Trial) -> None:
        nonlocal over
        over += 1
        point = trial.best(spec)
        score = f"{spec.metric} = {point[1]:.4g} at step {point[0]}" if point else "no report"
        console.print(
            f"[{over}/{spec.trials}] {trial.name} {trial.status}: {trial.reason or score}",
            markup=False,
            highlight=False,
        )

    console.print(f"Sweep {spec.name}: {spec.trials} trials, {spec.concurrency} at a time.")
    report = run_sweep(spec, base, resume=resume, on_trial=on_trial)

    table = Table("trial", "status", spec.metric, *_short_keys(list(spec.space)), title=spec.name)
    for row in rows(spec, report.trials)[:20]:
        score = row[spec.metric]
        table.add_row(
            str(row["trial"]),
            row["status"],
            f"{score:.4g}" if score != "" else row["reason"][:60],
            *(_short(row.get(key, "")) for key in spec.space),
        )
    console.print(table)
    console.print(f"table: {report.table}\nplot: {report.plot}", markup=False)
    if report.best is None:
        raise SweepError(
            f"no trial of sweep '{spec.name}' could be judged. The reasons are in {report.table}, "
            f"the tracebacks in {report.folder}/trials"
        )
    console.print(f"best: {report.best.name}; train it again with: rlsvc train {report.best_yaml}", markup=False)
    if report.best_bundle:
        console.print(f"best bundle: {report.best_bundle}", markup=False)
    if not report.complete:
        console.print("The sweep is not complete: the same command with --resume goes on with it.")
        raise typer.Exit(130)


def _short_keys(keys: list[str]) -> list[str]:
    """The last part of a dotted key, where no other key has the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
