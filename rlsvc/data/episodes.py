"""Whole episodes put together from the chunks of rollouts, and windows over them beside those of demonstrations.

Both are memory alone: filled again with the same chunks from the journal, they are the same ones.

Letters: S streams, N rows of demonstrations and episodes together, W windows, n steps of an episode, D datasets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import Chunk
from rlsvc.data.windows import Windows

Episode = dict[str, np.ndarray]
"""Columns of one episode by name, [n + 1, ...]; the last row holds the final observation alone."""


class EpisodeAssembler:
    """Puts the rows of each stream together until an episode is whole."""

    def __init__(self) -> None:
        self._open: dict[int, list[Episode]] = {}

    def add(self, chunk: Chunk) -> list[Episode]:
        """The episodes that end in a chunk, by stream and in the order of time.

        An episode that was cut (its simulator or worker died), or of which a chunk is missing, is never given.
        """
        out = []
        for i, stream in enumerate(chunk.streams.tolist()):
            first, end = int(chunk.offsets[i]), int(chunk.offsets[i + 1])
            begins = first + np.flatnonzero(chunk.columns["is_first"][first:end])
            cuts = sorted({first, *begins.tolist(), end})
            for a, b in pairwise(cuts):
                piece = {name: column[a:b] for name, column in chunk.columns.items()}
                if not self._take(stream, piece):
                    continue
                if piece["is_last"][-1]:
                    parts = self._open.pop(stream)
                    out.append({name: np.concatenate([part[name] for part in parts]) for name in piece})
        return out

    def _take(self, stream: int, piece: Episode) -> bool:
        """Whether the piece goes on with what the stream has, or begins an episode."""
        if piece["is_first"][0]:
            self._open[stream] = [piece]
            return True
        before = self._open.get(stream)
        if before is None:
            return False
        last = before[-1]
        if last["episode"][-1] != piece["episode"][0] or last["step"][-1] + 1 != piece["step"][0]:
            del self._open[stream]
            return False
        before.append(piece)
        return True


class GrowingWindows:
    """Windows of demonstrations, and of episodes that are added one after the other; in host memory.

    All rows lie in the same arrays, which grow by doubling, so that a batch is gathered from both at once and nothing
    is compiled anew when episodes come. Where the capacity is reached the oldest episodes make room.

    Attributes:
        num_episodes: that are held now.
        num_steps: rows of them.
    """

    def __init__(self, demonstrations: Windows, capacity: int, group: int) -> None:
        """Begin with the demonstrations alone.

        Args:
            demonstrations: in host memory.
            capacity: rows of episodes that are kept.
            group: normaliser group of the episodes.
        """
        assert demonstrations.on_host
        self._demonstrations, self._capacity, self._group = demonstrations, capacity, group
        self._base = len(demonstrations.columns[demonstrations.action])
        self._columns = dict(demonstrations.columns)
        self._lengths: deque[int] = deque()
        self.num_episodes, self.num_steps = 0, 0

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add an episode: what the windows' columns hold, [n, ...].

        Raises:
            DatasetError: a column that is missing or does not fit, or an episode that is longer than the capacity.
        """
        for name, column in self._columns.items():
            if name not in columns or columns[name].shape[1:] != column.shape[1:]:
                got = f"shape {list(columns[name].shape[1:])}" if name in columns else "nothing"
                raise DatasetError(
                    f"episode: '{name}': got {got}, expected shape {list(column.shape[1:])}, which the demonstrations "
                    "have"
                )
        count = len(next(iter(columns.values())))
        if count > self._capacity:
            raise DatasetError(f"replay.capacity: {self._capacity} rows do not hold an episode of {count} steps")
        self._make_room(count)
        start = self._base + self.num_steps
        for name, column in self._columns.items():
            if len(column) < start + count:
                size = self._base + min(max(2 * self.num_steps, 1024, self.num_steps + count), self._capacity)
                grown = np.empty((size, *column.shape[1:]), column.dtype)
                grown[:start] = column[:start]
                self._columns[name] = grown
            self._columns[name][start : start + count] = columns[name]
        self._lengths.append(count)
        self.num_episodes, self.num_steps = self.num_episodes + 1, self.num_steps + count

    def view(self, share: float) -> Windows:
        """What updates draw from; good until the next `add`.

        Args:
            share: of a batch, on average, that comes from episodes; the rest comes from demonstrations, by the shares
                of their datasets. Without episodes all comes from demonstrations.
        """
        old = self._demonstrations
        if not self._lengths or share <= 0:
            return old
        lengths = np.asarray(self._lengths)
        ends = self._base + np.cumsum(lengths)
        parts = {
            "anchor": np.arange(self._base, self._base + self.num_steps),
            "start": np.repeat(ends - lengths, lengths),
            "end": np.repeat(ends, lengths),
            "group": np.full(self.num_steps, self._group),
        }
        rows = {name: np.concatenate([getattr(old, name), part.astype(np.int32)]) for name, part in parts.items()}
        return replace(
            old,
            columns=self._columns,
            offset=np.append(old.offset, np.int32(len(rows["anchor"]))).astype(np.int32),
            weight=np.append(old.weight * np.float32(1 - share), np.float32(share)).astype(np.float32),
            **rows,
        )

    def _make_room(self, count: int) -> None:
        dropped = 0
        while self.num_steps - dropped + count > self._capacity:
            dropped += self._lengths.popleft()
            self.num_episodes -= 1
        if not dropped:
            return
        kept = self.num_steps - dropped
        for name, column in self._columns.items():
            self._columns[name][self._base : self._base + kept] = column[
                self._base + dropped : self._base + self.num_steps
            ].copy()
        self.num_steps = kept
