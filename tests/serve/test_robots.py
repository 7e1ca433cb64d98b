"""A served pi0 policy answers openpi's own client with the example observations of ALOHA, DROID and LIBERO.

The weights are all zero, so that the velocity is 0 and the policy returns the noise that it began with: what the client
gets is then known, in the robot's own numbers.
"""

import contextlib
import warnings

import jax
import numpy as np
import pytest
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
from serving_fakes import serving

from rlsvc.client import PolicyClient
from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.params import flatten_params
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.runner import PolicyRunner
from rlsvc.spec.compose import compose
from rlsvc.spec.pi0 import Pi0Spec
from rlsvc.store.bundle import read_bundle, write_bundle

WIDTHS = {"aloha": (14, 14), "droid": (8, 8), "libero": (8, 7)}
"""Numbers of the state and of the action."""
RNG = np.random.default_rng(0)


def photo(*shape):
    return RNG.integers(0, 256, shape).astype(np.uint8)


# As openpi's examples/simple_client/main.py sends them.
EXAMPLES = {
    "aloha": {
        "state": np.ones(14),
        "images": {name: photo(3, 224, 224) for name in ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")},
        "prompt": "do something",
    },
    "droid": {
        "observation/exterior_image_1_left": photo(224, 224, 3),
        "observation/wrist_image_left": photo(224, 224, 3),
        "observation/joint_position": RNG.random(7),
        "observation/gripper_position": RNG.random(1),
        "prompt": "do something",
    },
    "libero": {
        "observation/state": RNG.random(8),
        "observation/image": photo(224, 224, 3),
        "observation/wrist_image": photo(224, 224, 3),
        "prompt": "do something",
    },
}


def robot_of(name):
    robot = compose(["experiment=pi05_debug", f"robot={name}", "policy.horizon=50", "policy.n_action_steps=50"]).robot
    assert robot is not None
    return robot


def bundle_of(folder, name):
    """A pi0 of a few thousand zeros for this robot."""
    robot, (state, action) = robot_of(name), WIDTHS[name]
    spec = Pi0Spec.model_validate(
        {
            "tokenizer": {"name": "byte"}, "vision": "dummy", "image_size": [28, 28], "sample_steps": 1, "remat": False,
            "backbone": {"width": 8, "depth": 1, "mlp_dim": 8, "heads": 1, "head_dim": 8},
            "expert": {"width": 8, "depth": 1, "mlp_dim": 8, "heads": 1, "head_dim": 8},
            "horizon": robot.horizon, "n_action_steps": robot.horizon,
        }
    )  # fmt: skip
    observation = {
        key: Feature((state,), "float32")
        if key == "observation.state"
        else Feature((), TEXT)
        if key == "task"
        else Feature((224, 224, 3), "uint8")
        for key in robot.keys
    }
    contract = Contract(observation, Feature((action,), "float32"), robot.rate_hz or 10.0, 1, robot.horizon)
    params = jax.eval_shape(Pi0Policy(spec, contract).init, jax.random.key(0))
    return write_bundle(
        folder / name,
        policy=spec.model_dump(mode="json"),
        contract=contract,
        normalizer=Normalizer.identity({**observation, "action": contract.action}),
        params=flatten_params(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)),
        robot=robot,
    )


@pytest.fixture(scope="module", params=list(WIDTHS))
def served(request, tmp_path_factory):
    """The robot's name and an address at which its policy is served."""
    runner = PolicyRunner(read_bundle(bundle_of(tmp_path_factory.mktemp("bundles"), request.param)), device="cpu")
    runner.warm_up()
    with serving(runner) as address:
        yield request.param, address


@contextlib.contextmanager
def connected(address):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # openpi's client calls websockets the old way
        client = WebsocketClientPolicy(*address.split(":"))
    try:
        yield client
    finally:
        client._ws.close()


def noise(step, horizon, width):
    """What the policy began with at this step, for seed 0."""
    key = jax.random.fold_in(jax.random.key(0), step)
    return np.asarray(jax.random.normal(key, (horizon, 32)))[:, :width]


def expected(name, step):
    """[H, A] in the robot's numbers.

    ALOHA: a joint moves by the noise from where it is (1 rad), backwards where it is turned; half of a gripper's range
    is 2.1123 / 2 rad above the shut one, which is -0.6213 - 0.5476.
    """
    drawn = noise(step, robot_of(name).horizon, WIDTHS[name][1])
    if name != "aloha":
        return drawn
    out = 1 + drawn * np.array([1, -1, -1, 1, 1, 1, 0, 1, -1, -1, 1, 1, 1, 0])
    out[:, [6, 13]] = (drawn[:, [6, 13]] + 0.6213 + 0.5476) / 2.1123
    return out


def test_the_example_of_each_robot_is_answered_with_its_actions(served):
    name, address = served
    with connected(address) as client:
        for step in range(2):
            actions = client.infer(EXAMPLES[name])["actions"]
            assert actions.shape == (robot_of(name).horizon, WIDTHS[name][1])
            np.testing.assert_allclose(actions, expected(name, step), atol=1e-4)


def test_a_runtime_executes_the_first_actions_of_each_chunk_as_it_is_published(served):
    name, address = served
    robot = robot_of(name)
    with connected(address) as client:
        broker = ActionChunkBroker(client, action_horizon=robot.execute)
        actions = [broker.infer(EXAMPLES[name])["actions"] for _ in range(robot.execute + 1)]
    np.testing.assert_allclose(actions[:-1], expected(name, 0)[: robot.execute], atol=1e-4)
    np.testing.assert_allclose(actions[-1], expected(name, 1)[0], atol=1e-4)


def test_the_runtime_is_told_what_it_looks_for_when_it_connects(served):
    name, address = served
    with connected(address) as client:
        told = client.get_server_metadata()
    assert told.get("reset_pose") == ([0, -1.5, 1.5, 0, 0, 0] if name == "aloha" else None)
    with PolicyClient(address) as client:
        assert client.execute == robot_of(name).execute
        reply = client.act(client.contract.example_observation())
    assert reply.action.shape == (robot_of(name).horizon, WIDTHS[name][1])


def without(name, *path):
    example = {key: dict(value) if isinstance(value, dict) else value for key, value in EXAMPLES[name].items()}
    inner = example
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return example


def faults(name):
    """Observations that do not fit, and what is said of them."""
    prompt = (without(name, "prompt"), "observation 'prompt' is missing: the policy needs a prompt")
    camera = {
        "aloha": (
            (*("images", "cam_left_wrist"),),
            r"lacks 'images/cam_left_wrist' \(got 2 of the policy's 3 cameras\)",
        ),
        "droid": (("observation/wrist_image_left",), r"lacks 'observation/wrist_image_left' \(got 1 of the policy's 2"),
        "libero": (("observation/image",), r"lacks 'observation/image' \(got 1 of the policy's 2 cameras\)"),
    }
    path, text = camera[name]
    yield without(name, *path), text
    yield prompt
    more = {**EXAMPLES[name], "observation/exterior_image_2_left": photo(224, 224, 3)}
    yield more, f"robot '{name}' sends no 'observation/exterior_image_2_left'"
    wide = {"aloha": "state", "droid": "observation/joint_position", "libero": "observation/state"}[name]
    yield {**EXAMPLES[name], wide: np.ones(20)}, r"'observation.state': got shape \(2\d,\), expected \(1, (14|8)\)"


def test_an_observation_that_does_not_fit_is_refused_by_name_and_the_connection_stays(served):
    name, address = served
    with connected(address) as client:
        for observation, text in faults(name):
            with pytest.raises(RuntimeError, match=text):
                client.infer(observation)
        assert "actions" in client.infer(EXAMPLES[name])
