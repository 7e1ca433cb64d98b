"""Prompts equal those that openpi's own program made with the same files (tests/data/pi_tokens)."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsvc.core.errors import ContractError, SpecError, UserError
from rlsvc.data.fast_tokenizer import FastTokenizer, MalformedActionError
from rlsvc.data.prompts import PromptTokenizer, action_ids_in_text, discretize_state, with_advantage
from rlsvc.data.text_tokenizer import ByteTokenizer, PaliGemmaTokenizer, make_tokenizer
from rlsvc.spec.tokenizer import ByteTokenizerSpec, PaliGemmaTokenizerSpec

FOLDER = Path(__file__).parents[1] / "data" / "pi_tokens"
MODEL = FOLDER / "small.model"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((FOLDER / "golden.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def paligemma() -> PaliGemmaTokenizer:
    return PaliGemmaTokenizer.load(MODEL)


@pytest.fixture(scope="module")
def fast() -> FastTokenizer:
    return FastTokenizer.load(FOLDER / "fast")


@pytest.fixture(scope="module")
def actions() -> np.ndarray:
    """[N, 2] float32 in [-1, 1], as the golden numbers were made from."""
    with np.load(FOLDER.parent / "pusht" / "pusht_first3.npz") as file:
        return file["action"] / np.float32(256) - 1


def state_of(case: dict[str, Any]) -> np.ndarray:
    return np.array(case["state"], case["dtype"])


def test_pi0_prompts_are_openpis(golden, paligemma):
    for case in golden["pi0"]:
        tokens, mask = PromptTokenizer(paligemma, case["length"]).pi0(case["prompt"])
        assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)
        assert (tokens.tolist(), mask.tolist()) == (case["tokens"], [bool(m) for m in case["mask"]]), case["prompt"]


def test_pi05_prompts_are_openpis(golden, paligemma):
    for case in golden["pi05"]:
        tokens, mask = PromptTokenizer(paligemma, case["length"]).pi05(case["prompt"], state_of(case))
        assert (tokens.tolist(), mask.tolist()) == (case["tokens"], [bool(m) for m in case["mask"]]), case["prompt"]


def test_pi0_fast_sequences_and_their_masks_are_openpis(golden, paligemma, fast, actions):
    for case in golden["pi0_fast"]:
        chunk = None if case["step"] is None else actions[case["step"] : case["step"] + 16]
        made = PromptTokenizer(paligemma, case["length"], fast).pi0_fast(case["prompt"], state_of(case), chunk)
        for name in ("tokens", "mask", "ar_mask", "loss_mask"):
            assert getattr(made, name).astype(int).tolist() == case[name], (name, case["prompt"], case["step"])


def test_rows_of_a_batch_are_what_they_are_alone(paligemma, fast, actions):
    prompts = PromptTokenizer(paligemma, 64, fast)
    texts = np.array([["pick up the red block", ""], ["open the drawer", "push"]])
    state = np.linspace(-1, 1, 12).reshape(2, 2, 3)
    chunks = np.stack([actions[i : i + 16] for i in (0, 9, 70, 200)]).reshape(2, 2, 16, 2)
    pi0, pi05, both = prompts.pi0(texts), prompts.pi05(texts, state), prompts.pi0_fast(texts, state, chunks)
    assert both.tokens.shape == (2, 2, 64)
    for at in np.ndindex(2, 2):
        alone = prompts.pi0_fast(texts[at], state[at], chunks[at])
        assert all(np.array_equal(a[at], b) for a, b in zip(both, alone, strict=True))
        assert all(np.array_equal(a[at], b) for a, b in zip(pi0, prompts.pi0(texts[at]), strict=True))
        assert all(np.array_equal(a[at], b) for a, b in zip(pi05, prompts.pi05(texts[at], state[at]), strict=True))


def test_a_byte_prompt_is_begin_bytes_newline_and_padding():
    tokens, mask = PromptTokenizer(ByteTokenizer(), 8).pi0(" a_b\n")
    assert tokens.tolist() == [2, 3 + 97, 3 + 32, 3 + 98, 3 + 10, 0, 0, 0]
    assert mask.tolist() == [True] * 5 + [False] * 3


def test_a_byte_prompt_of_pi05_spells_the_state():
    tokens, _ = PromptTokenizer(ByteTokenizer(), 64).pi05("Go", np.array([-1.0, 0.0, 2.0]))
    text = bytes(i - 3 for i in tokens.tolist() if i > 2).decode()
    assert text == "Task: Go, State: 0 128 255;\nAction: "


def test_a_text_tells_the_advantage_that_it_is_given_and_is_left_alone_without_one():
    texts = np.asarray([["push", "pull it"], ["lift", "drop"]])
    told = with_advantage(texts, np.asarray([["positive", ""], ["negative", "positive"]]))
    expected = [["push Advantage: positive", "pull it"], ["lift Advantage: negative", "drop Advantage: positive"]]
    assert told.tolist() == expected
    assert with_advantage(texts, np.asarray("positive"))[0].tolist() == [f"{x} Advantage: positive" for x in texts[0]]
    assert with_advantage(texts.astype(object), np.asarray("")).tolist() == texts.tolist()


def test_the_state_falls_into_bins_of_one_128th():
    state = np.array([-7.0, -1.0, -0.9922, -0.9921875, -0.001, 0.0, 0.9921, 0.9921875, 1.0, 9.0])
    assert discretize_state(state).tolist() == [-1, 0, 0, 1, 127, 128, 254, 255, 255, 255]


def test_paligemmas_vocabulary_gives_its_last_ids_before_the_segmentation_tokens_to_actions():
    assert action_ids_in_text([0, 1, 2047], 257_152, 128).tolist() == [257_023, 257_022, 254_976]
    assert action_ids_in_text([257_023, 254_976], 257_152, 128).tolist() == [0, 2047]


@pytest.mark.parametrize("name", ["paligemma", "byte"])
def test_a_sequence_of_pi0_fast_gives_its_chunk_back(name, paligemma, fast, actions):
    text = paligemma if name == "paligemma" else ByteTokenizer(action_tokens=fast.vocab_size)
    prompts = PromptTokenizer(text, 128, fast)
    made = prompts.pi0_fast("Push", np.zeros(2), actions[40:56])
    after_prompt = made.tokens[made.ar_mask].tolist()
    assert after_prompt[-1] == text.eos_id
    assert max(after_prompt) < text.vocab_size
    want = fast.decode(fast.encode(actions[40:56]), 16, 2)
    np.testing.assert_array_equal(prompts.decode_chunk([*after_prompt, 7, 0, 0], 16, 2), want)
    np.testing.assert_allclose(want, actions[40:56], atol=0.15)  # 32 coefficients, each off by at most 0.05


def test_what_is_no_action_is_refused_by_its_reason(paligemma, fast, actions):
    prompts = PromptTokenizer(paligemma, 128, fast)
    made = prompts.pi0_fast("Push", np.zeros(2), actions[40:56])
    good = made.tokens[made.ar_mask].tolist()
    start = len(paligemma.encode("Action: "))
    cases = {
        "no_action": good[1:],
        "no_end": good[:-2],
        "unknown_id": [*good[:start], 5, *good[start:]],
        "wrong_length": [*good[:start], *good[start + 1 :]],
    }
    for reason, tokens in cases.items():
        with pytest.raises(MalformedActionError) as caught:
            prompts.decode_chunk(tokens, 16, 2)
        assert caught.value.reason == reason
    with pytest.raises(MalformedActionError, match=r"0 coefficients, expected 16 \* 2"):
        prompts.decode_chunk([*good[:start], *good[-2:]], 16, 2)


def test_what_is_too_long_is_cut_counted_and_said_once(caplog):
    prompts = PromptTokenizer(ByteTokenizer(), 4)
    with caplog.at_level(logging.WARNING):
        tokens, mask = prompts.pi0(["abcdef", "a", "ghijkl"])
        prompts.pi0("abcdef")
    assert tokens[0].tolist() == [2, 100, 101, 102]
    assert mask[0].all()
    assert mask[1].tolist() == [True, True, True, False]
    assert prompts.truncated == 3
    assert [r.getMessage() for r in caplog.records] == [
        "a sequence of 8 tokens is cut to 4; said once, counted from here on. If it happens often, raise "
        "policy.max_tokens (of an insulated policy's chunks: policy.insulate.max_action_tokens)"
    ]


def test_action_tokens_that_do_not_fit_into_the_text_vocabulary_are_refused(fast, paligemma):
    with pytest.raises(SpecError, match=rf"259 ids have no room for the {fast.vocab_size} of the action"):
        PromptTokenizer(ByteTokenizer(), 8, fast)
    with pytest.raises(SpecError, match=r"no room"):
        PromptTokenizer(ByteTokenizer(action_tokens=fast.vocab_size - 200), 8, fast)
    tiny = ByteTokenizer()
    tiny.action_skip = 300  # a SentencePiece model with fewer pieces than are skipped
    with pytest.raises(SpecError, match=r"no room"):
        PromptTokenizer(tiny, 8, fast)
    PromptTokenizer(ByteTokenizer(action_tokens=fast.vocab_size), 8, fast)
    with pytest.raises(SpecError, match=r"made without an action tokenizer"):
        PromptTokenizer(paligemma, 8).pi0_fast("a", np.zeros(1), np.zeros((16, 2)))


def test_half_a_character_a_state_that_is_not_finite_and_a_state_too_few_are_refused(paligemma):
    prompts = PromptTokenizer(paligemma, 8)
    with pytest.raises(ContractError, match=r"prompt: no Unicode text, half a character at 1"):
        prompts.pi0("a\ud83d")
    with pytest.raises(ContractError, match=r"state: a value is not finite"):
        prompts.pi05("a", np.array([0.0, np.nan]))
    with pytest.raises(ContractError, match=r"got shape \(3,\) beside prompts \(2,\)"):
        prompts.pi05(["a", "b"], np.zeros(3))


def test_a_tokenizer_file_that_is_not_there_or_is_something_else_is_refused_by_name(tmp_path):
    with pytest.raises(
        UserError, match=r"none\.model': not readable \(No such file or directory\); expected PaliGemma"
    ):
        PaliGemmaTokenizer.load(tmp_path / "none.model")
    pointer = tmp_path / "pointer.model"
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\nsize 4264023\n", MODEL.read_bytes()[:9000]):
        pointer.write_bytes(content)
        with pytest.raises(UserError, match=r"pointer\.model': not a SentencePiece model"):
            PaliGemmaTokenizer.load(pointer)


def test_a_model_without_begin_or_end_is_refused():
    from sentencepiece import SentencePieceTrainer

    for missing in ("bos_id", "eos_id"):
        file = io.BytesIO()
        options = {"vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2, missing: -1}
        SentencePieceTrainer.train(sentence_iterator=iter(["push the block"]), model_writer=file, **options)
        with pytest.raises(UserError, match=r"the model has no begin or no end of a sequence"):
            PaliGemmaTokenizer(file.getvalue())


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"needs the package 'sentencepiece'.*pip install sentencepiece"):
        PaliGemmaTokenizer.load(MODEL)


def test_the_specification_names_the_tokenizer():
    assert make_tokenizer(ByteTokenizerSpec(action_tokens=5)).vocab_size == 264
    made = make_tokenizer(PaliGemmaTokenizerSpec(path=str(MODEL)))
    assert (made.vocab_size, made.bos_id, made.eos_id, made.pad_id) == (1120, 2, 1, 0)
