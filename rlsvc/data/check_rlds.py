"""Checks of RLDS folders: splits, flags and step markers, from the records themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.check import Finding, Report, broken
from rlsvc.data.rlds import RawEpisode, Split, declared_features, read_records, read_splits


def check_rlds(path: Path) -> Report:
    """The report of one RLDS dataset. It is not usable as it stands: rlsvc does not train from .tfrecord files."""
    report = Report(str(path), "RLDS")
    try:
        splits, declared = read_splits(path), declared_features(path)
    except DatasetError as error:
        report.findings.append(broken("metadata", str(path), error))
        return report
    report.findings.append(
        Finding(
            "error",
            "format",
            str(path),
            "RLDS tfrecord files",
            "LeRobot, zarr or npz",
            "export the episodes to .npz (state, action, episode_ends, fps) and import that",
        )
    )
    episodes: dict[str, list[RawEpisode]] = {}
    for split in splits:
        episodes[split.name] = list(_read_split(split, report))
    every = [episode for members in episodes.values() for episode in members]
    report.episodes = len(every)
    report.steps = sum(_length(episode) for episode in every)
    report.findings.extend(_same_splits(splits, episodes))
    if every:
        report.findings.extend(_undelivered(declared, every))
        report.findings.extend(_step_markers(every))
        report.findings.extend(_image_flags(every))
    return report


def _read_split(split: Split, report: Report) -> Iterator[RawEpisode]:
    for shard, expected in split.shards.items():
        if not shard.exists():
            report.findings.append(
                Finding(
                    "warning",
                    "missing split",
                    split.name,
                    f"no file {shard.name}",
                    f"{expected} episodes",
                    "copy it, or make a validation split of the episodes that are there",
                )
            )
            continue
        got = 0
        try:
            for episode in read_records(shard):
                got += 1
                yield episode
        except DatasetError as error:
            report.findings.append(broken("unreadable record", f"{shard.name}, episode {got}", error))
            continue
        if got != expected:
            report.findings.append(
                Finding(
                    "warning",
                    "number of episodes",
                    shard.name,
                    str(got),
                    f"{expected} (dataset_info.json)",
                    "copy the file again",
                )
            )


def _length(episode: RawEpisode) -> int:
    return len(episode.get("steps/is_first", ()))


def _same_splits(splits: list[Split], episodes: dict[str, list[RawEpisode]]) -> Iterator[Finding]:
    for i, one in enumerate(splits):
        for other in splits[i + 1 :]:
            both = {_fingerprint(e) for e in episodes[one.name]} & {_fingerprint(e) for e in episodes[other.name]}
            alike = one.num_bytes == other.num_bytes and list(one.shards.values()) == list(other.shards.values())
            if both or alike:
                got = (
                    f"{len(both)} episodes are in both"
                    if both
                    else f"both declare {one.num_bytes} bytes and the same shards"
                )
                yield Finding(
                    "warning",
                    "same clips in two splits",
                    f"{one.name}, {other.name}",
                    got,
                    "splits without a common episode",
                    "a validation loss on them says nothing; split by episode again",
                )


def _fingerprint(episode: RawEpisode) -> bytes:
    return np.asarray(episode.get("steps/action", ())).tobytes()


def _undelivered(declared: list[str], episodes: list[RawEpisode]) -> Iterator[Finding]:
    for name in declared:
        without = sum(name not in episode or len(episode[name]) == 0 for episode in episodes)
        if without:
            yield Finding(
                "warning",
                "absent feature",
                name,
                f"missing in {without} of {len(episodes)} episodes",
                "declared in features.json",
                "do not use it",
            )


def _step_markers(episodes: list[RawEpisode]) -> Iterator[Finding]:
    for name in ("is_last", "is_terminal"):
        marked = [episode for episode in episodes if f"steps/{name}" in episode]
        none = sum(not np.any(episode[f"steps/{name}"]) for episode in marked)
        if none:
            yield Finding(
                "warning",
                name,
                f"steps/{name}",
                f"never set in {none} of {len(episodes)} episodes",
                "1 on the last step",
                "the clips are cut out of longer episodes: their end is a truncation, bootstrap from it",
            )


def _image_flags(episodes: list[RawEpisode]) -> Iterator[Finding]:
    flags = sorted(key for key in episodes[0] if key.startswith("episode_metadata/has_image_"))
    for flag in flags:
        key = f"steps/observation/image_{flag.rpartition('_')[2]}"
        # An empty camera is filled with one placeholder frame; a real one changes from step to step.
        real = sum(len(set(episode.get(key, ()))) > 1 for episode in episodes)
        flagged = sum(bool(np.any(episode.get(flag, 0))) for episode in episodes)
        if real != flagged:
            yield Finding(
                "warning",
                "image flag",
                flag,
                f"set in {flagged} of {len(episodes)} episodes",
                f"{real}, those whose {key} changes",
                "go by the frames, not by the flag",
            )
        elif not real:
            yield Finding(
                "note",
                "empty camera",
                key,
                f"one placeholder frame in all {len(episodes)} episodes",
                "frames",
                "leave it out",
            )
