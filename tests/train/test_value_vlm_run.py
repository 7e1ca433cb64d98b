"""Runs without Ray: a value function that sees images and reads prompts, and a pi0 that is told what it finds good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlsvc.data.load import load_table
from rlsvc.data.mixture import split_episodes
from rlsvc.envs.two_goals import PROMPTS, demonstrations
from rlsvc.policies import make_prompter
from rlsvc.policies.api import PROMPT_MASK, PROMPT_TOKENS
from rlsvc.policies.prompt_fast import Pi0FastPrompter
from rlsvc.spec.compose import compose
from rlsvc.spec.data import DatasetSpec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store.bundle import read_bundle
from rlsvc.train.learner import WindowData
from rlsvc.train.run import train
from rlsvc.value import ValueRunner

FAST = Path(__file__).resolve().parents[1] / "data" / "pi_tokens" / "fast"
SIZES = (
    "policy.image_size=[16,16]", "policy.vision={width: 8, depth: 1, mlp_dim: 16, heads: 2, patch: 8}",
    "policy.backbone={width: 16, depth: 1, mlp_dim: 32, heads: 2, kv_heads: 1, head_dim: 8}",
)  # fmt: skip
DISCOUNT, EPISODES = 0.9, 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with demonstrations; the reward is 1 at the end of an episode, and nothing says how it ended."""
    folder = tmp_path_factory.mktemp("runs")
    columns = demonstrations(EPISODES, size=16)
    reward = np.zeros(len(columns["action"]), np.float32)
    reward[columns["episode_ends"] - 1] = 1
    np.savez(folder / "two_goals.npz", **columns, **{"next.reward": reward})
    return folder


def spec_of(root: Path, *overrides: str) -> RunSpec:
    return compose([
        "experiment=pi05_debug", f"root={root}", f"data.datasets.0.path={root / 'two_goals.npz'}", "env=null",
        "data.datasets.0.success=true", "data.validation_fraction=0.2", "tracking.trackers=[]", "log_interval=20",
        "learner.updates_per_call=20", "checkpoint.interval=100", *overrides, *SIZES, "algo.batch_size=8",
    ])  # fmt: skip


@pytest.fixture(scope="module")
def judged(root):
    """A run of a value function."""
    spec = spec_of(
        root, "name=value", "total_steps=100", "~policy", "~algo",
        "policy={name: value_vlm, tokenizer: {name: byte}, max_tokens: 64, state_in_prompt: true, augment: null}",
        "policy.head={name: hl_gauss, bins: 11}", f"policy.returns={{discount: {DISCOUNT}, success_bonus: 1}}",
        "algo={name: value_function, learning_rate: 3e-3, ema: null}",
        "algo.schedule={name: constant, warmup_steps: 0}",
    )  # fmt: skip
    return train(spec, local=True)


def table(root: Path):
    keys = ("observation.image", "observation.state", "task", "action")
    return load_table(DatasetSpec(path=str(root / "two_goals.npz")), keys)


def test_a_value_function_learns_from_images_and_prompts_and_its_bundle_judges_every_step(judged, root):
    assert judged.metrics["train/loss"] < np.log(11)
    runner, steps = ValueRunner.load(judged.bundle), table(root)
    values = runner.values(steps)
    assert (values.shape, values.dtype) == ((steps.num_steps,), np.float32)
    assert np.isfinite(values).all()
    # As before, neither the batch nor what stands before in the table changes a step's value.
    np.testing.assert_allclose(runner.values(steps.select([2])), values[slice(*steps.episode_ends[1:3])], rtol=1e-4)
    for name, change in (("observation.image", 255 - steps.columns["observation.image"]), ("task", PROMPTS[0])):
        other = {**steps.columns, name: np.broadcast_to(change, steps.columns[name].shape)}
        assert not np.allclose(runner.values(replace(steps, columns=other)), values, atol=1e-5)


def conditioned(root: Path, bundle: Path, *overrides: str) -> RunSpec:
    """A tiny pi0 without images that is told how good its demonstrations were by a value function that sees them."""
    return spec_of(
        root, "name=conditioned", "policy.advantage_in_prompt=true", "policy.max_tokens=96",
        "policy.expert={width: 12, depth: 1, mlp_dim: 24, heads: 2, kv_heads: 1, head_dim: 8}",
        f"algo.advantage={{bundle: {bundle}, mode: condition, quantile: 0.5}}", "total_steps=2",
        "learner.updates_per_call=2", "data.validation_fraction=0",
        "data.observation=[observation.state,task]", *overrides,
    )  # fmt: skip


def spelled(tokens: np.ndarray, there: np.ndarray) -> str:
    """The text of a prompt in bytes."""
    return bytes((tokens[there][1:] - 3).tolist()).decode()


def told(spec: RunSpec) -> np.ndarray:
    """What the prompts of the training steps tell: positive, negative, or nothing."""
    columns = WindowData(spec, None, lambda arrays: arrays, "cpu").source({}).columns
    rows = zip(columns[PROMPT_TOKENS], columns[PROMPT_MASK], strict=True)
    texts = [spelled(*row) for row in rows]
    words = [text.partition(", State: ")[0].partition(" Advantage: ") for text in texts]
    assert {task for task, _, _ in words} == {f"Task: {prompt}" for prompt in PROMPTS}
    return np.array([advantage for _, _, advantage in words])


def test_the_prompt_of_a_training_step_says_whether_its_advantage_is_above_the_bound(judged, root):
    spec = conditioned(root, judged.bundle, "algo.advantage.dropout=0")
    # By hand: the bonus of 1 at the end of each episode, and its discount for every step before it.
    steps = table(root).select(list(split_episodes(EPISODES, spec.data).train))
    to_end = np.concatenate([np.arange(n)[::-1] for n in np.diff(steps.episode_ends, prepend=0)])
    advantage = DISCOUNT**to_end - ValueRunner.load(judged.bundle).values(steps)
    good = np.zeros(steps.num_steps, bool)
    for task in range(len(steps.tasks)):
        rows = steps.task == task
        good[rows] = advantage[rows] >= np.median(advantage[rows])
    np.testing.assert_array_equal(told(spec), np.where(good, "positive", "negative"))


def test_a_share_of_the_prompts_tells_nothing_the_same_ones_for_the_same_seed(judged, root):
    whole = told(conditioned(root, judged.bundle, "algo.advantage.dropout=0"))
    first, again, other = (
        told(conditioned(root, judged.bundle, "algo.advantage.dropout=0.4", f"seed={seed}")) for seed in (3, 3, 4)
    )
    assert (first == "").mean() == pytest.approx(0.4, abs=0.15)
    np.testing.assert_array_equal(first[first != ""], whole[first != ""])
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_nothing_is_told_of_steps_whose_episode_was_cut(judged, root):
    spec = conditioned(root, judged.bundle, "data.datasets.0.success=null", "data.reward=next.reward")
    assert set(told(spec)) == {""}


@pytest.mark.slow
def test_a_policy_that_learnt_from_advantages_asks_for_a_positive_one_when_it_acts(judged, root):
    result = train(conditioned(root, judged.bundle), local=True)
    assert np.isfinite(result.metrics["train/loss"])
    bundle = read_bundle(result.bundle)
    observation = bundle.contract.example_observation(2) | {"task": np.full((2, 1), "push")}
    prepared = make_prompter(bundle.policy, bundle.path)(observation, bundle.normalizer)
    for tokens, there in zip(prepared[PROMPT_TOKENS][:, 0], prepared[PROMPT_MASK][:, 0], strict=True):
        assert spelled(tokens, there).startswith("Task: push Advantage: positive, State: ")


def test_pi0_fast_asks_for_a_positive_advantage_too_unless_its_prompt_is_to_tell_none(judged):
    normalizer = read_bundle(judged.bundle).normalizer
    observation = {"observation.state": np.zeros((1, 2), np.float32), "task": np.asarray(["Push"])}
    for tells, expected in ((True, "Task: push advantage: positive, State: "), (False, "Task: push, State: ")):
        spec = Pi0FastSpec.model_validate({
            "tokenizer": {"name": "byte", "action_tokens": 2048}, "action_tokenizer": {"path": str(FAST)},
            "advantage_in_prompt": tells,
        })  # fmt: skip
        prepared = Pi0FastPrompter(spec)(observation, normalizer)
        assert spelled(prepared[PROMPT_TOKENS][0], prepared[PROMPT_MASK][0]).startswith(expected)
