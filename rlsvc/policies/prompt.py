"""Texts become tokens on the host, before a compiled policy sees them: one path for training and for serving.

Letters: N rows with any leading axes, L tokens of a prompt, F tokens of a chunk of actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.errors import ContractError
from rlsvc.data.fast_tokenizer import FastTokenizer
from rlsvc.data.normalize import Normalizer
from rlsvc.data.prompts import ADVANTAGE, POSITIVE, PromptTokenizer, with_advantage
from rlsvc.data.text_tokenizer import PaliGemmaTokenizer, TextTokenizer, make_tokenizer
from rlsvc.data.windows import Windows
from rlsvc.policies.action_tokens import fit_action_tokenizer, normal_chunks
from rlsvc.policies.api import ACTION_MASK, ACTION_TOKENS, PROMPT_MASK, PROMPT_TOKENS
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.tokenizer import PaliGemmaTokenizerSpec, TokenizerSpec
from rlsvc.spec.value_function import ValueVlmSpec

TOKENIZER_FILE = "tokenizer.model"
"""Name of the text tokenizer's file in a bundle."""


class TextPrompter:
    """What a model that reads text needs done with an observation: its text, and its state if that is told in words."""

    finish = None
    """The policy gives actions itself."""

    def __init__(self, spec: Pi0Spec | ValueVlmSpec, folder: Path | None = None) -> None:
        """Open the tokenizer.

        Args:
            spec: of the policy, or value function.
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


class Pi0Prompter(TextPrompter):
    """A pi0 policy's: its text and for pi0.5 its state, and in training, if it is insulated, the tokens of its actions.

    Arguments as of `TextPrompter`. Raises besides UserError for an action tokenizer that is not there, and SpecError
    where the vocabulary has no room for its tokens.
    """

    spec: Pi0Spec

    def __init__(self, spec: Pi0Spec, folder: Path | None = None) -> None:
        super().__init__(spec, folder)
        self._fast: FastTokenizer | None = None
        path = None if spec.insulate is None else spec.insulate.action_tokenizer.path
        if path is not None:
            self._take(FastTokenizer.load(path))

    def _take(self, fast: FastTokenizer) -> None:
        assert self.spec.insulate is not None
        self._fast, self._actions = fast, PromptTokenizer(self._text, self.spec.insulate.max_action_tokens, fast)

    def fit(self, chunks: Windows, normalizer: Normalizer) -> None:
        """Fit the action tokenizer, if the run is to fit one. Raises UserError as FastTokenizer.fit."""
        fit = None if self.spec.insulate is None else self.spec.insulate.action_tokenizer.fit
        if fit is not None:
            self._take(fit_action_tokenizer(fit, chunks, normalizer))

    def files(self) -> dict[str, bytes]:
        """What a bundle keeps beside the weights, by name; the action tokenizer's are for a later run."""
        return {**super().files(), **({} if self._fast is None else self._fast.files())}

    def __call__(
        self,
        observation: Mapping[str, np.ndarray],
        normalizer: Normalizer,
        group: Any = 0,
        chunks: Windows | None = None,
    ) -> dict[str, Any]:
        """As of `TextPrompter`; with `chunks`, the rows' actions in training, also their tokens [N, F].

        Raises:
            ContractError: no text where the policy has no prompt of its own, or an empty one.
            UserError: as FastTokenizer.encode.
        """
        prepared = super().__call__(asked(observation, self.spec, chunks), normalizer, group)
        if chunks is None or self.spec.insulate is None:
            return prepared
        assert self._fast is not None, "the action tokenizer was not fitted"
        rows = np.arange(len(prepared[PROMPT_TOKENS]))
        parts = [self._actions.actions(block) for _, block in normal_chunks(chunks, rows, normalizer)]
        tokens, mask = (np.concatenate(column) for column in zip(*parts, strict=True))
        return {**prepared, ACTION_TOKENS: tokens, ACTION_MASK: mask}


def open_tokenizer(spec: TokenizerSpec, folder: Path | None) -> TextTokenizer:
    """The text tokenizer; `folder`: of the bundle, which has its file. Raises UserError."""
    if folder is not None and isinstance(spec, PaliGemmaTokenizerSpec):
        spec = spec.replace(path=str(folder / TOKENIZER_FILE))
    return make_tokenizer(spec)


def tokenizer_files(text: TextTokenizer) -> dict[str, bytes]:
    """What a bundle keeps of a text tokenizer, by name."""
    return {TOKENIZER_FILE: text.model} if isinstance(text, PaliGemmaTokenizer) else {}


def asked(
    observation: Mapping[str, np.ndarray], spec: Pi0Spec | Pi0FastSpec, chunks: Windows | None
) -> Mapping[str, np.ndarray]:
    """The observation with the advantage that its prompt tells: in training (`chunks`) its own, else `positive`."""
    if not spec.advantage_in_prompt:
        return observation
    if chunks is not None:
        assert ADVANTAGE in observation, "nobody told the advantages of the training steps"
        return observation
    return {**observation, ADVANTAGE: np.asarray(POSITIVE)}


def split_text(
    observation: Mapping[str, np.ndarray], prompt: str | None, normalizer: Normalizer, policy: str
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The text of each row, [N], with the advantage if one is to be told, and the rest of the observation.

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
    advantage = texts.pop(ADVANTAGE, np.asarray(""))
    if prompt is not None:
        return with_advantage(np.full(_lead(rest, normalizer), prompt), advantage), rest
    if len(texts) != 1:
        raise ContractError(f"{policy} needs one prompt, got {len(texts)} texts: {', '.join(texts) or 'none'}")
    ((name, text),) = texts.items()
    if any(not str(t).strip() for t in text.flat):
        raise ContractError(f"observation '{name}': the prompt is empty; the policy does what it is told")
    return with_advantage(text, advantage), rest


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
