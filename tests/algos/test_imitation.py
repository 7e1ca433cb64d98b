from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.algos.imitation import Imitation
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import NotFoundError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows
from rlsvc.policies.diffusion import DiffusionPolicy, masked_mse
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.imitation import ImitationSpec

FEATURES = {"state": Feature((1,), "float32"), "action": Feature((1,), "float32")}
KEY = jax.random.key(7)


class Quadratic:
    """A fake policy: one constant action, whose loss has no noise."""

    contract = Contract({"state": FEATURES["state"]}, FEATURES["action"], 10.0, 2, 2)
    dtype, narrow, compiler_options = jnp.float32, "", MappingProxyType({})

    def init(self, key):
        return {"w": jnp.zeros((1,))}

    def loss(self, params, batch, key):
        prediction = jnp.broadcast_to(params["w"][None, None], batch["action"].shape)
        loss = masked_mse(prediction, batch["action"], batch["mask"])
        return loss, {"loss": loss}

    def initial_carry(self, batch_size):
        return ()

    def act(self, params, observation, carry, keys, options):
        return jnp.broadcast_to(params["w"], (keys.shape[0], 2, 1)), carry, {}


def windows(lengths=(5, 7)) -> Windows:
    steps = np.linspace(-1, 1, sum(lengths), dtype=np.float32)[:, None]
    table = EpisodeTable(
        {"state": steps, "action": steps**2}, np.cumsum(lengths), 10.0, np.zeros(len(steps), np.int32), ["a"]
    )
    return Windows.build(
        [table], weights=[1.0], groups=[0], observation=("state",), action="action", n_obs_steps=2, horizon=4
    )


def on_device(data: Windows) -> Windows:
    return jax.tree.map(jnp.asarray, data)


def algorithm(policy=None, **fields) -> Imitation:
    fields = {"batch_size": 8, "learning_rate": 0.05, "schedule": {"warmup_steps": 2}, **fields}
    spec = ImitationSpec.model_validate(fields)
    return Imitation(policy or Quadratic(), Normalizer.identity(FEATURES), spec, total_steps=20)


def run(made: Imitation, calls: list[int], data: Windows | None = None):
    state = made.init(jax.random.key(0))
    metrics = {}
    for count in calls:
        state, metrics = made.update("update", state, on_device(windows()) if data is None else data, KEY, count)
    return state, metrics


def assert_same(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, a), jax.tree.map(np.asarray, b))


def test_k_updates_in_one_call_equal_k_calls_of_one():
    many, _ = run(algorithm(), [6])
    ones, _ = run(algorithm(), [1] * 6)
    assert int(many.step) == 6
    assert_same(many, ones)


def test_data_on_the_host_and_on_the_device_give_the_same_updates():
    device, host = run(algorithm(), [3, 3])[0], run(algorithm(), [3, 3], windows())[0]
    # Two programs round differently; other windows would differ far more.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), device, host)


def test_accumulated_micro_batches_equal_one_batch_even_when_padding_is_uneven():
    one, metrics = run(algorithm(), [1, 1, 1])
    four, accumulated = run(algorithm(optimizer={"accumulation": 4}), [1, 1, 1])
    np.testing.assert_allclose(four.params["w"], one.params["w"], rtol=1e-5)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(accumulated[name], metrics[name], rtol=1e-5)


def test_the_learning_rate_and_the_gradient_norm_are_those_of_the_step():
    made = algorithm()
    state = made.init(jax.random.key(0))
    rates = []
    for _ in range(3):
        state, metrics = made.update("update", state, on_device(windows()), KEY, 1)
        rates.append(float(metrics["learning_rate"]))
    assert rates == pytest.approx([0, 0.025, 0.05])
    assert float(metrics["grad_norm"]) > 0


def test_the_average_acts_and_starts_at_the_weights():
    made = algorithm(ema={"power": 0.75, "max_decay": 0.5})
    state = made.init(jax.random.key(0))
    expected = np.zeros(1)
    for step in range(4):
        state, _ = made.update("update", state, on_device(windows()), KEY, 1)
        decay = min(1 - (1 + step) ** -0.75, 0.5)
        expected = decay * expected + (1 - decay) * np.asarray(state.params["w"])
    np.testing.assert_allclose(made.acting_params(state)["w"], expected, rtol=1e-5)
    raw = algorithm(ema=None)
    assert raw.acting_params(run(raw, [1])[0]) is not None
    assert run(raw, [1])[0].ema is None


def test_steady_state_compiles_nothing():
    made, data = algorithm(), on_device(windows())
    state = made.init(jax.random.key(0))
    for count in (4, 4, 4, 2, 4, 2):
        state, _ = made.update("update", state, data, KEY, count)
    assert made._update._cache_size() == 2  # one program for each K


def test_validation_is_the_same_every_time_and_does_not_consume_the_state():
    made, data = algorithm(), on_device(windows())
    state = made.init(jax.random.key(0))
    first = float(made.validate(state, data, KEY)["loss"])
    batch = windows().gather(np.arange(12))
    valid = batch["action"][batch["mask"]]
    assert first == pytest.approx(float((valid**2).mean()), rel=1e-5)
    assert float(made.validate(state, data, KEY)["loss"]) == first
    made.update("update", state, data, KEY, 1)


def test_an_unknown_hook_is_refused():
    made = algorithm()
    with pytest.raises(NotFoundError, match=r"unknown hook of imitation 'updat'\. Did you mean 'update'\?"):
        made.update("updat", made.init(KEY), windows(), KEY, 1)


def test_a_tiny_diffusion_policy_learns_one_episode_in_bf16_with_float32_weights():
    spec = DiffusionSpec.model_validate(
        {"n_obs_steps": 2, "horizon": 4, "n_action_steps": 2, "train_steps": 10, "sample_steps": 2,
         "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8}}
    )  # fmt: skip
    policy = DiffusionPolicy(spec, Quadratic.contract, jnp.bfloat16)
    made = algorithm(policy, learning_rate=1e-2, schedule={"name": "constant", "warmup_steps": 0}, ema=None)
    data = on_device(windows((10,)))
    state = jax.jit(made.init)(jax.random.key(0))
    before = float(made.validate(state, data, KEY)["loss"])
    state, _ = made.update("update", state, data, KEY, 150)
    assert float(made.validate(state, data, KEY)["loss"]) < 0.5 * before
    floats = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.dtype != jnp.int32}
    assert floats == {jnp.dtype("float32")}
