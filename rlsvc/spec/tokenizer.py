"""Tokenizers of text (rlsvc/data/text_tokenizer.py) and of actions (rlsvc/data/fast_tokenizer.py)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlsvc.spec.base import Spec


class PaliGemmaTokenizerSpec(Spec):
    """PaliGemma's SentencePiece model, which every published checkpoint of the PI0 family reads with."""

    name: Literal["paligemma"] = "paligemma"
    path: str = Field(min_length=1)
    """Of the model file (`paligemma_tokenizer.model`); it is not downloaded."""

    @property
    def vocab_size(self) -> int:
        """Rows of an embedding of its ids."""
        return 257_152


class ByteTokenizerSpec(Spec):
    """The bytes of the text, without a file; for small models that are trained from nothing, and for tests."""

    name: Literal["byte"] = "byte"
    action_tokens: int = Field(default=0, ge=0)
    """Ids kept free for action tokens (FAST): at least as many as the action tokenizer's vocabulary has."""

    @property
    def vocab_size(self) -> int:
        """Rows of an embedding of its ids."""
        return 259 + self.action_tokens


TokenizerSpec = Annotated[PaliGemmaTokenizerSpec | ByteTokenizerSpec, Field(discriminator="name")]


class FastFitSpec(Spec):
    """An action tokenizer that is fitted on the run's training chunks."""

    vocab_size: int = Field(default=1024, ge=256)
    """Action tokens at most, 256 of them single bytes."""
    scale: float = Field(default=10.0, gt=0)
    """Larger keeps more detail and takes more tokens: a coefficient is off by at most 1 / (2 * scale)."""
    max_chunks: int = Field(default=100_000, ge=1)
    """Chunks to fit on at most, evenly spaced over all of them."""


class ActionTokenizerSpec(Spec):
    """Where the action tokenizer comes from; a bundle has it beside the weights, and needs neither."""

    fit: FastFitSpec | None = None
    """Fit one."""
    path: str | None = Field(default=None, min_length=1)
    """Folder of one that was published (physical-intelligence/fast) or fitted before (a bundle's folder); it is not
    downloaded."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.fit is None) == (self.path is None):
            raise ValueError(f"got {'neither fit nor' if self.fit is None else 'both fit and'} path; give one of them")
        return self


def check_room(text: PaliGemmaTokenizerSpec | ByteTokenizerSpec, actions: ActionTokenizerSpec) -> None:
    """Refuse a text tokenizer that has no room for the action tokens.

    Raises:
        ValueError: names both.
    """
    fit = actions.fit
    if fit is not None and isinstance(text, ByteTokenizerSpec) and text.action_tokens < fit.vocab_size:
        raise ValueError(
            f"tokenizer.action_tokens: got {text.action_tokens}, at least action_tokenizer.fit.vocab_size = "
            f"{fit.vocab_size}"
        )
