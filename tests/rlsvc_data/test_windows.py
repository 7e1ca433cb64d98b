import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.core.types import EpisodeTable
from rlsvc.data.windows import Windows, batches_from_host


def table(*lengths: int, first: int = 0) -> EpisodeTable:
    """Episodes whose state is the step's number (from `first`) and whose action is 100 more."""
    steps = first + np.arange(sum(lengths), dtype=np.float32)[:, None]
    return EpisodeTable(
        columns={"state": steps, "action": steps + 100},
        episode_ends=np.cumsum(lengths),
        fps=10.0,
        task=np.zeros(len(steps), np.int32),
        tasks=["push"],
    )


def build(*tables: EpisodeTable, weights=None, groups=None, n_obs_steps=2, horizon=4) -> Windows:
    return Windows.build(
        list(tables),
        weights=weights or [1.0] * len(tables),
        groups=groups or [0] * len(tables),
        observation=("state",),
        action="action",
        n_obs_steps=n_obs_steps,
        horizon=horizon,
    )


def on_device(data: Windows) -> Windows:
    return jax.tree.map(jnp.asarray, data)


def rows(batch, i):
    return (
        batch["observation"]["state"][i, :, 0].tolist(),
        batch["action"][i, :, 0].tolist(),
        batch["mask"][i].tolist(),
    )


def test_a_window_inside_an_episode_holds_its_own_steps():
    batch = build(table(6, 5)).gather(np.array([2]))
    assert rows(batch, 0) == ([1, 2], [101, 102, 103, 104], [True] * 4)


def test_the_start_of_an_episode_is_padded_with_its_first_row():
    batch = build(table(6, 5)).gather(np.array([6]))
    assert rows(batch, 0) == ([6, 6], [106, 106, 107, 108], [False, True, True, True])


def test_the_end_of_an_episode_is_padded_with_its_last_row():
    batch = build(table(6, 5)).gather(np.array([5, 4, 3]))
    assert rows(batch, 0) == ([4, 5], [104, 105, 105, 105], [True, True, False, False])
    assert rows(batch, 1) == ([3, 4], [103, 104, 105, 105], [True, True, True, False])
    assert rows(batch, 2) == ([2, 3], [102, 103, 104, 105], [True] * 4)


def test_an_episode_shorter_than_the_window_is_padded_on_both_sides():
    batch = build(table(1, 3), n_obs_steps=3, horizon=5).gather(np.array([0]))
    assert rows(batch, 0) == ([0, 0, 0], [100] * 5, [False, False, True, False, False])


def test_no_window_crosses_an_episode():
    data = build(table(3, 1, 7), table(4, 2, first=50), n_obs_steps=3, horizon=6)
    batch = data.gather(np.arange(data.num_windows))
    for i in range(data.num_windows):
        inside = range(data.start[i], data.end[i])
        allowed = {float(data.columns["state"][row, 0]) for row in inside}
        assert set(batch["observation"]["state"][i, :, 0].tolist()) <= allowed
        assert {a - 100 for a in batch["action"][i, :, 0].tolist()} <= allowed
        assert batch["mask"][i].sum() == sum(data.anchor[i] - 2 + h in inside for h in range(6))


def test_every_step_has_one_window_and_its_datasets_group():
    data = build(table(3, 2), table(4, first=50), groups=[1, 0])
    assert data.num_windows == 9
    assert data.anchor.tolist() == list(range(9))
    assert data.gather(np.arange(9))["group"].tolist() == [1] * 5 + [0] * 4
    assert data.offset.tolist() == [0, 5, 9]


def test_gathering_on_the_device_equals_gathering_on_the_host():
    data = build(table(6, 5), table(3, first=50), groups=[0, 1])
    index = np.arange(data.num_windows)[::-1].copy()
    host, device = data.gather(index), jax.jit(lambda d, i: d.gather(i))(on_device(data), index)
    jax.tree.map(np.testing.assert_array_equal, host, device)
    assert jax.tree.map(lambda x: x.dtype, host) == jax.tree.map(lambda x: np.dtype(x.dtype), device)


def test_drawing_takes_each_dataset_by_its_weight_and_its_windows_uniformly():
    data = build(table(10), table(30, first=50), weights=[3.0, 1.0])
    index = np.asarray(data.draw(jax.random.key(0), 40_000))
    counts = np.bincount(index, minlength=40)
    # 5 standard deviations of a binomial count.
    assert abs(counts[:10].sum() - 30_000) < 5 * np.sqrt(40_000 * 0.75 * 0.25)
    assert np.abs(counts[:10] - 3000).max() < 5 * np.sqrt(3000)
    assert np.abs(counts[10:] - 10_000 / 30).max() < 5 * np.sqrt(10_000 / 30)


def test_the_same_key_draws_the_same_windows_wherever_the_data_lies():
    data = build(table(10), table(30, first=50), weights=[3.0, 1.0])
    first = data.draw(jax.random.key(1), 16)
    assert np.array_equal(first, data.draw(jax.random.key(1), 16))
    assert np.array_equal(first, jax.jit(lambda d, k: d.draw(k, 16))(on_device(data), jax.random.key(1)))
    assert not np.array_equal(first, data.draw(jax.random.key(2), 16))


@pytest.mark.parametrize("sharded", [False, True])
def test_batches_gathered_on_the_host_are_those_of_the_device(sharded):
    data = build(table(6, 5))
    index = np.array([[0, 5, 10], [3, 3, 6]])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data")) if sharded else None
    batches = batches_from_host(data, index, sharding)
    assert all(isinstance(leaf, jax.Array) and leaf.shape[:2] == (2, 3) for leaf in jax.tree.leaves(batches))
    for k in range(2):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, k=k: x[k], batches), data.gather(index[k]))


def test_actions_are_float32_and_bytes_are_those_of_the_columns():
    wide = table(4)
    wide.columns["action"] = wide.columns["action"].astype(np.float64)
    data = build(wide)
    assert data.columns["action"].dtype == np.float32
    assert data.nbytes == 2 * 4 * 4
    assert data.on_host
    assert not on_device(data).on_host


def test_selected_windows_keep_what_lies_around_them_and_the_shares_of_their_datasets():
    data = build(table(6, 5), table(4, first=50), weights=[3.0, 1.0], groups=[0, 1])
    keep = np.isin(np.arange(15), [2, 5, 13])
    chosen = data.select(keep)
    assert (chosen.num_windows, chosen.offset.tolist(), chosen.weight.tolist()) == (3, [0, 2, 3], [0.75, 0.25])
    batch = chosen.gather(np.arange(3))
    assert rows(batch, 0) == ([1, 2], [101, 102, 103, 104], [True] * 4)
    assert rows(batch, 1) == ([4, 5], [104, 105, 105, 105], [True, True, False, False])
    assert rows(batch, 2)[0] == [51, 52]
    assert batch["group"].tolist() == [0, 0, 1]
    drawn = np.asarray(on_device(chosen).draw(jax.random.key(0), 400))
    assert set(drawn.tolist()) == {0, 1, 2}
    assert 0.65 < (drawn < 2).mean() < 0.85


def test_what_a_batch_is_asked_for_besides_is_that_of_the_present_step_on_host_and_device():
    data = table(3, 3)
    data.columns["return"] = np.arange(6, dtype=np.float32) * 10
    built = Windows.build(
        [data], weights=[1.0], groups=[0], observation=("state",), action="action", n_obs_steps=2, horizon=4,
        extra=("return",),
    )  # fmt: skip
    index = np.array([[0, 5], [3, 2]])
    assert built.gather(index)["return"].tolist() == [[0, 50], [30, 20]]
    assert on_device(built).gather(jnp.asarray(index))["return"].tolist() == [[0, 50], [30, 20]]
    assert batches_from_host(built, index, None)["return"].tolist() == [[0, 50], [30, 20]]
