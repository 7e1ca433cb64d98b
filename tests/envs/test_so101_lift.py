"""The simulated SO-101 that lifts a cube: what learning benchmarks of people in the loop stand on."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rlsvc.envs import so101_lift
from rlsvc.envs.so101_lift import HOLD_STEPS, LIFTED, MAX_STEPS, MOST, SO101Lift


@pytest.fixture(scope="module")
def env():
    made = SO101Lift()
    yield made
    made.close()


def play(env, seed, noise=0.1):
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    progress, done = [], False
    while not done:
        _, reward, success, truncated, info = env.step(env.expert(rng, noise))
        progress.append(env.progress())
        done = success or truncated
    return reward, info["is_success"], progress


def test_it_keeps_gymnasiums_promises_and_is_registered():
    check_env(gymnasium.make("rlsvc/SO101Lift-v0", render_mode=None).unwrapped, skip_render_check=True)


def test_the_script_lifts_the_cube_wherever_it_lies_and_its_progress_says_so(env):
    for seed in range(6):
        reward, success, progress = play(env, seed)
        assert success
        assert reward == 1
        assert env.sim.cube[2] > LIFTED
        assert progress[-1] > progress[0]


def test_a_cube_that_is_thrown_is_not_lifted(env):
    env.reset(seed=0)
    at = len(env.sim.angles)
    for _ in range(10):
        env.sim.data.qpos[at : at + 3] = (0.3, 0.3, 0.4)  # far from the arm, and falling
        env.sim.data.qvel[at:] = 0
        _, reward, success, _, info = env.step(np.zeros(6))
        assert env.sim.cube[2] > LIFTED
        assert (reward, success, info["is_success"]) == (0, False, False)


def test_a_cube_is_lifted_once_it_was_held_high_for_so_many_steps(env):
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    high, success = [], False
    while not success:
        success = env.step(env.expert(rng))[2]
        high.append(env.sim.cube[2] > LIFTED)
    assert high[-HOLD_STEPS - 1 :] == [False] + [True] * HOLD_STEPS


def test_nothing_is_lifted_by_an_arm_that_does_not_move_and_the_episode_ends(env):
    env.reset(seed=0)
    for step in range(MAX_STEPS):
        _, reward, success, truncated, info = env.step(np.zeros(6))
        assert not success
        assert not info["is_success"]
        assert reward == 0
        assert truncated == (step == MAX_STEPS - 1)


def test_the_same_seed_is_the_same_episode(env):
    one, _ = env.reset(seed=3)
    one = [one, env.step(np.full(6, 0.3))[0]]
    other, _ = env.reset(seed=3)
    np.testing.assert_array_equal(one, [other, env.step(np.full(6, 0.3))[0]])
    assert not np.allclose(other, env.reset(seed=4)[0])


def test_goals_stay_within_the_joints_ranges_and_move_no_faster_than_said(env):
    env.reset(seed=0)
    low, high = env.sim.model.jnt_range[:6].T
    for _ in range(30):
        before = env.goals.copy()
        env.step(np.full(6, 9.0))
        assert (np.abs(env.goals - before) <= MOST + 1e-9).all()
        assert (env.goals >= low).all()
        assert (env.goals <= high).all()
    assert np.allclose(env.goals[:4], high[:4])


def test_demonstrations_are_successes_by_lerobots_names():
    columns = so101_lift.demonstrations(2, seed=1)
    steps = columns["episode_ends"][-1]
    assert columns["observation.state"].shape == (steps, 17)
    assert columns["action"].shape == (steps, 6)
    assert len(columns["episode_ends"]) == 2
    assert columns["fps"] == 10
