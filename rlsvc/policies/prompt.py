"""Texts become tokens on the host, before a compiled policy sees them: one path for training and for serving.

Letters: N rows with any leading axes, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import ContractError
from rlsvc.data.normalize import Normalizer
from rlsvc.data.prompts import PromptTokenizer
from rlsvc.data.text_tokenizer import PaliGemmaTokenizer, make_tokenizer
from rlsvc.policies.api import PROMPT_MASK, PROMPT_TOKENS
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.tokenizer import PaliGemmaTokenizerSpec

TOKENIZER_FILE = "tokenizer.model"
"""Name of the text tokenizer's file in a bundle."""


class Pi0Prompter:
    """What a pi0 policy needs done with an observation: its text, and for pi0.5 its state, as `prompt_tokens`."""

    def __init__(self, spec: Pi0Spec, folder: Path | None = None) -> None:
        """Open the tokenizer.

        Args:
            spec: of the policy.
            folder: of the bundle, which has the tokenizer's file; None takes it from where the specification says.

        Raises:
            UserError: the tokenizer's file is not there, or is none.
        """
        tokenizer = spec.tokenizer
        if folder is not None and isinstance(tokenizer, PaliGemmaTokenizerSpec):
            tokenizer = tokenizer.replace(path=str(folder / TOKENIZER_FILE))
        self.spec, self._text = spec, make_tokenizer(tokenizer)
        self._prompts = PromptTokenizer(self._text, spec.prompt_tokens)

    def files(self) -> dict[str, bytes]:
        """What a bundle keeps beside the weights, by name."""
        return {TOKENIZER_FILE: self._text.model} if isinstance(self._text, PaliGemmaTokenizer) else {}

    def __call__(self, observation: Mapping[str, np.ndarray], normalizer: Normalizer, group: Any = 0) -> dict[str, Any]:
        """The observation with tokens [N, L] in the place of texts [N]; raw, as everything else in it.

        Raises:
            ContractError: no text where the policy has no prompt of its own, or an empty one.
        """
        texts = {name: x for name, x in observation.items() if x.dtype.kind in "UO"}
        rest = {name: x for name, x in observation.items() if name not in texts}
        if self.spec.prompt is not None:
            lead = _lead(rest, normalizer)
            text = np.full(lead, self.spec.prompt)
        elif len(texts) == 1:
            ((name, text),) = texts.items()
            empty = np.asarray([not str(t).strip() for t in text.flat])
            if empty.any():
                raise ContractError(f"observation '{name}': the prompt is empty; the policy does what it is told")
        else:
            raise ContractError(
                f"the pi0 policy needs one prompt, got {len(texts)} texts: {', '.join(texts) or 'none'}"
            )
        if self.spec.tells_state:
            names = sorted(
                name for name, x in rest.items() if normalizer.modes.get(name) != "image" and x.dtype != bool
            )
            state = [normalizer.normalize(name, rest[name], group) for name in names]
            flat = [x.reshape(*text.shape, int(np.prod(x.shape[text.ndim :]))) for x in state]
            tokens, mask = self._prompts.pi05(text, np.concatenate(flat, axis=-1))
        else:
            tokens, mask = self._prompts.pi0(text)
        return {**rest, PROMPT_TOKENS: tokens, PROMPT_MASK: mask}


def _lead(observation: Mapping[str, np.ndarray], normalizer: Normalizer) -> tuple[int, ...]:
    """Leading axes of an observation without texts: what a feature has more than its statistics."""
    for name, x in observation.items():
        if name in normalizer.stats:
            return x.shape[: x.ndim - normalizer.stats[name][0].mean.ndim]
    name, x = next(iter(observation.items()))
    return x.shape[:-3]
