"""`rlsvc timelapse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

console = Console()


def timelapse(
    run: Annotated[Path, typer.Argument(help="Folder of a run with evaluation.step_videos=true.")],
    output: Annotated[Path | None, typer.Option(help="The mp4 file; RUN/videos/timelapse.mp4 without it.")] = None,
    speed: Annotated[int, typer.Option(help="Take only every so many frames.", min=1)] = 2,
) -> None:
    """Join the videos of a run's evaluations into one, with the step written on it."""
    from rlsvc.data.timelapse import step_videos, write_timelapse

    videos = step_videos(run / "videos")
    target = output or run / "videos" / "timelapse.mp4"
    frames = write_timelapse(videos, target, speed=speed)
    steps = list(videos)
    text = f"{target}: {len(steps)} evaluations, step {steps[0]:,} to {steps[-1]:,}, {frames} frames"
    console.print(Text(text), soft_wrap=True)
