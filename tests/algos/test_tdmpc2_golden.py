"""The same weights and batch as in the authors' program give the same numbers, over 20 updates."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.algos.tdmpc2 import TDMPC2
from rlsvc.core.contract import Contract, Feature
from rlsvc.data.normalize import Normalizer
from rlsvc.policies.tdmpc2 import Task, TDMPC2Policy
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec, TDMPC2Spec

FEATURES = {"observation.state": Feature((5,), "float32")}
ACTION = Feature((2,), "float32")
SPEC = TDMPC2PolicySpec(
    latent_dim=16,
    hidden_dim=16,
    encoder_dim=8,
    num_q=2,  # so that a random pair is always the same
    dropout=0.0,
    log_std_range=(-20.0, -19.9),  # and the prior has next to no noise
    samples=64,
    policy_samples=8,
    elites=16,
    episodic=True,
)


@pytest.fixture(scope="module")
def golden(root: Path) -> dict[str, np.ndarray]:
    with np.load(root / "tests" / "data" / "tdmpc2" / "golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def algorithm() -> TDMPC2:
    policy = TDMPC2Policy(SPEC, Contract(FEATURES, ACTION, 20.0, 1, 1))
    return TDMPC2(policy, Normalizer.identity({**FEATURES, "action": ACTION}), TDMPC2Spec(batch_size=8), total_steps=1)


def fill(net, name: str, golden) -> None:
    """Give a stack of nets the weights [E, d, o] and the vectors [E, o] of this name."""
    for i, kernel in enumerate(net["kernels"].values()):
        weight = golden[f"{name}.{i}.w"]
        weight = weight if i else weight.swapaxes(0, 1)
        kernel[...] = jnp.pad(weight, [(0, n - m) for m, n in zip(weight.shape, kernel.shape, strict=True)])
        vectors = [golden[f"{name}.{i}.{k}"] for k in "bso" if f"{name}.{i}.{k}" in golden]
        affine = net["affines"][i]
        affine[...] = jnp.pad(np.stack(vectors, 1), ((0, 0), (0, 0), (0, affine.shape[-1] - vectors[0].shape[-1])))


def state_of(algorithm: TDMPC2, golden):
    state = jax.jit(algorithm.init)(jax.random.key(0))
    for name in ("encoder", "dynamics", "heads", "ending"):
        fill(state.params["model"][name], name, golden)
    fill(state.params["prior"]["net"], "prior", golden)
    fill(state.target, "heads", golden)
    return state


def test_twenty_updates_have_the_losses_and_gradients_of_the_authors_program(algorithm, golden):
    batch = {
        "observation": {"observation.state": golden["observation"].swapaxes(0, 1)},
        "action": golden["action"].swapaxes(0, 1),
        "reward": golden["reward"].T,
        "terminated": golden["terminated"].T,
        "mask": np.ones((8, 3), bool),
        "weight": np.ones(8, np.float32),
        "index": np.zeros(8, np.int32),
    }
    state, update = state_of(algorithm, golden), jax.jit(algorithm.update_once)
    for i in range(20):
        state, metrics = update(state, batch, jax.random.key(3))
        for name in ("consistency_loss", "reward_loss", "value_loss", "termination_loss", "total_loss"):
            assert float(metrics[name]) == pytest.approx(golden[f"after.{name}"][i], rel=1e-4), (name, i)
        for name in ("grad_norm", "prior_grad_norm", "scale"):
            assert float(metrics[name]) == pytest.approx(golden[f"after.{name}"][i], rel=1e-3), (name, i)
    assert golden["after.scale"][-1] > 1.05  # or the percentiles would not have been tried


def test_action_sequences_are_worth_what_the_authors_program_says(algorithm, golden):
    policy, params = algorithm.policy, state_of(algorithm, golden).params

    @jax.jit
    def values(params, z, sequences):
        model, prior = policy.model(params["model"]), policy.prior(params["prior"])
        one = Task(*(x[0] for x in model.task(None, 1)))
        return policy._value_function(model, prior, z, one)(sequences, jnp.zeros((64, 2)), jnp.array([0, 1]))

    got = values(params, golden["z"][0], golden["sequences"])
    np.testing.assert_allclose(got, golden["values"], rtol=1e-3, atol=1e-4)
