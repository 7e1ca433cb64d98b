"""The orchestrator: which work is done when. It knows no algorithm, no Ray and no files of a policy.

It hands out numbered work orders, the same for every rank of the learner group, and waits for the result of each. The
orders follow from the specification and the step alone (`schedule`), so that a run that resumes, or a group that was
restarted from a checkpoint, goes on where the state is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rlsvc.spec.run import RunSpec

Kind = Literal["update", "validate", "export", "checkpoint", "stop"]


@dataclass(frozen=True)
class Order:
    """One piece of work for the learner group.

    Attributes:
        kind: update (num_updates gradient steps of `hook`), validate (loss on the validation windows), export (write
            the bundle of this step), checkpoint (write the training state), stop.
        step: updates that will be done once the order is.
        hook: of the algorithm, for updates.
        num_updates: K, for updates.
        number: position in the run of the group, given when it is sent.
    """

    kind: Kind
    step: int
    hook: str = ""
    num_updates: int = 0
    number: int = -1


class GroupRestarted(Exception):  # noqa: N818 - an event that the orchestrator handles, not an error
    """The learner group came back from a checkpoint; `step` is where it is now."""

    def __init__(self, step: int) -> None:
        super().__init__(f"learner group restarted at step {step}")
        self.step = step


class LearnerGroup(Protocol):
    """Ranks that carry out orders."""

    def start(self) -> int:
        """Wait until all ranks are ready; the step that they are at."""
        ...

    def execute(self, order: Order) -> dict[str, Any]:
        """Have every rank do it and wait; the first rank's result.

        Raises:
            GroupRestarted: ranks were lost and the group came back from its last checkpoint; the order was not done.
        """
        ...

    def close(self) -> None:
        """Let the ranks end."""
        ...


def schedule(spec: RunSpec, step: int) -> Iterator[Order]:
    """Orders from `step` to the end; at one step validate, export (which is evaluated), checkpoint, in this order."""
    total, interval = spec.total_steps, spec.evaluation.interval
    evaluates = spec.env is not None
    while step < total:
        stops = [total, _next(step, spec.checkpoint.interval), _next(step, spec.log_interval)]
        if evaluates and interval:
            stops.append(_next(step, interval))
        count = min(spec.learner.updates_per_call, min(stops) - step)
        step += count
        yield Order("update", step, hook="update", num_updates=count)
        last = step == total
        evaluate_now = last or bool(evaluates and interval and step % interval == 0)
        checkpoint_now = last or step % spec.checkpoint.interval == 0
        if evaluate_now or checkpoint_now:
            if spec.data.validation_fraction:
                yield Order("validate", step)
            if evaluate_now:
                yield Order("export", step)
            if checkpoint_now:
                yield Order("checkpoint", step)


def _next(step: int, interval: int) -> int:
    return (step // interval + 1) * interval


class Listener(Protocol):
    """What the run does with results; see rlsvc/train/run.py."""

    def on_update(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of the updates since the last call, averaged."""
        ...

    def on_result(self, order: Order, result: dict[str, Any]) -> None:
        """A validation, an exported bundle, or a committed checkpoint."""
        ...


class Orchestrator:
    """Drives a learner group through the schedule.

    Consumes results, produces orders; waits for the group only. When `stop` is set between two orders, the group writes
    a checkpoint and the run ends early.
    """

    def __init__(self, spec: RunSpec, group: LearnerGroup, listener: Listener, stop: threading.Event) -> None:
        self.spec, self.group, self.listener, self.stop = spec, group, listener, stop
        self._number = 0
        self._pending: list[tuple[int, dict[str, float]]] = []

    def run(self) -> int:
        """Carry out the schedule; the step reached."""
        step = self.group.start()
        orders, stopping = schedule(self.spec, step), False
        while True:
            if self.stop.is_set() and not stopping:
                orders, stopping = iter([Order("checkpoint", step)]), True
            order = next(orders, Order("stop", step))
            try:
                self._do(order)
            except GroupRestarted as restarted:
                step = restarted.step
                orders, stopping = schedule(self.spec, step), False
                self._pending.clear()
                continue
            if order.kind == "stop":
                return step
            step = order.step

    def _do(self, order: Order) -> None:
        result = self.group.execute(replace(order, number=self._number))
        self._number += 1
        if order.kind == "update":
            self._pending.append((order.num_updates, result))
            if order.step % self.spec.log_interval == 0 or order.step == self.spec.total_steps:
                self._log(order.step)
        elif order.kind != "stop":
            self.listener.on_result(order, result)

    def _log(self, step: int) -> None:
        total = sum(count for count, _ in self._pending)
        names = self._pending[0][1]
        mean = {name: sum(count * metrics[name] for count, metrics in self._pending) / total for name in names}
        self._pending.clear()
        self.listener.on_update(step, mean)
