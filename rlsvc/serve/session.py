"""What a server keeps of a connection: its version and, for a client that keeps nothing, its episode.

A robot's carry is its observation history, what is left of its chunk, and what its policy hands from one chunk to the
next (a planner's warm start). A client may keep all of it: it then sends windows and gets chunks, with the policy's own
carry as bytes (`rlsvc.serve.carry`), and each request stands alone. Or it sends `"session": true` with the
observation of one control step, and gets one action: the rest is kept here, for as long as the connection lives and
`session_expiry_s` after its last request. The connection holds it to its replica. When either is gone a step above 0 is
refused with 409 and the reason `session`: the robot begins anew with step 0, and never goes on with a wrong carry.

Letters: A action dimensions, T observation steps.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import HTTPConnection

from rlsvc.core.history import ObservationHistory
from rlsvc.core.wire import SESSION_HEADER
from rlsvc.serve.codec import RequestError
from rlsvc.serve.log import IDENTITY
from rlsvc.serve.version import Version


@dataclass
class Episode:
    """An episode under way.

    Attributes:
        seed: of its randomness; another one is another episode.
        history: the last T observations.
        step: that comes next.
        chunk: actions [A] that are left.
        until: `time.monotonic()` up to which they may be executed.
        carry: the policy's, after the last chunk.
        used: `time.monotonic()` of the last request.
    """

    seed: int
    history: ObservationHistory
    step: int = 0
    chunk: deque[np.ndarray] = field(default_factory=deque)
    until: float = 0.0
    carry: Any = None
    used: float = field(default_factory=time.monotonic)

    def went_on(self, history: ObservationHistory) -> np.ndarray:
        """The next action [A]. Only now its observation counts as seen: a request that failed may come again."""
        self.history, self.used = history, time.monotonic()
        self.step += 1
        return self.chunk.popleft()


@dataclass(eq=False)
class Session:
    """One connection.

    Attributes:
        key: by which a canary's share is drawn: the same key is answered by the same version in every replica.
        version: that answers it.
        episode: what is kept of it; None where nothing is.
    """

    key: str
    version: Version
    episode: Episode | None = None

    def expire(self, seconds: float) -> None:
        """Forget an episode of which nothing was heard for so long."""
        if self.episode is not None and time.monotonic() - self.episode.used > seconds:
            self.episode = None

    def episode_for(self, seed: int, step: int, n_obs_steps: int) -> Episode:
        """The episode that a request goes on with; a new one at step 0.

        Raises:
            RequestError: 409, it is not here, or the step is not its next one.
        """
        if step == 0:
            self.episode = Episode(seed, ObservationHistory(n_obs_steps))
        elif self.episode is None or self.episode.seed != seed:
            raise RequestError(
                409,
                "session",
                f"step {step} of an episode that is not kept here: its replica was lost, it expired, or its version "
                "was replaced; begin anew with step 0",
            )
        elif step != self.episode.step:
            raise RequestError(
                409, "session", f"got step {step}, expected {self.episode.step}; send every control step, or begin anew"
            )
        return self.episode


def session_key(connection: HTTPConnection) -> str | None:
    """By which a session's version is drawn: what the client calls it, where that is a name."""
    given = connection.headers.get(SESSION_HEADER, "")
    return given if IDENTITY.fullmatch(given) else None
