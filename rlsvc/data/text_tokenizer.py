"""Text tokenizers: PaliGemma's SentencePiece model from a file, and plain bytes. The specification names which.

Both give ids without padding; rlsvc/data/prompts.py makes the prompts of the PI0 family of fixed length from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rlsvc.core.errors import UserError
from rlsvc.spec.tokenizer import ByteTokenizerSpec, PaliGemmaTokenizerSpec


class TextTokenizer(Protocol):
    """Text to ids.

    Attributes:
        vocab_size: ids are in [0, vocab_size); the rows that a policy's embedding needs.
        pad_id, bos_id, eos_id: padding, begin and end of a sequence.
        action_skip: ids at the end of the vocabulary that action tokens leave alone (rlsvc/data/prompts.py).
    """

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    action_skip: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with neither begin nor end."""
        ...


class PaliGemmaTokenizer:
    """PaliGemma's tokenizer (`paligemma_tokenizer.model`: pad 0, eos 1, bos 2, 257,152 pieces, a newline one of them).

    The last 128 pieces are segmentation tokens, which action tokens leave alone. Any other SentencePiece model with a
    begin and an end works likewise.

    Attributes:
        model: contents of the model file.
    """

    pad_id = 0  # openpi pads with 0 whatever the model says; the mask hides it
    action_skip = 128

    def __init__(self, model: bytes, where: str = "tokenizer") -> None:
        """From the contents of a model file.

        Args:
            model: the contents.
            where: what they belong to, for messages.

        Raises:
            UserError: no SentencePiece model, one without begin or end, or the package `sentencepiece` is missing.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError as error:
            raise UserError(
                "the PaliGemma tokenizer needs the package 'sentencepiece', which is not installed; "
                "install it (pip install sentencepiece)"
            ) from error
        if not model:  # the library would take it, and give nothing for every text
            raise UserError(f"{where}: not a SentencePiece model (it is empty)")
        try:
            self._pieces = SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError(f"{where}: not a SentencePiece model ({error})") from error
        self.model = model
        self.vocab_size: int = self._pieces.vocab_size()
        self.bos_id: int = self._pieces.bos_id()
        self.eos_id: int = self._pieces.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise UserError(f"{where}: the model has no begin or no end of a sequence; PaliGemma's has both")

    @classmethod
    def load(cls, path: str | Path) -> PaliGemmaTokenizer:
        """From a model file.

        Raises:
            UserError: no such file, and as the constructor; names the file.
        """
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise UserError(
                f"tokenizer '{path}': not readable ({error.strerror}); expected PaliGemma's paligemma_tokenizer.model"
            ) from error
        return cls(model, f"tokenizer '{path}'")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with neither begin nor end."""
        return self._pieces.encode(text)


class ByteTokenizer:
    """pad 0, eos 1, bos 2 as PaliGemma's, 3 + b for byte b of the UTF-8 text, then `action_tokens` ids for actions."""

    pad_id = 0
    eos_id = 1
    bos_id = 2
    action_skip = 0

    def __init__(self, action_tokens: int = 0) -> None:
        self.vocab_size = 3 + 256 + action_tokens

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with neither begin nor end."""
        return [3 + byte for byte in text.encode("utf-8")]


def make_tokenizer(spec: PaliGemmaTokenizerSpec | ByteTokenizerSpec) -> TextTokenizer:
    """The tokenizer that a specification names; none stands in for another.

    Raises:
        UserError: as the tokenizer's class says.
    """
    if isinstance(spec, ByteTokenizerSpec):
        return ByteTokenizer(spec.action_tokens)
    return PaliGemmaTokenizer.load(spec.path)
