"""pi0-FAST from demonstrations to actions: sequences of every window, a policy that knows them, a bundle that acts."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from rlsvc.algos.imitation import Imitation
from rlsvc.core.types import MALFORMED
from rlsvc.data.fast_tokenizer import FastTokenizer
from rlsvc.data.mixture import Demonstrations, load_demonstrations
from rlsvc.data.prompts import PromptTokenizer
from rlsvc.data.text_tokenizer import ByteTokenizer
from rlsvc.nn.params import flatten_params
from rlsvc.policies.api import PROMPT_AR_MASK, PROMPT_LOSS_MASK, PROMPT_MASK, PROMPT_TOKENS
from rlsvc.policies.pi0_fast import Pi0FastPolicy
from rlsvc.policies.prompt_fast import Pi0FastPrompter
from rlsvc.runner import PolicyRunner
from rlsvc.spec.data import DataSpec
from rlsvc.spec.imitation import ImitationSpec
from rlsvc.spec.pi0 import GemmaSpec, SiglipSpec
from rlsvc.spec.pi0_fast import Pi0FastSpec
from rlsvc.store.bundle import read_bundle, write_bundle

HORIZON, LENGTH = 3, 48
STATE = np.asarray([[0, 0], [1, 2], [2, 4], [3, 6]], np.float32)
ACTION = np.asarray([[0, 10], [4, 20], [-4, 30], [2, 20]], np.float32)


def fast_spec(**fields: object) -> Pi0FastSpec:
    chosen = {
        "vision": SiglipSpec(width=8, depth=1, mlp_dim=8, heads=1, patch=8),
        "backbone": GemmaSpec(width=32, depth=1, mlp_dim=64, heads=2, head_dim=16),
        "image_size": (8, 8),
        "tokenizer": {"name": "byte", "action_tokens": 270},
        "action_tokenizer": {"fit": {"vocab_size": 270}},
        "max_tokens": LENGTH,
        "max_action_tokens": 32,
        "horizon": HORIZON,
        "n_action_steps": 2,
        "augment": None,
        "remat": False,
        **fields,
    }
    return Pi0FastSpec.model_validate(chosen)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Pi0FastPrompter, Demonstrations]:
    """One episode of four steps, and what is made of it."""
    path = tmp_path_factory.mktemp("data") / "four.npz"
    tasks = {"episode_ends": np.asarray([4]), "tasks": np.asarray(["go"]), "fps": np.asarray(10.0)}
    np.savez(path, **{"observation.state": STATE, "action": ACTION}, **tasks)
    prompter = Pi0FastPrompter(fast_spec())
    spec = DataSpec.model_validate(
        {"datasets": [{"path": str(path)}], "observation": ["observation.state", "task"], "validation_fraction": 0}
    )
    made = load_demonstrations(spec, n_obs_steps=1, horizon=HORIZON, action_horizon=2, prepare=prompter)
    return prompter, made


def test_every_window_has_the_sequence_of_its_own_chunk(made):
    prompter, demonstrations = made
    batch = demonstrations.train.gather(np.arange(4))
    got = {name: x[:, 0] for name, x in batch["observation"].items()}
    fast = FastTokenizer.from_files(prompter.files())
    assert (fast.time_horizon, fast.action_dim) == (HORIZON, 2)
    prompts = PromptTokenizer(ByteTokenizer(270), LENGTH, fast)
    for window in range(4):
        # The last action stands in for those after the episode's end.
        chunk = ACTION[np.minimum(window + np.arange(HORIZON), 3)]
        normal = np.stack([chunk[:, 0] / 4, (chunk[:, 1] - 20) / 10], axis=1).astype(np.float32)
        state = np.asarray([STATE[window, 0] / 1.5 - 1, STATE[window, 1] / 3 - 1])
        expected = prompts.pi0_fast("go", state, normal)
        np.testing.assert_array_equal(got[PROMPT_TOKENS][window], expected.tokens)
        np.testing.assert_array_equal(got[PROMPT_MASK][window], expected.mask)
        np.testing.assert_array_equal(got[PROMPT_AR_MASK][window], expected.ar_mask)
        np.testing.assert_array_equal(got[PROMPT_LOSS_MASK][window], expected.loss_mask)
        text = bytes(
            i - 3 for i in got[PROMPT_TOKENS][window][got[PROMPT_MASK][window] & ~got[PROMPT_AR_MASK][window]][1:]
        )
        assert text == f"task: go, State: {[0, 85, 170, 255][window]} {[0, 85, 170, 255][window]};\n".encode().replace(
            b"task", b"Task"
        )


@pytest.fixture(scope="module")
def trained(made) -> dict[str, np.ndarray]:
    """Weights that were trained on the four windows."""
    _, demonstrations = made
    policy = Pi0FastPolicy(fast_spec(), demonstrations.contract)
    spec = ImitationSpec.model_validate(
        {"batch_size": 4, "learning_rate": 5e-3, "ema": None, "schedule": {"warmup_steps": 10}}
    )
    algorithm = Imitation(policy, demonstrations.normalizer, spec, total_steps=100)
    state = jax.jit(algorithm.init)(jax.random.key(0))
    state, _ = algorithm.update("update", state, demonstrations.train, jax.random.key(1), 100)
    return flatten_params(state.params)


def runner(folder: Path, made, params) -> PolicyRunner:
    prompter, demonstrations = made
    path = write_bundle(
        folder / "bundle",
        policy=fast_spec().model_dump(mode="json"),
        contract=demonstrations.contract,
        normalizer=demonstrations.normalizer,
        params=params,
        files=prompter.files(),
    )
    return PolicyRunner(read_bundle(path), batch_sizes=(4,))


def act(made: PolicyRunner, state: np.ndarray):
    observation = {"observation.state": state[:, None], "task": np.full((len(state), 1), "go")}
    return made.act(observation, np.arange(len(state)), np.zeros(len(state), int))


def test_a_policy_that_learnt_four_windows_gives_their_actions_from_its_bundle(trained, made, tmp_path):
    chunk = act(runner(tmp_path, made, trained), STATE)
    assert (chunk.action.shape, chunk.action.dtype) == ((4, 2, 2), np.float32)
    assert chunk.extras[MALFORMED].tolist() == ["", "", "", ""]
    for window in range(4):
        expected = ACTION[np.minimum(window + np.arange(2), 3)]
        # Coefficients are off by 0.05 at most, so an action by 0.05 * sqrt(3) of half its range.
        assert (np.abs(chunk.action[window] - expected) <= 0.087 * np.asarray([4, 10])).all()


def test_tokens_that_are_no_actions_give_no_actions_and_say_why(made):
    prompter, demonstrations = made
    tokens = demonstrations.train.gather(np.arange(4))["observation"][PROMPT_TOKENS][:, 0]
    said = np.zeros((4, 40), np.int32)
    for row, start in enumerate(np.argmax(demonstrations.train.columns[PROMPT_AR_MASK], axis=1)):
        said[row, : LENGTH - start] = tokens[row, start:][:40]
    said[1, 0] += 1
    said[2, 10:] = said[2, 9]
    action, extras = prompter.finish(said, demonstrations.normalizer)
    assert extras[MALFORMED].tolist() == ["", "no_action", "no_end", ""]
    assert np.isfinite(action[[0, 3]]).all()
    assert np.isnan(action[[1, 2]]).all()
    np.testing.assert_allclose(action[0], ACTION[:2], atol=0.9)


def test_a_robot_is_held_still_where_the_policy_says_how(made, tmp_path):
    for name, content in made[0].files().items():
        (tmp_path / name).write_bytes(content)
    prompter = Pi0FastPrompter(fast_spec(hold_action=[7.0, -1.0]), tmp_path)
    action, extras = prompter.finish(np.full((3, 32), 5, np.int32), made[1].normalizer)
    assert extras[MALFORMED].tolist() == ["no_action"] * 3
    np.testing.assert_array_equal(action, np.broadcast_to(np.asarray([7.0, -1.0], np.float32), (3, 2, 2)))
