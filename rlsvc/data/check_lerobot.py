"""Checks of LeRobot datasets: metadata against the rows, the videos and the statistics that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.check import Finding, some
from rlsvc.data.check_lerobot_stats import check_stats
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_meta import Episode, column_array, read_json, read_parquet, resolve
from rlsvc.data.video import count_frames, decode_frames


def check_lerobot(
    source: LeRobotSource, table: EpisodeTable | None, episodes: Sequence[int], *, deep: bool = False
) -> Iterator[Finding]:
    """Findings that only LeRobot datasets can have.

    Args:
        source: the dataset.
        table: its numbers, of the episodes that are readable.
        episodes: the numbers of those episodes.
        deep: decodes all video instead of counting its packets.
    """
    yield from _schema(source)
    yield from _totals(source)
    yield from _bookkeeping(source, episodes)
    yield from _videos(source, deep)
    if table is not None:
        yield from check_stats(source, table, episodes)


def _schema(source: LeRobotSource) -> Iterator[Finding]:
    meta = source.meta
    if meta.version != "v3.0":
        yield Finding(
            "note",
            "schema version",
            "meta/info.json",
            meta.version,
            "v3.0",
            "converted on the way in; rlsvc dataset import writes it as v3.0",
        )
    nested = [key for key, declared in meta.declared.items() if _is_nested(declared.get("names"))]
    if nested:
        yield Finding(
            "note", "nested names", some(nested), "element names inside another list", "one list", "flattened when read"
        )
    wide = [key for key in source.features if meta.declared[key]["dtype"] == "float64"]
    if wide:
        yield Finding("note", "float64", some(wide), "float64", "float32", "read as float32")
    for key, feature in source.features.items():
        if feature.names and len(feature.names) != int(np.prod(feature.shape)):
            yield Finding(
                "warning",
                "names",
                key,
                f"{len(feature.names)} names",
                f"{int(np.prod(feature.shape))} elements",
                "mend meta/info.json; the names are not used",
            )
    modality = meta.root / "meta" / "modality.json"
    if modality.exists():
        yield from _modality(source, modality)


def _is_nested(names: Any) -> bool:
    return isinstance(names, list) and any(isinstance(name, list) for name in names)


def _modality(source: LeRobotSource, path: Path) -> Iterator[Finding]:
    """GR00T's modality.json: slices of state and action, and cameras by their original names."""
    yield Finding(
        "note",
        "modality.json",
        str(path.name),
        "slices of state and action",
        "names in meta/info.json",
        "not carried over; the names of meta/info.json are used",
    )
    modality = {part: value for part, value in read_json(path).items() if isinstance(value, dict)}
    for part, column in (("state", "observation.state"), ("action", "action")):
        for name, span in modality.get(part, {}).items():
            width = source.features[column].shape[0] if column in source.features else 0
            if not 0 <= span.get("start", -1) < span.get("end", -1) <= width:
                yield Finding(
                    "warning",
                    "modality.json",
                    f"{part}.{name}",
                    f"{span.get('start')} to {span.get('end')}",
                    f"inside the {width} elements of {column}",
                    "mend modality.json",
                )
    for name, camera in modality.get("video", {}).items():
        if camera.get("original_key") not in source.features:
            yield Finding(
                "warning",
                "modality.json",
                f"video.{name}",
                str(camera.get("original_key")),
                "a camera that is there",
                "mend modality.json",
            )


def _totals(source: LeRobotSource) -> Iterator[Finding]:
    meta, info = source.meta, source.meta.info
    videos = {span.path for e in meta.episodes.values() for span in e.videos.values() if span.path.exists()}
    real = {
        "total_episodes": len(meta.episodes),
        "total_frames": source.num_steps,
        "total_tasks": len(meta.tasks),
        # v3.0 no longer has it
        **({"total_videos": len(videos)} if "total_videos" in info else {}),
    }
    for name, number in real.items():
        if info.get(name) != number:
            yield Finding(
                "warning", "totals", f"meta/info.json {name}", str(info.get(name)), str(number), "what is there is used"
            )
    for split, span in (info.get("splits") or {}).items():
        first, _, last = str(span).partition(":")
        if first.isdigit() and last.isdigit() and int(last) > len(meta.episodes):
            yield Finding(
                "warning",
                "splits",
                f"meta/info.json splits.{split}",
                str(span),
                f"at most 0:{len(meta.episodes)}",
                "rlsvc makes its own splits by episode, and does not read these",
            )
    yield from _moved(source)
    known = {episode.data for episode in meta.episodes.values()}
    stray = [p for p in sorted((meta.root / "data").glob("*/*.parquet")) if p not in known]
    if stray:
        yield Finding(
            "warning",
            "files without an episode",
            some([p.name for p in stray]),
            f"{len(stray)} parquet files",
            "none",
            "not read; meta/ does not name them",
        )


def _moved(source: LeRobotSource) -> Iterator[Finding]:
    """v2 path templates that do not name the files that are there (`resolve` finds them)."""
    meta = source.meta
    if meta.version == "v3.0":
        return
    size = meta.info.get("chunks_size", 1000)
    for kind, template in (("data_path", meta.info["data_path"]), ("video_path", meta.info.get("video_path") or "")):
        cameras = [key for key in meta.cameras if key not in source.absent] if kind == "video_path" else [""]
        wrong = [
            index
            for index in meta.episodes
            for camera in cameras
            for name in [template.format(episode_chunk=index // size, episode_index=index, video_key=camera)]
            if not (meta.root / name).exists() and resolve(meta.root, name).exists()
        ]
        if wrong:
            yield Finding(
                "warning",
                "path template",
                f"meta/info.json {kind}",
                template,
                f"a file for episodes {some(wrong)}",
                "the file of that name in another chunk is used; write {episode_chunk} for the chunk",
            )


def _bookkeeping(source: LeRobotSource, episodes: Sequence[int]) -> Iterator[Finding]:
    meta = source.meta
    if "frame_index" not in meta.declared:
        yield Finding(
            "warning",
            "frame_index",
            "meta/info.json",
            "not declared",
            "frame_index",
            "rows are taken in the order of the file",
        )
    files: dict[Path, list[Episode]] = {}
    for episode in (meta.episodes[e] for e in episodes):
        files.setdefault(episode.data, []).append(episode)
    drift, per_episode, unordered, used = [], [], [], set()
    for path, members in files.items():
        order = [name for name in ("frame_index",) if name in meta.declared]
        rows = read_parquet(
            path, ["episode_index", "task_index", *(["timestamp"] if "timestamp" in meta.declared else []), *order]
        )
        column = {name: column_array(path, name, rows[name]) for name in rows.column_names}
        for episode in members:
            mine = column["episode_index"] == episode.index
            frame = column["frame_index"][mine] if order else np.arange(episode.length)
            if (np.diff(frame) < 0).any():
                unordered.append(episode.index)
            used |= {int(i) for i in np.unique(column["task_index"][mine])}
            if "timestamp" in column:
                off = column["timestamp"][mine].astype(np.float64) - frame / meta.fps
                drift.append(np.abs(off))
                per_episode.append((episode.index, float(np.ptp(off)), float(np.abs(off).max())))
    if unordered:
        yield Finding(
            "warning",
            "frame_index",
            f"episodes {some(unordered)}",
            "rows out of order",
            "0, 1, 2, ...",
            "sorted when read",
        )
    unknown = sorted(used - set(meta.tasks))
    if unknown:
        yield Finding(
            "error", "task_index", "data", some(unknown), f"one of {sorted(meta.tasks)} (meta/tasks)", "mend meta/tasks"
        )
    unused = [task for index, task in sorted(meta.tasks.items()) if index not in used]
    if unused and len(episodes) == len(meta.episodes):
        yield Finding(
            "note",
            "tasks without a row",
            "meta/tasks",
            some([repr(t) for t in unused]),
            "a task_index for each",
            "ignored",
        )
    if drift:
        yield from _timestamps(np.concatenate(drift), per_episode, meta.fps)


def _timestamps(drift: np.ndarray, per_episode: list[tuple[int, float, float]], fps: float) -> Iterator[Finding]:
    """Timestamps that are more than half a frame from frame_index / fps. `drift`: [N] seconds."""
    wrong = drift > 0.5 / fps
    if not wrong.any():
        return
    episode, _, worst = max(per_episode, key=lambda item: item[2])
    offset = all(spread < 0.1 / fps for _, spread, _ in per_episode)
    kind = "are shifted by a constant" if offset else "drift (a wall clock?)"
    yield Finding(
        "warning",
        "timestamp",
        "data, column timestamp",
        f"{100 * wrong.mean():.0f} % of timestamps {kind}: more than {0.5 / fps:g} s from frame_index / fps, "
        f"worst {worst:.2f} s (episode {episode})",
        "frame_index / fps",
        "rlsvc goes by frame_index and ignores timestamp; lerobot looks videos up by timestamp, and would get wrong "
        "frames or refuse",
    )


def _videos(source: LeRobotSource, deep: bool) -> Iterator[Finding]:
    for camera in source.meta.cameras:
        if camera in source.absent:
            continue
        spans = {episode.index: episode.videos.get(camera) for episode in source.meta.episodes.values()}
        missing = [index for index, span in spans.items() if span is None or not span.path.exists()]
        if missing:
            yield Finding(
                "warning",
                "missing videos",
                camera,
                f"no file for {len(missing)} of {len(spans)} episodes: {some(missing)}",
                "a video for each",
                f"select `episodes` without them, or leave '{camera}' out",
            )
        for path, total in {span.path: span.total for span in spans.values() if span and span.path.exists()}.items():
            try:
                got = sum(1 for _ in decode_frames(path)) if deep else count_frames(path)
            except DatasetError as error:
                yield Finding(
                    "warning",
                    "unreadable video",
                    str(path),
                    str(error),
                    "a video",
                    f"copy it again, or leave '{camera}' out",
                )
                continue
            if got != total:
                yield Finding(
                    "warning",
                    "video frames",
                    str(path),
                    f"{got} frames",
                    f"{total}, one for each row",
                    f"copy it again, or leave '{camera}' out; rlsvc refuses it",
                )
            elif (gap := source.meta.video_gap(camera, path)) is not None:
                yield Finding(
                    "warning",
                    "video spans",
                    str(path),
                    f"no episode begins at frame {gap}",
                    "episodes end to end",
                    f"mend from_timestamp in meta/episodes, or leave '{camera}' out; rlsvc refuses it",
                )
