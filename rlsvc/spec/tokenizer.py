"""Text tokenizers of policies that read language (rlsvc/data/text_tokenizer.py)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlsvc.spec.base import Spec


class PaliGemmaTokenizerSpec(Spec):
    """PaliGemma's SentencePiece model, which every published checkpoint of the PI0 family reads with."""

    name: Literal["paligemma"] = "paligemma"
    path: str = Field(min_length=1)
    """Of the model file (`paligemma_tokenizer.model`); it is not downloaded."""


class ByteTokenizerSpec(Spec):
    """The bytes of the text, without a file; for small models that are trained from nothing, and for tests."""

    name: Literal["byte"] = "byte"
    action_tokens: int = Field(default=0, ge=0)
    """Ids kept free for action tokens (PI0-FAST): at least as many as the action tokenizer's vocabulary has."""


TokenizerSpec = Annotated[PaliGemmaTokenizerSpec | ByteTokenizerSpec, Field(discriminator="name")]
