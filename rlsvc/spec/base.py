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
