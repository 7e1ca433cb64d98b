"""What is particular to a suite."""

import numpy as np
import pytest

from rlsvc.spec.env import DMControlSpec, GymnasiumSpec


def test_a_control_suite_episode_runs_out_of_time_and_does_not_terminate(opened):
    """The suite's own limit is 1000 steps, which an action repeat of 8 makes 125."""
    env = opened(DMControlSpec(task="cartpole-balance", action_repeat=8), 1)
    env.reset([0])
    steps = [env.step(np.zeros((1, 1), np.float32)) for _ in range(126)]
    assert [t for t, s in enumerate(steps) if s.ended[0]] == [124]
    assert (bool(steps[124].truncated[0]), bool(steps[124].terminated[0])) == (True, False)


def test_a_control_suite_task_that_ends_itself_terminates(opened):
    """suite.lqr ends with discount 0 when its masses rest at the origin."""
    env = opened(DMControlSpec(task="lqr-lqr_2_1"))
    env.reset(seed=0)
    physics = env.env.unwrapped._sim.physics
    physics.data.qpos[:] = 0
    physics.data.qvel[:] = 0
    physics.forward()
    *_, terminated, truncated, _ = env.step(np.zeros(1, np.float32))
    assert (terminated, truncated) == (True, False)


def test_control_suite_states_are_named_and_actions_bounded(opened):
    contract = opened(DMControlSpec(task="cartpole-swingup")).contract()
    state = contract.observation["observation.state"]
    assert state.names == ("position_0", "position_1", "position_2", "velocity_0", "velocity_1")
    assert (contract.action.low, contract.action.high, contract.rate_hz) == ((-1.0,), (1.0,), 100.0)


@pytest.mark.render
def test_control_suite_pixels_are_stacked_images_of_the_state_after_the_last_repeat(opened):
    spec = DMControlSpec(task="cartpole-swingup", observation="pixels", image_size=24, frame_stack=3, action_repeat=2)
    env = opened(spec)
    first, _ = env.reset(seed=1)
    image = first["observation.image"]
    assert (image.shape, image.dtype) == ((24, 24, 9), np.uint8)
    np.testing.assert_array_equal(image[..., :3], image[..., 6:])
    for _ in range(5):
        seen, *_ = env.step(np.ones(1, np.float32))
    now = seen["observation.image"]
    assert (now[..., :3] != now[..., 6:]).any()
    np.testing.assert_array_equal(now[..., 6:], env.render())
    again = opened(spec)
    again.reset(seed=1)
    for _ in range(5):
        other, *_ = again.step(np.ones(1, np.float32))
    np.testing.assert_array_equal(other["observation.image"], now)


@pytest.mark.render
def test_car_racing_is_seen_through_its_camera(opened):
    env = opened(GymnasiumSpec(id="CarRacing-v3", image_size=48, max_steps=3), 1)
    assert env.contract.observation["observation.image"].shape == (48, 48, 3)
    assert (env.contract.action.low, env.contract.action.high) == ((-1.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    env.reset([0])
    steps = [env.step(np.array([[0.0, 1.0, 0.0]], np.float32)) for _ in range(3)]
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True]
    assert steps[0].observation["observation.image"].std() > 10
