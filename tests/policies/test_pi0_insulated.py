"""Knowledge insulation of pi0.5: who learns from what, and that nothing of it is left when acting."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_inputs import CAMERAS, contract_of, random_observation

from rlsvc.data.fast_tokenizer import FastTokenizer
from rlsvc.data.prompts import PromptTokenizer
from rlsvc.data.text_tokenizer import ByteTokenizer
from rlsvc.envs.two_goals import demonstrations
from rlsvc.nn.params import flatten_params, unflatten_params
from rlsvc.policies.api import (
    ACTION_MASK,
    ACTION_TOKENS,
    PROMPT_AR_MASK,
    PROMPT_LOSS_MASK,
    PROMPT_MASK,
    PROMPT_TOKENS,
)
from rlsvc.policies.pi0 import Pi0Policy, flow_loss, insulated_loss
from rlsvc.policies.pi0_fast import Pi0FastPolicy, token_loss
from rlsvc.runner import PolicyRunner
from rlsvc.spec.compose import compose
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec, SiglipSpec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.train.learner import WindowData
from rlsvc.train.run import train

GEMMA = GemmaSpec(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8)
READS = ("backbone", "vision", "embedding")
"""Weights of what reads images and language, and says tokens."""
SHARED = {
    "vision": SiglipSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=8),
    "backbone": GEMMA,
    "tokenizer": {"name": "byte", "action_tokens": 256},
    "image_size": (16, 16),
    "horizon": 4,
    "n_action_steps": 4,
    "augment": None,
    "remat": False,
}
FIT = {"fit": {"vocab_size": 256}}
NOISE, TIME = jax.random.normal(jax.random.key(5), (2, 4, 3)), jnp.asarray([0.5, 0.8])


def insulated(**fields: object) -> Pi0Spec:
    """The smallest pi0.5 that is insulated."""
    chosen = {
        **SHARED,
        "variant": "pi05",
        "expert": GEMMA.replace(width=12, mlp_dim=24),
        "max_tokens": 6,
        "action_dim": 3,
        "insulate": {"action_tokenizer": FIT, "max_action_tokens": 5, "alpha": 2.0},
        **fields,
    }
    return Pi0Spec.model_validate(chosen)


@pytest.fixture(scope="module")
def made():
    """A policy, random weights, and two rows: prompts of 5 and 4 tokens, chunks of 5 and 3."""
    spec = insulated()
    policy = Pi0Policy(spec, contract_of(spec, 3))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32),
        jax.eval_shape(policy.init, jax.random.key(0)),
    )
    observation = random_observation(rng, spec, 3)
    observation[ACTION_TOKENS] = jnp.asarray(rng.integers(259, 515, (2, 5)), jnp.int32)
    observation[ACTION_MASK] = jnp.arange(5)[None] < jnp.asarray([[5], [3]])
    batch = {
        "observation": observation,
        "action": jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32),
        "mask": jnp.ones((2, 4), bool).at[1, 3].set(False),
    }
    return policy, params, batch


@pytest.fixture(scope="module")
def losses(made):
    """The metrics of the insulated loss, compiled: of an observation, and noise."""
    policy, params, batch = made

    @jax.jit
    def metrics(observation, noise):
        return insulated_loss(policy.net(params), {**batch, "observation": observation}, noise, TIME, None)[1]

    return metrics


@pytest.fixture(scope="module")
def learnt(made):
    """By loss its value, and its gradient by weight: both terms of the insulated one, and `plain`, the uninsulated."""
    policy, params, batch = made

    def losses(params):
        plain, _ = flow_loss(policy.net(params), batch, NOISE, TIME, None)
        _, parts = insulated_loss(policy.net(params), batch, NOISE, TIME, None)
        return jnp.stack([plain, parts["flow_loss"], parts["token_loss"]])

    @jax.jit
    def both(params):
        values, pull = jax.vjp(losses, params)
        return values, jax.vmap(pull)(jnp.eye(3))

    values, (gradients,) = both(params)
    names = ("plain", "flow_loss", "token_loss")
    return {
        name: (float(values[i]), flatten_params(jax.tree.map(lambda x, i=i: x[i], gradients)))
        for i, name in enumerate(names)
    }


def test_the_flow_teaches_the_expert_as_ever_and_what_reads_nothing_at_all(learnt):
    (value, flow), (expected, plain) = learnt["flow_loss"], learnt["plain"]
    assert value == pytest.approx(expected, rel=1e-6)
    for name, gradient in flow.items():
        if name.startswith(READS):
            assert not gradient.any(), name
        else:
            np.testing.assert_allclose(gradient, plain[name], rtol=1e-4, atol=1e-6, err_msg=name)
            assert gradient.any(), name
    # Uninsulated, all that reads learns from the flow, but for the norm after the last layer, which nobody looks at.
    assert [name for name, gradient in plain.items() if not gradient.any()] == ["backbone.norm"]


def test_what_reads_learns_from_the_tokens_and_the_expert_does_not(learnt):
    for name, gradient in learnt["token_loss"][1].items():
        assert gradient.any() == name.startswith(READS), name


def test_tokens_and_flow_do_not_see_each_other_and_alpha_weighs_the_flow(made, losses):
    observation = made[2]["observation"]
    before, other_noise = losses(observation, NOISE), losses(observation, NOISE + 1)
    other_tokens = losses({**observation, ACTION_TOKENS: observation[ACTION_TOKENS][::-1]}, NOISE)
    assert other_tokens["flow_loss"] == before["flow_loss"]
    assert other_tokens["token_loss"] != before["token_loss"]
    assert other_noise["token_loss"] == before["token_loss"]
    assert other_noise["flow_loss"] != before["flow_loss"]
    assert float(before["loss"]) == pytest.approx(float(before["token_loss"] + 2 * before["flow_loss"]), rel=1e-6)


def test_the_tokens_loss_is_that_of_pi0_fast_on_the_same_sequence(made, losses):
    policy, params, batch = made
    spec = Pi0FastSpec.model_validate({**SHARED, "action_tokenizer": FIT, "max_tokens": 11})
    fast = Pi0FastPolicy(spec, policy.contract)
    weights = {name: x for name, x in flatten_params(params).items() if name.startswith(READS)}
    fast_params = unflatten_params(weights, jax.eval_shape(fast.init, jax.random.key(0)))
    # pi0-FAST counts a camera that is not there among the positions, so here all are.
    observation = {**batch["observation"], **{f"{name}_mask": jnp.ones(2) for name in CAMERAS}}
    # Its sequences have no padding between prompt and actions.
    prompt, chunk = (np.asarray(observation[name].sum(1)) for name in (PROMPT_MASK, ACTION_MASK))
    tokens = np.zeros((2, 11), np.int32)
    for row, (n, m) in enumerate(zip(prompt, chunk, strict=True)):
        tokens[row, :n] = observation[PROMPT_TOKENS][row, :n]
        tokens[row, n : n + m] = observation[ACTION_TOKENS][row, :m]
    at = np.arange(11)[None]
    there, said = at < (prompt + chunk)[:, None], at >= prompt[:, None]
    sequence = {PROMPT_TOKENS: tokens, PROMPT_MASK: there, PROMPT_AR_MASK: said, PROMPT_LOSS_MASK: there & said}
    sequence = {name: jnp.asarray(x) for name, x in sequence.items()}
    expected, metrics = jax.jit(lambda p: token_loss(fast.net(p), {"observation": {**observation, **sequence}}, None))(
        fast_params
    )
    got = losses(observation, NOISE)
    assert float(got["token_loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(got["token_accuracy"]) == float(metrics["token_accuracy"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "pi0"}, "insulate: pi0 is trained as a whole; use variant=pi05"),
        ({"insulate": {}}, r"insulate\.action_tokenizer\n  Field required"),
        ({"insulate": {"action_tokenizer": {}}}, "got neither fit nor path; give one of them"),
        ({"tokenizer": {"name": "byte", "action_tokens": 255}}, r"tokenizer\.action_tokens: got 255, at least"),
    ],
)
def test_a_specification_that_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        insulated(**fields)


def run_spec(root: Path, action_tokenizer: str = "{fit: {vocab_size: 256}}") -> RunSpec:
    """A run of an insulated policy on a few demonstrations, as small as can be."""
    data = root / "two_goals.npz"
    if not data.exists():
        np.savez(data, **demonstrations(4, size=16))
    return compose([
        "experiment=pi05_debug", f"root={root}", f"data.datasets.0.path={data}", "env=null",
        "policy.image_size=[16,16]", "policy.vision={width: 8, depth: 1, mlp_dim: 16, heads: 2, patch: 8}",
        "policy.backbone={width: 16, depth: 1, mlp_dim: 32, heads: 2, kv_heads: 1, head_dim: 8}",
        "policy.expert={width: 12, depth: 1, mlp_dim: 24, heads: 2, kv_heads: 1, head_dim: 8}",
        "policy.tokenizer.action_tokens=256", f"policy.insulate={{action_tokenizer: {action_tokenizer}}}",
        "policy.insulate.max_action_tokens=40", "policy.horizon=8", "algo.batch_size=8", "algo.learning_rate=1e-2",
        "algo.schedule.warmup_steps=0", "total_steps=40", "learner.updates_per_call=20", "log_interval=20",
        "checkpoint.interval=40", "tracking.trackers=[]", "data.validation_fraction=0", "policy.sample_steps=2",
    ])  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("runs")
    return root, train(run_spec(root), local=True)


@pytest.mark.slow
def test_a_run_learns_both_and_its_bundle_acts_without_any_of_it(trained):
    _, result = trained
    assert {"train/flow_loss", "train/token_loss", "train/token_accuracy"} <= result.metrics.keys()
    assert result.metrics["train/token_loss"] < np.log(515)
    assert read_bundle(result.bundle).policy["insulate"] is None
    runner = PolicyRunner.load(result.bundle)
    chunk = runner.act(runner.contract.example_observation(1), np.arange(1), np.zeros(1, int))
    assert chunk.action.shape == (1, 4, 2)
    assert np.isfinite(chunk.action).all()


def test_every_window_has_its_own_chunk_in_tokens_and_a_later_run_takes_the_bundles_tokenizer(trained):
    root, result = trained
    spec = run_spec(root, f"{{path: {result.bundle}}}")
    data = WindowData(spec, None, lambda arrays: arrays, "cpu")
    batch = data.source({}).gather(np.arange(3))
    text = ByteTokenizer(256)
    prompts = PromptTokenizer(text, 40, FastTokenizer.load(result.bundle))
    for row in range(3):
        said = batch["observation"][ACTION_TOKENS][row, 0][batch["observation"][ACTION_MASK][row, 0]]
        got = prompts.decode_chunk([*text.encode("Action: "), *said], 8, 2)
        expected = data.normalizer.normalize("action", batch["action"][row], 0)
        # A coefficient is off by 0.05 at most, so an action by 0.05 * sqrt(8).
        np.testing.assert_allclose(got, expected, atol=0.142)
