"""One loaded version of a served policy: a runner behind its batcher, and who keeps to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlsvc.serve.batcher import Answer, Batcher
from rlsvc.serve.distribution import Distribution
from rlsvc.serve.settings import ServeSettings

if TYPE_CHECKING:
    import numpy as np

    from rlsvc.runner import ServedRunner

CURRENT, CANARY, SHADOW, DRAINING = ROLES = ("current", "canary", "shadow", "draining")
"""What a version may be: it takes new sessions, it takes a share of them, it is only compared, it takes no more."""


class Version:
    """A runner behind a batcher.

    Attributes:
        runner: what acts; loaded and warm.
        distribution: how what it was asked compares with its training data; None where nothing is known of that.
        sessions: how many keep to it.
        under_way: requests that it has not answered yet.
        answered: how many requests.
        retired: `time.monotonic()` when it stopped taking new sessions; None while it takes them.
    """

    def __init__(self, runner: ServedRunner, settings: ServeSettings) -> None:
        """Start its thread."""
        self.runner = runner
        self.distribution = Distribution.of(runner)
        self.sessions = self.under_way = self.answered = 0
        self.retired: float | None = None
        self._batcher = Batcher(
            runner, max_batch=settings.max_batch, wait_s=settings.batch_wait_s, max_waiting=settings.max_waiting
        )

    @property
    def id(self) -> str:
        """The bundle's."""
        return self.runner.version

    @property
    def idle(self) -> bool:
        """Whether nobody keeps to it and nothing is asked of it."""
        return not (self.sessions or self.under_way)

    def healthy(self, stuck_s: float) -> bool:
        """Whether its thread lives and has not been in one batch for `stuck_s`."""
        return self._batcher.alive and self._batcher.busy_s() < stuck_s

    async def ask(
        self, observation: dict[str, np.ndarray], seed: int, step: int, carry: Any = None, *, keep: bool = False
    ) -> Answer:
        """See `Batcher.act`."""
        self.under_way += 1
        try:
            answer = await self._batcher.act(observation, seed, step, carry, keep=keep)
        finally:
            self.under_way -= 1
        self.answered += 1
        return answer

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits and end the thread; waits at most `timeout_s` for it."""
        self._batcher.close(timeout_s)
