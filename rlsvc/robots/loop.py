"""A fixed rate on a monotonic clock, and how well it is kept.

Letters: N ticks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from rlsvc.robots.api import ConnectionLost

WINDOW = 20_000
"""Newest ticks that percentiles are of: eleven minutes at 30 Hz."""


class Pacer:
    """Waits from tick to tick.

    Ticks lie a period apart from the first on, so that lateness does not add up. Who comes too late for a tick skips
    it: missed ticks are counted as overruns, never caught up with, since two commands in a row would be one jump.

    Attributes:
        tick: number of the present one.
        overruns: ticks that were missed so far.
    """

    def __init__(
        self,
        rate_hz: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Ticks begin with the first `wait`.

        Args:
            rate_hz: ticks a second.
            clock: monotonic, s.
            sleep: takes s.
        """
        self.period, self._clock, self._sleep = 1.0 / rate_hz, clock, sleep
        self.tick, self.overruns = 0, 0
        self._begin: float | None = None
        self._late: deque[float] = deque(maxlen=WINDOW)
        self._busy: deque[float] = deque(maxlen=WINDOW)
        self._woke = 0.0

    def restart(self) -> None:
        """Begin anew with the next `wait`, after a pause that is nobody's fault; what was measured stays."""
        self._begin = None

    def wait(self) -> float:
        """Wait for the next tick; when it began, s, on the clock."""
        now = self._clock()
        if self._begin is None:
            self._begin, self.tick, self._woke = now, 0, now
            return now
        self._busy.append(now - self._woke)
        due = self.tick + 1
        missed = int((now - self._begin) / self.period) - self.tick
        if missed > 0:  # the next one has begun already
            self.overruns += missed
            due += missed
        self.tick = due
        at = self._begin + due * self.period
        while (left := at - self._clock()) > 0:
            self._sleep(left)
        self._woke = self._clock()
        self._late.append(self._woke - at)
        return at

    def metrics(self) -> dict[str, float]:
        """Overruns; of the newest ticks, lateness (jitter) and time in use, ms, by name."""
        out = {"overruns": float(self.overruns)}
        for name, values in (("jitter", self._late), ("busy", self._busy)):
            out |= percentiles_ms(name, values)
        return out


class Skew:
    """How old camera frames are when joints are read; frames that are too old end the episode."""

    def __init__(self, bound_s: float) -> None:
        """`bound_s`: largest age that is allowed, s."""
        self.bound_s = bound_s
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def check(self, stamps: Mapping[str, float], of: str = "observation.state") -> None:
        """Measure one reading.

        Args:
            stamps: capture times by name, s, on one clock.
            of: what the others are compared with.

        Raises:
            ConnectionLost: a capture is farther away in time than the bound; names it.
        """
        for name, stamp in stamps.items():
            if name == of:
                continue
            apart = abs(stamps[of] - stamp)
            self._seen.append(apart)
            if not apart <= self.bound_s:
                raise ConnectionLost(f"'{name}' was captured {apart:.3f} s from '{of}', at most {self.bound_s:g} s")

    def metrics(self) -> dict[str, float]:
        """Of the newest readings, ms, by name."""
        return percentiles_ms("skew", self._seen)


def percentiles_ms(name: str, values: deque[float]) -> dict[str, float]:
    """p50, p99 and the largest, in ms; empty when there are none."""
    if not values:
        return {}
    p50, p99, most = np.percentile(np.asarray(values), [50, 99, 100]) * 1e3
    return {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99), f"{name}_max_ms": float(most)}
