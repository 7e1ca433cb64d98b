"""A reward classifier's run: it learns from rendered images, is calibrated, and rewards rollouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, SpecError
from rlsvc.core.types import REWARD_SOURCE, REWARD_SOURCES
from rlsvc.data.normalize import Normalizer
from rlsvc.envs.make import make_env
from rlsvc.policies import make_policy
from rlsvc.spec.compose import compose
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.spec.reward_classifier import RewardSourceSpec
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.train.reward import ClassifierReward, RewardRunner
from rlsvc.train.rollout_worker import Acting, RolloutWorker
from rlsvc.train.run import train

GOALS = GymnasiumSpec(id="rlsvc/TwoGoals-v0", import_module="rlsvc.envs.two_goals", kwargs={"size": 64}, max_steps=12)
PUSHT = Path(__file__).resolve().parents[1] / "data" / "pusht" / "pusht_first1.zarr"


def labelled(episodes: int) -> dict[str, np.ndarray]:
    """Images of a point on the left and on the right, eight to an episode: the task is done on the right."""
    rng = np.random.default_rng(0)
    env = make_env(GOALS)
    images, right = [], []
    for _ in range(episodes):
        env.reset(seed=int(rng.integers(2**31)))
        inner = env.env.unwrapped
        for i in range(8):
            inner.point = np.array([rng.uniform(0.6, 1.0) if i % 2 else rng.uniform(0.0, 0.4), rng.uniform(0, 1)])
            images.append(inner.render())
            right.append(i % 2)
    return {
        "observation.image": np.stack(images), "action": np.zeros((len(right), 2), np.float32),
        "on_the_right": np.asarray(right), "episode_ends": 8 * np.arange(1, episodes + 1), "fps": np.asarray(10.0),
    }  # fmt: skip


def words_of(root: Path, data: Path, *overrides: str) -> list[str]:
    return [
        "experiment=reward_classifier", f"root={root}", f"data.datasets=[{{path: {data}}}]", "algo.label=on_the_right",
        "policy.vision={crop: null, width: 8, keypoints: 8}", "policy.hidden=[32]", "algo.batch_size=16",
        "algo.learning_rate=3e-3", "algo.ema=null", "algo.schedule.warmup_steps=10", "algo.threshold=0.8", "total_steps=60",
        "learner.updates_per_call=10", "log_interval=60", "checkpoint.interval=60", "tracking.trackers=[]", *overrides,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("reward")
    np.savez(root / "goals.npz", **labelled(40))
    return train(compose(words_of(root, root / "goals.npz")), local=True)


def test_it_learns_to_see_that_the_task_is_done_and_says_how_far_it_is_to_be_trusted(trained):
    assert trained.metrics["validation/accuracy"] > 0.9
    assert trained.metrics["validation/calibration_precision"] > 0.7
    runner = RewardRunner(trained.bundle, device="cpu")
    found = runner.calibration
    assert found.threshold == 0.8
    assert found.episodes == 8
    assert found.precision_low <= found.precision <= found.precision_high
    assert found.loss <= found.loss_before + 1e-6
    data = labelled(40)
    p = runner.probabilities({"observation.image": data["observation.image"][:16]})
    assert p.shape == (16, 2)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(runner.progress({"observation.image": data["observation.image"][:16]}), p[:, 1])


def test_rollouts_are_rewarded_and_ended_by_it_and_say_so(trained):
    env = ClassifierReward(make_env(GOALS), RewardSourceSpec(classifier="x"), RewardRunner(trained.bundle))
    env.reset(seed=1)
    inner = env.env.env.unwrapped
    inner.point = np.array([0.1, 0.5])
    inner.goals = np.array([[0.5, 0.1], [0.5, 0.9]])
    _, reward, terminated, _, info = env.step(np.zeros(2, np.float32))
    assert (reward, terminated, info["is_success"]) == (0.0, False, False)
    inner.point = np.array([0.9, 0.5])  # on no disc, so that the environment gives nothing for it
    _, reward, terminated, truncated, info = env.step(np.zeros(2, np.float32))
    assert (reward, terminated, truncated, info["is_success"]) == (1.0, True, False, True)
    contract = make_env(GOALS).contract()
    acting = Acting(
        {}, contract, Normalizer.identity({}), "fp32", reward=RewardSourceSpec(classifier=str(trained.bundle))
    )
    worker = RolloutWorker(GOALS, acting, worker=0, num_envs=1, seed=0)
    chunk = worker.collect(30, "random")
    real = ~chunk.columns["is_last"]
    assert set(chunk.columns[REWARD_SOURCE][real].tolist()) == {REWARD_SOURCES.index("classifier")}
    assert set(chunk.columns["reward"].tolist()) <= {0.0, 1.0}
    np.testing.assert_array_equal(chunk.ended["return"] > 0, chunk.ended["success"])


def test_so_many_observations_in_a_row_have_to_say_so(trained):
    spec = RewardSourceSpec(classifier="x", consecutive=2, threshold=0.01)
    env = ClassifierReward(make_env(GOALS), spec, RewardRunner(trained.bundle))
    env._threshold = 0.0
    env.reset(seed=1)
    assert [env.step(np.zeros(2, np.float32))[2] for _ in range(2)] == [False, True]
    env.reset(seed=1)
    assert not env.step(np.zeros(2, np.float32))[2]


def test_what_does_not_fit_is_refused_by_name(trained, tmp_path):
    runner = RewardRunner(trained.bundle)
    other = Contract({"observation.image": Feature((48, 48, 3), "uint8")}, Feature((2,), "float32"), 10.0)
    with pytest.raises(ContractError, match=r"'observation\.image' is uint8 \(48, 48, 3\) in the environment"):
        runner.check(other)
    with pytest.raises(ContractError, match=r"the classifier sees 'observation\.image', the environment gives: x"):
        runner.check(Contract({"x": Feature((1,), "float32")}, Feature((2,), "float32"), 10.0))
    made = read_bundle(trained.bundle)
    with pytest.raises(ContractError, match=r"'reward_classifier' says what is rewarded and does not act"):
        make_policy(made.policy, made.contract)
    bare = write_bundle(
        tmp_path / "bare", policy=made.policy, contract=made.contract, normalizer=made.normalizer, params=made.params
    )
    with pytest.raises(BundleError, match=r"it has no calibration\.json"):
        RewardRunner(bare)
    with pytest.raises(SpecError, match=r"data\.validation_fraction: a reward classifier is calibrated"):
        compose(words_of(tmp_path, tmp_path / "x.npz", "data.validation_fraction=0"))


@pytest.mark.slow
def test_it_trains_on_the_images_of_pusht(tmp_path):
    """Real images: one human demonstration, cut in two so that one part can be held back."""
    from rlsvc.data.load import load_table
    from rlsvc.spec.data import DatasetSpec

    table = load_table(DatasetSpec(path=str(PUSHT)), ["observation.image", "action"])
    half = table.num_steps // 2
    np.savez(
        tmp_path / "halves.npz", **table.columns, episode_ends=np.array([half, table.num_steps]), fps=np.asarray(10.0),
        success=np.repeat([0, 1], [half, table.num_steps - half]),
    )  # fmt: skip
    words = words_of(
        tmp_path, tmp_path / "halves.npz", "algo.label=null", "data.success=success", "data.validation_fraction=0.5",
        "policy.vision={crop: [84, 84], width: 8, keypoints: 8}", "total_steps=20", "log_interval=20",
        "checkpoint.interval=20",
    )  # fmt: skip
    result = train(compose(words), local=True)
    assert np.isfinite(result.metrics["validation/loss"])
    assert RewardRunner(result.bundle, device="cpu").contract.observation["observation.image"].shape == (96, 96, 3)
