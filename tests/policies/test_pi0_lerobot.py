"""pi0 and pi0.5 against LeRobot's own PyTorch models: the same random weights, inputs, noise and times."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from lerobot_dummy import randomize, shrink
from pi0_inputs import CAMERAS, contract_of, random_observation

from rlsvc.nn.params import flatten_params, unflatten_params
from rlsvc.policies.pi0 import Pi0Policy, flow_loss, sample
from rlsvc.policies.pi0_weights import Taken, from_lerobot, to_lerobot
from rlsvc.spec.pi0 import GEMMA_SIZES, SIGLIP_SIZES, Pi0Spec

SIDE, HORIZON, ACTION, TOKENS, VOCAB = 56, 6, 7, 10, 300


def lerobot_model(variant: str, monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """LeRobot's model with random weights."""
    gemma = dict.fromkeys(("gemma_2b", "gemma_300m"), GEMMA_SIZES["dummy"])
    config, _, model = shrink(variant, SIGLIP_SIZES["dummy"], gemma, SIDE, VOCAB, monkeypatch)
    made = model(
        config(
            max_action_dim=ACTION, max_state_dim=ACTION, chunk_size=HORIZON, n_action_steps=HORIZON, dtype="float32",
            image_resolution=(SIDE, SIDE), device="cpu",
        )
    ).eval()  # fmt: skip
    randomize(made)
    return made


class Beside(NamedTuple):
    """Ours and LeRobot's model with the same weights, and what both are given: rows of 2."""

    policy: Pi0Policy
    params: Any
    taken: Taken
    model: torch.nn.Module
    theirs: dict[str, np.ndarray]
    observation: dict[str, jax.Array]
    noise: np.ndarray
    actions: np.ndarray

    def observed(self) -> list[Any]:
        """The observation as LeRobot's model takes it."""
        images = [torch.from_numpy(np.asarray(self.observation[c]).transpose(0, 3, 1, 2).copy()) for c in CAMERAS]
        there = [torch.from_numpy(np.asarray(self.observation[f"{c}_mask"]) > 0.5) for c in CAMERAS]
        tokens = torch.from_numpy(np.asarray(self.observation["prompt_tokens"])).long()
        mask = torch.from_numpy(np.asarray(self.observation["prompt_mask"]))
        told = self.policy.spec.variant == "pi05"
        state = [] if told else [torch.from_numpy(np.asarray(self.observation["observation.state"]))]
        return [images, there, tokens, mask, *state]


def beside_lerobot(variant: str, patch: pytest.MonkeyPatch) -> Beside:
    """Both models."""
    model = lerobot_model(variant, patch)
    theirs = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    vocab = theirs["paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"].shape[0]
    spec = Pi0Spec(
        variant=variant, vision="dummy", backbone="dummy", expert="dummy", image_size=(SIDE, SIDE), horizon=HORIZON,
        tokenizer={"name": "byte", "action_tokens": vocab - 259}, n_action_steps=HORIZON, action_dim=ACTION,
        max_tokens=TOKENS,
    )  # fmt: skip
    policy = Pi0Policy(spec, contract_of(spec, ACTION))
    taken = from_lerobot(theirs, spec)
    params = unflatten_params(taken.weights, jax.eval_shape(policy.init, jax.random.key(0)))
    rng = np.random.default_rng(0)
    observation = random_observation(rng, spec, ACTION)
    noise, actions = (rng.normal(size=(2, HORIZON, ACTION)).astype(np.float32) for _ in range(2))
    return Beside(policy, params, taken, model, theirs, observation, noise, actions)


def sampled_by_both(variant: str, patch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """Our actions and LeRobot's."""
    return _sampled(beside_lerobot(variant, patch))


def _sampled(both: Beside) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        theirs = both.model.sample_actions(*both.observed(), noise=torch.from_numpy(both.noise)).numpy()
    run = jax.jit(lambda p: sample(both.policy.net(p), both.observation, jnp.asarray(both.noise), 10))
    return np.asarray(run(both.params)), theirs


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_actions_and_loss_are_those_of_lerobots_own_model(variant, monkeypatch):
    both = beside_lerobot(variant, monkeypatch)
    ours, theirs = _sampled(both)
    assert (ours * theirs).sum() / np.linalg.norm(ours) / np.linalg.norm(theirs) >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-4)

    # LeRobot's features of time are float64, openpi's and ours float32, which differ by t times 1e-4: small times keep
    # that out of the comparison.
    t = np.asarray([0.05, 0.1], np.float32)
    with torch.no_grad():
        args = [torch.from_numpy(x) for x in (both.actions, both.noise, t)]
        their_loss = both.model.forward(*both.observed(), *args).numpy().mean()
    batch = {
        "observation": both.observation, "action": jnp.asarray(both.actions), "mask": jnp.ones((2, HORIZON), bool)
    }  # fmt: skip
    given = (batch, jnp.asarray(both.noise), jnp.asarray(t), None)
    loss, _ = jax.jit(lambda p: flow_loss(both.policy.net(p), *given))(both.params)
    assert float(loss) == pytest.approx(float(their_loss), abs=1e-5)

    back = to_lerobot(flatten_params(both.params), both.policy.spec)
    read = {name.removeprefix("model.") for name in back}
    assert read == both.taken.used & set(both.theirs) - {n for n in both.theirs if n.endswith("lm_head.weight")}
    for name, value in back.items():
        np.testing.assert_array_equal(value, both.theirs[name.removeprefix("model.")])
