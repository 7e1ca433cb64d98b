"""`rlsvc dataset relabel | trim | merge | split | view`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.text import Text

from rlsvc.commands.dataset import parse_episodes
from rlsvc.core.errors import DatasetError

if TYPE_CHECKING:
    from rlsvc.data.edit import Cut

console = Console()
FIRST_SHOWN = 20

SourceArgument = Annotated[Path, typer.Argument(help="A LeRobot dataset.")]
NewArgument = Annotated[Path, typer.Argument(help="Folder of the new dataset; may be the source with --overwrite.")]
EpisodesOption = Annotated[str | None, typer.Option(help="Only these, such as 0-9,12; all without it.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a dataset at the destination.")]


def relabel(
    source: SourceArgument,
    destination: NewArgument,
    episodes: EpisodesOption = None,
    task: Annotated[str | None, typer.Option(help="Prompt of these episodes.")] = None,
    outcome: Annotated[str | None, typer.Option(help="success, failure or cut; sets next.done, next.success.")] = None,
    reward: Annotated[float | None, typer.Option(help="Reward of the last step.")] = None,
    reward_source: Annotated[str | None, typer.Option(help="Where the reward of the last step comes from.")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Say anew what episodes were for and how they went; the others stay as they are."""
    from rlsvc.data.edit import Labels, all_cuts, check_labels, open_lerobot

    labels = Labels(task, outcome, reward, reward_source)
    check_labels(labels)
    opened = open_lerobot(source)
    chosen = {cut.episode for cut in all_cuts(opened, _numbers(episodes))}
    cuts = [replace(cut, labels=labels) if cut.episode in chosen else cut for cut in all_cuts(opened)]
    _write(cuts, destination, overwrite)


def trim(
    source: SourceArgument,
    destination: NewArgument,
    start: Annotated[int, typer.Option(help="Steps to drop at the start.", min=0)] = 0,
    end: Annotated[int, typer.Option(help="Steps to drop at the end.", min=0)] = 0,
    episodes: EpisodesOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Drop steps at the start and end of episodes; the others stay as they are."""
    from rlsvc.data.edit import all_cuts, open_lerobot

    if not start and not end:
        raise DatasetError("trim: nothing to drop; give --start or --end")
    opened = open_lerobot(source)
    chosen = {cut.episode for cut in all_cuts(opened, _numbers(episodes))}
    cuts = [
        replace(cut, start=start, stop=cut.span[1] - end) if cut.episode in chosen else cut for cut in all_cuts(opened)
    ]
    _write(cuts, destination, overwrite)


def merge(
    sources: Annotated[list[Path], typer.Argument(help="LeRobot datasets of the same robot, rate and columns.")],
    into: Annotated[Path, typer.Option(help="Folder of the new dataset.")],
    overwrite: OverwriteOption = False,
) -> None:
    """Put the episodes of datasets into one, in this order."""
    from rlsvc.data.edit import all_cuts, open_lerobot, refuse_different

    opened = [open_lerobot(path) for path in sources]
    refuse_different(opened)
    _write([cut for one in opened for cut in all_cuts(one)], into, overwrite)


def split(
    source: SourceArgument,
    into: Annotated[Path, typer.Argument(help="Folder that gets a dataset for each part.")],
    part: Annotated[list[str] | None, typer.Option(help="NAME=EPISODES, such as train=0-79; repeat it.")] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Write episodes into datasets of their own, INTO/NAME."""
    from rlsvc.data.edit import all_cuts, open_lerobot, parts_of
    from rlsvc.data.lerobot_write import refuse_in_the_way

    opened = open_lerobot(source)
    cuts = {name: all_cuts(opened, numbers) for name, numbers in parts_of(part or (), parse_episodes).items()}
    for name in cuts:
        refuse_in_the_way(into / name, overwrite)
    for name, those in cuts.items():
        _write(those, into / name, overwrite)


def view(
    source: SourceArgument,
    page: Annotated[Path, typer.Argument(help="Folder of the page; open its index.html in a browser.")],
    episodes: Annotated[str | None, typer.Option(help="Only these, such as 0-9; the first 20 without it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a page that is there.")] = False,
    rerun: Annotated[
        bool, typer.Option("--rerun", help="Write an .rrd file an episode for the Rerun viewer instead.")
    ] = False,
) -> None:
    """Write a web page with video, plots of state, action and reward, and where a person intervened."""
    from rlsvc.data.edit import open_lerobot
    from rlsvc.data.view import write_view

    chosen = _numbers(episodes) or open_lerobot(source).episode_ids[:FIRST_SHOWN]
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task("episodes", total=len(chosen))
        tell = lambda done: progress.update(bar, completed=done)  # noqa: E731
        if rerun:
            from rlsvc.data.rerun_log import write_rerun

            written = write_rerun(source, page, chosen, on_episode=tell)[0].parent
        else:
            written = write_view(source, page, chosen, overwrite=overwrite, on_episode=tell)
    console.print(Text(f"{written}: {len(chosen)} episodes"), soft_wrap=True)


def _numbers(episodes: str | None) -> tuple[int, ...] | None:
    return None if episodes is None else parse_episodes(episodes)


def _write(cuts: Sequence[Cut], destination: Path, overwrite: bool) -> None:
    from rlsvc.data.edit import write_cuts

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console) as progress:
        bar = progress.add_task("episodes", total=len(cuts))
        written = write_cuts(
            cuts, destination, overwrite=overwrite, on_episode=lambda done: progress.update(bar, completed=done)
        )
    videos = f"; videos: {written.copied} copied without loss, {written.encoded} encoded again"
    size = f"{destination}: LeRobot v3.0, {written.episodes} episodes, {written.steps} steps"
    console.print(Text(size + (videos if written.copied or written.encoded else "")), soft_wrap=True)
    if written.lost_reward:
        console.print(
            Text(f"the steps that were dropped at the end had rewards of {written.lost_reward:g} in all", "yellow"),
            soft_wrap=True,
        )


COMMANDS = (relabel, trim, merge, split, view)
