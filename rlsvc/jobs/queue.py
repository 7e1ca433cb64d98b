"""A queue of jobs: whose turn it is, by priority and then by age, when what it asks for is free.

A queued job is a Ray job from the start: it is listed, followed and stopped like any other. Its process on the head
(rlsvc/jobs/run.py) asks for its turn and waits. `Line` decides; it lives in a named actor of the cluster that the first
waiting job makes, and holds nothing that the jobs would not tell it again: they ask every few seconds, so that an actor
that was restarted knows all of them soon, and a job that has died is forgotten. The jobs that wait are the queue's
state; they outlive the cluster where they are written down (rlsvc/jobs/record.py).

The order is strict: while the first of the line does not fit, none behind it begins, so that a large job is not
overtaken for ever by small ones. Nobody who runs is stopped for another.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NAMESPACE = "rlsvc"
ASK_S = 2.0
SILENT_S = 30.0
"""A job that has not been heard of for so long has died."""
SETTLE_S = 3 * ASK_S
"""A line that was just made hears first who runs already."""
FRESH_S = 60.0
"""A job takes so long to take what it asks for; until then the cluster's word on what is free is lowered by it."""


class NeverError(Exception):
    """What a job asks for is more than the cluster will ever have."""


@dataclass(frozen=True)
class Ticket:
    """A place in a line.

    Attributes:
        job: its id.
        priority: the higher goes first.
        since: unix time in s; of two equal ones the older goes first.
        asks: amounts by resource.
    """

    job: str
    priority: int
    since: float
    asks: Mapping[str, float] = field(default_factory=dict)


class Line:
    """Who waits and who runs in one queue. Times are of one clock, in s."""

    def __init__(self, now: float) -> None:
        self._made = now
        self._heard: dict[str, float] = {}
        self._waiting: dict[str, Ticket] = {}
        self._running: dict[str, tuple[Ticket, float]] = {}

    def ask(self, ticket: Ticket, total: Mapping[str, float], free: Mapping[str, float], now: float) -> int:
        """0 when it may begin, else its place in the line from 1 on.

        Args:
            ticket: of a job that waits.
            total: what the cluster has, or will grow to.
            free: of that, what nobody holds.
            now: time.
        """
        self._heard[ticket.job] = now
        self._forget(now)
        if ticket.job in self._running:
            return 0
        self._waiting[ticket.job] = ticket
        order = sorted(self._waiting.values(), key=lambda one: (-one.priority, one.since, one.job))
        place = order.index(ticket)
        if place or now - self._made < SETTLE_S or not self._fits(ticket, total, free, now):
            return place + 1
        del self._waiting[ticket.job]
        self._running[ticket.job] = (ticket, now)
        return 0

    def runs(self, ticket: Ticket, now: float) -> None:
        """Hear that a job is still running."""
        self._heard[ticket.job] = now
        self._waiting.pop(ticket.job, None)
        self._running.setdefault(ticket.job, (ticket, now))
        self._forget(now)

    def over(self, job: str) -> None:
        """Hear that a job has ended, or waits no more."""
        for table in (self._heard, self._waiting, self._running):
            table.pop(job, None)

    def _fits(self, ticket: Ticket, total: Mapping[str, float], free: Mapping[str, float], now: float) -> bool:
        for name, amount in ticket.asks.items():
            held = sum(one.asks.get(name, 0.0) for one, _ in self._running.values())
            soon = sum(one.asks.get(name, 0.0) for one, begun in self._running.values() if now - begun < FRESH_S)
            if amount > total.get(name, 0.0) - held + 1e-9 or amount > free.get(name, 0.0) - soon + 1e-9:
                return False
        return True

    def _forget(self, now: float) -> None:
        for job in [job for job, heard in self._heard.items() if now - heard > SILENT_S]:
            self.over(job)


class QueueActor:
    """`Line` with the cluster's resources. Consumes the jobs' questions, waits for nobody.

    When a job dies it is forgotten after SILENT_S; when this actor dies Ray starts it again, and the jobs tell it what
    it was.
    """

    def __init__(self) -> None:
        self._line = Line(time.monotonic())

    def ask(self, ticket: dict[str, Any]) -> int:
        """See Line.ask; -1 for what the cluster will never have."""
        import ray

        from rlsvc.train.cluster import cluster_capacity

        one, total, now = Ticket(**ticket), cluster_capacity(), ray.cluster_resources()
        if any(amount > total.get(name, 0.0) + 1e-9 for name, amount in one.asks.items()):
            return -1
        idle = ray.available_resources()
        free = {name: idle.get(name, 0.0) + total[name] - now.get(name, 0.0) for name in total}
        return self._line.ask(one, total, free, time.monotonic())

    def runs(self, ticket: dict[str, Any]) -> None:
        """See Line.runs."""
        self._line.runs(Ticket(**ticket), time.monotonic())

    def over(self, job: str) -> None:
        """See Line.over."""
        self._line.over(job)


class Turn:
    """A job's own side: waits for its turn, then says every few seconds that it runs, from a thread.

    Consumes the actor's answers; when the actor is lost, asks again for as long as it takes Ray to restart it.
    """

    def __init__(self, queue: str, ticket: Ticket, say: Callable[[str], None]) -> None:
        self._queue, self._ticket, self._say = queue, ticket, say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="queue", daemon=True)

    def wait(self, connected: Callable[[], None], stop: threading.Event) -> bool:
        """Until it may begin (True) or `stop` is set (False).

        Args:
            connected: called once Ray is connected, which takes the handlers of signals.
            stop: ends the wait.

        Raises:
            NeverError: it asks for more than the cluster will ever have.
        """
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        connected()
        shown = 0
        while not stop.is_set():
            place: int | None = self._call("ask", asdict(self._ticket))
            if place == 0:
                from rlsvc.jobs.types import BEGINS

                print(BEGINS, flush=True)  # noqa: T201 - the job's log, which `rlsvc jobs list` reads
                self._thread.start()
                return True
            if place == -1:
                asks = ", ".join(f"{amount:g} {name}" for name, amount in self._ticket.asks.items())
                raise NeverError(f"job '{self._ticket.job}' asks for {asks}, more than the cluster will ever have")
            if place is not None and place != shown:
                self._say(f"waits in queue '{self._queue}', place {place} (priority {self._ticket.priority})")
                shown = place
            stop.wait(ASK_S)
        self.over()
        return False

    def over(self) -> None:
        """Give the place up."""
        self._ended.set()
        self._call("over", self._ticket.job)

    def _tell(self) -> None:
        while not self._ended.wait(ASK_S):
            self._call("runs", asdict(self._ticket))

    def _call(self, method: str, *arguments: Any) -> Any:
        """What the actor answers; None when there is none just now."""
        import ray
        import ray.exceptions

        options = {"name": f"queue:{self._queue}", "namespace": NAMESPACE, "get_if_exists": True}
        actor: Any = (
            ray.remote(QueueActor).options(lifetime="detached", num_cpus=0, max_restarts=-1, **options).remote()
        )
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=ASK_S * 5)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None
