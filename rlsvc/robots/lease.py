"""Who may command a robot: one policy, or one person, at a time.

A person takes over from a policy at any moment; a policy never from a person, and a person only from one who handed
back. Each grant has a token of its own, so that commands which are still under way when the lease changes are refused.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rlsvc.core.errors import BusyError


@dataclass(frozen=True)
class Grant:
    """The right to command.

    Attributes:
        token: larger than that of every grant before it.
        holder: a person's name, or the version of a policy.
        is_person: whether a person holds it.
    """

    token: int
    holder: str
    is_person: bool


class Lease:
    """Grants the right to command one robot; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grant: Grant | None = None
        self._count = 0

    @property
    def grant(self) -> Grant | None:
        """The one that is in force."""
        return self._grant

    def take(self, holder: str, *, is_person: bool) -> Grant:
        """The right to command, taken from a policy that has it.

        Raises:
            BusyError: a person has it, and is another one.
        """
        with self._lock:
            now = self._grant
            if now is not None and now.is_person and now.holder != holder:
                raise BusyError(f"{now.holder} commands the robot; {holder} can take over when it is handed back")
            if now is not None and now.holder == holder and now.is_person == is_person:
                return now
            self._count += 1
            self._grant = Grant(self._count, holder, is_person)
            return self._grant

    def give_back(self, grant: Grant) -> None:
        """End a grant; one that is no longer in force changes nothing."""
        with self._lock:
            if self._grant == grant:
                self._grant = None

    def holds(self, token: int) -> bool:
        """Whether this grant's token is the one in force."""
        grant = self._grant
        return grant is not None and grant.token == token
