"""What pi0-FAST needs done on the host: texts, states and actions to tokens before, tokens to actions after.

Letters: N rows, L tokens of a sequence, M decoded tokens, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import SpecError
from rlsvc.core.types import MALFORMED
from rlsvc.data.fast_tokenizer import FastTokenizer, MalformedActionError
from rlsvc.data.normalize import Normalizer
from rlsvc.data.prompts import FastSequence, PromptTokenizer
from rlsvc.data.windows import Windows
from rlsvc.policies.action_tokens import fit_action_tokenizer, normal_chunks
from rlsvc.policies.api import PROMPT_AR_MASK, PROMPT_LOSS_MASK, PROMPT_MASK, PROMPT_TOKENS
from rlsvc.policies.pi0_fast import END
from rlsvc.policies.prompt import asked, open_tokenizer, split_text, tokenizer_files, told_state
from rlsvc.spec.pi0_fast import Pi0FastSpec


class Pi0FastPrompter:
    """Sequences for a pi0_fast policy, and actions from its tokens."""

    def __init__(self, spec: Pi0FastSpec, folder: Path | None = None) -> None:
        """Open the tokenizers.

        Args:
            spec: of the policy.
            folder: of the bundle, which has the tokenizers' files; None takes them from where the specification says,
                and leaves an action tokenizer that is to be fitted to `fit`.

        Raises:
            UserError: a tokenizer's file is not there, or is none.
            SpecError: the vocabulary has no room for the action tokens, or ends a sequence with another id.
        """
        self.spec, self._text = spec, open_tokenizer(spec.tokenizer, folder)
        if self._text.eos_id != END:
            raise SpecError(
                f"policy.tokenizer: ends a sequence with id {self._text.eos_id}; pi0_fast stops at {END}, as PaliGemma"
            )
        source = folder or spec.action_tokenizer.path
        self._fast: FastTokenizer | None = None
        if source is not None:
            self._take(FastTokenizer.load(source))

    def _take(self, fast: FastTokenizer) -> None:
        self._fast, self._prompts = fast, PromptTokenizer(self._text, self.spec.max_tokens, fast)

    def fit(self, chunks: Windows, normalizer: Normalizer) -> None:
        """Fit the action tokenizer, if the run is to fit one.

        Args:
            chunks: of the training data, raw.
            normalizer: of the run.

        Raises:
            UserError: as FastTokenizer.fit.
        """
        fit = self.spec.action_tokenizer.fit
        if fit is not None and self._fast is None:
            self._take(fit_action_tokenizer(fit, chunks, normalizer))

    def files(self) -> dict[str, bytes]:
        """What a bundle keeps beside the weights, by name."""
        assert self._fast is not None, "the action tokenizer was not fitted"
        return {**tokenizer_files(self._text), **self._fast.files()}

    def __call__(
        self,
        observation: Mapping[str, np.ndarray],
        normalizer: Normalizer,
        group: Any = 0,
        chunks: Windows | None = None,
    ) -> dict[str, Any]:
        """The observation with a sequence's tokens and masks [N, L] in the place of texts [N]; the rest raw, as it was.

        Args:
            observation: raw.
            normalizer: of the run, or of the bundle.
            group: of its statistics.
            chunks: the rows' actions, in training: the sequence then goes on to their end, and has masks for the loss.

        Raises:
            ContractError: no text where the policy has no prompt of its own, or an empty one.
            UserError: as FastTokenizer.encode.
        """
        assert self._fast is not None, "the action tokenizer was not fitted"
        text, rest = split_text(asked(observation, self.spec, chunks), self.spec.prompt, normalizer, self.spec.name)
        state = told_state(rest, normalizer, group, text.shape)
        if chunks is None:
            sequence = self._prompts.pi0_fast(text, state)
            return {**rest, PROMPT_TOKENS: sequence.tokens, PROMPT_MASK: sequence.mask}
        parts = [
            self._prompts.pi0_fast(text[rows], state[rows], actions)
            for rows, actions in normal_chunks(chunks, np.arange(len(text)), normalizer)
        ]
        sequence = FastSequence(*(np.concatenate(field) for field in zip(*parts, strict=True)))
        return {
            **rest,
            PROMPT_TOKENS: sequence.tokens,
            PROMPT_MASK: sequence.mask,
            PROMPT_AR_MASK: sequence.ar_mask,
            PROMPT_LOSS_MASK: sequence.loss_mask,
        }

    def finish(
        self, tokens: np.ndarray, normalizer: Normalizer, group: int = 0
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Actions from what the policy said.

        Args:
            tokens: [N, M] int32, from the first after the prompt on.
            normalizer: of the bundle.
            group: of its statistics.

        Returns:
            The actions that are executed, [N, H, A] float32 in the contract's units; and `malformed` [N], "" for a row
            whose tokens are actions, else why they are none (the reason of MalformedActionError). Such a row is
            hold_action, or NaN where there is none.
        """
        assert self._fast is not None, "the action tokenizer was not fitted"
        spec, width = self.spec, normalizer.stats["action"][group].mean.size
        nothing = np.full(width, np.nan) if spec.hold_action is None else np.asarray(spec.hold_action)
        actions = np.tile(nothing.astype(np.float32), (len(tokens), spec.horizon, 1))
        reasons = np.full(len(tokens), "", "<U20")
        for i, row in enumerate(tokens):
            try:
                chunk = self._prompts.decode_chunk(row, spec.horizon, width)
            except MalformedActionError as error:
                reasons[i] = error.reason
            else:
                actions[i] = normalizer.unnormalize("action", chunk, group)
        return actions[:, : spec.n_action_steps], {MALFORMED: reasons}
