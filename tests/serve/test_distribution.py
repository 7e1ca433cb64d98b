"""The alarm when what is served is not what was trained on."""

import jax
import numpy as np
import pytest
from serving_fakes import CONTRACT, FakeRunner, observation, service_of
from starlette.testclient import TestClient

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.wire import pack, unpack
from rlsvc.data.normalize import Normalizer, Stats, compute_stats
from rlsvc.nn.params import flatten_params
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.runner import PolicyRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.distribution import Distribution, Watched, bounds
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.robot import RobotSpec
from rlsvc.store.bundle import read_bundle, write_bundle

JOINTS = ("shoulder", "elbow", "wrist")
ARM = Contract({"joints": Feature((3,), "float32", "rad", JOINTS)}, Feature((3,), "float32", "rad"), 10.0, 1, 3)
SPEC = DiffusionSpec.model_validate(
    {"n_obs_steps": 1, "horizon": 4, "n_action_steps": 3, "train_steps": 10, "sample_steps": 1,
     "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8}}
)  # fmt: skip


def poses(seed, count, low=-1.5, high=1.5):
    """[count, 3] rad: what the arm does in training."""
    return np.random.default_rng(seed).uniform(low, high, (count, 3)).astype(np.float32)


def arm_bundle(folder, **changes):
    columns = {"joints": poses(0, 400), "action": poses(1, 400)}
    fields = {
        "policy": SPEC.model_dump(mode="json"),
        "contract": ARM,
        "normalizer": Normalizer.fit({"arm": columns}, {**ARM.observation, "action": ARM.action}, {}),
        "params": flatten_params(jax.jit(DiffusionPolicy(SPEC, ARM).init)(jax.random.key(0))),
    }
    return read_bundle(write_bundle(folder, **{**fields, **changes}))


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """A trained policy's bundle, made ready to act."""
    return PolicyRunner(arm_bundle(tmp_path_factory.mktemp("bundles") / "arm"), device="cpu")


@pytest.fixture
def events(lines):
    """What was logged so far but for start and stop."""
    return lambda: [line for line in lines() if line["event"] not in ("started", "stopped")]


def ask(client, rows):
    for row in rows:
        body = pack({"observation": {"joints": row[None]}})
        answer = client.post("/v1/policies/fake/act", content=body, headers={"content-type": "application/msgpack"})
        assert answer.status_code == 200, unpack(answer.content)


def told(client):
    return client.get("/v1/policies/fake").json()["distribution"]


def test_a_bundles_policy_gives_no_alarm_on_its_training_distribution_and_one_on_degrees(arm, events):
    with service_of(arm) as service, TestClient(build_app(service)) as client:
        ask(client, poses(2, 60))
        assert told(client) == {
            "alarm": False,
            "features": {"joints": {"outside_share": 0.0, "dimension": None, "alarm": False}},
            "left_out": [],
        }
        assert events() == []
        ask(client, np.rad2deg(poses(3, 30)))
        feature = told(client)["features"]["joints"]
        assert feature["alarm"]
        assert feature["outside_share"] > 0.3
        lines = client.get("/metrics").text.splitlines()
        assert 'rlsvc_observation_out_of_distribution{feature="joints",policy="fake",replica="local"} 1.0' in lines
        assert 'rlsvc_observation_values_total{feature="joints",policy="fake",replica="local"} 270.0' in lines
        outside = next(line for line in lines if line.startswith("rlsvc_observation_values_outside_total"))
        assert 80 <= float(outside.split()[1]) <= 90
        ask(client, poses(4, 120))
        assert not told(client)["alarm"]
        assert 'rlsvc_observation_out_of_distribution{feature="joints",policy="fake",replica="local"} 0.0' in (
            client.get("/metrics").text
        )
    on, off = events()
    assert (on["event"], on["level"], on["feature"], on["alarm"]) == ("out_of_distribution", "warning", "joints", True)
    assert (off["event"], off["level"], off["alarm"]) == ("back_in_distribution", "info", False)
    assert on["policy"] == "fake"
    assert on["request_id"]


def test_one_joint_that_is_wrong_is_named(arm):
    distribution = Distribution.of(arm)
    rows = poses(5, 30)
    rows[:, 1] = np.rad2deg(rows[:, 1])
    changed = [distribution.observe({"joints": row[None]}) for row in rows]
    assert sum(map(len, changed)) == 1
    assert distribution.to_json()["features"]["joints"]["dimension"] == "elbow"


def test_a_moment_outside_is_no_alarm_and_a_dozen_requests_are(arm):
    distribution = Distribution.of(arm)
    for _ in range(11):
        assert distribution.observe({"joints": np.full((1, 3), 9.0)}) == []
    assert distribution.observe({"joints": np.full((1, 3), 9.0)}) == ["joints"]


def test_between_the_two_thresholds_the_alarm_stays_as_it_is():
    watched = Watched(np.zeros(1), np.ones(1), ("x",))
    outside, inside = np.full((1, 1), 2.0), np.full((1, 1), 0.5)
    changes = [watched.observe(outside if i % 7 == 0 else inside) for i in range(500)]  # 14 % outside
    assert not any(changes)
    while not watched.alarm:
        watched.observe(outside)
    assert not any(watched.observe(outside if i % 7 == 0 else inside) for i in range(500))
    assert watched.alarm


def test_a_robots_numbers_are_compared_as_the_policy_has_them(tmp_path):
    """The robot sends degrees, its map makes radians of them, and the statistics are of radians."""
    radians = {"dims": [0, 1, 2], "by": [{"name": "affine", "scale": float(np.pi / 180)}]}
    spec = {"name": "arm", "keys": {"joints": ["joints"]}, "maps": {"joints": [radians]}}
    bundle = arm_bundle(tmp_path / "mapped", robot=RobotSpec.model_validate(spec))
    distribution = Distribution.of(PolicyRunner(bundle, device="cpu"))
    for row in np.rad2deg(poses(6, 60)):
        distribution.observe({"joints": row[None]})
    assert distribution.to_json()["features"]["joints"]["outside_share"] == 0


class FakeTrained(FakeRunner):
    def training_statistics(self):
        return {"observation.state": compute_stats(poses(0, 100))}

    def encode(self, name, x):
        return x


def test_images_and_texts_are_left_out_and_it_is_said(events):
    with service_of(FakeTrained()) as service, TestClient(build_app(service)) as client:
        body = pack({"observation": observation(1.0)})
        client.post("/v1/policies/fake/act", content=body, headers={"content-type": "application/msgpack"})
        assert told(client)["left_out"] == ["observation.image", "task"]
        assert client.get("/v1/policies").json()["policies"][0]["distribution"] == told(client)


def test_a_policy_that_was_not_fitted_to_data_is_not_judged(tmp_path, arm):
    assert Distribution.of(FakeRunner(CONTRACT)) is None
    features = {**ARM.observation, "action": ARM.action}
    for number, normalizer in enumerate((Normalizer.identity(features), Normalizer.from_contract(ARM))):
        runner = PolicyRunner(arm_bundle(tmp_path / str(number), normalizer=normalizer), device="cpu")
        assert Distribution.of(runner) is None
    with service_of(FakeRunner(CONTRACT)) as service, TestClient(build_app(service)) as client:
        assert told(client) is None
        assert "rlsvc_observation" not in client.get("/metrics").text


def test_statistics_without_a_range_bound_by_standard_deviations(tmp_path):
    mean, std = np.array([1.0, 0.0, 0.0]), np.array([2.0, 0.1, 0.0])
    stats = Stats(mean, std, None, None, mean - std, mean + std, 0)
    low, high = bounds(stats)
    np.testing.assert_allclose(low, [-9.0, -0.5, -0.1])
    np.testing.assert_allclose(high, [11.0, 0.5, 0.1])
    for mode, known in (("mean_std", {"joints"}), ("identity", set())):
        both = {"joints": (stats,), "action": (stats,)}
        normalizer = Normalizer(("arm",), dict.fromkeys(both, mode), both)
        runner = PolicyRunner(arm_bundle(tmp_path / mode, normalizer=normalizer), device="cpu")
        assert set(runner.training_statistics()) == known


def test_a_range_is_widened_by_a_tenth_and_a_constant_counts_as_one_unit_wide():
    low, high = bounds(compute_stats(np.array([[0.0, 5.0], [10.0, 5.0]])))
    np.testing.assert_allclose(low, [-1.0, 4.9])
    np.testing.assert_allclose(high, [11.0, 5.1])
