import dataclasses
import itertools
import subprocess
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from chunks import SCHEMA, Row, episode, make_chunk
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsvc.core.contract import Feature
from rlsvc.core.errors import DatasetError, SpecError
from rlsvc.core.types import Chunk, EpisodeTable
from rlsvc.data.journal import Journal
from rlsvc.data.replay import Replay
from rlsvc.data.replay_table import replay_from_table
from rlsvc.data.sequence import ReplayView
from rlsvc.spec.replay import PrioritySpec, ReplaySpec

PLACEMENTS = ("device", "host", "disk")


def make(tmp_path=None, *, capacity=100, streams=(0,), placement="host", priority=None, schema=None) -> Replay:
    spec = ReplaySpec(capacity=capacity, placement=placement, priority=priority)
    return Replay(spec, schema or SCHEMA, streams, folder=tmp_path)


def transitions(replay: Replay) -> list[float]:
    """States that a real transition begins at, in the order in which they can be drawn."""
    view, rows = replay.view(), replay.view().rows_per_stream
    found = []
    for slot in range(len(replay.streams)):
        for k in range(int(view.count[slot])):
            at = int(view.starts[slot, (int(view.first[slot]) + k) % rows])
            found.append(float(view.columns["observation.state"][slot, at, 0]))
    return found


# What is stored


def test_every_step_is_a_transition_and_a_final_observation_is_none():
    replay = make()
    assert replay.add(make_chunk(0, {0: [*episode(1, 3, terminated=True), *episode(2, 2)]}))
    assert (replay.num_rows, replay.num_transitions, replay.num_episodes) == (7, 5, 2)
    assert transitions(replay) == [100, 101, 102, 200, 201]


def test_the_newest_step_becomes_a_transition_when_its_successor_arrives():
    replay = make()
    rows = episode(1, 3)
    replay.add(make_chunk(0, {0: rows[:2]}))
    assert transitions(replay) == [100]
    replay.add(make_chunk(1, {0: rows[2:]}))
    assert transitions(replay) == [100, 101, 102]


def test_the_last_row_of_an_episode_that_was_cut_is_no_transition():
    replay = make()
    replay.add(make_chunk(0, {0: [*episode(1, 3, cut=True), *episode(2, 1)]}))
    replay.add(make_chunk(1, {0: episode(3, 1)}))
    assert transitions(replay) == [100, 101, 200, 300]
    assert replay.num_episodes == 3


def test_rows_that_were_lost_in_between_make_no_transition_across_the_gap():
    replay = make()
    rows = episode(1, 6)
    replay.add(make_chunk(0, {0: rows[:3]}))
    replay.add(make_chunk(2, {0: rows[4:]}))
    assert transitions(replay) == [100, 101, 104, 105]


def test_a_stream_whose_first_row_is_in_the_middle_of_an_episode_has_no_transition_before_it():
    replay = make()
    replay.add(make_chunk(0, {0: episode(0, 3)[1:]}))
    assert transitions(replay) == [1, 2]


def test_old_rows_make_room_and_take_their_transitions_with_them():
    replay = make(capacity=5)
    replay.add(make_chunk(0, {0: episode(1, 3)}))
    replay.add(make_chunk(1, {0: episode(2, 2)}))
    # The ring holds 102, 103 (final), 200, 201, 202 (final).
    assert transitions(replay) == [102, 200, 201]
    assert (replay.num_rows, replay.num_episodes) == (5, 2)


def test_a_chunk_longer_than_the_ring_leaves_its_newest_rows():
    whole, parts = make(capacity=6), make(capacity=6)
    rows = [*episode(1, 9), *episode(2, 7)]
    whole.add(make_chunk(0, {0: rows}))
    for number, row in enumerate(rows):
        parts.add(make_chunk(number, {0: [row]}))
    assert transitions(whole) == transitions(parts) == [202, 203, 204, 205, 206]


def test_a_chunk_that_is_sent_again_is_ignored():
    replay = make()
    chunk = make_chunk(4, {0: episode(1, 3)})
    assert replay.add(chunk)
    before = replay.digest()
    assert not replay.add(chunk)
    assert replay.digest() == before
    assert replay.add(make_chunk(4, {0: episode(2, 3)}, worker=1))


def test_bytes_are_those_of_the_rings_and_wide_numbers_take_32_bits():
    schema = {"observation.state": Feature((3,), "float64"), "action": Feature((), "int64")}
    replay = make(schema=schema, capacity=10)
    assert replay.nbytes == 10 * (3 * 4 + 4 + 4 + 1)
    assert replay.view().columns["action"].dtype == np.int32


# What is refused


def changed(chunk: Chunk, **columns) -> Chunk:
    return dataclasses.replace(chunk, columns={**chunk.columns, **columns})


def with_number(column: np.ndarray, row: int, number: float) -> np.ndarray:
    column = column.copy()
    column[row] = number
    return column


GOOD = make_chunk(7, {0: episode(1, 3)}, worker=2)
BAD = {
    "stream 5 is not of this replay": make_chunk(0, {5: episode(1, 3)}),
    "stands in it twice": dataclasses.replace(
        GOOD, streams=np.zeros(2, np.int32), offsets=np.array([0, 2, 4], np.int64)
    ),
    "column 'reward' is not finite in row 1 \\(episode 1, step 1\\)": changed(
        GOOD, reward=with_number(GOOD.columns["reward"], 1, np.nan)
    ),
    "column 'observation.state' is not finite in row 2": changed(
        GOOD, **{"observation.state": with_number(GOOD.columns["observation.state"], 2, np.inf)}
    ),
    "column 'action' is float64\\[4, 1\\], expected float32\\[4, 1\\]": changed(
        GOOD, action=GOOD.columns["action"].astype(np.float64)
    ),
    "column 'action' is float32\\[4, 2\\]": changed(GOOD, action=np.zeros((4, 2), np.float32)),
    "column 'terminated' is bool\\[3\\]": changed(GOOD, terminated=np.zeros(3, bool)),
    "'observation.stat' is not in the replay's schema \\(did you mean 'observation.state'": changed(
        GOOD, **{"observation.stat": np.zeros(4, np.float32)}
    ),
    "column 'is_last' is missing": dataclasses.replace(
        GOOD, columns={name: column for name, column in GOOD.columns.items() if name != "is_last"}
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_a_chunk_that_does_not_fit_is_refused_by_name_and_nothing_is_stored(message):
    replay = make()
    replay.add(make_chunk(1, {0: episode(9, 3)}))
    before = replay.digest()
    with pytest.raises(DatasetError, match=message):
        replay.add(BAD[message])
    assert replay.digest() == before
    assert replay.add(GOOD)


def test_an_action_beyond_32_bits_is_refused():
    schema = {"observation.state": Feature((2,), "float32"), "action": Feature((), "int64")}
    replay = make(schema=schema)
    with pytest.raises(DatasetError, match="'action' has numbers beyond int32"):
        replay.add(changed(GOOD, action=np.array([0, 1, 2**40, 3])))


def test_a_replay_too_small_for_its_sequences_is_refused_by_name():
    spec = ReplaySpec(capacity=50)
    spec.check(streams=10, length=3)
    with pytest.raises(SpecError, match=r"capacity: 50 rows over 10 streams .* 4 steps need 6.* Set .* to 60"):
        spec.check(streams=10, length=4)
    with pytest.raises(SpecError, match="over 20 streams"):
        make(capacity=50, streams=range(20))
    replay = make(capacity=6)
    replay.add(make_chunk(0, {0: episode(1, 3)}))
    with pytest.raises(SpecError, match="holds 6 rows of a stream, but sequences of 5 steps need 7"):
        replay.view().sample(jax.random.key(0), 4, 5)


def test_a_schema_that_cannot_be_kept_is_refused_by_name():
    with pytest.raises(DatasetError, match="'task' is <U"):
        make(schema={**SCHEMA, "task": Feature((), "str")})
    with pytest.raises(DatasetError, match="'action' is not in the schema"):
        make(schema={"observation.state": SCHEMA["observation.state"]})
    with pytest.raises(DatasetError, match="cannot be called 'mask'"):
        make(schema={**SCHEMA, "mask": Feature((), "bool")})
    with pytest.raises(SpecError, match="disk needs a folder"):
        make(placement="disk")


def test_files_that_do_not_fit_on_the_disk_are_refused_before_anything_is_written(tmp_path):
    # A limit on file sizes stands for the full disk; the process is its own, since a limit cannot be taken back.
    program = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sys.path.insert(0, {str(tmp_path.parent)!r})
from pathlib import Path
from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.data.replay import Replay
from rlsvc.data.sequence import ReplayView
from rlsvc.spec.replay import ReplaySpec
schema = {{"observation.state": Feature((1000,), "float32"), "action": Feature((1,), "float32")}}
try:
    Replay(ReplaySpec(capacity=1000, placement="disk"), schema, [0], folder=Path({str(tmp_path)!r}))
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "observation.state.bin of 0.00 GiB cannot be made" in done.stdout
    assert not list(tmp_path.glob("observation*"))


# The same, wherever it lies


def naive(rows: list[Row], keep: int) -> tuple[list[int], dict[int, tuple[list[int], int]]]:
    """Transitions among the last `keep` rows, and for each the values that follow it in its episode."""
    rows = rows[-keep:]
    real = [
        not a.is_last and b.step != 0 and (b.episode, b.step) == (a.episode, a.step + 1)
        for a, b in itertools.pairwise(rows)
    ] + [False]
    following = {}
    for i, row in enumerate(rows):
        if real[i]:
            steps = next(n for n in range(len(rows)) if not real[i + n])
            following[row.value] = ([other.value for other in rows[i : i + steps + 1]], steps)
    return [row.value for row, is_real in zip(rows, real, strict=True) if is_real], following


@st.composite
def rollouts(draw) -> tuple[int, list[list[list[Row]]]]:
    """Rows of a stream, and for each of 2 streams its rows cut into chunks."""
    rows, streams = draw(st.integers(7, 12)), []
    for stream in range(2):
        lengths = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=6))
        flat = [
            row
            for number, (steps, terminated, cut) in enumerate(lengths)
            for row in episode(1 + number + 50 * stream, steps, terminated=terminated, cut=cut)
        ]
        cuts = sorted(draw(st.lists(st.integers(0, len(flat)), min_size=3, max_size=3)))
        streams.append([flat[a:b] for a, b in zip([0, *cuts], [*cuts, len(flat)], strict=True)])
    return rows, streams


gather_on_device = jax.jit(ReplayView.gather, static_argnums=2)


@settings(max_examples=40, deadline=None)
@given(rollouts())
def test_replays_hold_what_a_plain_list_of_rows_would_and_cut_the_same_sequences(rollout):
    capacity, streams = rollout
    host = make(capacity=2 * capacity, streams=(3, 8))
    device = make(capacity=2 * capacity, streams=(3, 8), placement="device")
    for number, (left, right) in enumerate(zip(*streams, strict=True)):
        for replay in (host, device):
            replay.add(make_chunk(number, {8: right, 3: left}))
    assert host.digest() == device.digest()
    view, length = host.view(), 5
    for slot, chunks in enumerate(streams):
        wanted, following = naive([row for part in chunks for row in part], capacity)
        index = [
            slot * capacity + int(view.starts[slot, (view.first[slot] + k) % capacity]) for k in range(len(wanted))
        ]
        assert view.count[slot] == len(wanted)
        if not wanted:
            continue
        batch = view.gather(np.array(index, np.int32), length)
        for i, value in enumerate(wanted):
            seen, steps = following[value]
            steps = min(steps, length)
            expected = [seen[min(j, steps)] for j in range(length + 1)]
            assert batch["observation"]["observation.state"][i, :, 0].tolist() == expected
            assert batch["mask"][i].tolist() == [j < steps for j in range(length)]
            done = [seen[min(j, steps - 1)] for j in range(length)]
            assert batch["action"][i, :, 0].tolist() == [number + 0.25 for number in done]
            assert batch["reward"][i].tolist() == [number + 0.5 for number in done]
        padded = np.resize(np.array(index, np.int32), 12)  # one shape, one compilation
        on_device = gather_on_device(device.view(), padded, length)
        jax.tree.map(np.testing.assert_array_equal, view.gather(padded, length), on_device)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_replay_that_is_filled_from_the_journal_is_the_old_one(tmp_path, placement):
    rng = np.random.default_rng(0)
    replay = make(tmp_path / "a", capacity=40, streams=(0, 1), placement=placement)
    with Journal(tmp_path / "journal", segment_bytes=3000) as journal:
        for number in range(30):
            rows = {stream: episode(2 * number + stream, int(rng.integers(1, 30))) for stream in (0, 1)}
            chunk = make_chunk(number, rows)
            cursor = journal.append(chunk)
            if number < 25:
                replay.add(chunk)
                kept = cursor
        again = make(tmp_path / "b", capacity=40, streams=(0, 1), placement=placement)
        for chunk in journal.read(0, kept):
            again.add(chunk)
    assert again.digest() == replay.digest()
    assert not again.add(chunk)


def test_digests_tell_replays_apart_that_differ_in_one_number():
    one, other = make(), make()
    chunk = make_chunk(0, {0: episode(1, 3)})
    one.add(chunk)
    other.add(changed(chunk, reward=with_number(chunk.columns["reward"], 1, 7.0)))
    assert one.digest() != other.digest()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_uniform_drawing_takes_every_transition_equally_often(tmp_path, placement):
    replay = make(tmp_path, capacity=60, streams=(0, 1, 2), placement=placement)
    # Streams of unlike fill, episodes of one step (half of their rows are final), a cut one, and overwritten rows.
    replay.add(make_chunk(0, {0: [row for e in range(1, 16) for row in episode(e, 1)], 1: episode(20, 4, cut=True)}))
    expected = transitions(replay)
    assert len(expected) == 10 + 3
    draws = 26_000
    batch = replay.view().sample(jax.random.key(3), draws, 1)
    counts = Counter(np.asarray(batch["observation"]["observation.state"])[:, 0, 0].tolist())
    assert set(counts) == set(expected)
    # 5 standard deviations of a binomial count.
    assert max(abs(n - draws / 13) for n in counts.values()) < 5 * np.sqrt(draws / 13)
    assert batch["mask"].all()
    assert np.asarray(batch["weight"]).tolist() == [1.0] * draws


@pytest.mark.parametrize("priority", [None, PrioritySpec()])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_empty_replay_gives_sequences_that_are_masked_altogether(tmp_path, placement, priority):
    replay = make(tmp_path, placement=placement, priority=priority)
    batch = replay.view().sample(jax.random.key(0), 4, 3)
    assert not batch["mask"].any()
    assert np.isfinite(batch["weight"]).all()


# In the compiled update


def compilations(work) -> int:
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(seen)


@pytest.mark.parametrize("priority", [None, PrioritySpec()])
def test_adding_and_sampling_compile_nothing_in_steady_state(priority):
    replay = make(capacity=400, streams=(0, 1), placement="device", priority=priority)
    sample = jax.jit(lambda view, key: view.sample(key, 8, 3))
    keys = list(jax.random.split(jax.random.key(0), 60))

    def step(number: int, rows: int) -> None:
        replay.add(make_chunk(number, {0: episode(2 * number, rows), 1: episode(2 * number + 1, 3)}))
        batch = sample(replay.view(), keys[number])
        if priority:
            replay.update_priorities(batch["index"], batch["reward"][:, 0])

    def warm() -> None:
        for number, rows in enumerate((5, 60)):  # one of each size that is padded to: 64 and 128 rows
            step(number, rows)

    def steady() -> None:
        for number in range(2, 60):
            step(number, 1 + 2 * number)

    assert compilations(warm) > 0
    assert compilations(steady) == 0


def test_every_leaf_of_a_view_has_the_stream_axis_first():
    replay = make(capacity=60, streams=(4, 5, 6), placement="device", priority=PrioritySpec())
    assert {leaf.shape[0] for leaf in jax.tree.leaves(replay.view())} == {3}


# Priorities


def shares(replay: Replay, draws: int = 20_000) -> dict[float, float]:
    batch = replay.view().sample(jax.random.key(1), draws, 1)
    counts = Counter(np.asarray(batch["observation"]["observation.state"])[:, 0, 0].tolist())
    return {value: count / draws for value, count in counts.items()}


def index_of(replay: Replay, values: list[float]) -> np.ndarray:
    states = np.asarray(replay.view().columns["observation.state"])[..., 0]
    return np.array([int(np.flatnonzero(states.reshape(-1) == value)[0]) for value in values], np.int32)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_transitions_are_drawn_in_proportion_to_their_priority(tmp_path, placement):
    priority = PrioritySpec(alpha=0.5, beta=1.0, epsilon=1e-9)
    replay = make(tmp_path, capacity=60, streams=(0, 1), placement=placement, priority=priority)
    replay.add(make_chunk(0, {0: episode(1, 3), 1: episode(2, 1)}))
    index = index_of(replay, [100, 101, 102, 200])
    replay.update_priorities(index, np.array([1.0, 4.0, 9.0, 16.0], np.float32))
    # Square roots 1, 2, 3, 4 of 10; 5 standard deviations.
    found = shares(replay)
    for value, share in {100: 0.1, 101: 0.2, 102: 0.3, 200: 0.4}.items():
        assert abs(found[value] - share) < 5 * np.sqrt(share * (1 - share) / 20_000)
    # Weights (N p) ** -1 over the largest of the batch: 1, 1/2, 1/3, 1/4.
    weight = replay.view().gather(index, 1)["weight"]
    np.testing.assert_allclose(weight, [1, 1 / 2, 1 / 3, 1 / 4], rtol=1e-5)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_new_transition_gets_the_largest_priority_so_far(placement):
    replay = make(capacity=60, placement=placement, priority=PrioritySpec(alpha=1.0, epsilon=1e-9))
    replay.add(make_chunk(0, {0: episode(1, 2)}))
    replay.update_priorities(index_of(replay, [100, 101]), np.array([5.0, 0.5], np.float32))
    replay.add(make_chunk(1, {0: episode(2, 1)}))
    mass = np.asarray(replay.view().mass).reshape(-1)[index_of(replay, [100, 101, 200])]
    np.testing.assert_allclose(mass, [5.0, 0.5, 5.0], rtol=1e-6)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_of_two_priorities_for_one_transition_the_last_counts_and_one_that_is_not_finite_does_not(placement):
    replay = make(capacity=60, placement=placement, priority=PrioritySpec(alpha=1.0, epsilon=1e-9))
    replay.add(make_chunk(0, {0: episode(1, 3)}))
    a, b, c = index_of(replay, [100, 101, 102]).tolist()
    index = np.array([[a, b, c], [b, a, b]], np.int32)
    replay.update_priorities(index, np.array([[9.0, 8.0, np.nan], [7.0, 3.0, 2.0]], np.float32))
    np.testing.assert_allclose(np.asarray(replay.view().mass).reshape(-1)[[a, b, c]], [3.0, 2.0, 1.0], rtol=1e-6)
    # Nor does what was replaced count as the largest so far.
    replay.add(make_chunk(1, {0: episode(2, 1)}))
    np.testing.assert_allclose(np.asarray(replay.view().mass).reshape(-1)[index_of(replay, [200])], [3.0], rtol=1e-6)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_what_is_no_transition_any_more_is_never_drawn_whatever_its_priority(placement):
    replay = make(capacity=5, placement=placement, priority=PrioritySpec(alpha=1.0))
    replay.add(make_chunk(0, {0: episode(1, 3)}))
    old = index_of(replay, [100, 101, 102, 103])  # the last one is a final observation
    replay.add(make_chunk(1, {0: episode(2, 1)}))  # in place of 100, with its final observation there
    replay.update_priorities(old, np.full(4, 1e6, np.float32))
    mass = np.asarray(replay.view().mass)[0]
    states = np.asarray(replay.view().columns["observation.state"])[0, :, 0]
    assert set(states[mass > 0].tolist()) == set(transitions(replay)) == {101, 102, 200}
    assert set(shares(replay, 2000)) == {101, 102}  # 200 has a millionth


def test_a_million_unlike_priorities_are_told_apart():
    rows = 2**20
    view = make(capacity=16, priority=PrioritySpec()).view()
    mass = np.zeros((1, rows), np.float32)
    mass[0, [3, rows // 2, rows - 1]] = [1e-3, 2.0, 1.0]
    view = dataclasses.replace(view, mass=mass, real=mass > 0)
    index = view.draw(jax.random.key(0), (30_000,))
    assert set(index.tolist()) <= {3, rows // 2, rows - 1}
    assert abs((index == rows - 1).mean() - 1 / 3.001) < 5 * np.sqrt(2 / 9 / 30_000)


def test_rounding_never_draws_what_has_no_priority():
    view = make(capacity=16, priority=PrioritySpec()).view()
    mass = np.zeros((1, 16), np.float32)
    mass[0, 5] = 1e-45  # the smallest number there is: half of it is rounded up to all of it
    view = dataclasses.replace(view, mass=mass, real=mass > 0)
    assert set(view.draw(jax.random.key(0), (200,)).tolist()) == {5}


@pytest.mark.parametrize("placement", ["device", "host"])
def test_priorities_come_back_from_a_checkpoint(placement):
    def filled() -> Replay:
        replay = make(capacity=60, placement=placement, priority=PrioritySpec(alpha=1.0))
        replay.add(make_chunk(0, {0: episode(1, 3)}))
        return replay

    old, new = filled(), filled()
    old.update_priorities(index_of(old, [100, 102]), np.array([5.0, 0.25], np.float32))
    new.restore_priorities(old.priorities())
    for replay in (old, new):
        replay.add(make_chunk(1, {0: episode(2, 2)}))
    np.testing.assert_array_equal(old.view().mass, new.view().mass)
    one, other = (replay.view().sample(jax.random.key(5), 16, 2) for replay in (old, new))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert make().priorities() == {}


def test_priorities_for_a_uniform_replay_are_refused():
    with pytest.raises(SpecError, match="draws uniformly"):
        make().update_priorities(np.array([0]), np.array([1.0]))


# Demonstrations


def table(*lengths: int) -> EpisodeTable:
    steps = np.arange(sum(lengths), dtype=np.float32)
    ends = np.cumsum(lengths)
    done = np.zeros(len(steps), bool)
    done[ends[0] - 1] = True
    return EpisodeTable(
        columns={
            "observation.state": steps[:, None],
            "act": steps[:, None] + 0.25,
            "next.reward": steps + 0.5,
            "next.done": done,
        },
        episode_ends=ends,
        fps=10.0,
        task=np.zeros(len(steps), np.int32),
        tasks=["push"],
        source="demos",
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_demonstrations_keep_a_terminal_step_and_end_others_in_their_last_observation(tmp_path, placement):
    replay = replay_from_table(
        table(3, 4),
        observation=("observation.state",),
        action="act",
        reward="next.reward",
        terminated="next.done",
        spec=ReplaySpec(placement=placement),
        folder=tmp_path,
    )
    # Episode 0 terminated: steps 0, 1, 2. Episode 1 (rows 3 .. 6) did not: steps 3, 4, 5, final observation 6.
    assert transitions(replay) == [0, 1, 2, 3, 4, 5]
    batch = jax.tree.map(np.asarray, replay.view().gather(index_of(replay, [1, 4]), 3))
    assert batch["observation"]["observation.state"][..., 0].tolist() == [[1, 2, 2, 2], [4, 5, 6, 6]]
    assert batch["action"][..., 0].tolist() == [[1.25, 2.25, 2.25], [4.25, 5.25, 5.25]]
    assert batch["reward"].tolist() == [[1.5, 2.5, 2.5], [4.5, 5.5, 5.5]]
    assert batch["terminated"].tolist() == [[False, True, True], [False, False, False]]
    assert batch["mask"].tolist() == [[True, True, False], [True, True, False]]


def test_demonstrations_without_rewards_have_zeros_and_every_end_is_a_truncation():
    replay = replay_from_table(table(3, 4, 2), observation=("observation.state",), action="act", streams=2)
    assert transitions(replay) == [0, 1, 7, 3, 4, 5]
    assert not np.asarray(replay.view().columns["reward"]).any()
    assert not np.asarray(replay.view().columns["terminated"]).any()


def test_demonstrations_lacking_a_column_are_refused_by_name():
    with pytest.raises(DatasetError, match=r"demos: no column 'next.rewards' \(did you mean 'next.reward'"):
        replay_from_table(table(3), observation=("observation.state",), action="act", reward="next.rewards")
    with pytest.raises(DatasetError, match="1 episodes cannot fill 2 streams"):
        replay_from_table(table(3), observation=("observation.state",), action="act", streams=2)
