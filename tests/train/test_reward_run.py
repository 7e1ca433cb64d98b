"""A reward classifier: its run, its calibration in the bundle, and rollouts that are rewarded by it."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, SpecError
from rlsvc.core.types import REWARD_SOURCE, REWARD_SOURCES
from rlsvc.data.normalize import Normalizer
from rlsvc.envs.make import make_env
from rlsvc.nn.params import flatten_params
from rlsvc.policies import make_classifier, make_policy
from rlsvc.spec.compose import compose
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.reward_classifier import RewardClassifierSpec, RewardSourceSpec
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.train.calibration import CALIBRATION, Calibration, to_bytes
from rlsvc.train.reward import ClassifierReward, RewardRunner
from rlsvc.train.rollout_worker import Acting, RolloutWorker
from rlsvc.train.run import train

GOALS = GymnasiumSpec(id="rlsvc/TwoGoals-v0", import_module="rlsvc.envs.two_goals", kwargs={"size": 40}, max_steps=12)
STILL = np.zeros(2, np.float32)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a classifier that has learned nothing: it gives both classes one half; its threshold is 0.4."""
    contract = make_env(GOALS).contract()
    seen = Contract({"observation.image": contract.observation["observation.image"]}, contract.action, 10.0, 1, 0)
    fields = {"vision": {"crop": None, "width": 8, "keypoints": 8}, "hidden": [16]}
    spec = RewardClassifierSpec.model_validate(fields).model_dump(mode="json")
    found = Calibration(1.0, 0.4, 1.0, 0.5, 1.0, 1.0, 3, 3, 0.1, 0.2)
    return write_bundle(
        tmp_path_factory.mktemp("untrained") / "bundle",
        policy=spec,
        contract=seen,
        normalizer=Normalizer.identity({**seen.observation, "action": seen.action}),
        params=flatten_params(make_classifier(spec, seen).init(jax.random.key(0))),
        files={CALIBRATION: to_bytes(found)},
    )


@pytest.mark.parametrize(("threshold", "done"), [(None, True), (0.6, False)])
def test_a_step_is_rewarded_and_ends_the_episode_where_the_probability_reaches_the_threshold(
    untrained, threshold, done
):
    source = RewardSourceSpec(classifier="x", threshold=threshold)
    env = ClassifierReward(make_env(GOALS), source, RewardRunner(untrained, device="cpu"))
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(STILL)
    assert (reward, terminated, truncated, info["is_success"]) == (float(done), done, False, done)
    assert info["success_probability"] == pytest.approx(0.5)
    assert REWARD_SOURCES[info[REWARD_SOURCE]] == "classifier"


def test_so_many_observations_in_a_row_have_to_say_so(untrained):
    source = RewardSourceSpec(classifier="x", consecutive=2)
    env = ClassifierReward(make_env(GOALS), source, RewardRunner(untrained, device="cpu"))
    for seed in range(2):
        env.reset(seed=seed)
        assert [env.step(STILL)[2] for _ in range(2)] == [False, True]


def test_a_rollout_worker_s_rewards_and_successes_are_the_classifier_s(untrained):
    reward = RewardSourceSpec(classifier=str(untrained), consecutive=3)
    acting = Acting({}, make_env(GOALS).contract(), Normalizer.identity({}), "fp32", reward=reward)
    chunk = RolloutWorker(GOALS, acting, worker=0, num_envs=2, seed=0).collect(9, "random")
    assert chunk.ended["length"].tolist() == [3] * 6
    assert chunk.ended["success"].all()
    real = ~chunk.columns["is_last"]
    assert chunk.columns["reward"][real].tolist() == [0, 0, 1] * 6
    assert set(chunk.columns[REWARD_SOURCE][real].tolist()) == {REWARD_SOURCES.index("classifier")}


def test_what_does_not_fit_is_refused_by_name(untrained, tmp_path):
    runner = RewardRunner(untrained, device="cpu")
    other = Contract({"observation.image": Feature((48, 48, 3), "uint8")}, Feature((2,), "float32"), 10.0)
    with pytest.raises(ContractError, match=r"'observation\.image' is uint8 \(48, 48, 3\) in the environment"):
        runner.check(other)
    with pytest.raises(ContractError, match=r"the classifier sees 'observation\.image', the environment gives: x"):
        runner.check(Contract({"x": Feature((1,), "float32")}, Feature((2,), "float32"), 10.0))
    made = read_bundle(untrained)
    with pytest.raises(ContractError, match=r"'reward_classifier' says what is rewarded and does not act"):
        make_policy(made.policy, made.contract)
    bare = write_bundle(
        tmp_path / "bare", policy=made.policy, contract=made.contract, normalizer=made.normalizer, params=made.params
    )
    with pytest.raises(BundleError, match=r"it has no calibration\.json"):
        RewardRunner(bare)
    with pytest.raises(SpecError, match=r"data\.validation_fraction: a reward classifier is calibrated"):
        compose(["experiment=reward_classifier", "data.validation_fraction=0"])


@pytest.mark.slow
def test_a_run_learns_and_its_bundle_says_how_far_it_is_to_be_trusted(tmp_path):
    """From images and a state that gives it away: what is tested is the way from labels to a calibrated bundle."""
    rng = np.random.default_rng(0)
    side = np.tile([0, 1], 60)
    np.savez(
        tmp_path / "sides.npz",
        **{
            "observation.image": rng.integers(0, 256, (120, 40, 40, 3), np.uint8),
            "observation.state": (2 * side - 1 + rng.normal(0, 0.1, 120)).astype(np.float32)[:, None],
            "action": np.zeros((120, 2), np.float32),
            "side": side,
        },
        episode_ends=np.arange(6, 121, 6),
        fps=np.asarray(10.0),
    )
    words = [
        "experiment=reward_classifier", f"root={tmp_path}", f"data.datasets=[{{path: {tmp_path / 'sides.npz'}}}]",
        "data.observation=[observation.image, observation.state]", "algo.label=side", "algo.learning_rate=1e-2",
        "policy.vision={crop: null, width: 8, keypoints: 4}", "policy.hidden=[16]", "algo.batch_size=16",
        "algo.ema=null", "algo.schedule.warmup_steps=5", "algo.threshold=0.8", "total_steps=40", "log_interval=20",
        "learner.updates_per_call=5", "checkpoint.interval=40", "tracking.trackers=[]",
    ]  # fmt: skip
    result = train(compose(words), local=True)
    assert result.metrics["validation/accuracy"] > 0.9
    runner = RewardRunner(result.bundle, device="cpu")
    found = runner.calibration
    assert (found.threshold, found.episodes) == (0.8, 4)
    assert found.precision == result.metrics["validation/calibration_precision"]
    assert found.precision_low <= found.precision <= found.precision_high
    assert found.loss <= found.loss_before + 1e-6
    seen = {"observation.image": np.zeros((2, 40, 40, 3), np.uint8), "observation.state": np.float32([[-1], [1]])}
    assert (runner.probabilities(seen)[:, 1] > 0.5).tolist() == [False, True]
    np.testing.assert_allclose(runner.progress(seen), runner.probabilities(seen)[:, 1], rtol=1e-6)


@pytest.mark.slow
def test_images_alone_teach_it_where_a_point_is(tmp_path):
    from rlsvc.envs.two_goals import demonstrations

    columns, fresh = demonstrations(100, size=40), demonstrations(20, seed=900, size=40)
    side = {"side": (columns["observation.state"][:, 0] > 0.5).astype(np.int64)}
    np.savez(tmp_path / "points.npz", **columns, **side)
    words = [
        "experiment=reward_classifier", f"root={tmp_path}", f"data.datasets=[{{path: {tmp_path / 'points.npz'}}}]",
        "data.observation=[observation.image]", "algo.label=side", "algo.learning_rate=3e-3", "algo.batch_size=32",
        "policy.vision={crop: null, width: 8, keypoints: 8}", "policy.hidden=[32]", "algo.schedule.warmup_steps=20",
        "total_steps=200", "checkpoint.interval=200", "tracking.trackers=[]",
    ]  # fmt: skip
    result = train(compose(words), local=True)
    runner = RewardRunner(result.bundle, device="cpu")
    clear = np.abs(fresh["observation.state"][:, 0] - 0.5) > 0.06
    right = runner.probabilities({"observation.image": fresh["observation.image"][clear]})[:, 1] > 0.5
    assert (right == (fresh["observation.state"][clear, 0] > 0.5)).mean() > 0.95
    assert result.metrics["validation/calibration_precision"] > 0.8
