"""Episodes are put together from chunks, and become windows beside those of demonstrations."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from chunks import Row, episode, make_chunk

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.episodes import EpisodeAssembler, GrowingWindows
from rlsvc.data.texts import decode_texts, encode_texts
from rlsvc.data.windows import Windows


def values(episodes):
    return [ep["observation.state"][:, 0].tolist() for ep in episodes]


def test_an_episode_is_given_once_whole_with_its_final_observation():
    rows = episode(1, 3)
    assembler = EpisodeAssembler()
    assert assembler.add(make_chunk(0, {0: rows[:2]})) == []
    (whole,) = assembler.add(make_chunk(1, {0: rows[2:]}))
    assert whole["observation.state"][:, 0].tolist() == [100, 101, 102, 103]
    assert whole["is_last"].tolist() == [False, False, False, True]
    assert assembler.add(make_chunk(2, {0: [Row(2, 0)]})) == []


def test_several_episodes_of_a_chunk_come_by_stream_and_time():
    chunk = make_chunk(0, {0: [*episode(1, 1), *episode(2, 2)], 3: episode(7, 1)})
    assert values(EpisodeAssembler().add(chunk)) == [[100, 101], [200, 201, 202], [700, 701]]


def test_an_episode_that_was_cut_is_never_given():
    assembler = EpisodeAssembler()
    chunk = make_chunk(0, {0: [*episode(1, 2, cut=True), *episode(2, 1)]})
    assert values(assembler.add(chunk)) == [[200, 201]]


def test_an_episode_of_which_a_chunk_is_missing_is_never_given():
    rows = episode(1, 6)
    assembler = EpisodeAssembler()
    assembler.add(make_chunk(0, {0: rows[:2]}))
    assert assembler.add(make_chunk(2, {0: [*rows[4:], *episode(2, 1)]}))[0]["episode"][0] == 2
    assert EpisodeAssembler().add(make_chunk(0, {0: rows[1:]})) == []


def demonstrations():
    """Two datasets of one episode each: steps 0, 1, 2 and 10, 11."""
    tables = [
        EpisodeTable(
            {"state": np.array(x, np.float32)[:, None], "action": np.array(x, np.float32)[:, None]},
            np.array([len(x)]), 10.0, np.zeros(len(x), np.int32), [""],
        )
        for x in ([0, 1, 2], [10, 11])
    ]  # fmt: skip
    return Windows.build(
        tables, weights=[3.0, 1.0], groups=[0, 0], observation=("state",), action="action", n_obs_steps=2, horizon=3
    )


def rows(*numbers):
    column = np.array(numbers, np.float32)[:, None]
    return {"state": column, "action": column}


def test_windows_over_an_added_episode_stay_within_it():
    windows = GrowingWindows(demonstrations(), 10, group=2)
    windows.add(rows(20, 21))
    windows.add(rows(30, 31, 32))
    view = windows.view(0.5)
    assert view.num_windows == 10
    batch = view.gather(np.array([2, 5, 9]))
    assert batch["observation"]["state"][..., 0].tolist() == [[1, 2], [20, 20], [31, 32]]
    assert batch["action"][..., 0].tolist() == [[1, 2, 2], [20, 20, 21], [31, 32, 32]]
    assert batch["mask"].tolist() == [[True, True, False], [False, True, True], [True, True, False]]
    assert batch["group"].tolist() == [0, 2, 2]


def test_a_batch_has_the_share_of_episodes_and_the_datasets_keep_their_shares_of_the_rest():
    windows = GrowingWindows(demonstrations(), 10, group=0)
    windows.add(rows(20, 21))
    view = windows.view(0.6)
    assert view.weight.tolist() == pytest.approx([0.3, 0.1, 0.6])
    drawn = np.asarray(view.draw(jax.random.key(0), 4000))
    assert (drawn >= 5).mean() == pytest.approx(0.6, abs=0.03)
    assert set(np.asarray(windows.view(1.0).draw(jax.random.key(0), 200)).tolist()) == {5, 6}


def test_without_episodes_everything_comes_from_demonstrations_whatever_the_share():
    windows = GrowingWindows(demonstrations(), 10, group=0)
    for share in (0.5, 1.0):
        assert windows.view(share).num_windows == 5
    windows.add(rows(20, 21))
    assert windows.view(0.0).num_windows == 5


def test_the_oldest_episodes_make_room():
    windows = GrowingWindows(demonstrations(), 5, group=0)
    for numbers in ((20, 21), (30, 31, 32), (40,), (50, 51)):
        windows.add(rows(*numbers))
    assert (windows.num_episodes, windows.num_steps) == (2, 3)
    batch = windows.view(1.0).gather(np.arange(8))
    assert batch["observation"]["state"][:, -1, 0].tolist() == [0, 1, 2, 10, 11, 40, 50, 51]
    with pytest.raises(DatasetError, match=r"replay\.capacity: 5 rows do not hold an episode of 6 steps"):
        windows.add(rows(*range(6)))


def test_adding_copies_nothing_into_the_demonstrations():
    old = demonstrations()
    windows = GrowingWindows(old, 4, group=0)
    for i in range(5):
        windows.add(rows(i, i))
    assert old.columns["state"][:, 0].tolist() == [0, 1, 2, 10, 11]


def test_an_episode_of_other_columns_is_refused_by_name():
    windows = GrowingWindows(demonstrations(), 10, group=0)
    with pytest.raises(DatasetError, match=r"'action': got nothing, expected shape \[1\]"):
        windows.add({"state": np.zeros((2, 1), np.float32)})
    with pytest.raises(DatasetError, match=r"'state': got shape \[3\], expected shape \[1\]"):
        windows.add({"state": np.zeros((2, 3), np.float32), "action": np.zeros((2, 1), np.float32)})


def test_texts_survive_as_bytes_and_a_longer_one_is_refused():
    texts = np.array(["go to the red disc", "", "é→x"], object)
    coded = encode_texts(texts)
    assert (coded.shape, coded.dtype) == ((3, 256), np.uint8)
    assert decode_texts(coded).tolist() == texts.tolist()
    with pytest.raises(DatasetError, match=r"'task': a text of 257 bytes, at most 256"):
        encode_texts(np.array(["x" * 257], object), "task")
