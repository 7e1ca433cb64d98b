"""Prompts of the PI0 family: texts, states and action tokens as ids of one fixed length, with masks.

Equal to openpi's (Apache-2.0, src/openpi/models/tokenizer.py) in every id and mask for the same SentencePiece model:

    PI0       <bos> text <newline>
    PI0.5     <bos> Task: text, State: s s s;<newline>Action:·
    PI0-FAST  <bos> Task: text, State: s s s;<newline> | Action:· action tokens | <eos>

where · is a space, the bars set apart what is encoded by itself (the last one is a bar that the model reads), and s are
the normalised state's dimensions as whole numbers. PI0 and PI0.5 strip the text and read `_` and newlines as spaces;
PI0-FAST reads it in lower case, and leaves newlines. What is too long is cut at its end, as in openpi: a cut PI0 prompt
loses its newline, a cut PI0-FAST sequence its last actions. It is counted in `truncated` and warned of once.

Letters: L fixed length, S state dimensions, H actions of a chunk, A action dimensions; `...` any leading axes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlsvc.core.errors import ContractError, SpecError
from rlsvc.data.fast_tokenizer import FastTokenizer, MalformedActionError
from rlsvc.data.text_tokenizer import TextTokenizer

log = logging.getLogger(__name__)

STATE_BINS = np.linspace(-1, 1, 257)[:-1]
ACTION, END = "Action: ", "|"
ADVANTAGE = "prompt_advantage"
"""Beside an observation, what its prompt is to tell of the actions that follow: POSITIVE, NEGATIVE or "", nothing."""
POSITIVE, NEGATIVE = "positive", "negative"


class FastSequence(NamedTuple):
    """Sequences that PI0-FAST reads, and learns where there are actions; every array is [..., L].

    Attributes:
        tokens: int32, 0 beyond the end.
        mask: bool, true where there is a token.
        ar_mask: bool, true where a token is seen only by itself and those after it (the actions); the others see each
            other.
        loss_mask: bool, true for the tokens to learn (the actions).
    """

    tokens: np.ndarray
    mask: np.ndarray
    ar_mask: np.ndarray
    loss_mask: np.ndarray


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Normalised state as bins of equal width over [-1, 1]: [..., S] float -> [..., S] int.

    0 begins at -1 and 255 takes everything from 0.9921875 on; as in openpi, what lies below -1 is -1.

    Raises:
        ContractError: a value that is not finite.
    """
    if not np.isfinite(state).all():
        raise ContractError("state: a value is not finite, so that it cannot be written into the prompt")
    return np.digitize(state, STATE_BINS) - 1


def with_advantage(texts: Any, advantage: np.ndarray) -> np.ndarray:
    """Texts that tell how good the actions are that follow: `text Advantage: positive` (RECAP, arXiv:2511.14759).

    Args:
        texts: [...] strings.
        advantage: [...], or one for all; a text is left as it is where this is "".
    """
    tells = advantage != ""
    if not tells.any():
        return texts
    told = np.where(tells, np.char.add(" Advantage: ", advantage), "")
    return np.char.add(np.asarray(texts, np.str_), told)


def action_ids_in_text(ids: np.ndarray | Sequence[int], vocab_size: int, skip: int) -> np.ndarray:
    """Where FAST's ids lie in a text vocabulary: from its end, before the last `skip` ids, downwards. Its own inverse.

    PaliGemma's (257,152 pieces, skip 128) gives 257,023 to action token 0.
    """
    return vocab_size - 1 - skip - np.asarray(ids)


class PromptTokenizer:
    """Makes what a policy's language model reads, in training and when acting.

    Attributes:
        truncated: sequences that were cut so far.
    """

    def __init__(self, text: TextTokenizer, length: int, fast: FastTokenizer | None = None) -> None:
        """Make one.

        Args:
            text: of the language model.
            length: L. openpi has 48 for PI0, 200 for PI0.5 and, by robot, 180 to 250 for PI0-FAST.
            fast: the action tokenizer, for PI0-FAST.

        Raises:
            SpecError: the text vocabulary has no room for the action tokenizer's.
        """
        self._text, self.length, self._fast = text, length, fast
        self.truncated = 0
        self._action, self._end = text.encode(ACTION), text.encode(END)
        if fast is not None:
            last, first = action_ids_in_text([0, fast.vocab_size - 1], text.vocab_size, text.action_skip)
            taken = [
                i for i in (text.pad_id, text.bos_id, text.eos_id, *self._action, *self._end) if first <= i <= last
            ]
            if first < 0 or taken:
                raise SpecError(
                    f"the text tokenizer's {text.vocab_size} ids have no room for the {fast.vocab_size} of the action "
                    "tokenizer; take a smaller one (or, with the byte tokenizer, more action_tokens)"
                )

    def pi0(self, texts: Any) -> tuple[np.ndarray, np.ndarray]:
        """PI0's prompts.

        Args:
            texts: [...] strings.

        Returns:
            tokens int32 [..., L] and mask bool [..., L].

        Raises:
            ContractError: a text that is no Unicode.
        """
        texts = np.asarray(texts, np.str_)
        newline = self._text.encode("\n")
        return self._pad([[self._text.bos_id, *self._ids(_clean(text)), *newline] for text in texts.flat], texts.shape)

    def pi05(self, texts: Any, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """PI0.5's prompts.

        Args:
            texts: [...] strings.
            state: [..., S] normalised, to [-1, 1] for most values; not padded to the model's width.

        Returns:
            tokens int32 [..., L] and mask bool [..., L].

        Raises:
            ContractError: a text that is no Unicode, or a state that is not finite.
        """
        texts = np.asarray(texts, np.str_)
        rows = [
            [self._text.bos_id, *self._ids(f"{_task(_clean(text), bins)}{ACTION}")]
            for text, bins in zip(texts.flat, _rows(state, texts), strict=True)
        ]
        return self._pad(rows, texts.shape)

    def pi0_fast(self, texts: Any, state: np.ndarray, actions: np.ndarray | None = None) -> FastSequence:
        """PI0-FAST's sequences: up to the end of the chunk where there are actions, else up to where it begins.

        Args:
            texts: [...] strings.
            state: [..., S] as for `pi05`.
            actions: [..., H, A] normalised; None when acting.

        Raises:
            ContractError: as for `pi05`.
            UserError: as FastTokenizer.encode.
        """
        texts = np.asarray(texts, np.str_)
        prefixes = [
            [self._text.bos_id, *self._ids(_task(text.lower().strip().replace("_", " "), bins))]
            for text, bins in zip(texts.flat, _rows(state, texts), strict=True)
        ]
        postfixes: list[list[int]] = [[] for _ in prefixes]
        if actions is not None:
            chunks = actions.reshape(-1, *actions.shape[texts.ndim :])
            postfixes = [[*self._action, *self._chunk(chunk)] for chunk in chunks]
        tokens, mask = self._pad([a + b for a, b in zip(prefixes, postfixes, strict=True)], texts.shape)
        lengths = np.array([len(prefix) for prefix in prefixes]).reshape(*texts.shape, 1)
        learned = mask & (np.arange(self.length) >= lengths)
        return FastSequence(tokens, mask, learned, learned)

    def actions(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Chunks alone, as PI0-FAST has them after `Action:·`: action tokens | <eos>.

        Args:
            chunks: [N, H, A] normalised.

        Returns:
            tokens int32 [N, L] and mask bool [N, L].

        Raises:
            UserError: as FastTokenizer.encode.
        """
        return self._pad([self._chunk(chunk) for chunk in chunks], chunks.shape[:1])

    def decode_chunk(self, tokens: np.ndarray | Sequence[int], horizon: int, action_dim: int) -> np.ndarray:
        """The chunk [H, A], float32 and normalised, in what PI0-FAST gave after its prompt.

        openpi goes through text here, which does not give every action token back, and takes zeros for what it cannot
        read; this goes by ids.

        Args:
            tokens: [N] ids from the first that was sampled on; what follows the end does not matter.
            horizon: H.
            action_dim: A.

        Raises:
            MalformedActionError: no_action, no_end, or as FastTokenizer.decode. The caller counts it.
        """
        ids = [int(i) for i in tokens]
        if ids[: len(self._action)] != self._action:
            raise MalformedActionError("no_action", f"the sequence of {len(ids)} tokens does not begin with '{ACTION}'")
        ids = ids[len(self._action) :]
        ends = [ids.index(i) for i in (self._end[0], self._text.eos_id) if i in ids]
        if not ends:
            raise MalformedActionError("no_end", f"no end in {len(ids)} tokens; allow more, if this happens often")
        text = self._text
        return self._tokenizer().decode(
            action_ids_in_text(ids[: min(ends)], text.vocab_size, text.action_skip), horizon, action_dim
        )

    def _chunk(self, chunk: np.ndarray) -> list[int]:
        text = self._text
        ids = action_ids_in_text(self._tokenizer().encode(chunk), text.vocab_size, text.action_skip)
        return [*ids.tolist(), *self._end, text.eos_id]

    def _tokenizer(self) -> FastTokenizer:
        if self._fast is None:
            raise SpecError("this prompt tokenizer was made without an action tokenizer; PI0-FAST needs one")
        return self._fast

    def _ids(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ContractError(
                f"prompt: no Unicode text, half a character at {error.start}; send the whole"
            ) from error
        return self._text.encode(str(text))

    def _pad(self, rows: list[list[int]], shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.full((len(rows), self.length), self._text.pad_id, np.int32)
        mask = np.zeros((len(rows), self.length), np.bool_)
        for i, row in enumerate(rows):
            if len(row) > self.length:
                self._count(len(row))
            tokens[i, : len(row)] = row[: self.length]
            mask[i, : len(row)] = True
        return tokens.reshape(*shape, self.length), mask.reshape(*shape, self.length)

    def _count(self, got: int) -> None:
        self.truncated += 1
        if self.truncated == 1:
            log.warning(
                "a sequence of %d tokens is cut to %d; said once, counted from here on. If it happens often, raise "
                "policy.max_tokens (of an insulated policy's chunks: policy.insulate.max_action_tokens)",
                got,
                self.length,
            )


def _clean(text: str) -> str:
    return text.strip().replace("_", " ").replace("\n", " ")


def _task(text: str, bins: np.ndarray) -> str:
    return f"Task: {text}, State: {' '.join(map(str, bins.tolist()))};\n"


def _rows(state: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Bins [N, S] of a state [..., S], one row for each of N texts."""
    if state.shape[:-1] != texts.shape:
        raise ContractError(f"state: got shape {state.shape} beside prompts {texts.shape}, expected one state for each")
    return discretize_state(state).reshape(texts.size, -1)
