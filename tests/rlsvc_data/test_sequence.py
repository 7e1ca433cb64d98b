import jax
import numpy as np
import pytest
from chunks import SCHEMA, episode, make_chunk

from rlsvc.core.contract import Feature
from rlsvc.core.errors import DatasetError
from rlsvc.data.replay import Replay
from rlsvc.data.sequence import mix
from rlsvc.spec.replay import PrioritySpec, ReplaySpec

KEY = jax.random.key(0)


def sample(data, *arguments):
    """`data.sample`, compiled where it can be: one by one, its operations take seconds to compile."""
    static = tuple(range(2, 2 + len(arguments)))
    draw = type(data).sample if data.on_host else jax.jit(type(data).sample, static_argnums=static)
    return draw(data, KEY, *arguments)


def sample_many(data, *arguments):
    static = tuple(range(2, 2 + len(arguments)))
    draw = type(data).sample_many if data.on_host else jax.jit(type(data).sample_many, static_argnums=static)
    return draw(data, KEY, *arguments)


def filled(*rows, placement="host", capacity=40, schema=None, priority=None) -> Replay:
    """One stream with these rows, one chunk each."""
    spec = ReplaySpec(capacity=capacity, placement=placement, priority=priority)
    replay = Replay(spec, schema or SCHEMA, [0])
    for number, part in enumerate(rows):
        replay.add(make_chunk(number, {0: part}))
    return replay


def states(batch) -> list[list[float]]:
    return np.asarray(batch["observation"]["observation.state"])[..., 0].tolist()


# In this ring the episodes 1 (3 steps, terminated) and 2 (2 steps, truncated) lie at 0 .. 3 and 4 .. 6.
def two_episodes(**options) -> Replay:
    return filled(episode(1, 3, terminated=True), episode(2, 2), **options)


def test_a_sequence_inside_an_episode_holds_its_own_steps_and_the_observation_after_them():
    batch = two_episodes().view().gather(np.array([0], np.int32), 2)
    assert states(batch) == [[100, 101, 102]]
    assert batch["action"][..., 0].tolist() == [[100.25, 101.25]]
    assert batch["reward"].tolist() == [[100.5, 101.5]]
    assert batch["terminated"].tolist() == [[False, False]]
    assert batch["mask"].tolist() == [[True, True]]


def test_a_terminated_episode_ends_in_its_final_observation_and_repeats_its_last_step():
    batch = two_episodes().view().gather(np.array([1], np.int32), 4)
    assert states(batch) == [[101, 102, 103, 103, 103]]
    assert batch["action"][..., 0].tolist() == [[101.25, 102.25, 102.25, 102.25]]
    assert batch["terminated"].tolist() == [[False, True, True, True]]
    assert batch["mask"].tolist() == [[True, True, False, False]]


def test_a_truncated_episode_terminates_nowhere():
    batch = two_episodes().view().gather(np.array([4], np.int32), 3)
    assert states(batch) == [[200, 201, 202, 202]]
    assert batch["terminated"].tolist() == [[False] * 3]
    assert batch["mask"].tolist() == [[True, True, False]]


def test_an_episode_under_way_ends_at_its_newest_row():
    rows = episode(1, 9)
    batch = filled(rows[:4]).view().gather(np.array([1], np.int32), 4)
    assert states(batch) == [[101, 102, 103, 103, 103]]
    assert batch["mask"].tolist() == [[True, True, False, False]]


def test_earlier_observations_stay_inside_the_episode_and_repeat_its_first_row():
    view = two_episodes().view()
    assert states(view.gather(np.array([5, 4, 2], np.int32), 1, n_obs_steps=3)) == [
        [200, 200, 201, 202],
        [200, 200, 200, 201],
        [100, 101, 102, 103],
    ]


def test_earlier_observations_do_not_reach_past_the_oldest_row():
    # C is 6: the rows 104 .. 109 are left, and 104 lies beside the newest row.
    view = filled(episode(1, 9), capacity=6).view()
    assert view.columns["observation.state"][0, :, 0].tolist() == [106, 107, 108, 109, 104, 105]
    assert states(view.gather(np.array([4, 0], np.int32), 1, n_obs_steps=4)) == [
        [104, 104, 104, 104, 105],
        [104, 104, 105, 106, 107],
    ]


@pytest.mark.parametrize("shift", range(8))
def test_overwriting_never_mixes_new_rows_with_old_ones(shift):
    capacity = 8
    replay = filled(episode(1, 40)[: capacity + shift], capacity=capacity)
    view = replay.view()
    batch = view.gather(view.draw(KEY, (64,)), 6, 3)
    for seen, mask in zip(states(batch), batch["mask"], strict=True):
        inside = seen[2 : 3 + mask.sum()]
        assert np.diff(inside).tolist() == [1] * mask.sum()
        assert min(seen) >= 100 + shift
        assert sorted(seen) == seen


def test_other_columns_come_by_name_and_those_that_nobody_asked_for_stay_out():
    schema = {**SCHEMA, "version": Feature((), "int32")}
    batch = two_episodes(schema=schema).view().sample(KEY, 4, 2)
    assert batch["version"].shape == (4, 2)
    expected = {"observation", "action", "reward", "terminated", "mask", "weight", "index", "version"}
    assert set(batch) == expected
    assert set(two_episodes().view().sample(KEY, 4, 2)) == expected - {"version"}


@pytest.mark.parametrize("placement", ["host", "device"])
def test_shapes_and_dtypes_do_not_depend_on_where_the_rows_lie(placement):
    view = two_episodes(placement=placement).view()
    assert view.on_host == (placement == "host")
    one, many = sample(view, 5, 3, 2), sample_many(view, 4, 5, 3, 2)
    found = {name: (value.shape, str(value.dtype)) for name, value in one.items() if name != "observation"}
    assert found == {
        "action": ((5, 3, 1), "float32"),
        "reward": ((5, 3), "float32"),
        "terminated": ((5, 3), "bool"),
        "mask": ((5, 3), "bool"),
        "weight": ((5,), "float32"),
        "index": ((5,), "int32"),
    }
    assert one["observation"]["observation.state"].shape == (5, 5, 2)
    jax.tree.map(lambda a, b: (a.shape == (4, *b.shape) and a.dtype == b.dtype) or pytest.fail("shape"), many, one)


@pytest.mark.parametrize("priority", [None, PrioritySpec()])
@pytest.mark.parametrize("placement", ["host", "device"])
def test_the_same_key_draws_the_same_sequences_and_another_key_draws_others(placement, priority):
    view = two_episodes(placement=placement, priority=priority).view()
    first = view.draw(KEY, (16,)).tolist()
    assert first == view.draw(KEY, (16,)).tolist()
    assert first != view.draw(jax.random.key(1), (16,)).tolist()


def test_sampling_within_a_scan_equals_sampling_outside():
    view = two_episodes(placement="device").view()
    keys = jax.random.split(KEY, 3)
    _, inside = jax.lax.scan(lambda carry, key: (carry, view.draw(key, (4,))), 0, keys)
    assert inside.tolist() == [view.draw(key, (4,)).tolist() for key in keys]


# Mixing


def online_and_demonstrations(placement="host"):
    extra = {**SCHEMA, "version": Feature((), "int32")}
    return {
        "online": filled(episode(1, 20), placement=placement, schema=extra).view(),
        "demonstrations": filled(episode(2, 20), placement=placement).view(),
    }


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_mix_takes_a_fixed_share_of_every_batch_from_each_buffer(placement):
    mixed = mix(online_and_demonstrations(placement), {"online": 3, "demonstrations": 1})
    batch = sample(mixed, 10, 2)
    # 7.5 and 2.5: of equal remainders the first gets the row.
    assert mixed.sizes(10) == {"online": 8, "demonstrations": 2}
    assert [row[0] // 100 for row in states(batch)] == [1] * 8 + [2] * 2
    assert batch["buffer"].tolist() == [0] * 8 + [1] * 2
    many = sample_many(mixed, 3, 10, 2)
    assert many["buffer"].tolist() == [[0] * 8 + [1] * 2] * 3
    assert many["observation"]["observation.state"].shape == (3, 10, 3, 2)


def test_a_mix_draws_from_each_buffer_with_a_key_of_its_own():
    view = filled(episode(1, 20)).view()
    index = mix({"a": view, "b": view}, {"a": 1, "b": 1}).sample(KEY, 20, 2)["index"]
    assert index[:10].tolist() != index[10:].tolist()


def test_columns_that_only_one_buffer_has_are_left_out_of_a_mix():
    mixed = mix(online_and_demonstrations(), {"online": 1, "demonstrations": 1})
    assert "version" not in mixed.sample(KEY, 4, 2)


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [((1, 1, 1), 10, [4, 3, 3]), ((0.5, 0.25, 0.25), 8, [4, 2, 2]), ((98, 1, 1), 10, [10, 0, 0])],
)
def test_rows_of_a_batch_go_to_the_largest_remainders(shares, size, expected):
    view = two_episodes().view()
    mixed = mix(dict.fromkeys("abc", view), dict(zip("abc", shares, strict=True)))
    assert list(mixed.sizes(size).values()) == expected
    assert len(mixed.sample(KEY, size, 2)["mask"]) == size


def test_a_mix_that_does_not_fit_is_refused_by_name():
    views = online_and_demonstrations()
    wide = {"observation.state": Feature((3,), "float32"), "action": SCHEMA["action"]}
    with pytest.raises(DatasetError, match=r"ratios are given for \['online'\], but the buffers are \['demon"):
        mix(views, {"online": 1})
    with pytest.raises(DatasetError, match="ratio of buffer 'online' is 0"):
        mix(views, {"online": 0, "demonstrations": 1})
    with pytest.raises(DatasetError, match="different places"):
        mix({**views, "online": two_episodes(placement="device").view()}, {"online": 1, "demonstrations": 1})
    other = Replay(ReplaySpec(capacity=20, placement="host"), wide, [0]).view()
    with pytest.raises(
        DatasetError, match=r"'observation.state' is float32\[2\] in .* float32\[3\] in buffer 'online'"
    ):
        mix({**views, "online": other}, {"online": 1, "demonstrations": 1})
