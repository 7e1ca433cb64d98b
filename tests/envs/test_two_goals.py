"""The point that is told in words which disc to go to."""

import numpy as np

from rlsvc.envs.two_goals import MAX_STEPS, PROMPTS, STEP, TwoGoals, demonstrations


def walk(env: TwoGoals, goal: int) -> tuple[float, bool, dict]:
    """Straight to a disc; the last reward, whether it terminated, and the last info."""
    while True:
        way = env.goals[goal] - env.point
        _, reward, terminated, truncated, info = env.step(np.clip(way / STEP, -1, 1))
        if terminated or truncated:
            return reward, terminated, info


def test_the_disc_that_the_prompt_names_is_success_and_the_other_one_is_not():
    env = TwoGoals()
    observation, _ = env.reset(seed=3, options={"goal": 1})
    assert observation["task"] == PROMPTS[1]
    assert walk(env, 1) == (1.0, True, {"is_success": True})
    env.reset(seed=3, options={"goal": 1})
    assert walk(env, 0) == (0.0, True, {"is_success": False})


def test_a_misleading_prompt_names_the_other_disc_and_changes_nothing_else():
    right, wrong = TwoGoals().reset(seed=5)[0], TwoGoals(mislead=True).reset(seed=5)[0]
    assert {right["task"], wrong["task"]} == set(PROMPTS)
    np.testing.assert_array_equal(right["image"], wrong["image"])
    env = TwoGoals(mislead=True)
    observation, _ = env.reset(seed=5)
    assert walk(env, PROMPTS.index(observation["task"])) == (0.0, True, {"is_success": False})


def test_neither_image_nor_state_tells_which_disc_is_meant():
    one, other = (TwoGoals().reset(seed=7, options={"goal": goal})[0] for goal in (0, 1))
    np.testing.assert_array_equal(one["image"], other["image"])
    np.testing.assert_array_equal(one["state"], other["state"])
    assert one["task"] != other["task"]


def test_an_episode_that_reaches_nothing_is_cut_off():
    env = TwoGoals()
    env.reset(seed=0)
    ends = [env.step(np.zeros(2))[2:4] for _ in range(MAX_STEPS)]
    assert ends[:-1] == [(False, False)] * (MAX_STEPS - 1)
    assert ends[-1] == (False, True)


def test_demonstrations_reach_the_disc_that_their_task_names():
    data = demonstrations(6, size=24)
    ends = data["episode_ends"]
    assert data["observation.image"].shape == (ends[-1], 24, 24, 3)
    assert set(data["tasks"]) == set(PROMPTS)
    env = TwoGoals(24)
    env.reset(seed=0, options={"goal": 0})
    # Of a simulator the first episode's seed is that of the demonstrations: its actions, done again, end in success.
    for action in data["action"][: ends[0]]:
        *_, info = env.step(action)
    assert info["is_success"]
