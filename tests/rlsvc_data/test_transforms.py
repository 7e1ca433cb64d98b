"""Maps of single dimensions and relative actions, against numbers worked out by hand, and there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpi_client import image_tools

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.images import resize_with_pad
from rlsvc.data.mixture import relative_stats
from rlsvc.data.normalize import Normalizer
from rlsvc.data.transforms import MAPS, RobotTransforms, absolute, relative
from rlsvc.data.windows import Windows
from rlsvc.spec.compose import compose
from rlsvc.spec.robot import AffineSpec, DeltaSpec, RangeSpec, RobotSpec, SliderCrankSpec

STATE = "observation.state"
FLIPPED, GRIPPERS = [1, 2, 8, 9], [6, 13]


@pytest.fixture(scope="module")
def aloha() -> RobotSpec:
    robot = compose(["experiment=pi05_debug", "robot=aloha", "policy.horizon=50", "policy.n_action_steps=50"]).robot
    assert robot is not None
    return robot


def test_the_joints_of_aloha_are_turned_as_the_published_weights_know_them(aloha):
    joints = np.arange(1, 15, dtype=np.float32)
    for name in (STATE, "action"):
        encoded = RobotTransforms(aloha).encode(name, joints)
        assert encoded[[0, 3, 4, 5, 7, 10, 11, 12]].tolist() == [1, 4, 5, 6, 8, 11, 12, 13]
        assert encoded[FLIPPED].tolist() == [-2, -3, -9, -10]


def test_a_gripper_of_aloha_becomes_the_angle_of_its_motor(aloha):
    """Open is 58 mm = crank + rod, so a right angle: (pi/2 - 0.5476) / (1.6296 - 0.5476). Shut is 18.44 mm, and
    asin((22^2 + 18.44^2 - 36^2) / (2 * 22 * 18.44)) = asin(-0.581698) = -0.620815."""
    state = np.zeros((2, 14), np.float32)
    state[1, GRIPPERS] = 1
    encoded = RobotTransforms(aloha).encode(STATE, state)[:, GRIPPERS]
    np.testing.assert_allclose(encoded, [[-1.079866] * 2, [0.945653] * 2], atol=1e-6)


def test_a_grippers_target_of_aloha_is_an_angle_above_the_shut_one(aloha):
    """Half open: 0.5 * (1.4910 + 0.6213) - 0.6213 - 0.5476."""
    action = np.full((3, 14), 0.5, np.float32)
    np.testing.assert_allclose(RobotTransforms(aloha).encode("action", action)[:, GRIPPERS], -0.11275, atol=1e-6)


def test_a_way_beyond_the_linkages_reach_counts_as_its_end():
    crank = SliderCrankSpec(crank=0.022, rod=0.036)
    angle = MAPS["slider_crank"][0](crank, np.array([0.06, 0.01, 0.0]))
    np.testing.assert_allclose(angle, [np.pi / 2, -np.pi / 2, -np.pi / 2])


FINITE = st.floats(-10, 10, allow_nan=False)
LINES = st.one_of(
    st.builds(AffineSpec, scale=st.one_of(st.floats(0.1, 10), st.floats(-10, -0.1)), offset=FINITE),
    st.builds(
        lambda a, b, wide, tall: RangeSpec(of=(a, a + wide), to=(b, b - tall)),
        FINITE, FINITE, st.floats(0.1, 5), st.floats(0.1, 5),
    ),
)  # fmt: skip


@given(st.lists(LINES, min_size=1, max_size=3), st.lists(FINITE, min_size=3, max_size=3))
def test_what_lines_do_is_undone(lines, values):
    robot = RobotSpec.model_validate(
        {"name": "arm", "maps": {"action": [{"dims": [0, 2], "by": [line.model_dump() for line in lines]}]}}
    )
    transforms, x = RobotTransforms(robot), np.asarray(values, np.float32)
    encoded = transforms.encode("action", x)
    np.testing.assert_allclose(transforms.decode("action", encoded), x, rtol=1e-3, atol=1e-2)
    assert encoded[1] == x[1]


@given(st.floats(0.01, 0.05), st.floats(1.05, 3), st.floats(0.0, 1.0))
def test_what_a_slider_crank_does_is_undone(crank, ratio, share):
    linkage = SliderCrankSpec(crank=crank, rod=crank * ratio)
    forward, back = MAPS["slider_crank"]
    way = np.asarray(linkage.rod - crank + share * 2 * crank)
    np.testing.assert_allclose(back(linkage, forward(linkage, way)), way, atol=1e-8)
    angle = np.asarray((share - 0.5) * np.pi)
    np.testing.assert_allclose(forward(linkage, back(linkage, angle)), angle, atol=1e-5)


def test_without_a_robot_nothing_changes():
    x = np.ones(3, np.float32)
    assert RobotTransforms(None).encode(STATE, x) is x
    assert RobotTransforms(None).to_robot(x, {}) is x


@pytest.mark.parametrize("xp", [np, jnp])
def test_an_action_is_relative_to_the_newest_state_of_its_window(xp):
    """T = 2 observations, H = 3 actions of 3 dimensions; the second stays absolute, and the state has one more."""
    state = xp.asarray([[[9.0, 9, 9, 9], [1, 2, 3, 4]]], xp.float32)
    action = xp.asarray([[[1.0, 1, 1], [2, 2, 2], [3, 3, 3]]], xp.float32)
    delta = DeltaSpec(dims=(0, 2))
    moved = relative(action, {STATE: state}, delta)
    np.testing.assert_array_equal(np.asarray(moved), [[[0, 1, -2], [1, 2, -1], [2, 3, 0]]])
    np.testing.assert_array_equal(np.asarray(absolute(moved, {STATE: state}, delta)), np.asarray(action))


def windows(delta: DeltaSpec | None = DeltaSpec(dims=(0,))) -> Windows:  # noqa: B008 - frozen
    """One episode of three steps, H = 2: state 0, 1, 3, and action 1, 3, 4 beside one that stays absolute."""
    columns = {
        STATE: np.array([[0, 0], [1, 0], [3, 0]], np.float32),
        "observation.image": np.zeros((3, 2, 2, 3), np.uint8),
        "action": np.array([[1, 10], [3, 30], [4, 40]], np.float32),
    }
    table = EpisodeTable(columns, np.array([3]), 10.0, np.zeros(3, np.int32), [""])
    return Windows.build(
        [table], weights=[1.0], groups=[0], observation=(STATE, "observation.image"), action="action",
        n_obs_steps=1, horizon=2, delta=delta,
    )  # fmt: skip


RELATIVE = [[[1, 10], [3, 30]], [[2, 30], [3, 40]], [[1, 40], [1, 40]]]


def test_windows_give_relative_actions_on_the_host_and_on_the_device():
    on_host, index = windows(), np.arange(3)
    batch = on_host.gather(index)
    assert batch["action"].tolist() == RELATIVE
    assert batch["observation"][STATE][:, 0, 0].tolist() == [0, 1, 3]
    on_device = jax.tree.map(jnp.asarray, on_host)
    assert jax.jit(lambda data: data.gather(index))(on_device)["action"].tolist() == RELATIVE
    assert windows(None).gather(index)["action"][1].tolist() == [[3, 30], [4, 40]]


def test_statistics_are_those_of_the_relative_actions_that_are_not_padded():
    """1, 3, 2, 3, 1: the last window's second action is padding."""
    (stats,) = relative_stats(windows(), 1)
    assert stats.count == 5
    np.testing.assert_allclose(stats.mean, [2.0, 30.0])
    np.testing.assert_allclose(stats.std, [np.sqrt(0.8), np.sqrt(120.0)])
    assert stats.min is not None
    assert stats.max is not None
    assert (stats.min.tolist(), stats.max.tolist()) == ([1, 10], [3, 40])


def test_acting_gives_back_the_actions_that_training_made_targets_of(aloha):
    """A policy that returns its targets moves the robot as it was shown: maps, delta and normaliser undo each other."""
    rng = np.random.default_rng(0)
    raw = {STATE: rng.uniform(0.1, 0.9, (40, 14)), "action": rng.uniform(0.1, 0.9, (40, 14))}
    raw = {key: x.astype(np.float32) for key, x in raw.items()}
    transforms = RobotTransforms(aloha)
    table = EpisodeTable(
        {key: transforms.encode(key, x) for key, x in raw.items()}, np.array([40]), 50.0, np.zeros(40, np.int32), [""]
    )
    data = Windows.build(
        [table], weights=[1.0], groups=[0], observation=(STATE,), action="action", n_obs_steps=1, horizon=5,
        delta=aloha.delta,
    )  # fmt: skip
    features = {key: Feature((14,), "float32") for key in raw}
    normalizer = Normalizer.fit({"all": table.columns}, features, {}).with_stats("action", relative_stats(data, 1))
    batch = data.gather(np.arange(30))
    target = normalizer.normalize("action", batch["action"])
    assert np.abs(target).max() <= 1 + 1e-5
    seen = transforms.encode_observation({STATE: raw[STATE][:30, None]})
    action = transforms.to_robot(normalizer.unnormalize("action", target), seen)
    np.testing.assert_allclose(action, np.stack([raw["action"][t : t + 5] for t in range(30)]), atol=1e-5)


TURN = [{"name": "affine", "scale": -1}]
CONTRACT = Contract({STATE: Feature((4,), "float32"), "task": Feature((), "str")}, Feature((3,), "float32"), 10.0)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"maps": {"observation.stat": [{"dims": [0], "by": TURN}]}}, "did you mean 'observation.state'"),
        ({"maps": {"task": [{"dims": [0], "by": TURN}]}}, r"'task' is str \(\), expected a vector"),
        ({"maps": {"action": [{"dims": [3], "by": TURN}]}}, "'action' has no dimension 3, it has 0 to 2"),
        ({"delta": {"dims": [3]}}, "delta: 'action' has no dimension 3"),
        ({"delta": {"dims": [0], "of": "observation.pose"}}, "delta: there is no 'observation.pose'"),
        ({"keys": {STATE: "state"}}, "robot 'arm': its runtime does not send 'task'; leave it out of data.observation"),
        ({"rate_hz": 20}, "acts at 20 Hz, the data has 10 Hz"),
    ],
)  # fmt: skip
def test_a_robot_that_does_not_fit_the_data_is_refused_by_name(fields, text):
    robot = RobotSpec.model_validate({"name": "arm", **fields})
    with pytest.raises(ContractError, match=text):
        RobotTransforms(robot).check(CONTRACT)


def test_an_image_is_resized_into_the_middle_of_black_bars():
    image = np.full((4, 8, 3), 200, np.uint8)
    out = resize_with_pad(image, (4, 4))
    assert out[:, :, 0].tolist() == [[0] * 4, [200] * 4, [200] * 4, [0] * 4]
    assert resize_with_pad(image, (4, 8)) is image


@pytest.mark.parametrize(("shape", "size"), [((48, 64), (22, 22)), ((30, 17), (22, 22)), ((5, 9), (20, 31))])
def test_an_image_is_resized_to_the_pixels_that_openpis_clients_send(shape, size):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    np.testing.assert_array_equal(resize_with_pad(image, size), image_tools.resize_with_pad(image, *size))
