"""ManiSkill on the processor, and the batched form with the one environment that it can have there."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rlsvc.core.errors import UserError
from rlsvc.envs.maniskill import BatchedManiSkill, to_jax, to_torch
from rlsvc.envs.vector import episode_seed
from rlsvc.spec.env import ManiSkillSpec

PICK = ManiSkillSpec(id="PickCube-v1", max_steps=3)


def test_a_pick_cube_episode_means_what_every_episode_means(opened):
    env, single = opened(PICK, 1), opened(PICK)
    contract = env.contract
    assert contract.observation["observation.state"].shape == (42,)
    assert (contract.action.shape, contract.action.low, contract.rate_hz) == ((8,), (-1.0,) * 8, 20.0)
    first = env.reset([5])
    seen, _ = single.reset(seed=5)
    np.testing.assert_array_equal(first["observation.state"][0], seen["observation.state"])
    rng = np.random.default_rng(0)
    for t in range(4):
        action = env.random_actions(rng)
        step = env.step(action)
        seen, reward, terminated, truncated, info = single.step(action[0])
        assert step.reward[0] == np.float32(reward)
        assert (terminated, truncated, info["is_success"]) == (False, t == 2, False)
        assert (step.terminated[0], step.truncated[0], step.lost[0]) == (False, t == 2, False)
        np.testing.assert_array_equal(step.final_observation["observation.state"][0], seen["observation.state"])
        if truncated:
            seen, _ = single.reset(seed=episode_seed(5, 1))
        np.testing.assert_array_equal(step.observation["observation.state"][0], seen["observation.state"])


@pytest.mark.render
def test_cameras_and_what_the_robot_knows_are_seen_by_name(opened):
    env = opened(ManiSkillSpec(id="PickCube-v1", observation="rgb", image_size=32))
    contract = env.contract()
    assert {key: f.shape for key, f in contract.observation.items()} == {
        "observation.images.base_camera": (32, 32, 3),
        "observation.state": (29,),
    }
    seen, _ = env.reset(seed=0)
    contract.check_observation(seen)
    assert seen["observation.images.base_camera"].std() > 5


def test_the_batched_form_gives_the_numbers_of_the_single_one_as_jax_arrays(opened):
    batched, single = BatchedManiSkill(PICK, 1), opened(PICK)
    try:
        first = batched.reset([5])
        seen, _ = single.reset(seed=5)
        assert isinstance(first["observation.state"], jax.Array)
        assert batched.contract == single.contract()
        np.testing.assert_array_equal(first["observation.state"][0], seen["observation.state"])
        rng = np.random.default_rng(0)
        for t in range(3):
            action = batched.random_actions(rng)
            step = batched.step(jnp.asarray(action))
            seen, reward, *_ = single.step(action[0])
            np.testing.assert_allclose(step.final_observation["observation.state"][0], seen["observation.state"])
            np.testing.assert_allclose(step.reward[0], reward, rtol=1e-6)
            assert (bool(step.truncated[0]), bool(step.ended[0]), int(step.episode_length[0])) == (
                t == 2,
                t == 2,
                t + 1,
            )
        assert (
            float(jnp.abs(step.observation["observation.state"] - step.final_observation["observation.state"]).max())
            > 0
        )
        assert int(batched.step(action).episode_length[0]) == 1
    finally:
        batched.close()


def test_the_batched_form_repeats_actions_scales_rewards_and_gives_the_same_for_the_same_seed():
    spec = PICK.replace(action_repeat=2, reward_scale=0.5, rescale_action=True, max_steps=2)
    plain, env = BatchedManiSkill(PICK.replace(max_steps=100), 1), BatchedManiSkill(spec, 1)
    try:
        plain.reset([3])
        action = np.full((1, 8), 0.25, np.float32)
        want = [plain.step(action) for _ in range(2)]
        runs = []
        for _ in range(2):
            env.reset([3])
            runs.append([env.step(action) for _ in range(5)])
        step = runs[0][0]
        np.testing.assert_allclose(step.reward[0], 0.5 * sum(float(s.reward[0]) for s in want), rtol=1e-6)
        np.testing.assert_allclose(step.episode_return[0], sum(float(s.reward[0]) for s in want), rtol=1e-6)
        np.testing.assert_allclose(step.observation["observation.state"], want[1].observation["observation.state"])
        assert [bool(s.truncated[0]) for s in runs[0]] == [False, True, False, True, False]
        for a, b in zip(*runs, strict=True):
            np.testing.assert_array_equal(a.observation["observation.state"], b.observation["observation.state"])
        starts = [runs[0][t].observation["observation.state"] for t in (1, 3)]
        assert float(jnp.abs(starts[0] - starts[1]).max()) > 0
    finally:
        plain.close()
        env.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.int32, torch.int64])
def test_tensors_are_handed_over_with_their_numbers_and_a_memory_of_their_own(dtype):
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    array = to_jax(tensor.T)
    want = tensor.numpy().T.copy()
    tensor.zero_()
    np.testing.assert_array_equal(array, want)
    assert array.dtype == (np.int32 if dtype == torch.int64 else want.dtype)


def test_jax_arrays_numpy_arrays_and_lists_of_numbers_become_tensors():
    cpu = torch.device("cpu")
    for array in (jnp.ones((2, 3)), np.ones((2, 3), np.float32)):
        assert torch.equal(to_torch(array, cpu), torch.ones(2, 3))


def test_a_missing_vulkan_device_is_refused_with_what_to_install():
    program = (
        "from rlsvc.envs.make import make_env\nfrom rlsvc.spec.env import ManiSkillSpec\n"
        "from rlsvc.core.errors import UserError\n"
        "try:\n    make_env(ManiSkillSpec(id='PickCube-v1'))\nexcept UserError as error:\n    print(error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RLSVC_VULKAN_PROBED"} | {
        "VK_ICD_FILENAMES": "/nothing.json"
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ManiSkill needs a Vulkan device, also for state observations" in done.stdout
    assert "mesa-vulkan-drivers 25 or newer" in done.stdout


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ManiSkillSpec(id="PickCub-v1"), "unknown ManiSkill task 'PickCub-v1'. Did you mean 'PickCube-v1'"),
        (ManiSkillSpec(id="PickCube-v1", control_mode="pd_foo"), "cannot be made with control_mode pd_foo"),
        (ManiSkillSpec(id="PickCube-v1", backend="gpu"), "backend: gpu is for many environments at once"),
    ],
)
def test_what_does_not_exist_is_refused(opened, spec, words):
    with pytest.raises(UserError, match=words):
        opened(spec)


@pytest.mark.gpu
def test_gpu_environments_step_as_one_and_their_arrays_stay_on_the_device():
    env = BatchedManiSkill(ManiSkillSpec(id="PickCube-v1", backend="gpu", max_steps=3), 16)
    try:
        first = env.reset(range(16))
        assert next(iter(first["observation.state"].devices())).platform == "gpu"
        action = jnp.zeros((16, 8))
        steps = [env.step(action) for _ in range(4)]
        assert [int(s.truncated.sum()) for s in steps] == [0, 0, 16, 0]
        assert np.unique(np.asarray(steps[2].observation["observation.state"]), axis=0).shape[0] == 16
    finally:
        env.close()
