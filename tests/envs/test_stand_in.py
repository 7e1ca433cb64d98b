"""The stand-in for a person: when it takes over, when it hands back, and what its steps say."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.core.errors import UserError
from rlsvc.envs.make import make_env
from rlsvc.envs.planar_push import MAX_STEPS, REACHED, TOUCH, PlanarPush, demonstrations
from rlsvc.envs.stand_in import StandIn
from rlsvc.envs.vector import VectorEnv
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.stand_in import StandInSpec

PUSH = GymnasiumSpec(id="rlsvc/PlanarPush-v0", import_module="rlsvc.envs.planar_push")
STILL = np.zeros(2, np.float32)


def watched(**fields) -> StandIn:
    return StandIn(make_env(PUSH), StandInSpec.model_validate(fields))


def who(env: StandIn, steps: int, action=STILL) -> list[bool]:
    return [bool(env.step(action)[4]["intervention"]) for _ in range(steps)]


def test_it_takes_over_after_so_many_steps_without_progress_and_hands_back_after_its_own():
    env = watched(patience=3, control_steps=2, min_progress=1.0)
    env.reset(seed=0)
    assert who(env, 9) == [False] * 3 + [True] * 2 + [False] * 3 + [True]
    env.reset(seed=1)
    assert who(env, 3) == [False] * 3


def test_progress_keeps_it_from_taking_over():
    env = watched(patience=3, control_steps=5, min_progress=0.0)
    env.reset(seed=0)
    assert not any(who(env, 20))


def test_a_step_of_it_says_what_was_executed_and_one_of_the_policy_s_what_it_asked_for():
    env = watched(patience=1, control_steps=1, min_progress=1.0, noise=0.0)
    env.reset(seed=0)
    asked = np.array([0.5, -0.25], np.float32)
    info = env.step(asked)[4]
    assert not info["intervention"]
    assert info["action"].tolist() == info["commanded"].tolist() == asked.tolist()
    before = env.unwrapped.env.unwrapped.point.copy()
    info = env.step(asked)[4]
    assert info["intervention"]
    assert info["action"].tolist() != asked.tolist()
    moved = env.unwrapped.env.unwrapped.point - before
    np.testing.assert_allclose(moved, 0.05 * info["action"], atol=1e-6)


def test_an_environment_without_a_script_is_refused_by_name():
    with pytest.raises(UserError, match=r"rollout\.stand_in: environment PendulumEnv has no `expert`"):
        StandIn(make_env(GymnasiumSpec(id="Pendulum-v1")), StandInSpec())


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_vector_hands_on_what_its_environments_tell_of_each_step(isolation):
    import told_env

    spec = GymnasiumSpec(id=told_env.ID, import_module="told_env", isolation=isolation)
    env = VectorEnv(spec, 2)
    try:
        assert set(env.step_columns) == {"action", "intervention"}
        env.reset([0, 1])
        out = env.step(np.array([[0.25], [-0.5]], np.float32))
        assert out.columns["intervention"].tolist() == [False, True]
        assert out.columns["action"].tolist() == [[0.25], [0.5]]
    finally:
        env.close()


def test_the_script_pushes_the_disc_to_the_mark_from_everywhere():
    env, rng = PlanarPush(), np.random.default_rng(0)
    for seed in range(40):
        env.reset(seed=seed)
        for _ in range(MAX_STEPS):
            observation, reward, terminated, _, info = env.step(env.expert(rng))
            if terminated:
                break
        assert (reward, info["is_success"]) == (1.0, True)
        assert np.linalg.norm(observation[4:]) < REACHED


def test_the_disc_gives_way_along_the_line_between_the_centres():
    env = PlanarPush()
    env.reset(seed=0)
    env.point, env.disc, env.mark = np.array([0.3, 0.5]), np.array([0.3 + TOUCH, 0.5]), np.array([0.9, 0.9])
    observation, reward, *_ = env.step(np.array([1.0, 0.0]))
    np.testing.assert_allclose(observation, [0.35, 0.5, TOUCH, 0, 0.9 - 0.35 - TOUCH, 0.4], atol=1e-6)
    assert reward == 0.0


def test_demonstrations_are_the_same_for_the_same_seed_and_end_where_episodes_do():
    one, two = demonstrations(3, seed=4), demonstrations(3, seed=4)
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert one["episode_ends"][-1] == len(one["action"]) == len(one["observation.state"])
