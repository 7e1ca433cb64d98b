"""Whether a LeRobot dataset's own statistics are those of its data. rlsvc never trains on them; others may."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.check import Finding, some
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_meta import BOOKKEEPING, read_json, read_json_lines

MOMENTS = {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}
QUANTILES = ("q01", "q99")
NOT_USED = "rlsvc computes its own and does not read these"


def check_stats(source: LeRobotSource, table: EpisodeTable, episodes: Sequence[int]) -> Iterator[Finding]:
    """Findings about meta/stats.json (v3.0, v2.0) or meta/episodes_stats.jsonl (v2.1)."""
    meta = source.meta
    name = "episodes_stats.jsonl" if meta.version == "v2.1" else "stats.json"
    path = meta.root / "meta" / name
    where = f"meta/{name}"
    if not path.exists():
        yield Finding("warning", "statistics", where, "no file", "statistics of every feature", NOT_USED)
        return
    # By episode, or under None for the whole dataset.
    stats: dict[int | None, dict[str, Any]] = {}
    try:
        if meta.version == "v2.1":
            stats |= {int(row["episode_index"]): row["stats"] for row in read_json_lines(path)}
        else:
            stats[None] = read_json(path)
        if not all(isinstance(feature, dict) for named in stats.values() for feature in named.values()):
            raise TypeError("expected statistics by feature name")
    except (DatasetError, KeyError, TypeError, AttributeError) as error:
        yield Finding("warning", "statistics", where, f"not readable: {error}", "statistics of every feature", NOT_USED)
        return
    yield from _keys(source, where, stats)
    whole = len(episodes) == len(meta.episodes)
    if None in stats and not whole:
        return
    rows: dict[int | None, dict[str, np.ndarray]] = {None: table.columns}
    if None not in stats:
        rows = {e: table.episode(i) for i, e in enumerate(episodes)}
    lacking = [episode for episode in rows if episode not in stats]
    if lacking:
        yield Finding("warning", "statistics", where, f"no episodes {some(lacking)}", "every episode", NOT_USED)
    for key in table.columns:
        yield from _values(
            where, key, [(stats[e].get(key), columns[key], e) for e, columns in rows.items() if e in stats]
        )


def _keys(source: LeRobotSource, where: str, stats: Mapping[int | None, Mapping[str, Any]]) -> Iterator[Finding]:
    features = {key for key in source.meta.declared if key not in BOOKKEEPING and key in source.features}
    features -= {key for key in features if source.features[key].dtype == "str"}
    named = set().union(*stats.values())
    missing, extra = sorted(features - named), sorted(named - set(source.meta.declared))
    if missing:
        yield Finding(
            "warning", "statistics", where, f"nothing for {some(missing)}", "statistics of every feature", NOT_USED
        )
    if extra:
        yield Finding(
            "warning",
            "statistics",
            where,
            f"for {some(extra)}, which are not features",
            some(sorted(features)),
            NOT_USED,
        )
    without = sorted(
        key for key in features & named if any(q not in s.get(key, {}) for s in stats.values() for q in QUANTILES)
    )
    if without:
        yield Finding(
            "note",
            "statistics",
            where,
            f"no quantiles (q01, q99) for {some(without)}",
            "q01 and q99 for quantile normalisation",
            NOT_USED,
        )


def _values(where: str, key: str, parts: list[tuple[Any, np.ndarray, int | None]]) -> Iterator[Finding]:
    """Compare moments with the data's, to a thousandth of the range."""
    wrong: dict[str, list[int | None]] = {}
    worst = (0.0, "")
    for stats, column, episode in parts:
        if stats is None or column.dtype.kind not in "fiub" or not np.isfinite(column).all():
            continue
        values = column.astype(np.float64)
        scale = np.ptp(values, axis=0)
        for name, moment in MOMENTS.items():
            if name not in stats:
                continue
            real = moment(values, axis=0)
            try:
                got = np.asarray(stats[name], np.float64)
            except (ValueError, TypeError):
                yield Finding(
                    "warning", "statistics", where, f"'{name}' of '{key}' is no array", str(real.shape), NOT_USED
                )
                return
            if got.shape != real.shape:
                yield Finding(
                    "warning",
                    "statistics",
                    where,
                    f"'{name}' of '{key}' has shape {got.shape}",
                    str(real.shape),
                    NOT_USED,
                )
                return
            # In units of what is tolerated: others compute in float32.
            error = np.abs(got - real) / (1e-3 * scale + 1e-5 * np.abs(real) + 1e-6)
            if (error > 1).any():
                wrong.setdefault(name, []).append(episode)
                i = int(error.argmax())
                if error.max() > worst[0]:
                    worst = (
                        float(error.max()),
                        f"{name} of element {i}: {got.flat[i]:.6g} where the data has {real.flat[i]:.6g}",
                    )
    if wrong:
        where_wrong = (
            ""
            if None in next(iter(wrong.values()))
            else f" in {len(set().union(*wrong.values()))} of {len(parts)} episodes"
        )
        yield Finding(
            "warning",
            "statistics",
            f"{where} '{key}'",
            f"{', '.join(wrong)} are not the data's{where_wrong}; worst {worst[1]}",
            "statistics of this data",
            NOT_USED,
        )
