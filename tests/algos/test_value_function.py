import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.algos.value_function import ValueLearning, explained_variance, value_loss
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import NotFoundError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows
from rlsvc.nn.distributions import HLGauss, TwoHot
from rlsvc.policies.value_mlp import ValueMlp
from rlsvc.spec.value_function import ValueFunctionSpec, ValueMlpSpec

FEATURES = {"state": Feature((1,), "float32"), "action": Feature((1,), "float32")}
KEY = jax.random.key(7)
STATE = np.linspace(-1, 1, 40, dtype=np.float32)
# Far from zero and of another scale than the net's, so that what is not brought to units shows.
RETURNS = 500 + 100 * STATE**2


def windows(returns=RETURNS) -> Windows:
    columns = {"state": STATE[:, None], "action": STATE[:, None], "return": np.asarray(returns, np.float32)}
    table = EpisodeTable(columns, np.array([40]), 10.0, np.zeros(40, np.int32), ["a"])
    return Windows.build(
        [table], weights=[1.0], groups=[0], observation=("state",), action="action", n_obs_steps=1, horizon=1,
        extra=("return",),
    )  # fmt: skip


def learning(head="hl_gauss", **fields) -> ValueLearning:
    policy = ValueMlpSpec.model_validate(
        {"hidden": [16], "head": {"name": head, **({"bins": 21} if head == "hl_gauss" else {})}}
    )
    function = ValueMlp(policy, Contract({"state": FEATURES["state"]}, FEATURES["action"], 10.0, 1, 0))
    columns = {"state": STATE[:, None], "action": STATE[:, None], "return": RETURNS}
    normalizer = Normalizer.fit({"default": columns}, {**FEATURES, "return": Feature((), "float32")}, {})
    fields = {
        "batch_size": 16,
        "learning_rate": 1e-2,
        "ema": None,
        "schedule": {"name": "constant", "warmup_steps": 0},
        **fields,
    }
    return ValueLearning(function, normalizer, ValueFunctionSpec.model_validate(fields), total_steps=200)


def started(made: ValueLearning):
    return jax.jit(made.init)(jax.random.key(0))


def on_device(data: Windows) -> Windows:
    return jax.tree.map(jnp.asarray, data)


def test_regression_is_the_mean_squared_error():
    loss = value_loss(jnp.array([[1.0], [3.0]]), jnp.array([0.0, 5.0]), TwoHot(bins=0))
    assert float(loss) == pytest.approx((1 + 4) / 2)


def test_hl_gauss_is_the_mean_cross_entropy_with_the_histogram():
    head = HLGauss(4, -2.0, 2.0, sigma_ratio=1.0)
    logits = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]))
    p = np.array([0.14239, 0.35761, 0.35761, 0.14239])
    expected = (-(p * np.log([0.1, 0.2, 0.3, 0.4])).sum() + np.log(4)) / 2
    assert float(value_loss(logits, jnp.zeros(2), head)) == pytest.approx(expected, abs=1e-4)


def test_explained_variance_is_one_for_the_returns_and_zero_for_any_constant():
    returns = jnp.array([1.0, 2.0, 6.0])
    assert float(explained_variance(returns + 10, returns)) == pytest.approx(1)
    assert float(explained_variance(jnp.full(3, 7.0), returns)) == pytest.approx(0)
    # Var[G] = 14/3 and Var[G - V] = 2/3.
    assert float(explained_variance(jnp.array([0.0, 2, 5]), jnp.array([1.0, 2, 6]))) == pytest.approx(
        1 - (2 / 9) / (14 / 3)
    )
    assert float(explained_variance(jnp.array([1.0, 2.0]), jnp.array([3.0, 3.0]))) == 0


@pytest.mark.parametrize("head", ["regression", "hl_gauss"])
def test_both_heads_learn_a_curve_and_say_what_they_know_in_the_units_of_the_reward(head):
    made, data = learning(head), on_device(windows())
    state = started(made)
    before = {name: float(value) for name, value in made.validate(state, data, KEY).items()}
    assert before["value"] == pytest.approx(550, abs=1)  # the middle of 500 to 600
    assert before["return"] == pytest.approx(RETURNS.mean(), rel=1e-5)
    assert before["explained_variance"] == pytest.approx(0, abs=1e-4)
    state, metrics = made.update("update", state, data, KEY, 200)
    after = {name: float(value) for name, value in made.validate(state, data, KEY).items()}
    assert after["loss"] < before["loss"]
    assert after["explained_variance"] > 0.9
    assert after["value"] == pytest.approx(after["return"], abs=10)
    assert {"loss", "value", "return", "explained_variance", "grad_norm"} <= metrics.keys()
    assert ("out_of_support" in metrics) == (head == "hl_gauss")


def test_returns_beyond_the_support_are_counted():
    made, data = learning(), windows([*[1000.0] * 10, *RETURNS[10:]])
    found = made.validate(started(made), on_device(data), KEY)
    assert float(found["out_of_support"]) == pytest.approx(0.25)


def test_accumulated_micro_batches_equal_one_batch():
    states = []
    for accumulation in (1, 4):
        made = learning(optimizer={"accumulation": accumulation})
        state, _ = made.update("update", started(made), on_device(windows()), KEY, 2)
        states.append(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *states)


def test_steady_state_compiles_nothing_and_data_on_the_host_gives_the_same_weights():
    made = learning()
    device, host = started(made), started(made)
    for _ in range(3):
        device, _ = made.update("update", device, on_device(windows()), KEY, 2)
        host, _ = made.update("update", host, windows(), KEY, 2)
    assert (made._update._cache_size(), made._update_from_batches._cache_size()) == (1, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), device.params, host.params)


def test_an_unknown_hook_is_refused():
    made = learning()
    with pytest.raises(NotFoundError, match=r"unknown hook of value_function 'updat'\. Did you mean 'update'\?"):
        made.update("updat", made.init(KEY), windows(), KEY, 1)
