"""experiment=pi0_fast_pusht with small nets: its own keys, real actions, noise for images."""

import numpy as np
import pytest

from rlsvc.data.mixture import load_demonstrations
from rlsvc.policies import make_prompter
from rlsvc.policies.api import PROMPT_LOSS_MASK, PROMPT_MASK
from rlsvc.spec.compose import compose
from rlsvc.store.bundle import read_bundle
from rlsvc.train.run import train


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory, root):
    """Three of the human demonstrations, with noise for images."""
    with np.load(root / "tests" / "data" / "pusht" / "pusht_first3.npz") as file:
        columns = dict(file)
    columns["img"] = np.random.default_rng(0).integers(0, 256, (len(columns["action"]), 96, 96, 3), np.uint8)
    path = tmp_path_factory.mktemp("pusht") / "pusht.npz"
    np.savez(path, **columns)
    return path


@pytest.fixture
def words(tmp_path, demonstrations):
    return [
        "experiment=pi0_fast_pusht", f"root={tmp_path}", "total_steps=1", "log_interval=1", "precision=fp32",
        "policy.vision={width: 8, depth: 1, mlp_dim: 8, heads: 1, patch: 48}",
        "policy.backbone={width: 8, depth: 1, mlp_dim: 8, heads: 1, head_dim: 8}", "policy.augment=null",
        f"data.datasets.0.path={demonstrations}", "data.validation_fraction=0", "algo.batch_size=2", "env.max_steps=2",
        "learner.updates_per_call=1", "evaluation.interval=null", "evaluation.episodes=1", "evaluation.parallel=1",
        "evaluation.videos=false", "tracking.trackers=[]",
    ]  # fmt: skip


def test_the_experiment_fits_its_tokens_trains_and_acts_in_the_environment(words):
    result = train(compose([*words, "policy.max_action_tokens=2", "policy.hold_action=[256,256]"]), local=True)
    assert (result.step, result.metrics["eval/length"]) == (1, 2.0)
    bundle = read_bundle(result.bundle)
    assert list(bundle.contract.observation) == ["observation.image", "observation.state"]
    assert {"tokenizer.json", "processor_config.json"} <= {file.name for file in bundle.path.iterdir()}


def test_the_experiments_lengths_hold_every_sequence_of_the_demonstrations(words):
    spec = compose(words)
    policy = spec.policy
    loaded = load_demonstrations(
        spec.data, n_obs_steps=1, horizon=policy.horizon, action_horizon=policy.n_action_steps,
        prepare=make_prompter(policy.model_dump(mode="json")),
    )  # fmt: skip
    columns = loaded.train.columns
    assert columns[PROMPT_MASK].sum(-1).max() < policy.max_tokens
    assert columns[PROMPT_LOSS_MASK].sum(-1).max() <= policy.max_action_tokens
