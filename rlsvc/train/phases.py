"""The phase scheduler: what a run does next, as a small state machine over the phases of its specification.

It knows hooks and counts, no algorithm, environment or clock. `next` says what to do, `advance` that it was done; the
whole state is a few counters that a checkpoint holds.

The run's clock is what `total_steps`, intervals and bundles count: environment steps while a phase is online, updates
while it is offline, evaluations while it is eval_only, one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlsvc.core.errors import UserError
from rlsvc.spec.phases import COLLECT, EVALUATE, PhaseSpec


@dataclass(frozen=True)
class Work:
    """What to do next.

    Attributes:
        hook: collect, evaluate, or one of the algorithm's.
        count: environment steps to collect at most, evaluations, or gradient updates.
    """

    hook: str
    count: int


class PhaseScheduler:
    """Where a run is in its phases.

    Attributes:
        env_steps: environment steps of the whole run.
        updates: gradient updates of the whole run.
        fill: steps in the replay.
        surplus: steps that a run which was cut off had collected beyond the phase that its checkpoint is in; they count
            in the online phases after it.
    """

    def __init__(
        self, phases: Sequence[PhaseSpec], updates_per_call: int, state: Mapping[str, Any] | None = None
    ) -> None:
        """Begin, or go on where `state` (of `to_json`) says."""
        state = state or {}
        self.phases, self.updates_per_call = tuple(phases), updates_per_call
        self.index = int(state.get("phase", 0))
        self.counts: dict[str, int] = {hook: int(n) for hook, n in dict(state.get("counts", {})).items()}
        self.unowed = int(state.get("unowed", 0))
        self.env_steps, self.updates = int(state.get("env_steps", 0)), int(state.get("updates", 0))
        self.fill, self.surplus = int(state.get("fill", 0)), int(state.get("surplus", 0))

    def to_json(self) -> dict[str, Any]:
        """The whole state as plain values."""
        return {
            "phase": self.index,
            "counts": dict(self.counts),
            "unowed": self.unowed,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "fill": self.fill,
            "surplus": self.surplus,
        }

    @property
    def finished(self) -> bool:
        """Whether no phase is left."""
        return self.index >= len(self.phases)

    @property
    def phase(self) -> PhaseSpec:
        """The current phase; the last one when the run is over."""
        return self.phases[min(self.index, len(self.phases) - 1)]

    @property
    def progress(self) -> float:
        """Share of the current phase that is done, in [0, 1]."""
        return 1.0 if self.finished else min(self._done / max(self.phase.length, 1), 1.0)

    @property
    def clock(self) -> int:
        """See the module; a phase that overshot counts as its length."""
        before = sum(phase.length for phase in self.phases[: self.index])
        return before if self.finished else before + min(self._done, self.phase.length)

    @property
    def ahead(self) -> int:
        """Environment steps by which collecting is ahead of the updates that are owed to them; 0 without updates."""
        phase = self.phase
        if phase.type != "online" or not phase.update_hooks:
            return 0
        used = min(self._count(hook) * phase.hooks[COLLECT] // phase.hooks[hook] for hook in phase.update_hooks)
        return self._count(COLLECT) - self.unowed - used

    @property
    def room(self) -> int:
        """Environment steps that the phase has yet to collect; any number where its updates say when it ends."""
        if self.phase.type != "online":
            return 0
        if self.phase.duration_updates is not None:
            return sys.maxsize
        return max(0, self.phase.length - self._count(COLLECT))

    def next(self, boundary: int | None = None) -> Work | None:
        """What to do next, None when the run is over.

        Args:
            boundary: value of the clock at which a call of several updates must end.

        Raises:
            UserError: an offline phase finds fewer transitions than its min_fill.
        """
        while not self.finished:
            work = self._next_online() if self.phase.type == "online" else self._next_in_cycle(boundary)
            if work is not None:
                return work
            self.index, self.counts, self.unowed = self.index + 1, {}, 0
            self._count_surplus()
        return None

    def advance(self, hook: str, count: int) -> None:
        """Tell that `count` of `hook` was done."""
        if hook == COLLECT:
            self.env_steps, self.fill = self.env_steps + count, self.fill + count
            self._count_steps(count)
            return
        self.counts[hook] = self._count(hook) + count
        if hook != EVALUATE:
            self.updates += count

    def absorb(self, steps: int) -> None:
        """Steps that the journal holds beyond the checkpoint: collected in this phase, if it is online and has room.

        What it has no room for was collected in the online phases after it, and counts there.
        """
        self.env_steps, self.fill = self.env_steps + steps, self.fill + steps
        self.surplus += steps
        self._count_surplus()

    def _count_steps(self, count: int) -> None:
        """Steps that are in `fill` already are collected in this phase; those before its min_fill are owed nothing."""
        self.counts[COLLECT] = self._count(COLLECT) + count
        self.unowed += min(count, max(0, self.phase.min_fill - 1 - (self.fill - count)))

    def _count_surplus(self) -> None:
        if self.finished or self.phase.type != "online" or not self.surplus:
            return
        is_last = all(phase.type != "online" for phase in self.phases[self.index + 1 :])
        room = self.surplus if is_last else max(0, self.phase.length - self._count(COLLECT))
        count = min(self.surplus, room)
        self.surplus -= count
        if count:
            self._count_steps(count)

    def _count(self, hook: str) -> int:
        return self.counts.get(hook, 0)

    @property
    def _updates_here(self) -> int:
        return sum(self._count(hook) for hook in self.phase.update_hooks)

    @property
    def _done(self) -> int:
        if self.phase.type == "online":
            return self._count(COLLECT)
        return self._updates_here if self.phase.type == "offline" else self._count(EVALUATE)

    def _next_online(self) -> Work | None:
        phase = self.phase
        limit = phase.duration_updates
        for hook, per_cycle in phase.hooks.items():
            if hook == COLLECT:
                continue
            owed = (self._count(COLLECT) - self.unowed) * per_cycle // phase.hooks[COLLECT] - self._count(hook)
            if hook == EVALUATE:
                if owed > 0:
                    return Work(EVALUATE, 1)
                continue
            if limit is not None:
                owed = min(owed, limit - self._updates_here)
            if owed > 0:
                return Work(hook, min(owed, self.updates_per_call))
        if limit is not None:
            return None if self._updates_here >= limit else Work(COLLECT, phase.hooks[COLLECT])
        remaining = phase.length - self._count(COLLECT)
        return Work(COLLECT, remaining) if remaining > 0 else None

    def _next_in_cycle(self, boundary: int | None) -> Work | None:
        phase = self.phase
        if self.fill < phase.min_fill:
            raise UserError(
                f"phase '{phase.name}': the replay holds {self.fill} transitions, min_fill asks for {phase.min_fill}; "
                "collect more in an earlier phase, or lower min_fill"
            )
        if self._done >= phase.length and not self._owes_evaluation():
            return None
        # One hook alone needs no cycles: its calls are as long as they may be.
        alone = len(phase.hooks) == 1
        cycle = min(self._count(hook) // n for hook, n in phase.hooks.items())
        for hook, per_cycle in phase.hooks.items():
            missing = phase.length - self._done if alone else (cycle + 1) * per_cycle - self._count(hook)
            if missing <= 0:
                continue
            if hook == EVALUATE:
                return Work(EVALUATE, 1)
            left = phase.length - self._done
            if left <= 0:
                continue
            if boundary is not None:
                left = min(left, boundary - self.clock)
            return Work(hook, min(missing, left, self.updates_per_call))
        return None

    def _owes_evaluation(self) -> bool:
        """Whether the cycle that the last updates ended still lacks its evaluations."""
        phase = self.phase
        if phase.type != "offline" or EVALUATE not in phase.hooks:
            return False
        first = phase.update_hooks[0]
        return self._count(EVALUATE) < self._count(first) // phase.hooks[first] * phase.hooks[EVALUATE]
