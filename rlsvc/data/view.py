"""A dataset as a web page: by episode its videos, plots of state, action and reward, and where a person intervened.

The page is a folder with index.html and the videos, and needs nothing else: no network, no server, no other program.
Plots are inline SVG. Letters: N steps of an episode, D dimensions.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT
from rlsvc.core.errors import DatasetError
from rlsvc.data.edit import open_lerobot
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_write import replace_folder
from rlsvc.data.video_cut import FrameReader, cut_video
from rlsvc.data.view_page import GENERATOR, PAGE

WIDTH, HEIGHT, POINTS = 1000, 150, 500
COLOURS = (
    *("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#475569", "#92400e"),
)
REWARDS = ("reward", "next.reward")
BESIDE = {"action": "commanded"}
"""What is drawn dashed over what."""


def write_view(
    path: Path,
    target: Path,
    episodes: Sequence[int] | None = None,
    *,
    overwrite: bool = False,
    on_episode: Callable[[int], None] | None = None,
) -> Path:
    """Write the page of some episodes; the folder appears whole or not at all.

    Args:
        path: of the dataset.
        target: folder of the page.
        episodes: their numbers; None takes all.
        overwrite: replaces a page that is there.
        on_episode: called with the number of episodes done so far.

    Returns:
        The page.

    Raises:
        DatasetError: something is in the way, an episode that there is not, damage, or a full disk.
    """
    source = open_lerobot(path)
    chosen = source.episode_ids if episodes is None else list(episodes)
    for episode in chosen:
        if episode not in source.meta.episodes:
            raise DatasetError(f"{path}: no episode {episode}; it has {len(source.episode_ids)} episodes")
    _refuse(target, overwrite)
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        (temporary / "videos").mkdir(parents=True)
        reader, sections = FrameReader(), []
        for done, episode in enumerate(chosen, 1):
            sections.append(_section(source, episode, reader, temporary))
            if on_episode is not None:
                on_episode(done)
        about = (
            f"{source.meta.info.get('robot_type') or 'robot not named'} · {source.fps:g} Hz · {len(chosen)} of "
            f"{len(source.episode_ids)} episodes"
        )
        text = PAGE.format(generator=GENERATOR, title=escape(path.name), about=escape(about), body="\n".join(sections))
        (temporary / "index.html").write_text(text, "utf-8")
        replace_folder(temporary, target)
    except OSError as error:
        raise DatasetError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target / "index.html"


def _refuse(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    page = target / "index.html"
    if not page.is_file() or GENERATOR not in page.read_text("utf-8", "replace")[:500]:
        raise DatasetError(f"{target}: exists and is not such a page, so it is not overwritten; choose another folder")
    if not overwrite:
        raise DatasetError(f"{target}: a page is already there; choose another folder, or pass --overwrite")


def _section(source: LeRobotSource, episode: int, reader: FrameReader, root: Path) -> str:
    """The part of the page that shows one episode; writes its videos."""
    cameras = [camera for camera in source.meta.cameras if camera in source.features]
    table = source.read([key for key in source.features if key not in cameras], [episode])
    rows, length = table.columns, table.num_steps
    videos = []
    for camera in cameras:
        span = source.meta.episodes[episode].videos[camera]
        name = f"videos/{episode:06d}_{camera.rpartition('.')[2]}.mp4"
        cut_video(reader, span.path, span.first, span.length, root / name, source.fps)
        caption = escape(camera.removeprefix("observation.images."))
        videos.append(
            f'<figure><video src="{escape(name)}" muted playsinline preload="metadata"></video>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    acted = rows["intervention"].reshape(length).astype(bool) if "intervention" in rows else np.zeros(length, bool)
    plots = [
        plot(key, rows[key], table.names.get(key, ()), table.units.get(key, ""), acted, rows.get(BESIDE.get(key, "")))
        for key in _plotted(source, rows)
    ]
    facts = [f"{length} steps", f"{length / source.fps:.1f} s", *_outcome(rows)]
    if acted.any():
        facts.append(f"a person acted in {100 * acted.mean():.0f} % of steps")
    if "actor" in rows:
        facts.append("actors: " + ", ".join(map(str, dict.fromkeys(rows["actor"].ravel()))))
    chips = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    task = escape(table.tasks[table.task[0]] or "(no prompt)")
    return (
        f'<section data-seconds="{length / source.fps:.6f}"><h2><b>{episode}</b> {task}</h2>'
        f'<p class="facts">{chips}</p>'
        f'<div class="videos">{"".join(videos)}</div><button>play</button>{"".join(plots)}</section>'
    )


def _plotted(source: LeRobotSource, rows: Mapping[str, Any]) -> list[str]:
    """Observations, the action and the reward, as far as they are vectors or numbers."""
    seen = [key for key in rows if key.startswith("observation.")]
    wanted = [*seen, *(key for key in ("action", *REWARDS) if key in rows)]
    return [key for key in wanted if source.features[key].dtype != TEXT and len(source.features[key].shape) <= 1]


def _outcome(rows: Mapping[str, np.ndarray]) -> list[str]:
    if "next.success" not in rows:
        return []
    if rows["next.success"].any():
        return ["success"]
    return ["failure"] if rows.get("next.done", np.ones(1)).any() else ["cut"]


def plot(
    key: str, column: np.ndarray, names: Sequence[str], unit: str, acted: np.ndarray, beside: np.ndarray | None = None
) -> str:
    """A column over time as SVG, with a legend.

    Args:
        key: its name.
        column: [N] or [N, D] numbers.
        names: of the dimensions, where known.
        unit: of the column.
        acted: [N] bool, steps that are marked.
        beside: [N, D], drawn dashed where it differs.
    """
    values = column.reshape(len(column), -1).astype(np.float64)
    other = None if beside is None else beside.reshape(len(values), -1).astype(np.float64)
    both = values if other is None else np.concatenate([values, other])
    low, high = float(both.min()), float(both.max())
    lines = [_line(values[:, d], low, high, f'stroke="{COLOURS[d % len(COLOURS)]}"') for d in range(values.shape[1])]
    if other is not None and other.shape == values.shape:
        lines += [
            _line(other[:, d], low, high, f'stroke="{COLOURS[d % len(COLOURS)]}" stroke-dasharray="4 3" opacity=".5"')
            for d in range(values.shape[1])
            if not np.array_equal(other[:, d], values[:, d])
        ]
    labels = [names[d] if d < len(names) else str(d) for d in range(values.shape[1])] if values.shape[1] > 1 else []
    legend = "".join(
        f'<span><i style="background:{COLOURS[d % len(COLOURS)]}"></i>{escape(label)}</span>'
        for d, label in enumerate(labels)
    )
    title = escape(f"{key} ({unit})" if unit else key)
    return (
        f'<div class="plot"><p><b>{title}</b>{legend}<em>{low:.4g} to {high:.4g}</em></p>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{_marks(acted)}{"".join(lines)}'
        f'<line class="now" x1="0" x2="0" y1="0" y2="{HEIGHT}"/></svg></div>'
    )


def _line(values: np.ndarray, low: float, high: float, style: str) -> str:
    """A polyline of [N] values; of a long episode every k-th."""
    shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).astype(int))
    x = _x(shown, len(values))
    y = (HEIGHT - 6) - (values[shown] - low) / (high - low if high > low else 1.0) * (HEIGHT - 12)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return f'<polyline points="{points}" {style}/>'


def _x(steps: np.ndarray, length: int) -> np.ndarray:
    return steps * WIDTH / length


def _marks(acted: np.ndarray) -> str:
    """A rectangle for each stretch of steps in which a person acted."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], acted.astype(np.int8), [0]])))
    starts, ends = _x(edges[::2], len(acted)), _x(edges[1::2], len(acted))
    return "".join(
        f'<rect class="person" x="{a:.1f}" y="0" width="{b - a:.1f}" height="{HEIGHT}"/>'
        for a, b in zip(starts, ends, strict=True)
    )
