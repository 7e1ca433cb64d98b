"""Rollouts made by hand: every number of a row tells which step of which episode it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.types import Chunk

SCHEMA = {"observation.state": Feature((2,), "float32"), "action": Feature((1,), "float32")}


@dataclass(frozen=True)
class Row:
    """Its state is (100 * episode + step, 0), its action and reward the same number plus 0.25 and 0.5."""

    episode: int
    step: int
    is_last: bool = False
    terminated: bool = False

    @property
    def value(self) -> int:
        return 100 * self.episode + self.step


def episode(number: int, steps: int, *, terminated: bool = False, cut: bool = False) -> list[Row]:
    """The rows of an episode of so many steps; `cut`: its simulator died, there is no final observation."""
    rows = [Row(number, step, terminated=terminated and step == steps - 1) for step in range(steps)]
    return rows if cut else [*rows, Row(number, steps, is_last=True)]


def make_chunk(number: int, rows: dict[int, list[Row]], worker: int = 0) -> Chunk:
    """Rows by stream."""
    flat = [row for part in rows.values() for row in part]
    value = np.array([row.value for row in flat], np.float32)
    is_last = np.array([row.is_last for row in flat], bool)
    columns = {
        "observation.state": np.stack([value, np.zeros_like(value)], 1).reshape(-1, 2),
        "action": np.where(is_last, 0, value + 0.25)[:, None].astype(np.float32),
        "reward": np.where(is_last, 0, value + 0.5).astype(np.float32),
        "terminated": np.array([row.terminated for row in flat], bool),
        "truncated": np.zeros(len(flat), bool),
        "is_first": np.array([row.step == 0 for row in flat], bool),
        "is_last": is_last,
        "episode": np.array([row.episode for row in flat], np.int64),
        "step": np.array([row.step for row in flat], np.int32),
        "version": np.zeros(len(flat), np.int32),
    }
    offsets = np.cumsum([0, *(len(part) for part in rows.values())], dtype=np.int64)
    return Chunk(worker, 0, number, np.array(list(rows), np.int32), offsets, columns)
