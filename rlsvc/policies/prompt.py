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
from rlsvc.data.text_tokenizer import PaliGemmaTokenizer, TextTokenizer, make_tokenizer
from rlsvc.data.windows import Windows
from rlsvc.policies.api import PROMPT_MASK, PROMPT_TOKENS
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.tokenizer import PaliGemmaTokenizerSpec, TokenizerSpec

TOKENIZER_FILE = "tokenizer.model"
"""Name of the text tokenizer's file in a bundle."""


class Pi0Prompter:
    """What a pi0 policy needs done with an observation: its text, and for pi0.5 its state, as `prompt_tokens`."""

    finish = None
    """The policy gives actions itself."""

    def __init__(self, spec: Pi0Spec, folder: Path | None = None) -> None:
        """Open the tokenizer.

        Args:
            spec: of the policy.
            folder: of the bundle, which has the tokenizer's file; None takes it from where the specification says.

        Raises:
            UserError: the tokenizer's file is not there, or is none.
        """
        self.spec, self._text = spec, open_tokenizer(spec.tokenizer, folder)
        self._prompts = PromptTokenizer(self._text, spec.prompt_tokens)

    def fit(self, chunks: Windows, normalizer: Normalizer) -> None:
        """Nothing is learnt from the actions."""

    def files(self) -> dict[str, bytes]:
        """What a bundle keeps beside the weights, by name."""
        return tokenizer_files(self._text)

    def __call__(
        self,
        observation: Mapping[str, np.ndarray],
        normalizer: Normalizer,
        group: Any = 0,
        chunks: Windows | None = None,
    ) -> dict[str, Any]:
        """The observation with tokens [N, L] in the place of texts [N]; raw, as everything else in it.

        Raises:
            ContractError: no text where the policy has no prompt of its own, or an empty one.
        """
        del chunks
        text, rest = split_text(observation, self.spec.prompt, normalizer, self.spec.name)
        if self.spec.tells_state:
            tokens, mask = self._prompts.pi05(text, told_state(rest, normalizer, group, text.shape))
        else:
            tokens, mask = self._prompts.pi0(text)
        return {**rest, PROMPT_TOKENS: tokens, PROMPT_MASK: mask}


def open_tokenizer(spec: TokenizerSpec, folder: Path | None) -> TextTokenizer:
    """The text tokenizer; `folder`: of the bundle, which has its file. Raises UserError."""
    if folder is not None and isinstance(spec, PaliGemmaTokenizerSpec):
        spec = spec.replace(path=str(folder / TOKENIZER_FILE))
    return make_tokenizer(spec)


def tokenizer_files(text: TextTokenizer) -> dict[str, bytes]:
    """What a bundle keeps of a text tokenizer, by name."""
    return {TOKENIZER_FILE: text.model} if isinstance(text, PaliGemmaTokenizer) else {}


def split_text(
    observation: Mapping[str, np.ndarray], prompt: str | None, normalizer: Normalizer, policy: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The text of each row, [N], and the rest of the observation.

    Args:
        observation: raw.
        prompt: of a policy that has its own.
        normalizer: knows the features' shapes.
        policy: its name, for messages.

    Raises:
        ContractError: no text where the policy has no prompt of its own, or an empty one.
    """
    texts = {name: x for name, x in observation.items() if x.dtype.kind in "UO"}
    rest = {name: x for name, x in observation.items() if name not in texts}
    if prompt is not None:
        return np.full(_lead(rest, normalizer), prompt), rest
    if len(texts) != 1:
        raise ContractError(
            f"the {policy} policy needs one prompt, got {len(texts)} texts: {', '.join(texts) or 'none'}"
        )
    ((name, text),) = texts.items()
    if any(not str(t).strip() for t in text.flat):
        raise ContractError(f"observation '{name}': the prompt is empty; the policy does what it is told")
    return text, rest


def told_state(
    rest: Mapping[str, np.ndarray], normalizer: Normalizer, group: Any, shape: tuple[int, ...]
) -> np.ndarray:
    """The normalised state that a prompt tells, [*shape, S]: vectors in alphabetical order."""
    names = sorted(name for name, x in rest.items() if normalizer.modes.get(name) != "image" and x.dtype != bool)
    state = [normalizer.normalize(name, rest[name], group) for name in names]
    return np.concatenate([x.reshape(*shape, int(np.prod(x.shape[len(shape) :]))) for x in state], axis=-1)


def _lead(observation: Mapping[str, np.ndarray], normalizer: Normalizer) -> tuple[int, ...]:
    """Leading axes of an observation without texts: what a feature has more than its statistics."""
    for name, x in observation.items():
        if name in normalizer.stats:
            return x.shape[: x.ndim - normalizer.stats[name][0].mean.ndim]
    name, x = next(iter(observation.items()))
    return x.shape[:-3]
