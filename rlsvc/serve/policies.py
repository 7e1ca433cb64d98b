"""The policies of one replica, by name: the first is always there, others are loaded when they are asked for.

What their weights take together stays below a budget: before one is loaded, those that were asked for longest ago and
that nobody uses now are let go. Each replica decides by itself, so that with several of them a policy may be loaded in
some and not in others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rlsvc.core.errors import unknown_name
from rlsvc.serve.codec import RequestError
from rlsvc.serve.log import write
from rlsvc.serve.service import PolicyService, check_same_contract, described, internal_error
from rlsvc.serve.version import CANARY, CURRENT
from rlsvc.serve.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlsvc.core.contract import Contract
    from rlsvc.runner import ServedRunner
    from rlsvc.serve.watch import Source
    from rlsvc.spec.robot import RobotSpec


@dataclass(frozen=True)
class Offered:
    """A policy that a replica can load.

    Attributes:
        name: under which clients ask for it.
        load: makes the runner, warm, in the replica's process.
        contract, robot, version: of its bundle when the application was built.
        weight_bytes: that its weights take on disk, for the budget.
        sources: by role the versions that are watched while it is loaded.
    """

    name: str
    load: Callable[[], ServedRunner]
    contract: Contract
    robot: RobotSpec | None
    version: str
    weight_bytes: int
    sources: Mapping[str, Source] = field(default_factory=dict)


class Policies:
    """Policies by name. All of it happens on one event loop; loading in threads, one at a time.

    Attributes:
        first: the policy that is always there, and that is meant where none is named.
    """

    def __init__(
        self,
        first: PolicyService,
        offered: Sequence[Offered] = (),
        *,
        first_bytes: int = 0,
        budget_bytes: float = float("inf"),
        watch_s: float | None = None,
    ) -> None:
        """Begin with the first alone.

        Args:
            first: loaded and warm.
            offered: others.
            first_bytes: that its weights take.
            budget_bytes: that the weights of all together may take.
            watch_s: how often their aliases are looked up; None never.
        """
        self.first = first
        self._offered = {one.name: one for one in offered}
        self._loaded: dict[str, PolicyService] = {}
        self._used: dict[str, float] = {}
        self._loading: dict[str, asyncio.Task[PolicyService]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._first_bytes, self._budget_bytes, self._watch_s = first_bytes, budget_bytes, watch_s
        self._one_at_a_time = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Of all policies."""
        return [self.first.name, *self._offered]

    @property
    def services(self) -> list[PolicyService]:
        """Those that are loaded."""
        return [self.first, *self._loaded.values()]

    async def get(self, name: str | None) -> PolicyService:
        """The policy of a name, loaded where it is not yet; None means the first.

        Raises:
            RequestError: there is none (404); it is being loaded, or there is no room for it since all others are in
                use (503); it does not load (500).
        """
        if name is None or name == self.first.name:
            return self.first
        self._used[name] = time.monotonic()
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._offered:
            del self._used[name]
            raise RequestError(404, "unknown_policy", str(unknown_name("policy", name[:80], self.names)))
        if name not in self._loading:
            task = asyncio.get_running_loop().create_task(self._load(self._offered[name]))
            self._loading[name] = task
            task.add_done_callback(lambda task: self._load_ended(name, task))
        try:
            # Who gives up waiting must not end the load that others wait for.
            return await asyncio.wait_for(asyncio.shield(self._loading[name]), self.first.settings.deadline_s)
        except TimeoutError as error:
            raise RequestError(
                503, "loading", f"policy '{name}' is being loaded; try again", retry_after_s=5
            ) from error

    def status(self, name: str) -> dict[str, Any]:
        """What is told of a policy; of one that is not loaded what its bundle says. Raises RequestError, 404."""
        service = self.loaded(name)
        if service is not None:
            return service.status()
        one = self.offered(name)
        told = described(one.name, one.version, one.contract, one.robot)
        return {**told, "distribution": None, "versions": [], "shadow": None}

    def loaded(self, name: str) -> PolicyService | None:
        """The policy of a name, where it is loaded."""
        return self.first if name == self.first.name else self._loaded.get(name)

    def offered(self, name: str) -> Offered:
        """A policy that is not loaded. Raises RequestError, 404."""
        if name not in self._offered:
            raise RequestError(404, "unknown_policy", str(unknown_name("policy", name[:80], self.names)))
        return self._offered[name]

    def model(self, name: str) -> tuple[list[str], Contract]:
        """The versions of a policy that may be asked for by name, and its contract. Raises RequestError, 404."""
        service = self.loaded(name)
        if service is None:
            one = self.offered(name)
            return [one.version], one.contract
        return [one.id for role, one in service.versions() if role in (CURRENT, CANARY)], service.contract

    def ready(self, name: str) -> bool:
        """Whether a policy would act now."""
        service = self.loaded(name)
        return service is not None and service.ready

    def render(self) -> bytes:
        """The metrics of all that are loaded, as Prometheus text; counters of one that was let go begin anew."""
        if not self._loaded:
            return self.first.metrics.render()
        together = CollectorRegistry()
        together.register(_Together([service.metrics.registry for service in self.services]))
        return generate_latest(together)

    async def close(self) -> None:
        """End the watches and the threads, but for the first's."""
        for name in list(self._loaded):
            await self._let_go(name)

    async def _load(self, one: Offered) -> PolicyService:
        async with self._one_at_a_time:
            await self._make_room(one)
            began = time.monotonic()
            try:
                runner = await asyncio.to_thread(one.load)
                check_same_contract(runner.contract, one.contract, runner.version)
            except Exception as error:
                raise internal_error(error) from error
            service = PolicyService(one.name, runner, self.first.settings, self.first.replica)
            self._loaded[one.name] = service
            if one.sources and self._watch_s is not None:
                watcher = Watcher(service, one.sources, self._watch_s)
                self._watches[one.name] = asyncio.get_running_loop().create_task(watcher.run())
            took = round(time.monotonic() - began, 3)
            write(logging.INFO, "policy_loaded", {**service.about(), "seconds": took})
            return service

    def _load_ended(self, name: str, task: asyncio.Task[PolicyService]) -> None:
        del self._loading[name]
        if not task.cancelled():
            task.exception()  # it is logged, and whoever waited was told; asyncio would complain where nobody did

    async def _make_room(self, one: Offered) -> None:
        while self._weight_bytes() + one.weight_bytes > self._budget_bytes:
            free = [name for name, service in self._loaded.items() if service.idle]
            if not free:
                raise RequestError(
                    503, "memory", f"no room for policy '{one.name}' while the others are in use; try again later"
                )
            await self._let_go(min(free, key=lambda name: self._used[name]))

    def _weight_bytes(self) -> int:
        """Of what is loaded; a version that drains or is a candidate counts as another copy."""
        extra = sum(len(s.versions()) * self._offered[name].weight_bytes for name, s in self._loaded.items())
        return self._first_bytes * len(self.first.versions()) + extra

    async def _let_go(self, name: str) -> None:
        service = self._loaded.pop(name)
        watch = self._watches.pop(name, None)
        if watch is not None:
            watch.cancel()
        await asyncio.to_thread(service.close)
        write(logging.INFO, "policy_let_go", service.about())


class _Together(Collector):
    """Several registries as one: the text format wants all series of a metric in one place."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type)).samples.extend(
                    family.samples
                )
        yield from families.values()
