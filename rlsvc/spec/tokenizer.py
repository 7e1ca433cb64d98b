"""Text tokenizers (placeholder until merged)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class PaligemmaTokenizerSpec(Spec):
    """PaliGemma's."""

    name: Literal["paligemma"] = "paligemma"
    path: str
    """File."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return 257_152


class ByteTokenizerSpec(Spec):
    """Bytes."""

    name: Literal["byte"] = "byte"
    action_tokens: int = 0
    """Tokens."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return 259 + self.action_tokens


TokenizerSpec = Annotated[PaligemmaTokenizerSpec | ByteTokenizerSpec, Field(discriminator="name")]
