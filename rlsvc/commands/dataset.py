"""`rlsvc dataset import | info | stats | check`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Column, Table
from rich.text import Text

from rlsvc.core.errors import DatasetError

app = typer.Typer(help="Import, describe, check and share demonstrations.", no_args_is_help=True)
console = Console()

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}

PathArgument = Annotated[Path, typer.Argument(help="A LeRobot or zarr folder, or an .npz file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[str, typer.Option("--format", help="auto, lerobot, zarr or npz.")]


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="LeRobot v2.0, v2.1 or v3.0, zarr or npz.")],
    destination: Annotated[Path, typer.Argument(help="Folder of the new LeRobot v3.0 dataset.")],
    format: FormatOption = "auto",
    fps: Annotated[float | None, typer.Option(help="Control rate in Hz, where the source does not say it.")] = None,
    task: Annotated[str | None, typer.Option(help="Prompt of every episode that has none.")] = None,
    episodes: Annotated[str | None, typer.Option(help="Only these, such as 0-9,12.")] = None,
    images: Annotated[str, typer.Option(help="video (small, lossy) or image (exact).")] = "video",
    robot: Annotated[str | None, typer.Option(help="Robot type to write into the metadata.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a dataset at the destination.")] = False,
) -> None:
    """Convert a dataset to LeRobot v3.0, saying what does not fit."""
    from rlsvc.data.lerobot_write import refuse_in_the_way, write_lerobot
    from rlsvc.data.load import load_source, open_source
    from rlsvc.spec.data import DatasetSpec

    if images not in ("video", "image"):
        raise DatasetError(f"--images: got '{images}', expected video or image")
    refuse_in_the_way(destination, overwrite)
    opened = open_source(source, _known_format(format), fps)
    _show_what_does_not_fit(opened)
    numbers = None if episodes is None else parse_episodes(episodes)
    spec = DatasetSpec.model_validate({"path": str(source), "format": format, "episodes": numbers})
    table = load_source(opened, spec)
    if task is not None:
        table.tasks = [prompt or task for prompt in table.tasks]
    # SVT-AV1 prints its whole configuration for each video otherwise.
    os.environ.setdefault("SVT_LOG", "1")
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task("episodes", total=table.num_episodes)
        write_lerobot(
            table,
            destination,
            images="video" if images == "video" else "image",
            robot_type=robot,
            overwrite=overwrite,
            on_episode=lambda done: progress.update(bar, completed=done),
        )
    console.print(
        Text(f"{destination}: LeRobot v3.0, {table.num_episodes} episodes, {table.num_steps} steps, {table.fps:g} Hz"),
        soft_wrap=True,
    )


@app.command()
def info(path: PathArgument, format: FormatOption = "auto", as_json: JsonOption = False) -> None:
    """Show what a dataset holds, from its metadata."""
    from rlsvc.data.check import some
    from rlsvc.data.load import open_source

    source = open_source(path, _known_format(format))
    tasks = source.episode_tasks(source.episode_ids)
    counts = {task: tasks.count(task) for task in dict.fromkeys(tasks)}
    if as_json:
        value = {
            "path": str(path),
            "format": source.format,
            "episodes": len(source.episode_ids),
            "steps": source.num_steps,
            "fps": source.fps,
            "tasks": counts,
            "features": {key: feature.to_json() for key, feature in source.features.items()},
            "absent": source.absent,
        }
        typer.echo(json.dumps(value, indent=2))
        return
    minutes = source.num_steps / source.fps / 60
    size = f"{len(source.episode_ids)} episodes, {source.num_steps} steps at {source.fps:g} Hz ({minutes:.1f} minutes)"
    console.print(Text(f"{path}: {source.format}, {size}"), soft_wrap=True)
    table = Table(Column("feature", overflow="fold"), "shape", "dtype", "unit", "names")
    for key, feature in source.features.items():
        shape = " x ".join(map(str, feature.shape)) or "1"
        table.add_row(*(Text(cell) for cell in (key, shape, feature.dtype, feature.unit, some(feature.names, 4))))
    console.print(table)
    for key, why in source.absent.items():
        console.print(Text(f"absent: {key}: {why}", style=COLOURS["warning"]), soft_wrap=True)
    for task, count in counts.items():
        console.print(Text(f"{count} episodes: {task or '(no prompt)'}"), soft_wrap=True)


@app.command()
def stats(
    path: PathArgument,
    keys: Annotated[list[str] | None, typer.Option("--key", help="Only this feature; may be repeated.")] = None,
    format: FormatOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Show the statistics that normalisers are made of, cached beside the dataset by its content."""
    from rlsvc.data.cache import dataset_stats
    from rlsvc.data.load import open_source
    from rlsvc.spec.data import DatasetSpec

    source = open_source(path, _known_format(format))
    numeric = [k for k, feature in source.features.items() if not feature.is_image and feature.dtype != "str"]
    spec = DatasetSpec.model_validate({"path": str(path), "format": format})
    found = dataset_stats(spec, keys or numeric)
    if as_json:
        typer.echo(json.dumps({key: value.to_json() for key, value in found.items()}, indent=2))
        return
    table = Table("feature", "element", "min", "q01", "mean", "std", "q99", "max")
    for key, value in found.items():
        feature = source.features[key]
        for i in range(value.mean.size):
            name = feature.names[i] if i < len(feature.names) else str(i)
            numbers = (getattr(value, field).flat[i] for field in ("min", "q01", "mean", "std", "q99", "max"))
            table.add_row(Text(key if i == 0 else ""), Text(name), *(f"{number:.5g}" for number in numbers))
    console.print(table)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="A dataset, or a folder that holds some.")],
    deep: Annotated[bool, typer.Option("--deep", help="Decode every image and video frame besides.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is wrong with a dataset and whether it can be used all the same (exit code 2 when it cannot)."""
    from rlsvc.data.check import check_path

    reports = [report.to_json() for report in check_path(path, deep=deep)]
    if as_json:
        typer.echo(json.dumps(reports, indent=2))
    else:
        for report in reports:
            _show_report(report)
    if not all(report["usable"] for report in reports):
        raise typer.Exit(2)


def parse_episodes(text: str) -> tuple[int, ...]:
    """Episode numbers of a text such as "0-9,12".

    Raises:
        DatasetError: it is not of that form.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise DatasetError(f"--episodes: got '{text}', expected numbers and ranges such as 0-9,12")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _known_format(format: str) -> str:
    from rlsvc.data.load import FORMATS

    if format != "auto" and format not in FORMATS:
        raise DatasetError(f"--format: got '{format}', expected auto, {', '.join(FORMATS)}")
    return format


def _show_what_does_not_fit(source: Any) -> None:
    from rlsvc.data.lerobot import LeRobotSource

    if isinstance(source, LeRobotSource):
        from rlsvc.data.check_lerobot import check_lerobot

        for finding in check_lerobot(source, None, source.episode_ids):
            console.print(
                Text(f"{finding.what}: {finding.where}: {finding.got}; {finding.todo}", "yellow"), soft_wrap=True
            )
    for key, why in source.absent.items():
        console.print(Text(f"left out: {key}: {why}", style="yellow"), soft_wrap=True)


def _show_report(report: dict[str, Any]) -> None:
    verdict = "can be used" if report["usable"] else "cannot be used as it stands"
    style = "green" if report["usable"] else COLOURS["error"]
    console.print(
        Text(f"{report['path']} ({report['format']}, {report['episodes']} episodes, {report['steps']} steps): ").append(
            verdict, style
        ),
        soft_wrap=True,
    )
    for finding in report["findings"]:
        head = Text(f"  {finding['severity']:8}", COLOURS[finding["severity"]])
        console.print(head.append(f"{finding['what']}: {finding['where']}", "default"), soft_wrap=True)
        for label, key in (("got", "got"), ("expected", "expected"), ("do", "todo")):
            console.print(Text(f"          {label:9} {finding[key]}"), soft_wrap=True)
    if not report["findings"]:
        console.print("  nothing found")
