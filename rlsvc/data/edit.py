"""New LeRobot v3.0 datasets from parts of others: relabelled, trimmed, merged, split.

Everything is one operation: a list of `Cut`s, written one after the other as episodes. Columns, names, units, tasks and
the rate stay as they are. Video is copied without loss where a part begins and ends at key frames, and compared with
its source frame by frame; else it is encoded again, from exactly the frames of the steps that are kept.

Letters: N steps of a cut.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.episode_stats import FeatureStats, image_stats
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_append import LeRobotAppender
from rlsvc.data.lerobot_columns import differences
from rlsvc.data.lerobot_files import lock_folder
from rlsvc.data.lerobot_write import refuse_in_the_way, replace_folder
from rlsvc.data.recorder import OUTCOMES
from rlsvc.data.video_cut import FrameReader, cut_video

DONE, SUCCESS, CAPTURE = "next.done", "next.success", "capture_time"


@dataclass(frozen=True)
class Labels:
    """What to say anew of an episode; None leaves it as it is.

    Attributes:
        task: the prompt of all its steps.
        outcome: "success", "failure" or "cut", as of the recorder: sets `next.done` and `next.success`.
        reward: of the last step.
        reward_source: of the last step.
    """

    task: str | None = None
    outcome: str | None = None
    reward: float | None = None
    reward_source: str | None = None


@dataclass(frozen=True)
class Cut:
    """The steps start .. stop of an episode, as an episode of a new dataset."""

    source: LeRobotSource
    episode: int
    start: int = 0
    stop: int | None = None
    labels: Labels = field(default_factory=Labels)

    @property
    def span(self) -> tuple[int, int]:
        """First step, and the one after the last."""
        length = self.source.meta.episodes[self.episode].length
        return self.start, length if self.stop is None else self.stop


@dataclass
class Written:
    """What came of it.

    Attributes:
        episodes: that the dataset has.
        steps: likewise.
        copied: videos that were copied without loss.
        encoded: videos that were encoded again.
        lost_reward: rewards of steps that were dropped at the end, added up.
    """

    episodes: int = 0
    steps: int = 0
    copied: int = 0
    encoded: int = 0
    lost_reward: float = 0.0


def open_lerobot(path: Path) -> LeRobotSource:
    """A dataset that can be edited.

    Raises:
        DatasetError: not a LeRobot dataset, or one whose images lie in its rows.
    """
    source = LeRobotSource(path)
    rows = [key for key, feature in source.features.items() if feature.is_image and key not in source.meta.cameras]
    if rows:
        raise DatasetError(
            f"{path}: the images of '{rows[0]}' lie in its rows, not in videos; convert it first: rlsvc dataset import "
            f"{path} NEW --images video"
        )
    return source


def all_cuts(source: LeRobotSource, episodes: Sequence[int] | None = None) -> list[Cut]:
    """Whole episodes, in this order; None takes all.

    Raises:
        DatasetError: an episode that there is not.
    """
    chosen = source.episode_ids if episodes is None else list(episodes)
    for episode in chosen:
        if episode not in source.meta.episodes:
            raise DatasetError(
                f"{source.path}: no episode {episode}; it has {len(source.episode_ids)}, from {source.episode_ids[0]} "
                f"to {source.episode_ids[-1]}"
            )
    return [Cut(source, episode) for episode in chosen]


def refuse_different(sources: Sequence[LeRobotSource]) -> None:
    """Refuse to merge what does not belong together.

    Raises:
        DatasetError: two datasets differ in robot, rate or columns; says in what.
    """
    first = sources[0]
    for other in sources[1:]:
        different = differences(_comparable(first), _comparable(other), ("in the first", "in the other"))
        if different:
            raise DatasetError(
                f"{other.path} does not go with {first.path}: {different}. Datasets "
                "of different robots or rates are not merged; name them both in data.datasets to train on both"
            )


def write_cuts(
    cuts: Sequence[Cut],
    path: Path,
    *,
    overwrite: bool = False,
    on_episode: Callable[[int], None] | None = None,
) -> Written:
    """Write a dataset; the folder appears whole or not at all.

    Args:
        cuts: its episodes, in order. All sources must go together (`refuse_different`).
        path: of the dataset; may be a source's own when `overwrite` is set.
        overwrite: replaces a LeRobot dataset that is there.
        on_episode: called with the number of episodes written so far.

    Raises:
        DatasetError: something is in the way, nothing is left, a source is damaged, or the disk is full.
        BusyError: somebody records into the dataset that is to be replaced.
    """
    refuse_in_the_way(path, overwrite)
    if not cuts:
        raise DatasetError(f"{path}: no episodes are left to write")
    for cut in cuts:
        start, stop = cut.span
        length = cut.source.meta.episodes[cut.episode].length
        if not 0 <= start < stop <= length:
            raise DatasetError(
                f"{cut.source.path}: nothing is left of episode {cut.episode}: it has {length} steps, and {start} .. "
                f"{stop} were to be kept"
            )
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Nothing is to be recorded into what is replaced.
    lock = lock_folder(path) if path.exists() else None
    try:
        written = _write(cuts, temporary, on_episode)
        replace_folder(temporary, path)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed there"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return written


def _write(cuts: Sequence[Cut], root: Path, on_episode: Callable[[int], None] | None) -> Written:
    meta, features = cuts[0].source.meta, cuts[0].source.features
    info = {camera: meta.declared[camera].get("info") for camera in meta.cameras if camera in features}
    appender = LeRobotAppender(
        root,
        features,
        meta.fps,
        meta.info.get("robot_type"),
        durable=False,
        video_info={camera: about for camera, about in info.items() if about},
    )
    written, reader = Written(), FrameReader()
    try:
        for done, cut in enumerate(cuts, 1):
            stage = appender.begin()
            videos: dict[str, Path] = {}
            stats: dict[str, FeatureStats] = {}
            start, stop = cut.span
            for i, camera in enumerate(appender.cameras):
                span = cut.source.meta.episodes[cut.episode].videos.get(camera)
                if span is None:
                    raise DatasetError(f"{cut.source.path}: episode {cut.episode} has no video of '{camera}'")
                videos[camera] = stage / f"{i}.mp4"
                copied, histogram = cut_video(
                    reader, span.path, span.first + start, stop - start, videos[camera], meta.fps
                )
                stats[camera] = image_stats(histogram, stop - start)
                written.copied += copied
                written.encoded += not copied
            columns, tasks, lost = _columns(cut, appender)
            appender.append(columns, videos, stats, tasks)
            written.episodes, written.steps = done, written.steps + stop - start
            written.lost_reward += lost
            if on_episode is not None:
                on_episode(done)
    finally:
        appender.close()
    return written


def _columns(cut: Cut, appender: LeRobotAppender) -> tuple[dict[str, np.ndarray], list[str], float]:
    """Columns [N, ...] and prompts [N] of a cut, and the rewards of steps after it, added up."""
    numbers = [key for key in appender.features if key not in appender.cameras]
    table = cut.source.read(numbers, [cut.episode])
    start, stop = cut.span
    columns = {key: column[start:stop].copy() for key, column in table.columns.items()}
    tasks = [table.tasks[i] for i in table.task[start:stop]]
    for key in (DONE, SUCCESS):
        # The end of the episode is now at the last step that is left.
        if key in columns and table.columns[key].size == len(table.columns[key]):
            columns[key][-1] = table.columns[key][stop - 1 :].any()
    if CAPTURE in columns and start:
        columns[CAPTURE] -= columns[CAPTURE].min()
    lost = float(table.columns["reward"][stop:].sum()) if "reward" in columns else 0.0
    labels = cut.labels
    if labels.task is not None:
        tasks = [labels.task] * len(tasks)
    if labels.outcome is not None:
        _need(cut, columns, DONE, SUCCESS)
        columns[DONE][:], columns[SUCCESS][:] = False, False
        columns[DONE][-1], columns[SUCCESS][-1] = labels.outcome != "cut", labels.outcome == "success"
    if labels.reward is not None:
        _need(cut, columns, "reward")
        columns["reward"][-1] = labels.reward
    if labels.reward_source is not None:
        _need(cut, columns, "reward_source")
        columns["reward_source"][-1] = labels.reward_source
    return columns, tasks, lost


def check_labels(labels: Labels) -> None:
    """Refuse labels that say nothing or nonsense.

    Raises:
        DatasetError: by name.
    """
    if labels == Labels():
        raise DatasetError("relabel: nothing to say; give a task, an outcome, a reward or its source")
    if labels.outcome is not None and labels.outcome not in OUTCOMES:
        raise DatasetError(f"outcome: got '{labels.outcome}', expected one of {', '.join(OUTCOMES)}")
    if labels.task is not None and not labels.task.strip():
        raise DatasetError("task: got an empty text, expected what the robot was to do")
    if labels.reward is not None and not np.isfinite(labels.reward):
        raise DatasetError(f"reward: got {labels.reward}, expected a finite number")


def _need(cut: Cut, columns: Mapping[str, np.ndarray], *keys: str) -> None:
    for key in keys:
        if key not in columns:
            raise DatasetError(f"{cut.source.path}: no column '{key}' to relabel; it has: {', '.join(columns)}")


def _comparable(source: LeRobotSource) -> dict[str, Any]:
    """What `differences` looks at, of what is really read."""
    features = {
        key: {"dtype": f.dtype, "shape": list(f.shape), "names": list(f.names), "unit": f.unit}
        for key, f in source.features.items()
    }
    return {"fps": source.fps, "robot_type": source.meta.info.get("robot_type"), "features": features}


def parts_of(text: Iterable[str], parse: Callable[[str], Sequence[int]]) -> dict[str, list[int]]:
    """Parts of a split from texts such as "train=0-79".

    Raises:
        DatasetError: not of that form, the same name or episode twice.
    """
    parts: dict[str, list[int]] = {}
    for item in text:
        name, equals, episodes = item.partition("=")
        if not equals or not name or "/" in name or name in parts:
            raise DatasetError(f"--part: got '{item}', expected NAME=EPISODES such as train=0-79, each name once")
        parts[name] = list(parse(episodes))
    used: dict[int, str] = {}
    for name, episodes in parts.items():
        for episode in episodes:
            if episode in used:
                raise DatasetError(f"--part: episode {episode} is in '{used[episode]}' and in '{name}'")
            used[episode] = name
    if not parts:
        raise DatasetError("--part: got none, expected NAME=EPISODES such as --part train=0-79 --part val=80-99")
    return parts
