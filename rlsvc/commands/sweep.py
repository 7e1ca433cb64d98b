"""`rlsvc sweep`: hyperparameters from a YAML search space, and what a sweep came to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from typer.core import TyperGroup

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.spec.run import RunSpec
    from rlsvc.spec.sweep import SweepSpec
    from rlsvc.tune.trial import Trial

REFRESH_S = 2.0
SHOWN = 20
Root = Annotated[str, typer.Option(help="Where runs live; the sweep is in ROOT/sweeps/NAME.")]
Name = Annotated[str, typer.Argument(help="Of the sweep, as its YAML says.")]


class SweepError(UserError):
    """A sweep in which no trial could be judged."""


class _SpaceFirst(TyperGroup):
    """`rlsvc sweep FILE` is `rlsvc sweep run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._named(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self._named(args))

    def _named(self, args: list[str]) -> list[str]:
        return ["run", *args] if args and args[0] not in (*self.commands, "--help") else args


app = typer.Typer(
    cls=_SpaceFirst,
    help="Search hyperparameters from a YAML search space: `rlsvc sweep FILE`, or what a sweep came to.",
    no_args_is_help=True,
)


@app.command()
def run(
    space: Annotated[Path, typer.Argument(help="Search space, such as tune_spaces/pusht_diffusion.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="key=value: the sweep's own keys (samples=8, scheduler.grace=500), or any of the run's."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this sweep; finished trials stay.")] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="As --resume where the sweep has begun, else begin.")
    ] = False,
    samples: Annotated[int | None, typer.Option(help="Number of configurations; the same as samples=N.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Try the space against the run's schema and end.")] = False,
) -> None:
    """Run trials, show how they get on, write the report, best.yaml and the best bundle."""
    from rlsvc.spec.compose import compose
    from rlsvc.spec.sweep import check_space
    from rlsvc.tune.space import load_sweep

    console = Console()
    spec = load_sweep(space, [*(overrides or []), *([f"samples={samples}"] if samples is not None else [])])
    base = compose(list(spec.run))
    check_space(spec, base)
    console.print(f"Sweep {spec.name}: {_count(spec)}, {spec.searcher.name} search, {spec.scheduler.name}.")
    if check:
        console.print("The space fits the run.")
        return
    with _needing_ray(space):
        from rlsvc.tune.run import has_begun, run_sweep, sweep_folder

    over = 0

    def on_trial(trial: Trial) -> None:
        nonlocal over
        over += 1
        point = trial.best(spec)
        score = f"{spec.metric} = {point[1]:.4g} at step {point[0]}" if point else "no report"
        line = f"[{over}/{spec.trials}] {trial.name} {trial.status}: {trial.reason or score}"
        console.print(line, markup=False, highlight=False)

    with _live(console, lambda: _progress(sweep_folder(base.root, spec.name), spec)):
        report = run_sweep(spec, base, resume=resume or (go_on and has_begun(spec, base)), on_trial=on_trial)

    console.print(_table(spec, report.trials))
    console.print(f"report: {report.page}\ntable: {report.table}", markup=False, soft_wrap=True)
    if report.best is None:
        raise SweepError(
            f"no trial of sweep '{spec.name}' could be judged. The reasons are in {report.table}, "
            f"the tracebacks in {report.folder}/trials"
        )
    line = f"best: {report.best.name}; train it again with: rlsvc train {report.best_yaml}"
    console.print(line, markup=False, soft_wrap=True)
    for name, value in {"best bundle": report.best_bundle, "registered as": report.registered}.items():
        if value:
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    if not report.complete:
        console.print("The sweep is not complete: the same command with --resume goes on with it.")
        raise typer.Exit(130)


@app.command()
def status(
    name: Name,
    root: Root = "runs",
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every 2 s until the sweep is over.")] = False,
) -> None:
    """Show how the trials of a sweep get on, also from another terminal."""
    from rlsvc.tune.trial import load_trials

    folder, spec, _ = _stored(root, name)
    console = Console()
    if not watch:
        console.print(_progress(folder, spec))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(_progress(folder, spec), refresh=True)
            trials = load_trials(folder, spec.metric)
            if len(trials) == spec.trials and all(trial.over for trial in trials):
                return
            time.sleep(REFRESH_S)


@app.command()
def report(name: Name, root: Root = "runs") -> None:
    """Write the report of a sweep anew, also of one that is under way: report/index.html, trials.csv, best.yaml."""
    made = _report(*_stored(root, name))
    console = Console(soft_wrap=True)
    console.print(f"report: {made.page}\ntable: {made.table}", markup=False)
    for path in (made.best_yaml, made.best_bundle):
        if path is not None:
            console.print(f"{path.stem.replace('_', ' ')}: {path}", markup=False)


@app.command()
def best(name: Name, root: Root = "runs") -> None:
    """Print the best configuration: its scores, its values, and where its run and its bundle lie."""
    folder, spec, base = _stored(root, name)
    made = _report(folder, spec, base)
    from rlsvc.tune.judge import best_configuration
    from rlsvc.tune.trial import values_of

    winner = best_configuration(spec, made.found)
    if made.best is None or winner is None or winner.scores is None:
        raise SweepError(f"no trial of sweep '{name}' can be judged yet; rlsvc sweep status {name} shows them")
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None)
    table.add_row("configuration", f"{winner.number} ({made.best.name})")
    for key, value in {**winner.scores, "step": winner.step, **values_of(made.best)}.items():
        table.add_row(key, _short(value))
    console.print(table)
    console.print(f"rlsvc train {made.best_yaml}", markup=False)
    if made.best_bundle is not None:
        console.print(f"rlsvc serve {made.best_bundle}", markup=False)


@app.command()
def promote(
    name: Name,
    alias: Annotated[str, typer.Option(help="That points at it from now on.")] = "best",
    root: Root = "runs",
) -> None:
    """Register the best trial's bundle and point an alias at it: models:/POLICY@ALIAS."""
    folder, spec, base = _stored(root, name)
    _report(folder, spec, base)
    from rlsvc.store.registry import Registry
    from rlsvc.tune.sweep_run import register_best

    registered = register_best(folder, spec, base)
    policy, version = registered.removeprefix("models:/").split("/")
    Registry(base.root, base.tracking.mlflow_uri).promote(policy, int(version), alias)
    Console(soft_wrap=True).print(f"models:/{policy}@{alias} is version {version}", markup=False, highlight=False)


def _stored(root: str, name: str) -> tuple[Path, SweepSpec, RunSpec]:
    from rlsvc.tune.stored import load_stored

    return load_stored(root, name)


def _report(folder: Path, spec: SweepSpec, base: RunSpec) -> Any:
    from rlsvc.tune.report import write_report
    from rlsvc.tune.stored import ended_by
    from rlsvc.tune.trial import load_trials

    return write_report(folder, spec, base, load_trials(folder, spec.metric), ended=ended_by(folder))


@contextmanager
def _needing_ray(space: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"a sweep needs {error.name}, which is not installed: pip install 'rlsvc[all]', or send it to a cluster: "
            f"rlsvc submit -- sweep {space}"
        ) from error


@contextmanager
def _live(console: Console, show: Callable[[], Any]) -> Iterator[None]:
    """Shows a table that is made anew every 2 s, on a terminal; elsewhere nothing but the lines of trials."""
    if not console.is_terminal:
        yield
        return
    over = Event()
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def refresh() -> None:
            while not over.wait(REFRESH_S):
                live.update(show(), refresh=True)

        thread = Thread(target=refresh, name="sweep-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _progress(folder: Path, spec: SweepSpec) -> Group:
    """Counts, what runs now, and the best so far."""
    from rlsvc.tune.stored import load_meter
    from rlsvc.tune.trial import load_trials

    trials = load_trials(folder, spec.metric)
    counts: dict[str, int] = {}
    for trial in trials:
        counts[trial.status] = counts.get(trial.status, 0) + 1
    counts["to come"] = spec.trials - len(trials)
    meter = load_meter(folder)
    line = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    used = f"{meter.get('seconds', 0) / 3600:.2f} h"
    if meter.get("gpu_seconds"):
        used += f", {meter['gpu_seconds'] / 3600:.2f} GPU h"
    ended = f"; ended by {meter['ended']}" if meter.get("ended") else ""
    return Group(f"{spec.name}: {line} of {spec.trials} trials; {used}{ended}", _table(spec, trials))


def _table(spec: SweepSpec, trials: list[Trial]) -> Table:
    from rlsvc.tune.report import rows

    columns = ["#", "status", *spec.goals, "step", *_short_keys(list(spec.space))]
    table = Table(*columns, title=f"{spec.name}, the best first")
    for row in rows(spec, trials)[:SHOWN]:
        scores = (
            [_short(row[name]) for name in spec.goals] if row[spec.metric] != "" else ["", *[""] * len(spec.objectives)]
        )
        if row["std"] != "":
            scores[0] += f" ± {row['std']:.2g}"
        if row["reason"]:
            scores[0] = scores[0] or row["reason"][:60]
        values = (_short(row.get(key, "")) for key in spec.space)
        table.add_row(str(row["configuration"]), row["status"], *scores, str(row["steps"]), *values)
    return table


def _count(spec: SweepSpec) -> str:
    seeds = f" of {spec.seeds} seeds" if spec.seeds > 1 else ""
    at_once = f", {spec.concurrency} at a time" if spec.concurrency else ""
    return f"{spec.configurations} configurations{seeds}{at_once}"


def _short_keys(keys: list[str]) -> list[str]:
    """The last part of a dotted key, where no other key has the same."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
