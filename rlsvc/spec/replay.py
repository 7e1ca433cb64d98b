"""Replay of rollouts: how many rows it holds, where they lie, and how starts are drawn (rlsvc/data/replay.py)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rlsvc.core.errors import SpecError
from rlsvc.spec.base import Spec

MAX_CAPACITY = 2**31 - 1
MARGIN = 2
"""Rows that a stream holds besides a sequence's steps: its final observation, and the row being written."""


class PrioritySpec(Spec):
    """Prioritised replay (arXiv:1511.05952): a transition is drawn in proportion to (priority + epsilon) ** alpha."""

    alpha: float = Field(default=0.6, ge=0, le=1)
    """0 draws uniformly, 1 in proportion to the priority."""
    beta: float = Field(default=0.4, ge=0, le=1)
    """Exponent of the importance weights; 1 corrects the whole bias."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to every priority, so that no transition is never drawn again."""


class ReplaySpec(Spec):
    """A ring of the newest rows of every stream (a stream is one environment slot of one rollout worker)."""

    capacity: int = Field(default=1_000_000, ge=1, le=MAX_CAPACITY)
    """Rows of all streams together; each gets an equal share. An episode of n steps is n + 1 rows."""
    placement: Literal["auto", "device", "host", "disk"] = "auto"
    """device samples inside the compiled update; host and disk (memory-mapped files) sample in numpy. auto takes the
    device when the ring fills no more than half of its memory, else the host."""
    priority: PrioritySpec | None = None
    """null draws every transition equally often."""

    @model_validator(mode="after")
    def _one_row(self) -> Self:
        if self.capacity <= MARGIN:
            raise ValueError(f"capacity: got {self.capacity} rows, expected {MARGIN + 1} or more")
        return self

    def rows_per_stream(self, streams: int) -> int:
        """C, the rows that one of so many streams keeps."""
        return self.capacity // streams

    def check(self, streams: int, length: int = 1) -> None:
        """Refuse a ring in which a sequence of `length` steps does not fit.

        Raises:
            SpecError: says what capacity would do.
        """
        rows = self.rows_per_stream(streams)
        if rows < length + MARGIN:
            raise SpecError(
                f"replay.capacity: {self.capacity} rows over {streams} streams leave {rows} rows to each, but "
                f"sequences of {length} steps need {length + MARGIN}. Set replay.capacity to "
                f"{streams * (length + MARGIN)} or more, or use fewer environments or shorter sequences."
            )
