"""Arrays that travel between the parts.

Letters: N steps, H action steps, A action dimensions, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ActionChunk:
    """Actions that a policy proposes, to be executed one after the other at the contract's rate.

    Attributes:
        action: [H, A] or, for a batch, [B, H, A] float32, in the contract's units (not normalised).
        version: of the policy that made it (a bundle's id), "" when it has none.
    """

    action: np.ndarray
    version: str = ""


@dataclass
class EpisodeTable:
    """Episodes in memory, one after the other: the form that every dataset reader gives and every sampler takes.

    Attributes:
        columns: by feature name an array [N, ...], N steps of all episodes in order. Images are uint8 (H, W, C).
        episode_ends: [E] int64, exclusive end of each episode in N.
        fps: steps a second.
        task: [N] int32 index into `tasks`.
        tasks: the prompts.
        source: where it came from, for messages.
        names: by feature name the names of a vector's elements, where known.
        units: by feature name the unit, where known.
    """

    columns: dict[str, np.ndarray]
    episode_ends: np.ndarray
    fps: float
    task: np.ndarray
    tasks: list[str]
    source: str = ""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """N."""
        return int(self.episode_ends[-1]) if len(self.episode_ends) else 0

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.episode_ends)

    @property
    def episode_starts(self) -> np.ndarray:
        """[E] int64, inclusive start of each episode."""
        return np.concatenate([np.zeros(1, np.int64), self.episode_ends[:-1]])

    def episode(self, index: int) -> dict[str, Any]:
        """The columns of one episode: by feature name an array [length, ...] (a view)."""
        start, end = int(self.episode_starts[index]), int(self.episode_ends[index])
        return {key: column[start:end] for key, column in self.columns.items()}

    def select(self, episodes: np.ndarray | list[int]) -> EpisodeTable:
        """A table of these episodes alone, in this order (copies)."""
        starts = self.episode_starts
        rows = [np.arange(starts[e], self.episode_ends[e]) for e in episodes]
        index = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        return EpisodeTable(
            columns={key: column[index] for key, column in self.columns.items()},
            episode_ends=np.cumsum([len(r) for r in rows], dtype=np.int64),
            fps=self.fps,
            task=self.task[index],
            tasks=self.tasks,
            source=self.source,
            names=self.names,
            units=self.units,
        )
