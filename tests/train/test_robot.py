"""A run with a robot: what is learnt, stored and acted on are the same numbers."""

import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.data.load import load_table
from rlsvc.data.mixture import split_episodes
from rlsvc.data.transforms import RobotTransforms
from rlsvc.runner import PolicyRunner
from rlsvc.spec.robot import RobotSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.train.learner import Learner


def test_a_run_learns_relative_actions_and_its_bundle_acts_in_absolute_ones(make_spec, tmp_path):
    """PushT's actions are places that the agent shall go to, here relative to where it is.

    Sampled actions are clipped to the range of the statistics, so they stay around the agent wherever it is.
    """
    spec = make_spec("env=null", "robot.name=agent", "robot.delta.dims=[0,1]")
    bundle = read_bundle(Learner(spec, tmp_path / "run").export(tmp_path / "bundle"))
    assert bundle.robot == spec.robot
    (stats,) = bundle.normalizer.stats["action"]
    low, high = reach(spec)
    np.testing.assert_allclose([stats.min, stats.max], [low, high], rtol=1e-5)
    runner = PolicyRunner(bundle, batch_sizes=(2,))
    state = np.zeros((2, 2, 2), np.float32)
    state[1] = 5000.0
    seen = {**runner.contract.example_observation(2), "observation.state": state}
    moved = runner.act(seen, np.zeros(2), np.zeros(2)).action - state[:, -1:]
    assert (moved > low - 1e-2).all()
    assert (moved < high + 1e-2).all()


def reach(spec):
    """Smallest and largest difference of an action and the state of a window: it has H = 16 from one step before."""
    dataset = spec.data.datasets[0]
    table = load_table(dataset, ["observation.state", "action"])
    table = table.select(list(split_episodes(table.num_episodes, spec.data).train))
    moved = []
    for episode in map(table.episode, range(table.num_episodes)):
        for step, state in enumerate(episode["observation.state"]):
            moved.extend(episode["action"][max(0, step - 1) : step + 15] - state)
    return np.min(moved, axis=0), np.max(moved, axis=0)


def test_an_environments_images_are_seen_in_the_robots_size():
    robot = RobotSpec.model_validate({"name": "arm", "image_size": [4, 4]})
    observation = {"observation.image": Feature((4, 8, 3), "uint8"), "observation.state": Feature((2,), "float32")}
    contract = Contract(observation, Feature((2,), "float32"), 10.0)
    assert RobotTransforms(robot).seen(contract).observation["observation.image"].shape == (4, 4, 3)
    assert RobotTransforms(None).seen(contract) is contract
    window = {"observation.image": np.full((2, 1, 4, 8, 3), 9, np.uint8), "observation.state": np.ones((2, 1, 2))}
    seen = RobotTransforms(robot).encode_observation(window)
    assert seen["observation.image"].shape == (2, 1, 4, 4, 3)
    assert seen["observation.image"][1, 0, :, 0, 0].tolist() == [0, 9, 9, 0]
