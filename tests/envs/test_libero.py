"""The protocol of LIBERO's evaluations, on a suite that only counts (tests/envs/test_runtime.py has the real one)."""

from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from rlsvc.core.errors import ContractError, UserError
from rlsvc.envs.libero import Libero, adapt_libero
from rlsvc.spec.env import LiberoSpec

STATES = 50


class Sim:
    """Counts steps; a state is a number, the task is solved when `solved_after` steps with motion were made."""

    def __init__(self, scene, size, solved_after):
        self.scene, self.size, self.solved_after = scene, size, solved_after
        self.actions, self.seeds, self.closed = [], [], False
        self.robots = [SimpleNamespace(gripper=SimpleNamespace(current_action=np.ones(1)))]

    def seed(self, seed):
        self.seeds.append(seed)

    def reset(self):
        self.actions, self.state = [], None

    def set_init_state(self, state):
        self.state = float(state[0])
        return self.raw()

    def step(self, action):
        self.actions.append(list(action))
        done = sum(any(a[:6]) for a in self.actions) >= self.solved_after
        return self.raw(), float(done), done, {}

    def raw(self):
        image = np.zeros((self.size, self.size, 3), np.uint8)
        image[0, 1] = 255  # near the upper left corner
        half = np.sqrt(0.5)
        return {
            "agentview_image": image,
            "robot0_eye_in_hand_image": image // 2,
            "robot0_eef_pos": np.array([self.state, len(self.actions), 3.0]),
            "robot0_eef_quat": np.array([0.0, 0.0, half, half]),  # a quarter turn about z, (x, y, z, w)
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
        }

    def close(self):
        self.closed = True


class Suite:
    n_tasks = 3

    def get_task(self, i):
        return SimpleNamespace(name=f"SCENE{i}_do_it", language="do it")

    def get_task_init_states(self, i):
        return 100.0 * i + np.arange(STATES)[:, None]

    def get_task_bddl_file_path(self, i):
        return f"{i}.bddl"


@pytest.fixture
def make():
    def env(solved_after=10**9, **fields):
        spec = LiberoSpec(**{"image_size": 8, "runtime": None, **fields})
        sims = []

        def make_sim(scene, size):
            sims.append(Sim(scene, size, solved_after))
            return sims[-1]

        return adapt_libero(Libero(spec, Suite(), make_sim), spec), sims

    return env


MOVE = np.array([0.1, 0, 0, 0, 0, 0, 1], np.float32)


def test_consecutive_seeds_are_every_task_from_every_recorded_state_once(make):
    env, _ = make()
    seen = []
    for seed in range(3 * STATES):
        observation, info = env.reset(seed=seed)
        seen.append((info["task"], info["initial_state"], observation["observation.state"][0]))
    assert seen[:4] == [
        ("SCENE0_do_it", 0, 0),
        ("SCENE1_do_it", 0, 100),
        ("SCENE2_do_it", 0, 200),
        ("SCENE0_do_it", 1, 1),
    ]
    assert len(set(seen)) == 3 * STATES
    assert env.reset(seed=3 * STATES)[1]["initial_state"] == 0


def test_the_seeds_of_one_task_are_its_recorded_states_in_order(make):
    env, sims = make(task=2)
    starts = [env.reset(seed=seed)[0]["observation.state"][0] for seed in (0, 1, 49, 50, 100_000)]
    assert starts == [200, 201, 249, 200, 200]
    assert (len(sims), sims[0].seeds) == (1, [0, 1, 49, 50, 100_000])


def test_a_scene_is_loaded_when_the_task_changes_and_the_old_one_is_freed(make):
    env, sims = make()
    for seed in (0, 3, 1):
        env.reset(seed=seed)
    assert [(sim.scene, sim.closed) for sim in sims] == [("0.bddl", True), ("1.bddl", False)]


def test_an_episode_begins_with_ten_steps_without_motion_and_the_gripper_open(make):
    env, sims = make()
    observation, _ = env.reset(seed=0)
    assert sims[0].actions == [[0, 0, 0, 0, 0, 0, -1]] * 10
    assert observation["observation.state"][1] == 10
    assert sims[0].robots[0].gripper.current_action == 0


def test_images_are_turned_by_180_degrees_and_the_state_is_position_axis_angle_and_fingers(make):
    env, _ = make()
    observation, _ = env.reset(seed=0)
    for name, value in (("observation.images.image", 255), ("observation.images.image2", 127)):
        assert np.argwhere(observation[name][..., 0]).tolist() == [[7, 6]]
        assert observation[name][7, 6, 0] == value
    np.testing.assert_allclose(observation["observation.state"], [0, 10, 3, 0, 0, np.pi / 2, 0.04, -0.04], atol=1e-6)
    assert observation["task"] == "do it"


@pytest.mark.parametrize(
    ("suite", "limit"),
    [("libero_spatial", 220), ("libero_object", 280), ("libero_goal", 300), ("libero_10", 520), ("libero_90", 400),
     ("libero_10_with_mug", 520)],
)  # fmt: skip
def test_episodes_have_the_published_number_of_steps_beside_those_of_coming_to_rest(make, suite, limit):
    env, sims = make(suite=suite)
    env.reset(seed=0)
    ends = [env.step(MOVE)[2:4] for _ in range(limit)]
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]
    assert len(sims[0].actions) == limit + 10


def test_the_step_that_solves_the_task_terminates_with_success_even_when_it_is_the_last(make):
    env, _ = make(solved_after=2, max_steps=2)
    env.reset(seed=0)
    assert env.step(MOVE)[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step(MOVE)
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, True, False, True)


def test_openpis_keys_are_there_by_one_word(make):
    """openpi_client sends these from its LIBERO example."""
    env, _ = make(rename="openpi")
    observation, _ = env.reset(seed=0)
    assert list(observation) == ["observation/image", "observation/wrist_image", "observation/state", "prompt"]
    assert env.contract().observation["observation/state"].names[0] == "x"
    env.contract().check_observation(observation)


@pytest.mark.parametrize(
    ("names", "message"),
    [({"observation.image": "image"}, r"env\.rename: the environment gives no 'observation\.image'; it gives: obs"),
     ({"task": "observation.state"}, r"env\.rename: two observations would be called 'observation\.state'")],
)  # fmt: skip
def test_a_name_that_is_not_there_or_is_taken_is_refused(make, names, message):
    with pytest.raises(ContractError, match=message):
        make(rename=names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"suite": "libero_spatail"}, r"did you mean 'libero_spatial'\?"),
     ({"suite": "libero_goal", "task": 10}, "task: got 10, expected 0 to 9 in libero_goal"),
     ({"rename": "openpy"}, "got 'openpy', expected openpi")],
)  # fmt: skip
def test_a_suite_a_task_and_names_that_do_not_exist_are_refused_without_the_simulator(fields, message):
    with pytest.raises(ValidationError, match=message):
        LiberoSpec(**fields)


def test_a_task_beyond_a_variation_of_a_suite_is_refused_when_it_is_made(make):
    with pytest.raises(UserError, match=r"env\.task: got 3, expected 0 to 2 in libero_goal_with_mug"):
        make(suite="libero_goal_with_mug", task=3)


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 10), ({"suite": "libero_90"}, 90), ({"task": 4}, 1), ({"suite": "libero_goal_swap"}, None)],
)
def test_it_is_known_how_many_tasks_the_seeds_go_round(fields, count):
    assert LiberoSpec(**fields).task_count == count
