"""A candidate that sees what the served policy sees, whose actions nobody gets: they are only compared.

The candidate is asked after the answer has gone, with the same observation, seed and step, so that it delays nobody but
by the device that it shares; while it is behind, requests are passed over and counted. What is told by action dimension
is the root mean square of the difference and, to hold it against, the standard deviation of the answers themselves.

Letters: H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsvc.serve.version import Version

if TYPE_CHECKING:
    from rlsvc.core.contract import Contract
    from rlsvc.serve.batcher import Answer

BEHIND = 8
"""Requests that wait for the candidate beyond which more are passed over."""


class Shadow:
    """Comparisons with one candidate.

    Attributes:
        version: the candidate.
        compared, skipped, failed: how many requests were compared, passed over, and ended in an error of the candidate.
    """

    def __init__(self, version: Version, contract: Contract) -> None:
        """Begin with none."""
        self.version = version
        self.compared = self.skipped = self.failed = 0
        count = int(np.prod(contract.action.shape))
        names = contract.action.names
        self._names = names if len(names) == count else tuple(str(i) for i in range(count))
        # By dimension, over all actions of all chunks: squared differences, and the answers' sum and squares.
        self._squares, self._sum, self._sum_squares = np.zeros(count), np.zeros(count), np.zeros(count)
        self._actions = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, observation: dict[str, np.ndarray], seed: int, step: int, answer: Answer) -> None:
        """Compare an answer, later; `observation` is not changed after this."""
        if self.version.under_way >= BEHIND:
            self.skipped += 1
            return
        task = asyncio.get_running_loop().create_task(self._compare(observation, seed, step, answer.action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self, observation: dict[str, np.ndarray], seed: int, step: int, action: np.ndarray) -> None:
        try:
            own = (await self.version.ask(observation, seed, step)).action
        except Exception:  # whatever the candidate does must not be seen by who was answered; it is counted
            self.failed += 1
            return
        given = action.reshape(len(action), -1).astype(np.float64)
        self.compared += 1
        self._actions += len(given)
        self._squares += ((own.reshape(given.shape) - given) ** 2).sum(0)
        self._sum += given.sum(0)
        self._sum_squares += (given**2).sum(0)

    async def finish(self) -> None:
        """Wait for the comparisons under way."""
        while self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks)

    def differences(self) -> dict[str, dict[str, float]]:
        """By dimension, in the contract's units: `rms_difference`, and `std` of the answers."""
        count = max(1, self._actions)
        rms = np.sqrt(self._squares / count)
        std = np.sqrt(np.maximum(0.0, self._sum_squares / count - (self._sum / count) ** 2))
        return {
            name: {"rms_difference": float(a), "std": float(b)}
            for name, a, b in zip(self._names, rms, std, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        """What is told of it: plain JSON types."""
        counts = {"compared": self.compared, "skipped": self.skipped, "failed": self.failed}
        return {"version": self.version.id, **counts, "action": self.differences()}
