"""Arrays that travel between the parts.

Letters: N steps, H action steps, A action dimensions, B batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

MALFORMED = "malformed"
"""Among the extras of a policy that says its actions as tokens, [B] texts: "" for a row whose tokens are actions, else
why they are none. Such a row is NaN, unless the policy has an action that holds the robot still."""


INTERVENTION, COMMANDED = "intervention", "commanded"
"""Columns that rows may have: bool, a person (or a stand-in) acted; [A], what was asked for, by the policy or the
person, where a guard stands before the robot. `action` is what was executed."""
CLASSIFIER = "classifier "
"""What a recorded `reward_source` says of a reward that a classifier gave, before its version."""
REWARD_SOURCE, REWARD_SOURCES = "reward_source", ("environment", "person", "classifier")
"""A column that rows may have, int32, which of these the reward is from; without it, the environment."""


@dataclass(frozen=True)
class ActionChunk:
    """Actions that a policy proposes, to be executed one after the other at the contract's rate.

    Attributes:
        action: [H, A] or, for a batch, [B, H, A] float32, in the contract's units (not normalised).
        version: of the policy that made it (a bundle's id), "" when it has none.
        carry: the policy's state after it, to be given back with the next observation; None when it has none.
        extras: by name [B, ...]: what the policy hands out besides (`behaviour_mean`, ...).
    """

    action: np.ndarray
    version: str = ""
    carry: Any = None
    extras: dict[str, np.ndarray] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of the streams of one rollout worker: what travels from worker to journal and replay.

    A stream is one environment slot of one worker. A row is one step of an episode; an episode of n steps is n + 1
    rows, the last of which (`is_last`) holds only the final observation. Row i of a stream is a real transition where
    it is not `is_last`, row i + 1 exists, and that one is not `is_first`: an episode that was cut, since its simulator
    or worker died, has no last row, and its newest row has no successor.

    Letters: R rows, N streams of the worker, A action dimensions.

    Attributes:
        worker: number of the rollout worker.
        incarnation: how often that worker was started before.
        number: of the chunk, counted by the worker; (worker, incarnation, number) is its id, also when it is resent.
        streams: [N] int32, numbers of the streams in the run.
        offsets: [N + 1] int64; rows offsets[i] .. offsets[i + 1] belong to streams[i], in the order of time.
        columns: by name [R, ...]: the observation's features by their names, `action`, `reward` (float32),
            `terminated`, `truncated`, `is_first`, `is_last` (bool), `episode` (int64, unique in the run), `step`
            (int32, in the episode), `version` (int32, of the weights that acted), and what the policy hands out besides
            (`behaviour_mean` [R, A], ...), and what the environment tells besides (`intervention`, `commanded`). A text
            is [R, 256] uint8 (rlsvc/data/texts.py).
        ended: for each episode that ended in it, in order, by name: `return` (float), `length` (int), `success` (bool).
        lost: episodes that were discarded since their simulator failed.
    """

    worker: int
    incarnation: int
    number: int
    streams: np.ndarray
    offsets: np.ndarray
    columns: dict[str, np.ndarray]
    ended: dict[str, np.ndarray] = field(default_factory=dict)
    lost: int = 0

    @property
    def id(self) -> tuple[int, int, int]:
        """The same for a chunk that is sent again."""
        return self.worker, self.incarnation, self.number

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.offsets[-1])

    @property
    def num_steps(self) -> int:
        """Environment steps in it: rows that are not final observations."""
        return self.num_rows - int(self.columns["is_last"].sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for column in self.columns.values())
