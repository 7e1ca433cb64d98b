"""Which rows of a replay are where, and which of them are real transitions: its part that is always on the host.

Rows of a stream fill a ring of C slots. A second ring, `starts`, holds the positions of the real transitions among them
in the order of time: one is appended when its successor row arrives, and the oldest leave when their rows are
overwritten. The two never need a search, and drawing from `starts` is uniform over transitions.

Letters: S streams, C rows of a stream, R rows that are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Change:
    """Where the rows of a piece go, and which transitions that begins.

    Attributes:
        slot, position: [R]; of each new row.
        begun_slot, begun: where a row became a real transition, since its successor arrived.
        entry: likewise, its place in the ring of starts.
    """

    slot: np.ndarray
    position: np.ndarray
    begun_slot: np.ndarray
    begun: np.ndarray
    entry: np.ndarray


class Ring:
    """Which rows are where, and which of them are real transitions: the part of a replay that is always on the host.

    `real`, `starts`, `first` and `count` are those of `ReplayView`.
    """

    def __init__(self, streams: int, rows: int) -> None:
        self.streams, self.rows = streams, rows
        self.head = np.zeros(streams, np.int32)  # where the next row goes
        self.size = np.zeros(streams, np.int32)
        self.real = np.zeros((streams, rows), bool)
        self.starts = np.zeros((streams, rows), np.int32)
        self.first = np.zeros(streams, np.int32)
        self.count = np.zeros(streams, np.int32)
        self.opens = np.zeros((streams, rows), bool)  # rows that begin an episode
        self.last_step = np.zeros(streams, np.int64)  # of the newest row, as are the two below
        self.last_episode = np.zeros(streams, np.int64)
        self.ended = np.ones(streams, bool)

    @property
    def num_episodes(self) -> int:
        """Episodes of which at least one row is stored."""
        tail = (self.head - self.size) % self.rows
        cut = (self.size > 0) & ~self.opens[np.arange(self.streams), tail]
        return int(self.opens.sum() + cut.sum())

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All that two equal rings have in common."""
        places = self.head, self.size, self.first, self.count, self.ended, self.last_step, self.last_episode
        return (*places, self.real, self.opens, self.starts)

    def add(self, slot: np.ndarray, columns: Mapping[str, np.ndarray]) -> Change:
        """Take in rows (at most C - 1 of a stream, each stream's in a row, in the order of time)."""
        new = np.bincount(slot, minlength=self.streams)
        begins = np.flatnonzero(np.diff(slot, prepend=-1))  # of each stream's rows among all
        rank = np.arange(len(slot)) - np.repeat(begins, new[slot[begins]])
        position = (self.head[slot] + rank) % self.rows

        # The rows before the new ones: within the piece, or the newest one of the stream.
        is_begin = rank == 0
        episode, step, is_last = columns["episode"], columns["step"], columns["is_last"]
        before_episode = np.where(is_begin, self.last_episode[slot], np.roll(episode, 1))
        before_step = np.where(is_begin, self.last_step[slot], np.roll(step, 1))
        before_ended = np.where(is_begin, self.ended[slot], np.roll(is_last, 1))
        # A row that does not follow the one before it (one between them was lost) makes no transition of it.
        follows = (episode == before_episode) & (step == before_step + 1)
        link = ~columns["is_first"] & ~before_ended & follows
        begun_slot, begun = slot[link], (position[link] - 1) % self.rows

        # What the new rows overwrite is the oldest, so its transitions are the oldest entries of `starts`.
        lost = np.bincount(slot[self.real[slot, position]], minlength=self.streams)
        self.first[:] = (self.first + lost) % self.rows
        self.count -= lost.astype(np.int32)
        self.real[slot, position] = False
        self.real[begun_slot, begun] = True
        linked_before = np.cumsum(link) - link
        order = linked_before[link] - np.repeat(linked_before[begins], new[slot[begins]])[link]
        entry = (self.first[begun_slot] + self.count[begun_slot] + order) % self.rows
        self.starts[begun_slot, entry] = begun
        self.count += np.bincount(begun_slot, minlength=self.streams).astype(np.int32)

        self.opens[slot, position] = columns["is_first"]
        ends, touched = begins + new[slot[begins]] - 1, slot[begins]
        self.last_episode[touched], self.last_step[touched] = episode[ends], step[ends]
        self.ended[touched] = is_last[ends]
        self.head[:] = (self.head + new) % self.rows
        self.size[:] = np.minimum(self.size + new, self.rows)
        return Change(slot, position, begun_slot, begun, entry)
