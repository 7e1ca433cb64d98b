import numpy as np
import pytest

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError
from rlsvc.spec.env import PushTSpec


def test_without_options_an_environment_gives_its_observation_by_name_and_its_contract(opened, toy):
    env = opened(toy())
    observation, _ = env.reset(seed=7)
    np.testing.assert_array_equal(observation["observation.state"], [7, 0])
    contract = env.contract(n_obs_steps=2, action_horizon=3)
    assert contract.observation == {"observation.state": Feature((2,), "float32")}
    assert contract.action == Feature((1,), "float32", low=(-2.0,), high=(2.0,))
    assert (contract.rate_hz, contract.n_obs_steps, contract.action_horizon) == (20.0, 2, 3)


def test_action_repeat_sums_rewards_and_slows_the_rate(opened, toy):
    env = opened(toy(length=10, options={"action_repeat": 3}))
    env.reset(seed=0)
    observation, reward, terminated, *_ = env.step(np.array([2.0], np.float32))
    np.testing.assert_array_equal(observation["observation.state"], [6, 3])
    assert (reward, terminated) == (6.0, False)
    assert env.contract().rate_hz == pytest.approx(20 / 3)


def test_action_repeat_stops_at_an_end(opened, toy):
    env = opened(toy(length=4, options={"action_repeat": 3}))
    env.reset(seed=0)
    env.step(np.array([1.0], np.float32))
    observation, reward, terminated, truncated, info = env.step(np.array([1.0], np.float32))
    np.testing.assert_array_equal(observation["observation.state"], [4, 4])
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, True, False, True)


def test_max_steps_counts_steps_of_the_policy_and_truncates(opened, toy):
    env = opened(toy(length=100, options={"action_repeat": 2, "max_steps": 3}))
    env.reset(seed=0)
    ends = [env.step(np.zeros(1, np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_an_end_that_comes_with_the_last_step_is_a_termination_alone(opened, toy):
    env = opened(toy(length=3, options={"max_steps": 3}))
    env.reset(seed=0)
    assert [env.step(np.zeros(1, np.float32))[2:4] for _ in range(3)][-1] == (True, False)


def test_rescaled_actions_reach_the_bounds(opened, toy):
    env = opened(toy(options={"rescale_action": True}))
    env.reset(seed=0)
    assert env.contract().action == Feature((1,), "float32", low=(-1.0,), high=(1.0,))
    assert [env.step(np.array([a], np.float32))[1] for a in (-1.0, 0.5)] == [-2.0, 1.0]


def test_rewards_are_scaled_and_statistics_are_not(opened, toy):
    env = opened(toy(options={"reward_scale": 0.5, "episode_statistics": True}))
    env.reset(seed=0)
    steps = [env.step(np.array([2.0], np.float32)) for _ in range(3)]
    assert [step[1] for step in steps] == [1.0, 1.0, 1.0]
    assert (steps[-1][4]["episode"]["r"], steps[-1][4]["episode"]["l"]) == (6.0, 3)


def test_stacked_vectors_lie_end_to_end_oldest_first(opened, toy):
    env = opened(toy(options={"frame_stack": 3}))
    first, _ = env.reset(seed=5)
    np.testing.assert_array_equal(first["observation.state"], [5, 0, 5, 0, 5, 0])
    second, *_ = env.step(np.array([1.0], np.float32))
    np.testing.assert_array_equal(second["observation.state"], [5, 0, 5, 0, 6, 1])
    assert env.contract().observation["observation.state"].shape == (6,)
    again, _ = env.reset(seed=8)
    np.testing.assert_array_equal(again["observation.state"], [8, 0, 8, 0, 8, 0])


def test_stacked_images_lie_along_the_channels_and_texts_are_the_newest(opened, toy):
    env = opened(toy("Camera", options={"frame_stack": 2}))
    env.reset(seed=1)
    observation, *_ = env.step(np.array([1.0], np.float32))
    assert observation["observation.camera"].shape == (6, 8, 6)
    np.testing.assert_array_equal(observation["observation.camera"][2, 3], [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(observation["observation.state"], [1, 0, 2, 1])
    assert observation["task"] == "go to 2"


def test_a_dictionary_keeps_its_names_under_observation(opened, toy):
    contract = opened(toy("Camera")).contract()
    assert {key: (f.shape, f.dtype) for key, f in contract.observation.items()} == {
        "observation.camera": ((6, 8, 3), "uint8"),
        "task": ((), "str"),
        "observation.state": ((2,), "float32"),
    }


def test_images_are_resized(opened, toy):
    env = opened(toy("Camera", options={"image_size": 16}))
    env.reset(seed=0)
    observation, *_ = env.step(np.zeros(1, np.float32))
    image = observation["observation.camera"]
    assert (image.shape, image.dtype) == ((16, 16, 3), np.uint8)
    assert (image == 1).all()


def test_a_flat_observation_is_one_vector_with_discrete_ones_as_one_hot(opened, toy):
    env = opened(toy("Buttons", options={"flatten": True}))
    env.reset(seed=0)
    observation, *_ = env.step(1)
    np.testing.assert_array_equal(observation["observation.state"], [0, 1, 0, 0, 0, 0.25, 0.5])


def test_discrete_actions_count_from_zero(opened, toy):
    env = opened(toy("Buttons", options={"flatten": True}))
    env.reset(seed=0)
    assert env.contract().action == Feature((), "int64", low=(0.0,), high=(3.0,))
    assert [env.step(np.int64(a))[1] for a in (0, 3)] == [3.0, 6.0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("Buttons", {}, "env.flatten=true"),
        ("Buttons", {"rescale_action": True}, "env.rescale_action: needs bounded continuous actions"),
        ("Walk", {"image_size": 16}, "env.image_size: the observations have no image"),
    ],
)
def test_an_option_that_the_spaces_do_not_allow_is_refused_by_name(opened, toy, name, options, words):
    with pytest.raises(UserError, match=words):
        opened(toy(name, options=options))


def test_pusht_takes_the_options_and_keeps_its_units(opened):
    env = opened(PushTSpec(observation="state", action_repeat=2, max_steps=2, frame_stack=2, rescale_action=True))
    contract = env.contract()
    assert contract.observation["observation.state"] == Feature(
        (4,), "float32", "px", ("agent_x", "agent_y", "agent_x", "agent_y"), (0.0,), (512.0,)
    )
    assert contract.observation["block_pose"].shape == (6,)
    assert (contract.action.unit, contract.action.low, contract.action.high) == ("", (-1.0, -1.0), (1.0, 1.0))
    assert contract.rate_hz == 5.0
    plain = opened(PushTSpec(observation="state"))
    seen, _ = env.reset(seed=3)
    want, _ = plain.reset(seed=3)
    np.testing.assert_array_equal(seen["observation.state"][2:], want["observation.state"])
    seen, reward, *_ = env.step(np.zeros(2, np.float32))
    rewards = [plain.step(np.array([256.0, 256.0]))[1] for _ in range(2)]
    assert reward == pytest.approx(sum(rewards))
    assert env.step(np.zeros(2, np.float32))[2:4] == (False, True)
