"""The orchestrator: which work is done when. It knows no algorithm, no Ray and no files of a policy.

It asks the phase scheduler what comes next, has the rollout workers collect and the learner group update, writes what
arrives to the journal, and evaluates, logs and checkpoints as the run's clock passes the intervals. The work orders for
the group are numbered, and the same for every rank. All of its state is in the scheduler's counters and the journal's
cursor, which every checkpoint holds: a run that resumes, or a group that came back, goes on from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from rlsvc.core.types import INTERVENTION, Chunk
from rlsvc.spec.env import RobotEnvSpec
from rlsvc.spec.phases import COLLECT, EVALUATE
from rlsvc.spec.run import RunSpec
from rlsvc.train.phases import PhaseScheduler, Work
from rlsvc.train.rollout import Arrived, Rollouts

Kind = Literal["update", "absorb", "weights", "validate", "export", "checkpoint", "stop"]
MAX_UNSENT_BYTES = 64 * 2**20
"""Chunks that a phase without updates lets pile up before the group is given them."""
POLL_S = 0.5


@dataclass(frozen=True)
class Order:
    """One piece of work for the learner group.

    Attributes:
        kind: update (num_updates gradient steps of `hook`), absorb (take in chunks, nothing else), weights (hand out
        the
            acting weights), validate (loss on the validation windows), export (write the bundle of this step),
            checkpoint (write the training state), stop.
        step: the run's clock when the order is done.
        hook: of the algorithm, for updates.
        num_updates: K, for updates.
        phase: name of the phase, and the share of it that is done.
        buffer: what updates draw from: shares of a batch by buffer.
        chunks: what arrived since the last order, `Chunk` or references to them; every order begins with taking them
        in. cursor: records of the journal that the replay holds once it has.
        with_weights: whether the result is to have the acting weights.
        meta: for checkpoints, what lies beside the state.
        number: position in the run of the group, given when it is sent.
    """

    kind: Kind
    step: int
    hook: str = ""
    num_updates: int = 0
    phase: tuple[str, float] = ("", 0.0)
    buffer: dict[str, float] = field(default_factory=dict)
    chunks: tuple[Any, ...] = ()
    cursor: int = 0
    with_weights: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
    number: int = -1


class GroupRestarted(Exception):  # noqa: N818 - an event that the orchestrator handles, not an error
    """The learner group came back from a checkpoint; `step` is the clock of it, 0 without one."""

    def __init__(self, step: int) -> None:
        super().__init__(f"learner group restarted at step {step}")
        self.step = step


class LearnerGroup(Protocol):
    """Ranks that carry out orders."""

    def start(self) -> int:
        """Wait until all ranks are ready; the clock of the checkpoint that they are at, 0 without one."""
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


class Journal(Protocol):
    """Where chunks are acknowledged; `rlsvc.data.journal.Journal`."""

    def append(self, chunk: Chunk) -> int:
        """Write a chunk once; the cursor after it."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Any:
        """Chunks of these records."""
        ...

    def __len__(self) -> int:
        """Records."""
        ...


class Listener(Protocol):
    """What the run does with results; see rlsvc/train/run.py."""

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics since the last call, by their full names (`train/loss`, `collect/return`)."""
        ...

    def on_result(self, order: Order, result: dict[str, Any]) -> None:
        """A validation, an exported bundle, or a committed checkpoint."""
        ...


class Orchestrator:
    """Drives learner group and rollout workers through the phases.

    Consumes chunks and results, produces orders. When `stop` is set between two orders, the group writes a checkpoint
    and the run ends early.
    """

    def __init__(
        self,
        spec: RunSpec,
        group: LearnerGroup,
        listener: Listener,
        stop: threading.Event,
        *,
        rollouts: Rollouts | None = None,
        journal: Journal | None = None,
        read_meta: Callable[[int], dict[str, Any]] = lambda step: {},
    ) -> None:
        """Not started yet.

        Args:
            spec: of the run.
            group: the ranks.
            listener: is told of everything.
            stop: see the class.
            rollouts: workers, for online phases.
            journal: of the run, for online phases.
            read_meta: what lies beside the checkpoint of a clock step.
        """
        self.spec, self.group, self.listener, self.stop = spec, group, listener, stop
        self.rollouts, self.journal, self._read_meta = rollouts, journal, read_meta
        self._number = 0
        self._update_metrics: list[tuple[str, int, dict[str, float]]] = []
        self._collected = _Collected()
        self._unsent: list[Arrived] = []
        self._weights_version = -1
        self._logged_at = 0.0

    def run(self) -> int:
        """Carry out the phases; the clock reached."""
        self._restore(self.group.start())
        while True:
            try:
                if self.stop.is_set():
                    self._checkpoint()
                    self._send(Order("stop", self._scheduler.clock))
                    return self._scheduler.clock
                if not self._unit():
                    self._send(Order("stop", self._scheduler.clock))
                    return self._scheduler.clock
            except GroupRestarted as restarted:
                self._restore(restarted.step)

    def _restore(self, step: int) -> None:
        meta = self._read_meta(step) if step else {}
        # A checkpoint of a run without phases says no more than its step.
        state = meta.get("scheduler") or {"phase": 0, "counts": {"update": step}, "updates": step}
        self._scheduler = PhaseScheduler(self.spec.curriculum, self.spec.learner.updates_per_call, state)
        self._scheduler.next()
        if self.journal is not None:
            beyond = self.journal.read(int(meta.get("cursor", 0)))
            self._scheduler.absorb(sum(chunk.num_steps for chunk in beyond))
        self._seen = self._scheduler.clock
        self._unsent, self._unsent_bytes = [], 0
        self._update_metrics.clear()
        self._weights_version = -1

    def _unit(self) -> bool:
        """Do the next thing, and what is due after it; False when nothing is left."""
        scheduler = self._scheduler
        work = scheduler.next(self._boundary())
        if work is None:
            return False
        if work.hook == EVALUATE:
            self._send(Order("export", scheduler.clock))
            scheduler.advance(EVALUATE, 1)
        elif work.hook == COLLECT:
            self._collect(work)
        else:
            self._update(work)
        follows = scheduler.next(self._boundary())
        # Steps are done with once the updates that they are owed are made; workers that run ahead always owe some.
        ahead = self.spec.rollout.mode == "async"
        if follows is None or follows.hook == COLLECT or scheduler.phase.type != "online" or ahead:
            self._pass_intervals(final=follows is None)
        return follows is not None

    def _boundary(self) -> int:
        """The next value of the clock at which something is due."""
        intervals = [self.spec.checkpoint.interval, self.spec.log_interval]
        if self.spec.evaluates and self.spec.evaluation.interval:
            intervals.append(self.spec.evaluation.interval)
        return min((self._scheduler.clock // interval + 1) * interval for interval in intervals)

    def _pass_intervals(self, *, final: bool) -> None:
        """Log, validate, export (which is evaluated), checkpoint, in this order, where the clock passed an interval."""
        before, now = self._seen, self._scheduler.clock
        self._seen = now

        def passed(interval: int | None) -> bool:
            return interval is not None and now // interval > before // interval

        if final or passed(self.spec.log_interval):
            self._log()
        evaluate_now = final or (self.spec.evaluates and passed(self.spec.evaluation.interval))
        checkpoint_now = final or passed(self.spec.checkpoint.interval)
        if evaluate_now or checkpoint_now:
            if self.spec.data is not None and self.spec.data.validation_fraction:
                self._send(Order("validate", now))
            if evaluate_now:
                self._send(Order("export", now))
            if checkpoint_now:
                self._checkpoint()

    def _checkpoint(self) -> None:
        self._send(Order("checkpoint", self._scheduler.clock))

    def _update(self, work: Work) -> None:
        scheduler, phase = self._scheduler, self._scheduler.phase
        online = self.rollouts is not None and phase.type == "online"
        if online and self.spec.rollout.mode == "async":
            self._take(self._poll(0.0, needed=False))
        due = scheduler.updates + work.count - self._weights_version >= self.spec.rollout.weights_interval
        order = Order(
            "update",
            scheduler.clock + (work.count if phase.type == "offline" else 0),
            hook=work.hook,
            num_updates=work.count,
            phase=(phase.name, scheduler.progress),
            buffer=phase.mixture,
            with_weights=online and due,
        )
        result = self._send(order)
        scheduler.advance(work.hook, work.count)
        self._give_weights(result)
        self._update_metrics.append((work.hook, work.count, result))

    def _collect(self, work: Work) -> None:
        assert self.rollouts is not None
        acting = self._scheduler.phase.acting
        # Updates of an offline phase before this one have handed out no weights.
        behind = self._scheduler.updates - self._weights_version
        # A robot's worker compiles before its first episode, also where that one's actions are drawn.
        acts = acting == "policy" or isinstance(self.spec.env, RobotEnvSpec)
        if acts and (self._weights_version < 0 or behind >= self.spec.rollout.weights_interval):
            self._give_weights(self._send(Order("weights", self._scheduler.clock, with_weights=True)))
        if self.spec.rollout.mode == "sync":
            streams = self.spec.rollout.workers * self.spec.rollout.envs_per_worker
            steps = max(1, min(self.spec.rollout.chunk_steps, work.count // streams))
            self._take(self.rollouts.collect(steps, acting))
        else:
            self._take(self._poll(POLL_S, needed=True))

    def _poll(self, timeout_s: float, *, needed: bool) -> list[Arrived]:
        """What has arrived, while workers go on; they are asked for no more than the phase has room for."""
        assert self.rollouts is not None
        budget = min(self.spec.rollout.max_ahead - self._scheduler.ahead, self._scheduler.room)
        self.rollouts.pump(budget, self._scheduler.phase.acting, needed)
        return self.rollouts.poll(timeout_s)

    def _take(self, arrived: Sequence[Arrived]) -> None:
        """Acknowledge chunks: from here on they are in the journal, and so in every replay."""
        assert self.journal is not None
        bound = self.spec.rollout.max_staleness
        for one in arrived:
            chunk = one.chunk
            staleness = self._staleness(chunk)
            self._collected.staleness.append(staleness)
            if bound is not None and staleness > bound:
                self._collected.stale_dropped += 1
                continue
            known = len(self.journal)
            if self.journal.append(chunk) <= known:
                continue  # a chunk that was sent again
            self._collected.add(chunk)
            self._scheduler.advance(COLLECT, chunk.num_steps)
            self._unsent.append(one)
            self._unsent_bytes += chunk.nbytes
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._send(Order("absorb", self._scheduler.clock))

    def _staleness(self, chunk: Chunk) -> int:
        """Updates by which the oldest weights that acted in it are behind the learner's; 0 for random actions."""
        versions = chunk.columns["version"]
        acted = versions[versions >= 0]
        return max(0, self._scheduler.updates - int(acted.min())) if len(acted) else 0

    def _give_weights(self, result: dict[str, Any]) -> None:
        params = result.pop("params", None)
        if params is not None and self.rollouts is not None:
            self._weights_version = self._scheduler.updates
            self.rollouts.set_weights(params, self._weights_version)

    def _send(self, order: Order) -> dict[str, Any]:
        cursor = 0 if self.journal is None else len(self.journal)
        meta = {"scheduler": self._scheduler.to_json(), "cursor": cursor} if order.kind == "checkpoint" else {}
        chunks = tuple(one.chunk if one.ref is None else one.ref for one in self._unsent)
        begin = time.monotonic()
        result = self.group.execute(replace(order, number=self._number, chunks=chunks, cursor=cursor, meta=meta))
        self._collected.busy += time.monotonic() - begin
        self._number += 1
        self._unsent, self._unsent_bytes = [], 0
        if order.kind in ("validate", "export", "checkpoint"):
            begin = time.monotonic()
            self.listener.on_result(order, result)
            self._collected.paused += time.monotonic() - begin
        return result

    def _log(self) -> None:
        scheduler = self._scheduler
        metrics: dict[str, float] = {}
        for hook in dict.fromkeys(hook for hook, _, _ in self._update_metrics):
            mine = [(count, result) for name, count, result in self._update_metrics if name == hook]
            total = sum(count for count, _ in mine)
            prefix = "controller" if hook == "update_controller" else "train"
            for name in mine[0][1]:
                metrics[f"{prefix}/{name}"] = sum(count * result[name] for count, result in mine) / total
        self._update_metrics.clear()
        if self.rollouts is not None:
            metrics |= self._collected.metrics()
            metrics |= {f"rollout/{name}": value for name, value in self.rollouts.metrics().items()}
            metrics |= {"progress/env_steps": float(scheduler.env_steps), "progress/updates": float(scheduler.updates)}
            self._collected = _Collected()
        if metrics:
            self.listener.on_metrics(scheduler.clock, metrics)


@dataclass
class _Collected:
    """What arrived since the last log."""

    steps: int = 0
    interventions: int | None = None
    lost: int = 0
    stale_dropped: int = 0
    staleness: list[int] = field(default_factory=list)
    ended: dict[str, list[float]] = field(default_factory=dict)
    busy: float = 0.0
    paused: float = 0.0  # evaluating, which is no learning that was missed
    since: float = field(default_factory=time.monotonic)

    def add(self, chunk: Chunk) -> None:
        self.steps += chunk.num_steps
        self.lost += chunk.lost
        if INTERVENTION in chunk.columns:
            self.interventions = (self.interventions or 0) + int(chunk.columns[INTERVENTION].sum())
        for name, values in chunk.ended.items():
            self.ended.setdefault(name, []).extend(float(value) for value in values)

    def metrics(self) -> dict[str, float]:
        elapsed = max(time.monotonic() - self.since, 1e-9)
        out = {
            "collect/steps_per_s": self.steps / elapsed,
            "rollout/learner_idle": max(0.0, 1 - self.busy / max(elapsed - self.paused, 1e-9)),
            "collect/episodes_lost": float(self.lost),
            "rollout/stale_dropped": float(self.stale_dropped),
        }
        if self.interventions is not None:
            out["collect/intervention"] = self.interventions / max(self.steps, 1)
        if self.staleness:
            out |= {
                "rollout/staleness": float(np.mean(self.staleness)),
                "rollout/staleness_max": float(max(self.staleness)),
            }
        if self.ended.get("return"):
            out |= {f"collect/{name}": float(np.mean(values)) for name, values in self.ended.items()}
            out["collect/episodes"] = float(len(self.ended["return"]))
        return out
