"""What datasets and robots call things, brought to the run's names."""

import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, DatasetError
from rlsvc.data.mixture import load_demonstrations
from rlsvc.data.repack import load_features, repack
from rlsvc.spec.data import DatasetSpec, DataSpec
from rlsvc.spec.robot import RobotSpec

HIGH, WRIST, STATE = "observation.images.high", "observation.images.wrist", "observation.state"
ROBOT = RobotSpec.model_validate(
    {
        "name": "arm",
        "keys": {HIGH: "images/high", WRIST: "images/wrist", STATE: ["joints", "hand/grip"], "task": "prompt"},
        "unused": ["images/low"],
        "image_layout": "chw",
        "image_size": [4, 4],
    }
)
CONTRACT = Contract(
    {
        HIGH: Feature((4, 4, 3), "uint8"),
        WRIST: Feature((4, 4, 3), "uint8"),
        STATE: Feature((3,), "float32"),
        "task": Feature((), "str"),
    },
    Feature((2,), "float32"),
    10.0,
)


def sent(**changes):
    """What the robot sends, nested, with a number where the contract has a vector."""
    image = np.arange(96, dtype=np.uint8).reshape(3, 4, 8)
    values = {
        "images": {"high": image, "wrist": image[:, :, :4], "low": image},
        "joints": np.array([1.0, 2.0]),
        "hand": {"grip": 0.5},
        "prompt": "pick up the cup",
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def images(**changes):
    return {key: value for key, value in {**sent()["images"], **changes}.items() if value is not None}


def test_an_observation_comes_under_the_contracts_names_and_fits_it():
    got = repack(sent(), ROBOT, CONTRACT)
    assert list(got) == list(CONTRACT.observation)
    assert got[STATE].tolist() == [1.0, 2.0, 0.5]
    assert got["task"] == "pick up the cup"
    # Channels last: the first pixel has the first number of each of the three planes of 4 x 8 (the wrist: of 4 x 4).
    assert got[WRIST][0, 0].tolist() == [0, 32, 64]
    assert got[HIGH].shape == (4, 4, 3)
    assert not got[HIGH][[0, 3]].any()
    CONTRACT.check_observation(got)


def test_paths_may_be_written_with_slashes():
    flat = {
        "images/high": images()["high"],
        "images/wrist": images()["wrist"],
        "joints": [1, 2],
        "hand/grip": [0.5],
        "prompt": "go",
    }
    assert repack(flat, ROBOT, CONTRACT)[STATE].tolist() == [1.0, 2.0, 0.5]


def test_a_float_image_is_taken_where_the_robot_sends_them():
    robot = ROBOT.replace(image_dtype="float32", image_layout="hwc", image_size=None)
    # All 256 values, each a rounding error below its own: they are rounded, not cut.
    whole = np.resize(np.arange(256, dtype=np.uint8), (16, 16, 3))
    image = np.nextafter(whole / np.float32(255), np.float32(0))
    got = repack(sent(images=dict.fromkeys(("high", "wrist"), image)), robot, CONTRACT)
    assert got[HIGH].dtype == np.uint8
    np.testing.assert_array_equal(got[HIGH], whole)
    with pytest.raises(ContractError, match=r"'images/high': a float32 image with values outside \[0, 1\]"):
        repack(sent(images=dict.fromkeys(("high", "wrist"), image * 2)), robot, CONTRACT)


def test_the_contracts_own_names_are_left_to_the_contract():
    own = CONTRACT.example_observation()
    assert repack(own, ROBOT, CONTRACT) == own
    assert repack({}, ROBOT, CONTRACT) == {}
    same = ROBOT.replace(keys={**ROBOT.keys, STATE: STATE})
    assert repack(own, same, CONTRACT) == own


def test_a_robot_that_sends_no_prompt_may_have_one_of_its_own():
    assert repack(sent(prompt=None), ROBOT.replace(prompt="fold"), CONTRACT)["task"] == "fold"
    assert repack(sent(), ROBOT.replace(prompt="fold"), CONTRACT)["task"] == "pick up the cup"


BAD = {
    "a missing camera": (
        sent(images=images(wrist=None)),
        r"lacks 'images/wrist' \(got 1 of the policy's 2 cameras\); expected: images/high, images/wrist, joints, ",
    ),
    "a camera that nobody knows": (
        sent(images=images(wirst=images()["wrist"])),
        r"robot 'arm' sends no 'images/wirst' \(did you mean 'images/wrist'\?\)",
    ),
    "a missing part of the state": (sent(hand=None), "lacks 'hand/grip'; expected"),
    "a missing prompt": (sent(prompt=None), "'prompt' is missing: the policy needs a prompt"),
    "an empty prompt": (sent(prompt=" "), "'prompt' is empty: the policy needs a prompt"),
    "another layout": (
        sent(images=images(high=np.zeros((4, 8, 3), np.uint8))),
        r"'images/high': got shape \(4, 8, 3\), robot 'arm' sends \(c, h, w\) with 3 channels",
    ),
    "another type": (
        sent(images=images(high=np.zeros((3, 4, 8), np.float32))),
        "'images/high': got float32, robot 'arm' sends uint8",
    ),
    "a text for a vector": (sent(joints="up"), "'joints': got str, expected a vector"),
    "a matrix for a vector": (sent(joints=np.zeros((1, 2))), r"'joints': got shape \(1, 2\), expected a vector"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_observation_that_does_not_fit_is_refused_by_the_robots_own_names(case):
    observation, text = BAD[case]
    with pytest.raises(ContractError, match=text):
        repack(observation, ROBOT, CONTRACT)


def test_a_camera_that_the_policy_does_not_see_is_refused():
    one = Contract({k: v for k, v in CONTRACT.observation.items() if k != WRIST}, CONTRACT.action, 10.0)
    with pytest.raises(
        ContractError, match=r"'images/wrist' is 'observation.images.wrist', which the policy does not see"
    ):
        repack(sent(), ROBOT, one)
    assert HIGH in repack(sent(images=images(wrist=None)), ROBOT, one)


def test_a_policy_of_several_observation_steps_is_asked_for_in_windows():
    two = Contract(CONTRACT.observation, CONTRACT.action, 10.0, n_obs_steps=2)
    with pytest.raises(ContractError, match="sends one observation, the policy sees 2 in a row"):
        repack(sent(), ROBOT, two)


@pytest.fixture
def dataset(tmp_path):
    """Six steps of two episodes, with names of its own."""
    rng = np.random.default_rng(0)
    arrays = {
        "joint_position": rng.uniform(0, 1, (6, 2)).astype(np.float32),
        "gripper_position": rng.uniform(0, 1, (6, 1)).astype(np.float32),
        "observation.images.exterior": np.full((6, 4, 8, 3), 200, np.uint8),
        "action": np.arange(12, dtype=np.float32).reshape(6, 2),
    }
    np.savez(tmp_path / "droid.npz", **arrays, episode_ends=np.array([3, 6]), fps=10.0)
    keys = {STATE: ["joint_position", "gripper_position"], HIGH: "observation.images.exterior", "velocity": "action"}
    return {"path": str(tmp_path / "droid.npz"), "keys": keys}, arrays


def test_a_dataset_is_read_under_the_runs_names(dataset):
    spec, arrays = dataset
    table = load_features(DatasetSpec.model_validate(spec), [STATE, HIGH, "velocity"])
    assert list(table.columns) == [STATE, HIGH, "velocity"]
    np.testing.assert_array_equal(table.columns[STATE][:, :2], arrays["joint_position"])
    np.testing.assert_array_equal(table.columns[STATE][:, 2:], arrays["gripper_position"])
    assert table.columns[HIGH].shape == (6, 4, 8, 3)
    assert load_features(DatasetSpec.model_validate(spec), [STATE, HIGH, "velocity"]).columns[HIGH].shape == (
        6,
        4,
        8,
        3,
    )


def test_a_name_that_is_no_feature_of_the_run_is_refused(dataset):
    spec, _ = dataset
    with pytest.raises(DatasetError, match="`keys` names 'velocity', which is no feature of the run"):
        load_features(DatasetSpec.model_validate(spec), [STATE, HIGH])


def test_only_vectors_of_floats_are_joined(dataset):
    spec, _ = dataset
    keys = {STATE: ["joint_position", "observation.images.exterior"]}
    with pytest.raises(
        DatasetError, match=r"'observation.images.exterior' is uint8 \(4, 8, 3\); 'observation.state' joins vectors"
    ):
        load_features(DatasetSpec.model_validate({**spec, "keys": keys}), [STATE])


def test_demonstrations_hold_what_the_robot_makes_of_them_under_a_contract_in_its_own_terms(dataset):
    """The first action dimension is turned and relative to the first of the state; statistics are those."""
    spec, arrays = dataset
    robot = RobotSpec.model_validate(
        {
            "name": "arm", "rate_hz": 10, "image_size": [4, 4], "delta": {"dims": [0]},
            "maps": {"action": [{"dims": [0], "by": [{"name": "affine", "scale": -1}]}]},
        }
    )  # fmt: skip
    data = DataSpec.model_validate(
        {"datasets": [spec], "observation": [STATE, HIGH], "action": "velocity", "validation_fraction": 0}
    )
    made = load_demonstrations(data, n_obs_steps=1, horizon=1, action_horizon=1, robot=robot)
    assert made.contract.observation[HIGH].shape == (4, 4, 3)
    assert made.train.columns[HIGH][5, :, 0, 0].tolist() == [0, 200, 200, 0]
    action = made.train.gather(np.arange(6))["action"][:, 0]
    np.testing.assert_allclose(action[:, 0], -arrays["action"][:, 0] - arrays["joint_position"][:, 0])
    np.testing.assert_array_equal(action[:, 1], arrays["action"][:, 1])
    stats = made.normalizer.stats["action"][0]
    assert stats.max is not None
    np.testing.assert_allclose(stats.max, action.max(0))
    with pytest.raises(ContractError, match="robot 'arm': its runtime acts at 20 Hz, the data has 10 Hz"):
        load_demonstrations(data, n_obs_steps=1, horizon=1, action_horizon=1, robot=robot.replace(rate_hz=20))
