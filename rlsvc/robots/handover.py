"""From chunks of actions to one command a tick, while the next chunk is being made.

A chunk answers the observation of one tick: its first action is for that tick, the next for the one after. When it
arrives, some ticks later, those of its actions are used whose time has not passed. Where it overlaps the chunk under
way, the two are blended: the new one's share grows along the overlap, so that the command does not jump.

Modes: `sync` waits for a chunk when the last one is used up; `async` asks ahead and blends. Real-time chunking is the
policy's own (`policy.real_time`): it makes the new chunk go on from the old one, so `async` need not blend it.

Letters: H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlsvc.core.errors import UserError

Ask = Callable[[Any, int], np.ndarray]
"""Observation and tick to a chunk [H, A]; may take long."""


@dataclass(frozen=True)
class Planned:
    """One command of a plan.

    Attributes:
        action: [A] float32.
        answers: when the observation was captured that the newest chunk in it answers, s.
    """

    action: np.ndarray
    answers: float


class Plan:
    """Commands of the ticks ahead."""

    def __init__(self, blend: bool) -> None:
        """`blend`: whether overlaps are blended; else the newest chunk counts."""
        self._blend = blend
        self._first = 0
        self._actions = np.zeros((0, 0), np.float32)
        self._answers = 0.0

    def put(self, chunk: np.ndarray, tick: int, answers: float, now: int) -> int:
        """Take in a chunk.

        Args:
            chunk: [H, A] float32.
            tick: of the observation that it answers.
            answers: when that was captured, s.
            now: the next tick that will be commanded.

        Returns:
            Actions of it that can still be used.
        """
        new = chunk[max(0, now - tick) :]
        old = self._actions[max(0, now - self._first) :]
        overlap = min(len(new), len(old)) if self._blend else 0
        if overlap:
            share = (np.arange(1, overlap + 1, dtype=np.float32) / (overlap + 1))[:, None]
            new = np.concatenate([old[:overlap] * (1 - share) + new[:overlap] * share, new[overlap:]])
        if not len(new):
            return 0
        self._first, self._actions, self._answers = now, new.astype(np.float32), answers
        return len(new)

    def at(self, tick: int) -> Planned | None:
        """The command of a tick, None when the plan has none."""
        i = tick - self._first
        if not 0 <= i < len(self._actions):
            return None
        return Planned(self._actions[i], self._answers)

    def left(self, tick: int) -> int:
        """Commands from this tick on."""
        return max(0, self._first + len(self._actions) - tick)

    def clear(self) -> None:
        """Forget them."""
        self._actions = self._actions[:0]


class Handover:
    """Asks a policy for chunks, in a thread of its own when it asks ahead.

    Consumes observations, produces at most one command a tick; in mode async it waits for nobody: a tick for which no
    chunk has come has no command, and the robot's watchdog stops the arm when that lasts. An error of the policy is
    raised at the next tick.
    """

    def __init__(
        self,
        ask: Ask,
        mode: Literal["sync", "async"] = "async",
        *,
        execute: int,
        ahead: int | None = None,
        blend: bool = True,
    ) -> None:
        """Nothing is planned yet.

        Args:
            ask: the policy.
            mode: see the module.
            execute: actions of each chunk after which the next one is asked for.
            ahead: async: asks when so many actions are left before `execute` is reached; None asks as soon as a chunk
                has come.
            blend: async: blend overlaps.

        Raises:
            UserError: numbers that do not fit.
        """
        if execute < 1 or (ahead is not None and not 0 <= ahead <= execute):
            raise UserError(f"execute, ahead: got {execute} and {ahead}, expected execute >= 1 and ahead within it")
        self._ask, self._mode, self._execute = ask, mode, execute
        self._wait = 0 if ahead is None else execute - ahead
        self._plan = Plan(blend and mode == "async")
        self._arrived: tuple[np.ndarray | BaseException, int, float] | None = None
        self._thread: threading.Thread | None = None
        self._asking = threading.Lock()
        self._next_ask = 0
        self._episode = 0
        self.chunks, self.empty = 0, 0

    def command(self, observation: Any, captured: float, tick: int) -> Planned | None:
        """The command of this tick, None when there is none yet.

        Args:
            observation: of this tick, for the policy.
            captured: when it was, s.
            tick: number; grows by 1 or, where the loop was late, by more.

        Raises:
            Exception: what the policy raised.
        """
        if self._mode == "sync":
            if tick >= self._next_ask or self._plan.at(tick) is None:
                self._plan.put(self._ask(observation, tick), tick, captured, tick)
                self._next_ask, self.chunks = tick + self._execute, self.chunks + 1
        else:
            self._take(tick)
            if self._thread is None and tick >= self._next_ask:
                self._begin(observation, captured, tick)
        planned = self._plan.at(tick)
        if planned is None:
            self.empty += 1
        return planned

    def reset(self) -> None:
        """Another episode begins, or somebody else took over: what was planned, or is being made, counts no more."""
        self._plan.clear()
        self._episode += 1
        self._arrived, self._thread, self._next_ask = None, None, 0

    def _begin(self, observation: Any, captured: float, tick: int) -> None:
        episode = self._episode

        def run() -> None:
            try:
                with self._asking:  # one of an episode before may still be under way
                    answer: np.ndarray | BaseException = self._ask(observation, tick)
            except BaseException as error:
                answer = error
            if episode == self._episode:
                self._arrived = (answer, tick, captured)

        self._thread = threading.Thread(target=run, name="policy", daemon=True)
        self._thread.start()

    def _take(self, now: int) -> None:
        arrived = self._arrived
        if arrived is None:
            return
        self._arrived, self._thread = None, None
        answer, tick, captured = arrived
        if isinstance(answer, BaseException):
            raise answer
        self._plan.put(answer, tick, captured, now)
        self._next_ask, self.chunks = tick + self._wait, self.chunks + 1
