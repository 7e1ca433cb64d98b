"""Requests that come at the same time become one batch, on one thread, so that the event loop stays free.

Handing a row to the thread and its answer back costs 0.1 ms, more than some policies take. One that has been quick for
a while therefore acts on the event loop itself, on what came in one turn of the loop, until a batch of it takes longer.

Letters: T observation steps, B batch, H action steps, A action dimensions.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsvc.core.types import MALFORMED

if TYPE_CHECKING:
    from rlsvc.runner import ServedRunner

QUICK_S = 0.0005
"""Below this a batch is quick: nothing else on the event loop notices that it waited."""
QUICK_BATCHES = 20
"""Batches in a row that have to be quick before the event loop acts."""
WAIT_SHARE, WAIT_SHARE_IN_ALL = 0.2, 0.5
"""Of what a batch took: for so long the next one of those whom it answered is waited for, and all of them."""


class OverloadedError(RuntimeError):
    """More requests wait than the server takes on; the client may try again later."""


@dataclass(frozen=True)
class Answer:
    """One row's action chunk and where its time went.

    Attributes:
        action: [H, A] float32, in the contract's units.
        version: of the policy.
        queue_s: seconds it waited for its batch.
        model_s: seconds the batch took.
        batch_size: rows in the batch.
        malformed: why what the policy said was no action, where it is an action that holds the robot still; else "".
        preprocess_s: seconds before that in which the request was decoded and held against the contract.
        carry: the policy's, of this row alone, on the host; None where it was not asked for.
        expires_in_ms: how long the action may be executed; None for what holds for every chunk.
    """

    action: np.ndarray
    version: str
    queue_s: float
    model_s: float
    batch_size: int
    malformed: str = ""
    preprocess_s: float = 0.0
    carry: Any = None
    expires_in_ms: float | None = None


class NoActionError(RuntimeError):
    """What the policy said is no action, and there is none that holds the robot still.

    Attributes:
        reason: as in `rlsvc.data.fast_tokenizer.MalformedActionError`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the policy's tokens are no actions ({reason}): keep the robot still, and ask again with another seed or "
            "observation; a policy with policy.hold_action answers with that instead"
        )
        self.reason = reason


@dataclass
class _Row:
    observation: dict[str, np.ndarray]
    seed: int
    step: int
    future: asyncio.Future[Answer]
    loop: asyncio.AbstractEventLoop
    carry: Any = None
    keep: bool = False
    since: float = field(default_factory=time.monotonic)


class Batcher:
    """Gathers rows into batches for a runner.

    Rows that came while the model was busy go together at once. Beyond that the first row waits for others, at most
    `wait_s`, and only while fewer have come than there are callers about: those whom the batch before answered, and
    those who waited for its end. Where they all ask again at once they would take turns for ever in two halves, and
    images take their time on a network: so the wait may also last for `WAIT_SHARE` of the batch before, from its end
    and again from each row that comes, for `WAIT_SHARE_IN_ALL` of it at most. One client alone is never made to wait.
    A row's answer does not depend on its batch (the runner's promise).
    """

    def __init__(
        self,
        runner: ServedRunner,
        *,
        max_batch: int = 1,
        wait_s: float = 0.002,
        max_waiting: int = 256,
        quick_s: float = QUICK_S,
    ) -> None:
        """Start the thread.

        Args:
            runner: what acts; called by one thread at a time, this batcher's or the event loop's.
            max_batch: most rows in one call of the runner.
            wait_s: that a row waits for others, as said above; 0 for no waiting at all.
            max_waiting: rows waiting beyond which `act` refuses.
            quick_s: below this a batch is quick, s.
        """
        if max_batch < 1 or wait_s < 0 or max_waiting < 1:
            raise ValueError(f"max_batch {max_batch}, wait_s {wait_s} or max_waiting {max_waiting} is out of range")
        self._runner = runner
        self._max_batch = max_batch
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._quick_s = quick_s
        self._queue: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()
        self._here: list[_Row] = []  # for the event loop's own batch
        self._acting = threading.Lock()
        self._quick = 0  # batches in a row
        self._about = 1  # callers, when the last batch was over
        self._ended, self._took = 0.0, 0.0  # of the last batch
        self._busy_since: float | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rlsvc-policy", daemon=True)
        self._thread.start()

    async def act(
        self, observation: dict[str, np.ndarray], seed: int, step: int, carry: Any = None, *, keep: bool = False
    ) -> Answer:
        """One row's answer.

        Args:
            observation: by key an array [T, ...] that fits the contract.
            seed: of this caller's randomness; the same seed and step give the same answer.
            step: of the caller's episode.
            carry: of the answer before; None begins anew.
            keep: whether the answer is to have its carry.

        Raises:
            OverloadedError: too many rows wait, or the batcher is closed.
            NoActionError: what the policy said for this row is no action.
            Exception: whatever the runner raised for this row.
        """
        if self._closed:
            raise OverloadedError("the policy is shutting down")
        if self._queue.qsize() + len(self._here) >= self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} requests are already waiting for this policy")
        loop = asyncio.get_running_loop()
        row = _Row(observation, seed, step, loop.create_future(), loop, carry, keep)
        if self._quick < QUICK_BATCHES:
            self._queue.put(row)
        else:
            if not self._here:
                loop.call_soon(self._act_here)
            self._here.append(row)
        return await row.future

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def busy_s(self) -> float:
        """Seconds that the batch under way has taken so far, 0 between batches."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout_s: float = 5.0) -> None:
        """Answer what waits, then end the thread; waits at most `timeout_s` for it."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (rows := self._gather()) is not None:
            with self._acting:
                self._act(rows, _deliver)

    def _act_here(self) -> None:
        """On the event loop: what waits there, unless the thread acts now or a batch was not quick."""
        rows, self._here = self._here, []
        while rows and self._quick >= QUICK_BATCHES and self._acting.acquire(blocking=False):
            batch, rows = rows[: self._max_batch], rows[self._max_batch :]
            try:
                self._act(batch, _settle)
            finally:
                self._acting.release()
        for row in rows:
            self._queue.put(row)

    def _gather(self) -> list[_Row] | None:
        first = self._queue.get()
        if first is None:
            return None
        rows = [first]
        took = self._took if self._wait_s else 0.0
        deadline = max(time.monotonic() + self._wait_s, self._ended + WAIT_SHARE * took)
        last = self._ended + WAIT_SHARE_IN_ALL * took
        while len(rows) < self._max_batch:
            remaining = deadline - time.monotonic() if len(rows) < self._about else 0.0
            try:
                row = self._queue.get(timeout=remaining) if remaining > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if row is None:
                self._queue.put(None)  # close: this batch is answered first
                break
            rows.append(row)
            deadline = max(deadline, min(time.monotonic() + WAIT_SHARE * took, last))
        return rows

    def _act(self, rows: list[_Row], deliver: Callable[[_Row, Answer | Exception], None]) -> None:
        # A caller that gave up (closed socket, deadline) costs no work.
        rows = [row for row in rows if not row.future.done()]
        if not rows:
            return
        self._busy_since = start = time.monotonic()
        try:
            answers = self._call(rows, start)
        except Exception as error:
            self._quick = 0
            if len(rows) == 1:
                deliver(rows[0], error)
            else:
                # One row may have brought the whole batch down: the others must not pay for it.
                for row in rows:
                    self._act([row], deliver)
        else:
            ended = time.monotonic()
            self._quick = self._quick + 1 if ended - start < self._quick_s else 0
            # Before those who are answered now ask again.
            self._about = len(rows) + self._queue.qsize()
            self._ended, self._took = ended, ended - start
            for row, answer in zip(rows, answers, strict=True):
                deliver(row, answer)
        finally:
            self._busy_since = None

    def _carry(self, rows: list[_Row]) -> Any:
        """The batch's; None where nobody goes on with one, since then none is copied to the device."""
        if all(row.carry is None for row in rows):
            return None
        import jax

        initial = jax.device_get(self._runner.initial_carry(1))
        carries = [initial if row.carry is None else row.carry for row in rows]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *carries)

    def _call(self, rows: list[_Row], start: float) -> list[Answer | NoActionError]:
        observation = {key: np.stack([row.observation[key] for row in rows]) for key in rows[0].observation}
        seeds = np.array([row.seed for row in rows], np.int64)
        steps = np.array([row.step for row in rows], np.int64)
        chunk = self._runner.act(observation, seeds, steps, self._carry(rows))
        carries = _carries(chunk.carry, rows)
        model_s = time.monotonic() - start
        contract = self._runner.contract
        shape = (len(rows), contract.action_horizon, *contract.action.shape)
        if chunk.action.shape != shape:
            raise RuntimeError(f"the policy returned actions of shape {chunk.action.shape}, its contract says {shape}")
        reasons = [str(reason) for reason in chunk.extras.get(MALFORMED, [""] * len(rows))]
        finite = [bool(np.isfinite(action).all()) for action in chunk.action]
        if any(not ok and not reason for ok, reason in zip(finite, reasons, strict=True)):
            raise RuntimeError("the policy returned actions that are not finite")
        return [
            Answer(chunk.action[i], chunk.version, start - row.since, model_s, len(rows), reasons[i], carry=carries[i])
            if finite[i]
            else NoActionError(reasons[i])
            for i, row in enumerate(rows)
        ]


def _carries(carry: Any, rows: list[_Row]) -> list[Any]:
    """By row its carry, with a leading axis of one; None where it is not to be kept."""
    if not any(row.keep for row in rows):
        return [None] * len(rows)
    import jax

    carry = jax.device_get(carry)
    return [jax.tree.map(lambda x, i=i: x[i : i + 1], carry) if row.keep else None for i, row in enumerate(rows)]


def _deliver(row: _Row, result: Answer | Exception) -> None:
    """From the thread."""
    # The loop may have closed under a request that was under way at shutdown: nobody waits for the answer then.
    with contextlib.suppress(RuntimeError):
        row.loop.call_soon_threadsafe(_settle, row, result)


def _settle(row: _Row, result: Answer | Exception) -> None:
    """On the row's own loop."""
    if row.future.done():
        return
    if isinstance(result, Exception):
        row.future.set_exception(result)
    else:
        row.future.set_result(result)
