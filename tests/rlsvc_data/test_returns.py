import jax.numpy as jnp
import numpy as np
import pytest
from chunks import SCHEMA, episode, make_chunk

from rlsvc.core.errors import SpecError
from rlsvc.data.replay import Replay
from rlsvc.data.returns import n_step
from rlsvc.spec.replay import ReplaySpec


def batch(reward, mask, terminated=None, n_obs_steps=1, xp=np):
    """One sequence; its observations are 0, 1, 2, ... and its actions 10, 11, ..."""
    length = len(reward)
    return {
        "observation": {"state": xp.arange(1 - n_obs_steps, length + 1, dtype=xp.float32)[None, :, None]},
        "action": xp.arange(10, 10 + length, dtype=xp.float32)[None, :, None],
        "reward": xp.asarray([reward], xp.float32),
        "terminated": xp.asarray([terminated or [False] * length]),
        "mask": xp.asarray([mask], bool),
        "weight": xp.asarray([0.5], xp.float32),
        "index": xp.asarray([7], xp.int32),
        "version": xp.arange(length, dtype=xp.int32)[None],
    }


def numbers(found):
    return {
        "reward": found["reward"].tolist()[0],
        "discount": found["discount"].tolist()[0],
        "steps": found["steps"].tolist()[0],
        "next": found["next_observation"]["state"][0, :, 0].tolist(),
    }


BOTH = pytest.mark.parametrize("xp", [np, jnp])


@BOTH
def test_three_steps_add_their_rewards_discounted_and_bootstrap_from_the_third_next_observation(xp):
    found = n_step(batch([1, 2, 4, 100], [True] * 4, xp=xp), 0.5, 3)
    assert numbers(found) == {"reward": 1 + 1 + 1, "discount": 0.125, "steps": 3, "next": [3]}
    assert found["observation"]["state"].tolist() == [[[0]]]
    assert found["action"].tolist() == [[10]]
    assert (found["weight"].tolist(), found["index"].tolist(), found["version"].tolist()) == ([0.5], [7], [0])


@BOTH
def test_one_step_is_the_plain_transition(xp):
    assert numbers(n_step(batch([3, 2], [True, True], xp=xp), 0.9, 1)) == {
        "reward": 3,
        "discount": pytest.approx(0.9),
        "steps": 1,
        "next": [1],
    }


@BOTH
def test_termination_ends_the_sum_and_does_not_bootstrap(xp):
    found = n_step(batch([1, 2, 2, 2], [True, True, False, False], [False, True, True, True], xp=xp), 0.5, 4)
    assert numbers(found) == {"reward": 2, "discount": 0, "steps": 2, "next": [2]}


@BOTH
def test_truncation_ends_the_sum_and_bootstraps_from_the_final_observation(xp):
    found = n_step(batch([1, 2, 2, 2], [True, True, False, False], xp=xp), 0.5, 4)
    assert numbers(found) == {"reward": 2, "discount": 0.25, "steps": 2, "next": [2]}


def test_a_termination_after_the_n_steps_leaves_the_bootstrap():
    found = n_step(batch([1, 1, 1], [True] * 3, [False, False, True]), 0.5, 2)
    assert numbers(found) == {"reward": 1.5, "discount": 0.25, "steps": 2, "next": [2]}


def test_rewards_after_a_termination_do_not_count_even_where_the_mask_goes_on():
    found = n_step(batch([1, 1, 100], [True] * 3, [False, True, False]), 1.0, 3)
    assert numbers(found) == {"reward": 2, "discount": 0, "steps": 2, "next": [2]}


def test_what_is_masked_altogether_is_worth_nothing_and_takes_no_step():
    assert numbers(n_step(batch([5, 5], [False, False]), 0.5, 2)) == {
        "reward": 0,
        "discount": 1,
        "steps": 0,
        "next": [0],
    }


def test_observation_windows_move_along_with_the_steps():
    found = n_step(batch([1, 2, 4], [True] * 3, n_obs_steps=3), 0.5, 2)
    assert found["observation"]["state"][0, :, 0].tolist() == [-2, -1, 0]
    assert found["next_observation"]["state"][0, :, 0].tolist() == [0, 1, 2]


def test_many_batches_and_images_keep_their_axes():
    one = batch([1, 2, 4], [True] * 3)
    many = {name: np.stack([np.concatenate([value] * 5)] * 2) for name, value in one.items() if name != "observation"}
    many["observation"] = {"image": np.zeros((2, 5, 4, 8, 8, 3), np.uint8)}
    found = n_step(many, 0.5, 2)
    assert found["reward"].tolist() == [[2.0] * 5] * 2
    assert found["action"].shape == (2, 5, 1)
    assert found["next_observation"]["image"].shape == (2, 5, 1, 8, 8, 3)


def test_returns_of_what_replay_samples_are_those_worked_out_by_hand():
    replay = Replay(ReplaySpec(capacity=40, placement="host"), SCHEMA, [0])
    replay.add(make_chunk(0, {0: [*episode(1, 3, terminated=True), *episode(2, 2)]}))
    # Starts: 100 (three steps to the end), 102 (terminates at once), 201 (truncated after it).
    found = n_step(replay.view().gather(np.array([0, 2, 5], np.int32), 3), 0.5, 3)
    assert found["reward"].tolist() == [100.5 + 101.5 / 2 + 102.5 / 4, 102.5, 201.5]
    assert found["discount"].tolist() == [0, 0, 0.5]
    assert found["next_observation"]["observation.state"][..., 0].tolist() == [[103], [103], [202]]


def test_sequences_shorter_than_n_are_refused_by_name():
    with pytest.raises(SpecError, match="3 steps do not fit into sequences of 2"):
        n_step(batch([1, 2], [True] * 2), 0.5, 3)
