"""FAST, against what the published processor gave with the same files, and by hand."""

import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import idct

from rlsvc.core.errors import UserError
from rlsvc.data.fast_tokenizer import FastTokenizer, MalformedActionError

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = DATA / "pi_tokens" / "fast"


@pytest.fixture(scope="module")
def actions() -> np.ndarray:
    with np.load(DATA / "pusht" / "pusht_first3.npz") as file:
        return file["action"] / np.float32(256) - 1


@pytest.fixture(scope="module")
def chunks(actions) -> list[np.ndarray]:
    return [actions[i : i + 16] for i in range(0, 400, 4)]


@pytest.fixture(scope="module")
def fitted(chunks) -> FastTokenizer:
    return FastTokenizer.fit(chunks, vocab_size=400)


def test_a_published_folder_gives_the_published_processors_ids_and_actions(actions):
    golden = json.loads((DATA / "pi_tokens" / "golden.json").read_text("utf-8"))
    fast = FastTokenizer.load(PUBLISHED)
    for case in golden["fast"]:
        ids = fast.encode(actions[case["step"] : case["step"] + 16])
        assert ids == case["ids"]
        np.testing.assert_array_equal(fast.decode(ids, 16, 2), np.float32(case["decoded"]))
    assert fast.clipped == 0


def test_a_length_that_a_published_file_pads_or_cuts_to_is_not_applied(actions):
    files = {file.name: file.read_bytes() for file in PUBLISHED.iterdir()}
    changed = json.loads(files["tokenizer.json"]) | {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "!"},
    }  # fmt: skip
    fast = FastTokenizer.from_files(files | {"tokenizer.json": json.dumps(changed).encode()})
    assert fast.encode(actions[:16]) == FastTokenizer.load(PUBLISHED).encode(actions[:16])


def test_a_coefficient_below_the_smallest_is_raised_as_published_counted_and_said_once(caplog):
    golden = json.loads((DATA / "pi_tokens" / "golden.json").read_text("utf-8"))["below"]
    fast = FastTokenizer.load(PUBLISHED)
    with caplog.at_level(logging.WARNING):
        ids = [fast.encode(np.full((16, 2), -1.0, np.float32)) for _ in range(2)]
    assert ids == [golden["ids"]] * 2
    np.testing.assert_array_equal(fast.decode(ids[0], 16, 2), np.float32(golden["decoded"]))
    assert fast.clipped == 2
    assert [r.getMessage()[:70] for r in caplog.records] == [
        "FAST tokenizer: a coefficient of -40 is below the smallest that it was"
    ]


def test_a_coefficient_that_a_published_vocabulary_cannot_spell_is_refused_not_left_out():
    """The published processor gives 30 coefficients of 32 here, and with them a chunk of zeros."""
    with pytest.raises(UserError, match=r"cannot spell the coefficients \[360\]"):
        FastTokenizer.load(PUBLISHED).encode(np.full((16, 2), 9.0, np.float32))


def spelled(fast: FastTokenizer, chunk: np.ndarray) -> list[int]:
    """Coefficients that stand in the text of a chunk's ids."""
    bpe = json.loads(fast.files()["tokenizer.json"])["model"]["vocab"]
    names = {i: name for name, i in bpe.items()}
    # Codes below 128 are one byte each; GPT-2's byte alphabet writes byte b below 33 as 256 + b.
    text = "".join(names[i] for i in fast.encode(chunk))
    return [(ord(c) - 256 if ord(c) >= 256 else ord(c)) + fast.min_token for c in text]


def test_coefficients_are_of_an_orthonormal_dct_and_the_lowest_frequency_comes_first():
    # The DCT of a constant c over 4 steps is 2c, 0, 0, 0; that of (1, -1, -1, 1) is 0, 0, 2, 0.
    chunk = np.array([[0.5, 1.0], [0.5, -1.0], [0.5, -1.0], [0.5, 1.0]])
    fast = FastTokenizer.fit([chunk, -chunk], vocab_size=256, scale=10)
    assert fast.min_token == -20
    assert spelled(fast, chunk) == [10, 0, 0, 0, 0, 20, 0, 0]
    np.testing.assert_allclose(fast.decode(fast.encode(chunk), 4, 2), chunk, atol=1e-7)


def test_the_scale_sets_how_much_detail_is_kept():
    x = np.array([[0.30], [0.11]])  # coefficients 0.41 / sqrt 2 = 0.2899 and 0.19 / sqrt 2 = 0.1344
    coarse, fine = FastTokenizer.fit([x, -x], 256, scale=10), FastTokenizer.fit([x, -x], 256, scale=100)
    assert spelled(coarse, x) == [3, 1]
    assert spelled(fine, x) == [29, 13]
    root = math.sqrt(0.5)
    np.testing.assert_allclose(coarse.decode(coarse.encode(x), 2, 1), [[0.4 * root], [0.2 * root]], rtol=1e-6)


def test_pairs_that_are_frequent_become_one_token(chunks, fitted):
    lengths = [len(fitted.encode(chunk)) for chunk in chunks]
    assert 256 < fitted.vocab_size <= 400  # no more pairs occur twice
    assert np.mean(lengths) < 16  # of 32 coefficients
    bytes_alone = FastTokenizer.fit(chunks, vocab_size=256)
    assert {len(bytes_alone.encode(chunk)) for chunk in chunks} == {32}


def test_a_chunk_that_is_frequent_becomes_one_token_whatever_characters_its_coefficients_are():
    """The published fit cuts between letters, digits and signs, and needs four."""
    chunk = np.array([[0.0, 4.8, 6.5, 3.3]])  # of one step, so that the DCT changes nothing: characters 0, 48, 65, 33
    assert len(FastTokenizer.fit([chunk] * 3, vocab_size=300).encode(chunk)) == 1


def test_the_same_chunks_give_the_same_tokenizer(chunks, fitted):
    assert FastTokenizer.fit(chunks, vocab_size=400).files() == fitted.files()


def test_a_saved_tokenizer_is_plain_json_and_comes_back(tmp_path, chunks, fitted):
    fitted.save(tmp_path / "fast")
    assert {file.name for file in (tmp_path / "fast").iterdir()} == {"tokenizer.json", "processor_config.json"}
    config = json.loads((tmp_path / "fast" / "processor_config.json").read_text())
    assert config == {
        "scale": 10,
        "vocab_size": 400,
        "min_token": fitted.min_token,
        "time_horizon": 16,
        "action_dim": 2,
    }
    again = FastTokenizer.load(tmp_path / "fast")
    assert [again.encode(chunk) for chunk in chunks] == [fitted.encode(chunk) for chunk in chunks]
    assert again.files() == fitted.files()


@settings(max_examples=60, deadline=None)
@given(coefficients=st.lists(st.integers(-20, 5000), min_size=32, max_size=32))
def test_any_coefficients_come_back_also_those_that_no_training_chunk_had(fitted, coefficients):
    assert fitted.min_token < -20
    chunk = idct(np.array(coefficients, np.float64).reshape(16, 2) / 10, axis=0, norm="ortho")
    np.testing.assert_allclose(fitted.decode(fitted.encode(chunk), 16, 2), chunk, rtol=1e-6, atol=1e-4)
    assert fitted.clipped == 0


def test_ids_that_spell_no_chunk_are_refused_by_their_reason(fitted, chunks):
    ids = fitted.encode(chunks[3])
    vocab = json.loads(fitted.files()["tokenizer.json"])["model"]["vocab"]
    for bad, reason in (
        ([*ids, fitted.vocab_size], "unknown_id"),
        ([-1, *ids], "unknown_id"),
        ([*ids, vocab["Ã"]], "broken_character"),  # byte 0xC3, the first of two
        (ids[:-1], "wrong_length"),
        ([], "wrong_length"),
    ):
        with pytest.raises(MalformedActionError) as caught:
            fitted.decode(bad, 16, 2)
        assert caught.value.reason == reason, bad
    with pytest.raises(MalformedActionError, match=r"give 32 coefficients, expected 16 \* 3"):
        fitted.decode(ids, 16, 3)


def test_a_chunk_of_another_robot_or_not_a_chunk_at_all_is_refused(fitted):
    with pytest.raises(UserError, match=r"got a chunk \[16, 7\], it was fitted for \[16, 2\]"):
        fitted.encode(np.zeros((16, 7)))
    with pytest.raises(UserError, match=r"got a chunk \[50, 2\], it was fitted for \[16, 2\]"):
        fitted.encode(np.zeros((50, 2)))
    with pytest.raises(UserError, match=r"got a chunk of shape \(1, 16, 2\), expected"):
        fitted.encode(np.zeros((1, 16, 2)))
    with pytest.raises(UserError, match=r"action 3 of the chunk is not finite"):
        fitted.encode(np.where(np.arange(16)[:, None] == 3, np.nan, np.zeros((16, 2))))
    with pytest.raises(UserError, match=r"coefficient of 2e\+06 is far outside"):
        fitted.encode(np.full((16, 2), 5e4))


def test_a_fit_of_nothing_or_with_fewer_ids_than_bytes_is_refused():
    with pytest.raises(UserError, match=r"fitted on chunks of actions; got none"):
        FastTokenizer.fit([])
    with pytest.raises(UserError, match=r"vocab_size: got 100, expected at least 256"):
        FastTokenizer.fit([np.zeros((4, 2))], vocab_size=100)


def test_a_tokenizer_fitted_on_chunks_of_several_shapes_is_for_any(actions):
    fast = FastTokenizer.fit([actions[:16], actions[:10]], 256)
    assert (fast.time_horizon, fast.action_dim) == (None, None)
    assert fast.decode(fast.encode(actions[:7]), 7, 2).shape == (7, 2)


def test_a_folder_that_is_no_fast_tokenizer_is_refused_by_file_and_field(tmp_path):
    good = {file.name: file.read_bytes() for file in PUBLISHED.iterdir()}
    config = json.loads(good["processor_config.json"])

    def load(**changed: bytes | None) -> FastTokenizer:
        names = {"bpe": "tokenizer.json", "config": "processor_config.json"}
        files = good | {names[key]: value for key, value in changed.items()}
        return FastTokenizer.from_files({name: value for name, value in files.items() if value is not None}, "folder")

    load()
    with pytest.raises(UserError, match=r"nowhere': has no tokenizer\.json"):
        FastTokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"folder: has no processor_config\.json"):
        load(config=None)
    with pytest.raises(UserError, match=r"folder: tokenizer\.json is not of the library 'tokenizers'"):
        load(bpe=b"{}")
    with pytest.raises(UserError, match=r"folder: processor_config\.json: contents: Invalid JSON"):
        load(config=b"scale: 10")
    with pytest.raises(UserError, match=r"processor_config\.json: min_token: Field required"):
        load(config=json.dumps({"scale": 10, "vocab_size": 400}).encode())
    with pytest.raises(UserError, match=r"processor_config\.json: scale: Input should be greater than 0"):
        load(config=json.dumps(config | {"scale": 0}).encode())
    with pytest.raises(UserError, match=r"has 286 ids, processor_config\.json says 100; they are not of one tokenizer"):
        load(config=json.dumps(config | {"vocab_size": 100}).encode())


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"needs the package 'tokenizers'.*pip install tokenizers"):
        FastTokenizer.load(PUBLISHED)
