"""Phases: the curriculum of a run (rlsvc/train/phases.py)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rlsvc.spec.base import Spec

COLLECT, EVALUATE = "collect", "evaluate"
"""Hooks of the orchestrator; every other hook is the algorithm's."""
BUFFERS = ("replay", "demonstrations")
"""replay: what the rollout workers send; demonstrations: the datasets of `data`, and what people did in rollouts of a
robot (the replay's rows whose `intervention` is set, which stay in the replay as well)."""


class PhaseSpec(Spec):
    """One phase: cycles that carry out every hook as often as it says, until the phase has had its duration."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,49}$")
    """Of the phase; algorithms are told it."""
    type: Literal["online", "offline", "eval_only"]
    """online: environments are stepped; offline: updates alone; eval_only: evaluations alone."""
    hooks: dict[str, PositiveInt] = Field(min_length=1)
    """How often in a cycle, in this order: `collect` counts environment steps, `evaluate` evaluations, and the
    algorithm's own hooks (`update`, ...) gradient updates. `{collect: 1, update: 2}` makes two updates a step."""
    buffer: str | dict[str, float] = "replay"
    """What updates draw from: replay, demonstrations, or shares of a batch (`{replay: 0.5, demonstrations: 0.5}`)."""
    acting: Literal["policy", "random"] = "policy"
    """Who chooses the actions that are collected; random is uniform over the action's range."""
    min_fill: int = Field(default=0, ge=0)
    """Transitions that must be in the replay before the first update; steps before that are owed no updates."""
    duration_steps: int | None = Field(default=None, ge=1)
    """Environment steps (decisions, of all environments) after which the phase ends, once its updates are made."""
    duration_updates: int | None = Field(default=None, ge=1)
    """Gradient updates after which it ends, all hooks together."""
    duration_cycles: int | None = Field(default=None, ge=1)
    """Cycles after which it ends."""

    @property
    def update_hooks(self) -> tuple[str, ...]:
        """The algorithm's hooks of this phase, in order."""
        return tuple(hook for hook in self.hooks if hook not in (COLLECT, EVALUATE))

    @property
    def mixture(self) -> dict[str, float]:
        """Share of a batch by buffer."""
        return {self.buffer: 1.0} if isinstance(self.buffer, str) else self.buffer

    @property
    def length(self) -> int:
        """The phase's part of the run's clock: environment steps if online, updates if offline, else evaluations."""
        per_cycle = {
            "online": self.hooks.get(COLLECT, 0),
            "offline": sum(self.hooks[hook] for hook in self.update_hooks),
            "eval_only": self.hooks.get(EVALUATE, 0),
        }[self.type]
        if self.duration_cycles is not None:
            return self.duration_cycles * per_cycle
        if self.type == "online" and self.duration_updates is not None:
            per_update = sum(self.hooks[hook] for hook in self.update_hooks)
            return -(-self.duration_updates * per_cycle // per_update) + max(self.min_fill - 1, 0)
        return self.duration_steps or self.duration_updates or 0

    @property
    def num_updates(self) -> int:
        """Gradient updates of the phase, all hooks together, if its replay is empty when it begins."""
        per_cycle = sum(self.hooks[hook] for hook in self.update_hooks)
        if self.duration_updates is not None or not per_cycle:
            return self.duration_updates or 0
        if self.type == "offline":
            return self.length
        return max(self.length - max(self.min_fill - 1, 0), 0) * per_cycle // self.hooks[COLLECT]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        durations = [self.duration_steps, self.duration_updates, self.duration_cycles]
        if sum(duration is not None for duration in durations) != 1:
            raise ValueError(
                f"phase '{self.name}': got {3 - durations.count(None)} durations, expected one of duration_steps, "
                "duration_updates, duration_cycles"
            )
        if (COLLECT in self.hooks) != (self.type == "online"):
            raise ValueError(
                f"phase '{self.name}': type {self.type} with the hooks {', '.join(self.hooks)}; "
                "`collect` belongs to online phases, and every online phase has it"
            )
        if self.type == "offline" and not self.update_hooks:
            raise ValueError(f"phase '{self.name}': an offline phase needs a hook of the algorithm, such as update")
        if self.type == "eval_only" and set(self.hooks) != {EVALUATE}:
            raise ValueError(f"phase '{self.name}': an eval_only phase has the hook `evaluate` alone")
        if self.duration_steps is not None and self.type != "online":
            raise ValueError(
                f"phase '{self.name}': duration_steps counts environment steps, which only online phases make; "
                "take duration_updates or duration_cycles"
            )
        if self.duration_updates is not None and not self.update_hooks:
            raise ValueError(f"phase '{self.name}': duration_updates, but none of its hooks updates")
        if unknown := set(self.mixture) - set(BUFFERS):
            raise ValueError(f"phase '{self.name}': buffer '{unknown.pop()}', expected {' or '.join(BUFFERS)}")
        if not self.mixture or any(share <= 0 for share in self.mixture.values()):
            raise ValueError(f"phase '{self.name}': buffer: shares must be above 0, got {self.mixture}")
        return self
