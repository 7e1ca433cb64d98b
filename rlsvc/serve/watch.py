"""Versions of a policy that change while it is served: what an alias means is looked up again and again.

In each replica, beside its requests: the registry is asked every `every_s` which version an alias means. A new one is
loaded and compiled in a thread, held against the contract that is served, and then takes new sessions. One that does
not load or fit is refused, logged and counted, and tried again only where the reason may pass (`TRIES` times); the
versions before it go on. The same holds for a canary's and a shadow's alias; where theirs is deleted, they end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.serve.log import write
from rlsvc.serve.version import CURRENT

if TYPE_CHECKING:
    from rlsvc.runner import ServedRunner
    from rlsvc.serve.service import PolicyService


TRIES = 3
"""How often a version is loaded that fails for no fault of its own: memory or storage that is away."""


class Source(Protocol):
    """Where versions come from. Both methods block, and are called in threads of the replica."""

    def find(self) -> str:
        """The id of the bundle that is meant now. Raises NotFoundError where none is."""
        ...

    def load(self, like: ServedRunner | None = None) -> ServedRunner:
        """That bundle, loaded and warm; beside `like`, where it can share what that has compiled."""
        ...


class Watcher:
    """Keeps a service's versions to what their sources mean.

    Consumes: what the sources say. Produces: versions of the service, lines of the log. Waits for: `every_s` between
    looks, and for a version to load; it is ended by cancelling `run`. When a registry is away the versions stay.
    """

    def __init__(self, service: PolicyService, sources: Mapping[str, Source], every_s: float) -> None:
        """Watch for the roles (of `rlsvc.serve.version.ROLES`) that have a source."""
        self._service, self._sources, self._every_s = service, sources, every_s
        self._refused: dict[str, tuple[str, int]] = {}
        self._away: set[str] = set()

    async def run(self) -> None:
        """Look, without end."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        """Look once."""
        for role, source in self._sources.items():
            await self._look(role, source)
        self._service.tidy()

    async def _look(self, role: str, source: Source) -> None:
        try:
            meant = await asyncio.to_thread(source.find)
        except NotFoundError as error:
            if role == CURRENT:
                self._missing(role, error)
            elif self._service.role(role) is not None:
                write(logging.INFO, "version_taken_back", self._about(role, str(error)))
                self._service.assign(role, None)
            return
        except Exception as error:  # a registry that is away must not end the watch
            self._missing(role, error)
            return
        self._away.discard(role)
        now = self._service.role(role)
        if role != CURRENT and meant == self._service.version:
            self._service.assign(role, None)  # it is what everybody gets by now
        elif (now is None or now.id != meant) and self._refused.get(role) != (meant, TRIES):
            await self._take(role, source, meant)

    async def _take(self, role: str, source: Source, meant: str) -> None:
        service = self._service
        try:
            version = service.loaded(meant) or await asyncio.to_thread(source.load, service.current.runner)
            service.assign(role, version)
        except Exception as error:  # a version that does not load or fit must not take down the one that is served
            before = self._refused.get(role, ("", 0))
            passes = not isinstance(error, UserError)
            tries = before[1] + 1 if passes and before[0] == meant else 1 if passes else TRIES
            self._refused[role] = (meant, tries)
            service.metrics.refused_version(role)
            about = {**self._about(role, str(error)), "refused": meant, "tries_left": TRIES - tries}
            write(logging.ERROR, "version_refused", about, error if passes else None)
            return
        self._refused.pop(role, None)
        write(logging.INFO, "version_taken", {**service.about(), "role": role, "taken": meant})

    def _missing(self, role: str, error: Exception) -> None:
        if role not in self._away:  # once for each time that it goes away
            self._away.add(role)
            write(logging.WARNING, "registry_away", self._about(role, str(error)))

    def _about(self, role: str, reason: str) -> dict[str, str]:
        return {**self._service.about(), "role": role, "because": reason.splitlines()[0][:500] if reason else ""}
