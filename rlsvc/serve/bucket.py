"""A token bucket: so many acts a second, and a few at once."""

from __future__ import annotations

import time
from collections.abc import Callable


class TokenBucket:
    """Lets `per_s` acts a second through, and up to `burst` at once after a pause; not to be shared by threads."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin full. `clock` gives seconds that never go back."""
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._tokens, self._at = burst, clock()

    def take(self) -> float:
        """Take a token: 0.0, or where there is none the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._per_s
        self._tokens -= 1.0
        return 0.0
