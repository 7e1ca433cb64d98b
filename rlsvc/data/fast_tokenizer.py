"""FAST: chunks of actions as a few tokens (Pertsch et al. 2025, arXiv:2501.09747).

A normalised chunk [H, A] goes through an orthonormal DCT over time, action dimension by action dimension; coefficients
are multiplied by `scale` and rounded, flattened with the lowest frequency of all dimensions first, shifted by
`min_token` so that none is negative, written as a text with one character for each (`chr`), and byte-pair encoded.

Files are those of the published tokenizer (Hugging Face's `physical-intelligence/fast`): tokenizer.json of the library
`tokenizers` beside processor_config.json. A published folder gives the ids that its own processor gives, and where that
one goes on without a word this one says so:

    coefficient below min_token                   raised to it, as published; counted in `clipped`, and warned of once
    coefficient that the vocabulary cannot spell  published: left out, so that the rest shifts; here an error
    ids that spell no chunk of the asked shape    published: a chunk of zeros; here MalformedActionError

Tokenizers that are fitted here differ from those that the published `fit` makes in two ways. A chunk is one word of the
byte-pair encoding (the published one first cuts it where GPT-2's regular expression cuts English, which for integers
falls anywhere: up to a fifth more tokens on PushT). And the alphabet is all 256 bytes, so that every coefficient can be
spelled, also one that no training chunk had.

Letters: H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError
from scipy.fft import dct, idct

from rlsvc.core.errors import UserError

log = logging.getLogger(__name__)

BPE_FILE, CONFIG_FILE = "tokenizer.json", "processor_config.json"
# Beyond it come surrogates, which are no characters.
MAX_CODE = 0xD7FF

Reason = Literal["unknown_id", "broken_character", "wrong_length", "no_action", "no_end"]


class MalformedActionError(ValueError):
    """Tokens that a policy gave are no chunk of actions. It is the policy's doing: whoever asked counts it by `reason`.

    Attributes:
        reason: "unknown_id" (an id outside the action vocabulary), "broken_character" (bytes that end within a
            character), "wrong_length" (not H * A coefficients), "no_action" (the sequence does not begin as an action's
            does), "no_end" (it has no end).
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class _Config(BaseModel):
    """What counts of processor_config.json; the rest is of the library that loads the published one."""

    scale: float = Field(gt=0, allow_inf_nan=False)
    vocab_size: int = Field(ge=1)
    min_token: int
    time_horizon: int | None = Field(default=None, ge=1)
    action_dim: int | None = Field(default=None, ge=1)


class FastTokenizer:
    """Chunks of actions to ids and back.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        scale, min_token: as above.
        time_horizon, action_dim: H and A that this tokenizer is for; None takes any.
        clipped: chunks encoded so far with a coefficient below min_token.
    """

    def __init__(self, bpe: Any, config: _Config) -> None:
        """Made by `fit`, `load` or `from_files`."""
        bpe.no_padding()
        bpe.no_truncation()
        self._bpe, self._config = bpe, config
        self.vocab_size: int = bpe.get_vocab_size()
        self.scale, self.min_token = config.scale, config.min_token
        self.time_horizon, self.action_dim = config.time_horizon, config.action_dim
        self.clipped = 0

    @classmethod
    def fit(cls, chunks: Iterable[np.ndarray], vocab_size: int = 1024, scale: float = 10.0) -> FastTokenizer:
        """Learn the vocabulary from chunks; the same chunks give the same one.

        Args:
            chunks: [H, A] each, normalised (most values in [-1, 1]); if all are of one shape, the tokenizer is for it.
            vocab_size: ids at most, 256 of them single bytes.
            scale: larger keeps more detail and takes more tokens; a coefficient is off by at most 1 / (2 * scale).

        Raises:
            UserError: no chunks, chunks that are not [H, A] or not finite, or fewer ids than bytes.
        """
        if vocab_size < 256:
            raise UserError(f"vocab_size: got {vocab_size}, expected at least 256, one id for each byte")
        rows = [_coefficients(chunk, scale) for chunk in chunks]
        if not rows:
            raise UserError("a FAST tokenizer is fitted on chunks of actions; got none")
        shapes = {row.shape for row in rows}
        horizon, action_dim = shapes.pop() if len(shapes) == 1 else (None, None)
        min_token = int(min(row.min() for row in rows))
        texts = [_text(row, min_token) for row in rows]
        library = _tokenizers()
        bpe = library.Tokenizer(library.models.BPE())
        bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        )
        bpe.train_from_iterator(texts, trainer=trainer)
        config = _Config(
            scale=scale, vocab_size=vocab_size, min_token=min_token, time_horizon=horizon, action_dim=action_dim
        )
        return cls(bpe, config)

    def encode(self, chunk: np.ndarray) -> list[int]:
        """Ids of a normalised chunk [H, A]. The arithmetic is in its dtype, as in the published tokenizer.

        Raises:
            UserError: not [H, A] or not of this tokenizer's H and A, not finite, or a coefficient that the vocabulary
                cannot spell.
        """
        coefficients = _coefficients(chunk, self.scale)
        horizon, action_dim = coefficients.shape
        if horizon != (self.time_horizon or horizon) or action_dim != (self.action_dim or action_dim):
            raise UserError(
                f"FAST tokenizer: got a chunk [{horizon}, {action_dim}], it was fitted for "
                f"[{self.time_horizon or 'any'}, {self.action_dim or 'any'}]; fit one for this robot, or load another"
            )
        if coefficients.min() < self.min_token:
            self.clipped += 1
            if self.clipped == 1:
                log.warning(
                    "FAST tokenizer: a coefficient of %d is below the smallest that it was fitted on, %d, and is "
                    "raised to that; said once, counted from here on. Fit it on these actions if it happens often",
                    coefficients.min(),
                    self.min_token,
                )
        text = _text(coefficients, self.min_token)
        ids: list[int] = self._bpe.encode(text).ids
        if self._bpe.decode(ids, skip_special_tokens=False) != text:
            lost = sorted({int(c) for c in coefficients.flat if not self._spells(_text(c, self.min_token))})
            raise UserError(
                f"FAST tokenizer: its vocabulary cannot spell the coefficients {lost}; fit one on these actions, or "
                "see whether they are normalised"
            )
        return ids

    def _spells(self, text: str) -> bool:
        return self._bpe.decode(self._bpe.encode(text).ids, skip_special_tokens=False) == text

    def decode(self, ids: Sequence[int] | np.ndarray, horizon: int, action_dim: int) -> np.ndarray:
        """The chunk [H, A] that ids spell, float32, normalised.

        Raises:
            MalformedActionError: they spell no chunk of this shape (unknown_id, broken_character, wrong_length).
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size or self._bpe.id_to_token(i) is None:
                raise MalformedActionError("unknown_id", f"action token {i} is outside [0, {self.vocab_size})")
        text: str = self._bpe.decode(ids, skip_special_tokens=False)
        if "\ufffd" in text:
            raise MalformedActionError("broken_character", f"{len(ids)} action tokens end within a character")
        if len(text) != horizon * action_dim:
            raise MalformedActionError(
                "wrong_length", f"action tokens give {len(text)} coefficients, expected {horizon} * {action_dim}"
            )
        coefficients = np.array([ord(c) for c in text], np.float64).reshape(horizon, action_dim) + self.min_token
        return np.asarray(idct(coefficients / self.scale, axis=0, norm="ortho"), np.float32)

    def files(self) -> dict[str, bytes]:
        """Contents by file name; `from_files` is the inverse."""
        config = self._config.model_dump_json(indent=2)
        return {BPE_FILE: self._bpe.to_str(pretty=True).encode(), CONFIG_FILE: config.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: str = "FAST tokenizer") -> FastTokenizer:
        """From contents by file name; others than the two are not looked at.

        Args:
            files: as `files` gives them.
            where: what the contents belong to, for messages.

        Raises:
            UserError: a file that is missing or not what it should be, or two files of different tokenizers.
        """
        for name in (BPE_FILE, CONFIG_FILE):
            if name not in files:
                raise UserError(f"{where}: has no {name}; expected a folder like that of physical-intelligence/fast")
        try:
            config = _Config.model_validate_json(files[CONFIG_FILE])
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "contents"
            raise UserError(f"{where}: {CONFIG_FILE}: {field}: {first['msg']}") from error
        library = _tokenizers()
        try:
            bpe = library.Tokenizer.from_str(files[BPE_FILE].decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{where}: {BPE_FILE} is not of the library 'tokenizers' ({error})") from error
        if (size := bpe.get_vocab_size()) > config.vocab_size:
            raise UserError(
                f"{where}: {BPE_FILE} has {size} ids, {CONFIG_FILE} says {config.vocab_size}; they are not of one "
                "tokenizer"
            )
        return cls(bpe, config)

    def save(self, folder: str | Path) -> None:
        """Write the two files into a folder, which is made."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)

    @classmethod
    def load(cls, folder: str | Path) -> FastTokenizer:
        """A tokenizer from a local folder, saved here or published; nothing is downloaded and no code in it is run.

        Raises:
            UserError: as `from_files`; names the folder.
        """
        found = {n: (Path(folder) / n).read_bytes() for n in (BPE_FILE, CONFIG_FILE) if (Path(folder) / n).is_file()}
        return cls.from_files(found, f"FAST tokenizer '{folder}'")


def _coefficients(chunk: np.ndarray, scale: float) -> np.ndarray:
    """Scaled and rounded DCT coefficients [H, A], frequency first."""
    chunk = np.asarray(chunk)
    if chunk.ndim != 2 or not chunk.size:
        raise UserError(f"FAST tokenizer: got a chunk of shape {chunk.shape}, expected [horizon, action dimensions]")
    if not np.isfinite(chunk).all():
        row = int(np.argwhere(~np.isfinite(chunk))[0][0])
        raise UserError(f"FAST tokenizer: action {row} of the chunk is not finite")
    return np.around(np.asarray(dct(chunk, axis=0, norm="ortho")) * scale)


def _text(coefficients: np.ndarray, min_token: int) -> str:
    codes = np.maximum(coefficients.ravel() - min_token, 0)
    if codes.max() > MAX_CODE:
        raise UserError(
            f"FAST tokenizer: a coefficient of {codes.max() + min_token:g} is far outside what normalised actions "
            "give; normalise them first"
        )
    return "".join(map(chr, codes.astype(int)))


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise UserError(
            "the FAST tokenizer needs the package 'tokenizers', which is not installed; "
            "install it (pip install tokenizers)"
        ) from error
    return tokenizers
