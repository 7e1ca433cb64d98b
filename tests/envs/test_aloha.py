"""ALOHA's simulated tasks, with the real simulator; drawing in software takes a quarter of a second an image."""

import numpy as np
import pytest

from rlsvc.spec.env import AlohaSpec

pytestmark = pytest.mark.render
PROMPTS = {"transfer_cube": "Transfer cube", "insertion": "Insert the peg into the socket"}


@pytest.fixture(scope="module", params=PROMPTS)
def env(request):
    from rlsvc.envs.make import make_env

    made = make_env(AlohaSpec(task=request.param, max_steps=2))
    yield made
    made.close()


def test_an_observation_is_the_camera_above_the_table_both_arms_and_what_to_do(env):
    seen, info = env.reset(seed=0)
    assert {name: (x.shape, str(x.dtype)) for name, x in seen.items() if name != "task"} == {
        "observation.images.top": ((480, 640, 3), "uint8"),
        "observation.state": ((14,), "float32"),
    }
    assert (seen["task"], info["is_success"]) == (PROMPTS[env.env.unwrapped._gym.task], False)
    assert seen["observation.images.top"].std() > 10
    np.testing.assert_array_equal(env.render(), seen["observation.images.top"])
    # Both arms rest alike; their fingers are 0.02239 m apart, of 0.01844 (closed) to 0.058 (open).
    arm = [0, -0.96, 1.16, 0, -0.3, 0, (0.02239 - 0.01844) / (0.058 - 0.01844)]
    np.testing.assert_allclose(seen["observation.state"], [*arm, *arm], atol=1e-6)


def test_actions_are_bounded_by_the_motors_and_the_resting_pose_is_one(env):
    contract = env.contract()
    rest = env.reset(seed=0)[0]["observation.state"]
    assert (contract.rate_hz, contract.action.shape) == (50.0, (14,))
    assert env.action_space.contains(rest)
    assert rest[2] > 1.0, "gym-aloha declares actions in [-1, 1]"
    np.testing.assert_allclose(contract.action.low[1:8], [-1.85005, -1.76278, -3.14158, -1.8675, -3.14158, 0, -3.14158])
    np.testing.assert_allclose(contract.action.high[1:8], [1.25664, 1.6057, 3.14158, 2.23402, 3.14158, 1, 3.14158])


def test_the_same_seed_gives_the_same_episode_and_another_other_places(env):
    def episode(seed):
        observation, _ = env.reset(seed=seed)
        target = observation["observation.state"] + 0.1
        steps = [env.step(target) for _ in range(2)]
        return [observation, *(step[0] for step in steps)], [step[2:4] for step in steps]

    (first, ends), (again, _) = episode(5), episode(5)
    for a, b in zip(first, again, strict=True):
        for name in ("observation.state", "observation.images.top"):
            np.testing.assert_array_equal(a[name], b[name])
    assert ends == [(False, False), (False, True)]
    assert not np.array_equal(first[0]["observation.state"], first[2]["observation.state"])
    other, _ = env.reset(seed=6)
    assert (other["observation.images.top"] != first[0]["observation.images.top"]).any()


def test_the_last_stage_is_success_and_terminates():
    """The cube between the fingers of the left arm, above the table: what handing it over comes to."""
    from rlsvc.envs.make import make_env

    env = make_env(AlohaSpec(max_steps=1))
    rest = env.reset(seed=0)[0]["observation.state"]
    physics = env.env.unwrapped.physics
    fingers = [f"vx300s_left/10_{side}_gripper_finger" for side in ("left", "right")]
    physics.named.data.qpos["red_box_joint"][:3] = np.mean([physics.named.data.geom_xpos[f] for f in fingers], axis=0)
    _, reward, terminated, truncated, info = env.step(rest)
    env.close()
    assert (reward, terminated, truncated, info["is_success"]) == (4.0, True, False, True)
