"""`rlsvc collect`: demonstrations and policy rollouts of a robot; `rlsvc replay`: an episode once more."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import NotFoundError

INTERRUPTED = 130
SHOWN = ("overruns", "jitter_p50_ms", "jitter_p99_ms", "skew_p99_ms")


def collect(
    file: Annotated[Path, typer.Argument(help="YAML file of the session: robot, limits, task, dataset.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as episodes=5.")] = None,
    cfg: Annotated[bool, typer.Option("--cfg", help="Print the resolved specification and end.")] = False,
) -> None:
    """Record episodes of a robot, moved by people or a policy, into a LeRobot dataset; people steer it in a browser."""
    from rlsvc.spec.collect import CollectSpec
    from rlsvc.spec.compose import compose_file, to_yaml

    spec = compose_file(CollectSpec, file, overrides or [])
    console = Console()
    if cfg:
        console.print(to_yaml(spec), markup=False, highlight=False, end="", soft_wrap=True)
        return
    from rlsvc.collect import collect as run_session

    stop = _stop_by_signal()
    result = run_session(spec, say=lambda line: console.print(line, markup=False, highlight=False), stop=stop)
    table = Table(show_header=False, box=None)
    table.add_row("dataset", str(result.dataset))
    table.add_row("episodes", f"{result.episodes} kept, {result.discarded} discarded")
    for name in SHOWN:
        if name in result.metrics:
            table.add_row(name.replace("_", " "), f"{result.metrics[name]:.3g}")
    for name, count in sorted(result.metrics.items()):
        if name.startswith("guard_"):
            table.add_row(name.replace("_", " "), f"{count:.0f}")
    if spec.against is not None:
        from rlsvc.train.evaluate import share_interval

        for name, (won, of) in result.judged.items():
            table.add_row(f"{name}: success", f"{share_interval(won, of)} ({won} of {of})")
    console.print(table)
    if result.interrupted:
        console.print("Stopped before all episodes were there; the same command adds to the dataset.")
        raise typer.Exit(INTERRUPTED)


def replay(
    file: Annotated[Path, typer.Argument(help="YAML file of the session: robot and limits.")],
    dataset: Annotated[Path, typer.Argument(help="Dataset of this robot.")],
    episode: Annotated[int, typer.Option(help="Number of the episode, from 0.")] = 0,
    column: Annotated[str, typer.Option(help="action: what was sent then; commanded: what was asked for.")] = "action",
) -> None:
    """Send a recorded episode's commands to the robot again, through its guard."""
    from rlsvc.collect_replay import replay as run_replay
    from rlsvc.spec.collect import CollectSpec
    from rlsvc.spec.compose import compose_file

    spec, console = compose_file(CollectSpec, file), Console()
    say = lambda line: console.print(line, markup=False, highlight=False)  # noqa: E731
    done = run_replay(spec.station, dataset, episode, column=column, say=say, stop=_stop_by_signal())
    say(f"{done.steps} of {done.of} steps; the guard clipped {done.clipped} and refused {done.refused} commands")
    if not any(x != x for x in done.error):
        say("largest distance from the recorded joints: " + ", ".join(f"{x:.3g}" for x in done.error))
    if done.steps < done.of:
        raise typer.Exit(INTERRUPTED)


def send(
    dataset: Annotated[Path, typer.Argument(help="A LeRobot dataset that rlsvc collect recorded.")],
    url: Annotated[str, typer.Argument(help="Of the run with rollout.clients: host:port.")],
    key_file: Annotated[str | None, typer.Option(help="File with the API key; none is sent without it.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest to try.")] = 600.0,
) -> None:
    """Send a learner the episodes that it lacks, such as those of a session without a network."""
    from rlsvc.collect_send import read_key, send_all
    from rlsvc.data.edit import open_lerobot

    there = len(open_lerobot(dataset).episode_ids)
    say = lambda line: Console().print(line, markup=False, highlight=False)  # noqa: E731
    left = send_all(dataset, url, read_key(key_file), say, timeout_s)
    say(f"the learner has {there - left} of {there} episodes")
    if left:
        raise typer.Exit(1)


def console(robot: Annotated[str, typer.Argument(help="Id of the robot (station.id).")]) -> None:
    """Print the address of a robot's console: of the run or session that drives it on this machine."""
    from rlsvc.robots.console.app import address_file

    file = address_file(robot)
    if not file.exists():
        raise NotFoundError(
            f"no console of robot '{robot}' on this machine: nothing drives it here, or without a console"
        )
    Console().print(file.read_text(), markup=False, highlight=False, soft_wrap=True)


def _stop_by_signal() -> threading.Event:
    """Set by SIGTERM and Ctrl-C: what runs ends after the step under way, and the robot is stopped by rule."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())

    def interrupted(*_: object) -> None:
        if stop.is_set():  # a second Ctrl-C ends at once
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, interrupted)
    return stop
