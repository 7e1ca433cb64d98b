"""What is wrong with a dataset, and whether it can be used all the same.

`check_path` reads what is really there (never only the metadata) and gives one `Report` for each dataset. Severities:
an error makes the dataset unusable as it stands; a warning is something that a user must know, and that rlsvc handles
rightly or refuses when asked for it; a note is worth knowing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.load import datasets_inside, detect_format, format_of, open_source
from rlsvc.data.rlds import is_rlds
from rlsvc.data.source import Source

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# Actions count as meant for [-1, 1] when every dimension is mostly inside and none goes far outside: joint angles,
# which rest outside in some dimensions, are not meant.
NORMALISED_SHARE = 0.5
NORMALISED_MAX = 2.0
LEAST_SHARE = 0.001


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: "error", "warning" or "note".
        what: a short name of the kind ("timestamp", "constant dimensions").
        where: file, column or episode.
        got: what is there.
        expected: what should be.
        todo: what to do, or what rlsvc does about it.
    """

    severity: Severity
    what: str
    where: str
    got: str
    expected: str
    todo: str


@dataclass
class Report:
    """All findings of one dataset."""

    path: str
    format: str
    episodes: int = 0
    steps: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether training can use it: no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, worst findings first."""
        ordered = sorted(self.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        return {
            "path": self.path,
            "format": self.format,
            "episodes": self.episodes,
            "steps": self.steps,
            "usable": self.usable,
            "findings": [asdict(finding) for finding in ordered],
        }


def check_path(path: str | Path, *, deep: bool = False) -> list[Report]:
    """A report for the dataset at `path`, or for each of those in that folder.

    Args:
        path: a dataset, or a folder of some.
        deep: decodes every image and video frame besides, which takes a while.

    Raises:
        DatasetError: there is no dataset at all.
    """
    path = Path(path)
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    inside = [] if format_of(path) else datasets_inside(path)
    reports = [check_dataset(p, deep=deep) for p in inside]
    if is_rlds(path):
        from rlsvc.data.check_rlds import check_rlds

        return [check_rlds(path), *reports]
    return reports or [check_dataset(path, deep=deep)]


def check_dataset(path: Path, *, deep: bool = False) -> Report:
    """The report of one LeRobot, zarr or npz dataset; arguments as in `check_path`.

    Raises:
        DatasetError: `path` is not a dataset.
    """
    format = detect_format(path)
    report = Report(str(path), format)
    try:
        source, assumed = _open(path, format)
    except DatasetError as error:
        report.findings.append(broken("metadata", str(path), error))
        return report
    report.format, report.episodes, report.steps = source.format, len(source.episode_ids), source.num_steps
    if assumed:
        report.findings.append(
            Finding(
                "error",
                "control rate",
                str(path),
                "no array 'fps'",
                "steps a second",
                "it can be used once it is imported with its rate: rlsvc dataset import SRC DST --fps RATE",
            )
        )
    report.findings.extend(
        Finding(
            "warning",
            "absent feature",
            key,
            why,
            "data for every step",
            f"leave '{key}' out of the observation, or copy its files",
        )
        for key, why in source.absent.items()
    )
    numbers = [key for key, feature in source.features.items() if not feature.is_image and feature.dtype != "str"]
    table, episodes = read_what_can_be_read(source, numbers, report)
    if table is not None:
        report.findings.extend(check_table(table, episodes, source))
    if isinstance(source, LeRobotSource):
        from rlsvc.data.check_lerobot import check_lerobot

        try:
            for finding in check_lerobot(source, table, episodes, deep=deep):
                report.findings.append(finding)
        except DatasetError as error:
            report.findings.append(broken("metadata", str(path), error))
    if deep:
        report.findings.extend(_images(source))
    return report


def _images(source: Source) -> Iterator[Finding]:
    """Images that are stored as arrays or picture files (videos: `check_lerobot`)."""
    videos = source.meta.cameras if isinstance(source, LeRobotSource) else ()
    for key, feature in source.features.items():
        for episode in source.episode_ids if feature.is_image and key not in videos else ():
            try:
                source.read([key], [episode])
            except DatasetError as error:
                yield Finding(
                    "warning",
                    "unreadable images",
                    f"{key}, episode {episode}",
                    str(error),
                    "images",
                    f"leave '{key}' out, or select `episodes` without it",
                )


def _open(path: Path, format: str) -> tuple[Source, bool]:
    """The source, and whether its control rate had to be assumed to go on looking."""
    try:
        return open_source(path, format), False
    except DatasetError as error:
        if format == "lerobot" or "control rate" not in str(error):
            raise
        return open_source(path, format, fps=1.0), True


def broken(what: str, where: str, error: DatasetError) -> Finding:
    """The finding for data that could not be read at all; the error's own text says the rest."""
    return Finding("error", what, where, str(error), "readable data", "see there")


def read_what_can_be_read(source: Source, keys: Sequence[str], report: Report) -> tuple[EpisodeTable | None, list[int]]:
    """The table of the episodes that are readable, and their numbers; each one that is not becomes a finding."""
    try:
        return source.read(keys, source.episode_ids), source.episode_ids
    except DatasetError:
        good = []
        for episode in source.episode_ids:
            try:
                source.read(keys, [episode])
                good.append(episode)
            except DatasetError as error:
                report.findings.append(broken("unreadable episode", f"episode {episode}", error))
        return (source.read(keys, good), good) if good else (None, [])


def check_table(table: EpisodeTable, episodes: Sequence[int], source: Source) -> Iterator[Finding]:
    """What the numbers themselves show, whatever format they came in."""
    for key, column in table.columns.items():
        yield from _not_finite(key, column, table, episodes, source)
        yield from _constant(key, column, table)
    if "action" not in table.columns:
        yield Finding(
            "warning",
            "no action",
            source.format,
            f"features {some(list(source.features))}",
            "'action'",
            "name the feature that is the action in data.action",
        )
    yield from _action_range(table)
    yield from _duplicates(table, episodes)
    if not any(key.startswith("next.") for key in table.columns):
        yield Finding(
            "note",
            "no reward",
            source.format,
            "no reward or success column",
            "next.reward for offline reinforcement learning",
            "imitation does not need it",
        )
    short = [e for e, n in zip(episodes, np.diff(table.episode_ends, prepend=0), strict=True) if n < 2]
    if short:
        yield Finding(
            "warning",
            "short episodes",
            f"episodes {some(short)}",
            "1 step",
            "2 or more",
            "leave them out with `episodes`",
        )


def _not_finite(
    key: str, column: np.ndarray, table: EpisodeTable, episodes: Sequence[int], source: Source
) -> Iterator[Finding]:
    if column.dtype.kind != "f" or np.isfinite(column).all():
        return
    bad = np.flatnonzero(~np.isfinite(column).reshape(len(column), -1).all(axis=1))
    places = np.unique(np.searchsorted(table.episode_ends, bad, side="right"))
    first = places[0]
    yield Finding(
        "error",
        "not finite",
        f"{source.file_of(episodes[first])}, '{key}', episode {episodes[first]}, "
        f"row {bad[0] - table.episode_starts[first]}",
        f"NaN or infinity in {len(bad)} rows of episodes {some([episodes[p] for p in places])}",
        "finite numbers",
        f"mend the rows, or select `episodes` without them; without '{key}' the rest can be used",
    )


def _constant(key: str, column: np.ndarray, table: EpisodeTable) -> Iterator[Finding]:
    flat = column.reshape(len(column), -1)
    if column.dtype.kind not in "fiu" or key.startswith("next.") or not len(flat):
        return
    still = np.flatnonzero((flat == flat[0]).all(axis=0))
    if len(still):
        names = table.names.get(key, ())
        listed = [names[i] if len(names) == flat.shape[1] else str(i) for i in still]
        severity: Severity = "warning" if key == "action" else "note"
        yield Finding(
            severity,
            "constant dimensions",
            key,
            f"{len(still)} of {flat.shape[1]} never change: {some(listed)}",
            "numbers that vary",
            "the normaliser leaves them neutral; a policy learns nothing about them",
        )


def _action_range(table: EpisodeTable) -> Iterator[Finding]:
    action = table.columns.get("action")
    if action is None or not np.isfinite(action).all():
        return
    by_dimension = (np.abs(action) > 1).mean(axis=0)
    outside = float(by_dimension.mean())
    if outside >= LEAST_SHARE and by_dimension.max() < NORMALISED_SHARE and np.abs(action).max() <= NORMALISED_MAX:
        yield Finding(
            "warning",
            "action range",
            "action",
            f"{100 * outside:.1f} % of values outside [-1, 1], from {action.min():.3g} to {action.max():.3g}",
            "[-1, 1], if the actions are meant to be normalised",
            "an environment that clips them will not repeat the demonstration; rlsvc's normaliser keeps them",
        )


def _duplicates(table: EpisodeTable, episodes: Sequence[int]) -> Iterator[Finding]:
    seen: dict[bytes, int] = {}
    twice = []
    for place, episode in enumerate(episodes):
        rows = table.episode(place)
        content = b"".join(
            np.ascontiguousarray(rows[key]).tobytes() for key in ("action", "observation.state") if key in rows
        )
        if content and content in seen:
            twice.append(f"{episode} = {seen[content]}")
        seen.setdefault(content, episode)
    if twice:
        yield Finding(
            "warning",
            "same episode twice",
            f"episodes {some(twice)}",
            "equal actions and states",
            "different episodes",
            "a split by episode would put the same data into training and validation; leave one out with `episodes`",
        )


def some(items: Sequence[Any], most: int = 8) -> str:
    """The first few of a list, as text."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item) for item in items[:most]) + more
