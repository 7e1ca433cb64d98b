import numpy as np
import pytest

from rlsvc.core.errors import ContractError, UserError
from rlsvc.envs.vector import MAX_FAILURES, episode_seed, make_vector
from rlsvc.spec.env import DMControlSpec, GymnasiumSpec, PushTSpec

STATE = "observation.state"
SUITES = [
    GymnasiumSpec(id="Pendulum-v1"),
    GymnasiumSpec(id="CartPole-v1"),
    GymnasiumSpec(id="HalfCheetah-v5"),
    GymnasiumSpec(id="LunarLander-v3"),
    GymnasiumSpec(id="CartPole-v1", isolation="process"),
    DMControlSpec(task="cartpole-swingup"),
    PushTSpec(),
]


def name(spec):
    return f"{spec.name}-{getattr(spec, 'id', '')}-{spec.isolation}"


def act(env, *values):
    return env.step(np.array(values, np.float32)[:, None])


def targets(steps, bootstrap, discount):
    """TD targets of the transitions of one slot as a learner forms them: r + discount * not terminated * V(final)."""
    return [float(s.reward[0]) + discount * (not s.terminated[0]) * bootstrap(s.final_observation) for s in steps]


@pytest.mark.parametrize(
    ("end", "expected"),
    [("terminated", [1 + 0.5 * 6, 1 + 0.5 * 7, 1]), ("truncated", [4, 4.5, 5]), ("both", [4, 4.5, 1])],
)
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_termination_cuts_the_bootstrap_and_truncation_takes_it_from_the_final_observation(
    opened, toy, end, expected, isolation
):
    """x goes 5, 6, 7, 8 with reward 1 and V(x) = x, discount 1/2."""
    env = opened(toy(end=end, options={"isolation": isolation}), 1)
    env.reset([5])
    steps = [act(env, 1.0) for _ in range(3)]
    assert targets(steps, lambda o: float(o[STATE][0, 0]), 0.5) == expected
    assert [bool(s.ended[0]) for s in steps] == [False, False, True]
    assert bool(steps[2].terminated[0]) != bool(steps[2].truncated[0])


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_after_an_end_the_observation_is_the_next_episodes_first_and_no_step_is_a_reset(opened, toy, isolation):
    env = opened(toy(options={"isolation": isolation}), 2)
    env.reset([10, 20])
    steps = [act(env, 1.0, 2.0) for _ in range(6)]
    assert [s.ended.tolist() for s in steps] == [[False] * 2, [False] * 2, [True] * 2] * 2
    seeds = [episode_seed(10, 1), episode_seed(20, 1)]
    np.testing.assert_array_equal(steps[2].final_observation[STATE], [[13, 3], [26, 3]])
    np.testing.assert_array_equal(steps[2].observation[STATE], np.array([[seeds[0], 0], [seeds[1], 0]], np.float32))
    assert [s.observation[STATE][0, 1] for s in steps] == [1, 2, 0, 1, 2, 0]
    assert [s.reward.tolist() for s in steps] == [[1, 2]] * 6
    assert [s.success.tolist() for s in steps] == [[False] * 2, [False] * 2, [True] * 2] * 2
    assert [s.episode_return[1] for s in steps] == [2, 4, 6, 2, 4, 6]
    assert [s.episode_length[0] for s in steps] == [1, 2, 3, 1, 2, 3]


def test_where_no_episode_ends_what_the_step_led_to_is_what_is_seen_next(opened, toy):
    env = opened(toy(), 2)
    env.reset([1, 2])
    step = act(env, 1.0, 1.0)
    np.testing.assert_array_equal(step.final_observation[STATE], step.observation[STATE])


def test_a_step_leaves_the_arrays_of_earlier_steps_alone(opened, toy):
    env = opened(toy(), 1)
    first = env.reset([4])
    steps = [act(env, 1.0) for _ in range(4)]
    np.testing.assert_array_equal(first[STATE], [[4, 0]])
    assert [s.final_observation[STATE][0, 1] for s in steps] == [1, 2, 3, 1]


@pytest.mark.parametrize("spec", SUITES, ids=name)
def test_every_suite_means_the_same_by_an_episode(opened, spec):
    """Two episodes of a vector are those that the single environment gives when it is reset by hand."""
    spec = spec.replace(max_steps=4)
    env, single = opened(spec, 2), opened(spec)
    rng = np.random.default_rng(0)
    first = env.reset([3, 4])
    actions = [env.random_actions(rng) for _ in range(8)]
    steps = [env.step(a) for a in actions]
    for slot, seed in enumerate((3, 4)):
        seen, _ = single.reset(seed=seed)
        assert_row(first, slot, seen)
        episode = 0
        for step, action in zip(steps, actions, strict=True):
            seen, reward, terminated, truncated, _ = single.step(action[slot])
            assert_row(step.final_observation, slot, seen)
            assert step.reward[slot] == np.float32(reward)
            assert (step.terminated[slot], step.truncated[slot]) == (terminated, truncated)
            if terminated or truncated:
                episode += 1
                seen, _ = single.reset(seed=episode_seed(seed, episode))
            assert_row(step.observation, slot, seen)
        assert episode == 2
    assert [bool(s.truncated.all()) for s in steps] == [False, False, False, True] * 2
    assert not any(s.lost.any() for s in steps)


def assert_row(observation, slot, expected):
    assert observation.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(observation[key][slot], value)


@pytest.mark.parametrize("spec", SUITES, ids=name)
def test_the_same_seed_gives_the_same_trajectory_and_another_another(opened, spec):
    env = opened(spec.replace(max_steps=3), 2)
    actions = [env.random_actions(np.random.default_rng(i)) for i in range(5)]

    def run(seeds):
        first = env.reset(seeds)
        return [first, *(env.step(a).observation for a in actions)]

    once, again, other = run([1, 2]), run([1, 2]), run([1, 5])
    for a, b, c in zip(once, again, other, strict=True):
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])
            np.testing.assert_array_equal(a[key][0], c[key][0])
    assert any((a[key][1] != c[key][1]).any() for a, c in zip(once, other, strict=True) for key in a)


@pytest.mark.parametrize("spec", SUITES, ids=name)
def test_observations_and_actions_are_what_the_contract_says(opened, spec):
    env = opened(spec)
    contract = env.contract()
    seen, _ = env.reset(seed=0)
    contract.check_observation(seen)
    assert env.observation_space.contains(seen)
    action = env.action_space.sample()
    assert np.shape(action) == contract.action.shape
    contract.check_observation(env.step(action)[0])


def test_cartpole_pushed_one_way_falls_and_that_is_a_termination(opened):
    env = opened(GymnasiumSpec(id="CartPole-v1"), 1)
    env.reset([0])
    steps = 0
    while not steps or not step.ended[0]:
        step, steps = env.step(np.array([1])), steps + 1
    assert 6 < steps < 12
    assert (bool(step.terminated[0]), bool(step.truncated[0])) == (True, False)
    assert abs(step.final_observation[STATE][0, 2]) > 0.2095 > abs(step.observation[STATE][0, 2])


def test_texts_and_images_have_a_row_for_each_environment(opened, toy):
    env = opened(toy("Camera"), 2)
    first = env.reset([1, 2])
    step = act(env, 1.0, 1.0)
    assert first["task"].tolist() == ["go to 1", "go to 2"]
    assert step.observation["task"].tolist() == ["go to 2", "go to 3"]
    assert step.observation["observation.camera"].shape == (2, 6, 8, 3)
    assert (step.observation["observation.camera"] == 1).all()


def test_discrete_actions_are_taken_by_number(opened, toy):
    env = opened(toy("Buttons", options={"flatten": True}), 2)
    env.reset([0, 0])
    assert env.step(np.array([0, 3])).reward.tolist() == [3.0, 6.0]
    assert set(env.random_actions(np.random.default_rng(0)).tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("fault", ["raise", "nan", "nan_reward"])
@pytest.mark.parametrize("isolation", ["none", "process"])
def test_a_simulator_that_fails_is_made_anew_alone(opened, toy, fault, isolation):
    env = opened(toy(length=4, fault=fault, seed=20, options={"isolation": isolation}), 3)
    env.reset([10, 20, 30])
    steps = [act(env, 1.0, 1.0, 1.0) for _ in range(4)]
    assert [s.lost.tolist() for s in steps] == [[False] * 3, [False, True, False], [False] * 3, [False] * 3]
    at = steps[1]
    assert (at.reward.tolist(), at.ended.any(), at.success.any()) == ([1, 0, 1], False, False)
    np.testing.assert_array_equal(at.observation[STATE][1], np.float32([episode_seed(20, 1), 0]))
    assert np.isfinite(at.final_observation[STATE]).all()
    np.testing.assert_array_equal(at.observation[STATE][[0, 2]], [[12, 2], [32, 2]])
    assert [s.ended.tolist() for s in steps[2:]] == [[False] * 3, [True, False, True]]
    assert steps[3].episode_length.tolist() == [4, 2, 4]
    assert (env.restarts, list(env.failures)) == (1, [1])


def test_a_simulator_that_fails_while_it_is_reset_is_made_anew_with_another_seed(opened, toy):
    env = opened(toy(fault="reset", seed=20), 2)
    first = env.reset([10, 20])
    np.testing.assert_array_equal(first[STATE], np.float32([[10, 0], [episode_seed(20, 1), 0]]))
    assert env.restarts == 1


def test_a_simulator_that_fails_every_time_ends_the_run_with_its_reason(opened, toy):
    env = opened(toy(fault="raise", seed="any", at=1), 1)
    env.reset([0])
    for _ in range(MAX_FAILURES - 1):
        assert act(env, 1.0).lost[0]
    with pytest.raises(UserError, match=rf"failed {MAX_FAILURES} times in a row.*failed on purpose"):
        act(env, 1.0)


def test_failures_with_steps_in_between_are_survived(opened, toy):
    env = opened(toy(length=9, fault="raise", seed="any", at=2), 1)
    env.reset([0])
    lost = [bool(act(env, 1.0).lost[0]) for _ in range(4 * MAX_FAILURES)]
    assert lost == [False, True] * (2 * MAX_FAILURES)
    assert env.restarts == 2 * MAX_FAILURES


@pytest.mark.parametrize(
    ("actions", "words"),
    [(np.zeros((3, 1)), r"shape \(3, 1\), expected \(2, 1\)"), (np.array([[0.0], [np.nan]]), "row 1 is not finite")],
)
def test_actions_that_do_not_fit_are_refused(opened, toy, actions, words):
    env = opened(toy(), 2)
    env.reset([0, 1])
    with pytest.raises(ContractError, match=words):
        env.step(actions)


def test_the_wrong_number_of_seeds_is_refused_and_so_is_a_step_before_the_first_reset(opened, toy):
    env = opened(toy(), 2)
    with pytest.raises(UserError, match="got 3, expected one for each of 2"):
        env.reset([1, 2, 3])
    with pytest.raises(UserError, match="reset the environments first"):
        act(env, 0.0, 0.0)
    with pytest.raises(UserError, match="num_envs: got 0"):
        make_vector(toy(), 0)


def test_episode_seeds_differ_between_slots_and_episodes():
    seeds = {episode_seed(s, k) for s in range(100) for k in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert episode_seed(7, 0) == 7


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            GymnasiumSpec(id="HalfCheeta-v5"),
            "unknown gymnasium environment 'HalfCheeta-v5'. Did you mean 'HalfCheetah-v5'",
        ),
        (GymnasiumSpec(id="Pendulum-v7"), "Did you mean 'Pendulum-v1'"),
        (DMControlSpec(task="walker-wlk"), "unknown dm_control task 'walker-wlk'. Did you mean 'walker-walk'"),
        (GymnasiumSpec(id="CartPole-v1", kwargs={"gravity_": 1}), "cannot be made with kwargs {'gravity_': 1}"),
        (GymnasiumSpec(id="CartPole-v1", import_module="no_such_module"), "env.import_module: 'no_such_module'"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_nearest_names(opened, spec, words):
    with pytest.raises(UserError, match=words):
        opened(spec)
    with pytest.raises(UserError, match=words):
        opened(spec.replace(isolation="process"))
