"""pi0 and pi0.5 against LeRobot's own PyTorch models: the same random weights, inputs, noise and times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from lerobot_dummy import randomize, shrink
from pi0_inputs import CAMERAS, contract_of, random_observation

from rlsvc.nn.params import flatten_params, unflatten_params
from rlsvc.policies.pi0 import Pi0Policy, flow_loss, sample
from rlsvc.policies.pi0_weights import from_lerobot, to_lerobot
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


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_actions_and_loss_are_those_of_lerobots_own_model(variant, monkeypatch):
    model = lerobot_model(variant, monkeypatch)
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
    t = np.asarray([0.3, 0.9], np.float32)

    images = [torch.from_numpy(np.asarray(observation[c]).transpose(0, 3, 1, 2).copy()) for c in CAMERAS]
    there = [torch.from_numpy(np.asarray(observation[f"{c}_mask"]) > 0.5) for c in CAMERAS]
    tokens = torch.from_numpy(np.asarray(observation["prompt_tokens"])).long()
    mask = torch.from_numpy(np.asarray(observation["prompt_mask"]))
    state = [torch.from_numpy(np.asarray(observation["observation.state"]))] if variant == "pi0" else []
    with torch.no_grad():
        their_actions = model.sample_actions(images, there, tokens, mask, *state, noise=torch.from_numpy(noise)).numpy()
        args = [torch.from_numpy(x) for x in (actions, noise, t)]
        their_loss = model.forward(images, there, tokens, mask, *state, *args).numpy().mean()

    ours = np.asarray(jax.jit(lambda p: sample(policy.net(p), observation, jnp.asarray(noise), 10))(params))
    cosine = (ours * their_actions).sum() / np.linalg.norm(ours) / np.linalg.norm(their_actions)
    assert cosine >= 0.99999
    np.testing.assert_allclose(ours, their_actions, atol=2e-4)
    batch = {"observation": observation, "action": jnp.asarray(actions), "mask": jnp.ones((2, HORIZON), bool)}
    loss, _ = jax.jit(lambda p: flow_loss(policy.net(p), batch, jnp.asarray(noise), jnp.asarray(t), None))(params)
    assert float(loss) == pytest.approx(float(their_loss), rel=1e-5)

    back = to_lerobot(flatten_params(params), spec)
    read = {name.removeprefix("model.") for name in back}
    assert read == taken.used & set(theirs) - {n for n in theirs if n.endswith("lm_head.weight")}
    for name, value in back.items():
        np.testing.assert_array_equal(value, theirs[name.removeprefix("model.")])
