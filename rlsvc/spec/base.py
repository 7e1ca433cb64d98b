"""The base of every specification class."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Frozen, strict about names: an unknown key is an error, never ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with these fields changed (`model_copy(update=...)` would not validate)."""
        return type(self).model_validate({**self.model_dump(), **changes})


class OneStepPolicySpec(Spec):
    """A policy that sees one observation and hands out one action, without history and chunks."""

    @property
    def n_obs_steps(self) -> int:
        """Observations that the policy sees."""
        return 1

    @property
    def n_action_steps(self) -> int:
        """Actions that it hands out at a time."""
        return 1
