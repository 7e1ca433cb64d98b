"""experiment=pi0_aloha_sim_lora at a size that trains in seconds: its own keys, small nets, made-up demonstrations."""

import jax
import numpy as np
import pytest

from rlsvc.algos.imitation import trained
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.nn.params import leaf_names
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.spec.compose import compose
from rlsvc.store.bundle import read_bundle
from rlsvc.train.run import train

SIZE = 28
GEMMA = "{width: 8, depth: 1, mlp_dim: 8, heads: 1, head_dim: 8}"


@pytest.fixture
def demonstrations(tmp_path):
    """Two episodes of 30 steps that look like ALOHA's."""
    rng = np.random.default_rng(0)
    path = tmp_path / "aloha.npz"
    np.savez(
        path,
        **{
            "observation.images.top": rng.integers(0, 256, (60, SIZE, SIZE, 3), np.uint8),
            "observation.state": rng.normal(size=(60, 14)).astype(np.float32),
            "action": rng.normal(size=(60, 14)).astype(np.float32),
        },
        episode_ends=[30, 60],
        fps=50.0,
    )
    return path


@pytest.fixture
def words(tmp_path, demonstrations):
    return [
        "experiment=pi0_aloha_sim_lora", f"root={tmp_path}", "total_steps=1", "log_interval=1", "precision=fp32",
        "policy.vision={width: 8, depth: 1, mlp_dim: 8, heads: 1, patch: 14}", f"policy.image_size=[{SIZE},{SIZE}]",
        f"policy.backbone={GEMMA}", f"policy.expert={GEMMA}", "policy.max_tokens=16", "policy.augment=null",
        "policy.tokenizer={name: byte}", "~policy.tokenizer.path", "policy.horizon=4", "policy.n_action_steps=2",
        "policy.sample_steps=2", "policy.remat=false", "algo.weights=null", "algo.batch_size=2",
        f"data.datasets.0.path={demonstrations}", "data.validation_fraction=0", f"env.image_size={SIZE}",
        f"robot.image_size=[{SIZE},{SIZE}]", "robot.execute=2",
        "env.max_steps=2", "learner.updates_per_call=1", "evaluation.interval=null", "evaluation.episodes=1",
        "evaluation.parallel=1", "evaluation.videos=false", "tracking.trackers=[]",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.render
def test_the_experiment_trains_and_acts_in_the_environment(words):
    result = train(compose(words), local=True)
    assert (result.step, result.metrics["eval/length"]) == (1, 2.0)
    bundle = read_bundle(result.bundle)
    assert list(bundle.contract.observation) == ["observation.images.top", "observation.state"]
    assert (bundle.contract.rate_hz, bundle.contract.action_horizon) == (50.0, 2)
    assert bundle.contract.action.high[1] == pytest.approx(1.25664)


def test_of_the_transformers_the_adaptation_alone_is_trained(words):
    """As openpi freezes: all of both language models but the low-rank matrices; not the vision tower."""
    spec = compose(words)
    contract = Contract(
        {
            "observation.images.top": Feature((SIZE, SIZE, 3), "uint8"),
            "observation.state": Feature((14,), "float32"),
        },
        Feature((14,), "float32"),
        50.0,
        action_horizon=2,
    )
    names = leaf_names(jax.eval_shape(Pi0Policy(spec.policy, contract).init, jax.random.key(0)))
    learnt = [name for name, kept in zip(names, trained(names, spec.algo.freeze, ()), strict=True) if kept]
    transformers = [name for name in names if name.startswith(("backbone.", "expert."))]
    lora = [name for name in transformers if name.endswith(("_lora_a", "_lora_b"))]
    assert len(lora) == 16  # two experts, two matrices for each of qkv, out, gate_up and down
    assert [name for name in learnt if name in transformers] == lora
    assert set(names) - set(transformers) <= set(learnt)


def test_weights_that_are_not_there_are_named_before_training_starts(words):
    there = [word for word in words if not word.startswith("algo.weights")]
    with pytest.raises(UserError, match="weights/pi0_base"):
        train(compose([*there, "env=null"]), local=True)
