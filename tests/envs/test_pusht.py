from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.errors import NotFoundError
from rlsvc.data.load import load_table
from rlsvc.envs.make import make_env
from rlsvc.envs.pusht import PushT, keypoints
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.env import PushTSpec

DATASET = Path(__file__).parents[2] / "datasets" / "pusht_human"


@pytest.fixture
def make():
    made = []

    def env(**fields) -> PushT:
        made.append(make_env(PushTSpec(**fields)))
        return made[-1]

    yield env
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def demonstrations():
    return load_table(DatasetSpec(path=str(DATASET), episodes=(0, 1, 2)), None)


def rollout(env: PushT, seed: int, steps: int) -> list[np.ndarray]:
    env.reset(seed=seed)
    actions = np.random.default_rng(seed).uniform(100, 400, (steps, 2))
    out = []
    for action in actions:
        env.step(action)
        out.append(env.state())
    return out


def test_recorded_demonstrations_replayed_give_the_recorded_states_and_keypoints(make, demonstrations):
    env = make(observation="keypoints")
    errors, point_errors = [], []
    for e in range(3):
        episode = demonstrations.episode(e)
        state = np.concatenate([episode["observation.state"], episode["block_pose"]], axis=1)
        observation, _ = env.reset(seed=0, options={"state": state[0]})
        for t in range(len(state) - 1):
            errors.append(np.abs(env.state()[:4] - state[t, :4]).max())
            point_errors.append(
                np.abs(observation["observation.environment_state"] - episode["observation.environment_state"][t]).max()
            )
            observation, *_ = env.step(episode["action"][t])
    assert len(errors) > 400
    assert np.median(errors) < 1e-3
    assert np.median(point_errors) < 1e-3


def test_recorded_demonstrations_score_well(make, demonstrations):
    """The ceiling of imitation: the recorded actions end with the block on the target."""
    env = make()
    best = []
    for e in range(3):
        episode = demonstrations.episode(e)
        env.reset(seed=0, options={"state": [*episode["observation.state"][0], *episode["block_pose"][0]]})
        best.append(max(env.step(action)[1] for action in episode["action"]))
    assert min(best) > 0.8


def test_keypoints_turn_with_the_block():
    at_rest = keypoints(np.zeros(2), 0.0)
    turned = keypoints(np.array([10.0, 20.0]), np.pi / 2)
    np.testing.assert_allclose(turned, np.stack([10 - at_rest[:, 1], 20 + at_rest[:, 0]], axis=1), atol=1e-9)


def test_the_same_seed_gives_the_same_episode_and_another_another(make):
    env, other = make(), make()
    first = rollout(env, 3, 10)
    np.testing.assert_array_equal(first, rollout(env, 3, 10))
    np.testing.assert_array_equal(first, rollout(other, 3, 10))
    assert not np.allclose(first, rollout(env, 4, 10))


def test_an_episode_that_runs_out_of_steps_is_truncated_not_terminated(make):
    env = make(max_steps=3)
    env.reset(seed=0)
    ends = [env.step(np.array([10.0, 10.0]))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]
    env.reset(seed=0)
    assert env.step(np.array([10.0, 10.0]))[2:4] == (False, False)


def test_a_block_on_the_target_terminates_with_success_even_on_the_last_step(make):
    env = make(max_steps=1)
    goal = [100.0, 100.0, 256.0, 256.0, np.pi / 4]
    env.reset(seed=0, options={"state": goal})
    _, reward, terminated, truncated, info = env.step(np.array([100.0, 100.0]))
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, True, False, True)
    assert info["coverage"] >= 0.95


def test_the_reward_is_coverage_over_0_95_at_most_1(make):
    env = make()
    rewards, coverages = [], []
    for x in (256.0, 262.0, 275.0, 290.0):
        env.reset(seed=0, options={"state": [100.0, 100.0, x, 256.0, np.pi / 4]})
        _, reward, _, _, info = env.step(np.array([100.0, 100.0]))
        rewards.append(reward)
        coverages.append(info["coverage"])
    np.testing.assert_allclose(rewards, np.clip(np.array(coverages) / 0.95, 0, 1), atol=1e-9)
    assert 0 < rewards[-1] < rewards[-2] < 1


@pytest.mark.parametrize("observation", ["keypoints", "state", pytest.param("pixels", marks=pytest.mark.render)])
def test_observations_are_what_the_contract_says(make, observation):
    env = make(observation=observation)
    contract = env.contract()
    first, _ = env.reset(seed=0)
    then, *_ = env.step(np.array([256.0, 256.0], np.float32))
    for seen in (first, then):
        assert {k: (v.shape, str(v.dtype)) for k, v in seen.items()} == {
            k: (f.shape, f.dtype) for k, f in contract.observation.items()
        }
        assert env.observation_space.contains(seen)
        contract.check_observation(seen)
    assert (contract.action.low, contract.action.high, contract.rate_hz) == ((0.0,), (512.0,), 10.0)


@pytest.mark.parametrize("observation", ["keypoints", "state"])
def test_the_environment_fits_the_demonstrations(make, demonstrations, observation):
    contract = make(observation=observation).contract()
    for key, feature in contract.observation.items():
        assert demonstrations.columns[key].shape[1:] == feature.shape
        assert not feature.names or demonstrations.names[key] == feature.names
        assert demonstrations.units.get(key, "") in ("", feature.unit)


@pytest.mark.render
def test_images_show_the_block_where_it_is(make):
    env = make(observation="pixels")
    left, _ = env.reset(seed=0, options={"state": [400, 450, 120, 150, 0]})
    right, _ = env.reset(seed=0, options={"state": [400, 450, 400, 150, 0]})
    change = np.abs(left["observation.image"].astype(int) - right["observation.image"]).sum(-1)
    columns = np.flatnonzero(change.sum(0))
    assert columns.min() < 30
    assert columns.max() > 66
    assert env.render().shape == (256, 256, 3)


def test_an_unknown_environment_is_refused_with_the_list():
    with pytest.raises(NotFoundError, match=r"unknown environment 'pushit'\. Did you mean 'pusht'\?"):
        make_env(PushTSpec.model_construct(name="pushit"))
