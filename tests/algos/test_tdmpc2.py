from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlsvc.algos.api import Phase
from rlsvc.algos.tdmpc2 import TDMPC2, behaviour_log_prob, masked_mean, model_loss, percentile, prior_loss
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import DatasetError, NotFoundError
from rlsvc.data.normalize import Normalizer
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec, TDMPC2Spec

TINY = {"encoder_dim": 8, "hidden_dim": 8, "latent_dim": 8, "simnorm_dim": 4, "bins": 11, "num_q": 3, "horizon": 2}
FEATURES = {"observation.state": Feature((3,), "float32")}
ACTION = Feature((2,), "float32")
KEY = jax.random.key(7)


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["on_host"])
@dataclass(frozen=True)
class Source:
    """A fake replay: sequences of noise, of which the last step of some lies beyond the end."""

    rows: dict
    on_host: bool = False

    def sample(self, key, batch_size, length):
        index = jax.random.randint(key, (batch_size,), 0, self.rows["reward"].shape[0])
        return {**jax.tree.map(lambda x: jnp.asarray(x)[index], self.rows), "index": index}

    def sample_many(self, key, count, batch_size, length):
        return jax.vmap(lambda k: self.sample(k, batch_size, length))(jax.random.split(key, count))


def source(features=None, on_host=False, n=32, h=2, tasks=0) -> Source:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    features = features or FEATURES
    observation = {name: normal(n, h + 1, *f.shape) for name, f in features.items() if name != "task_index"}
    if tasks:
        observation["task_index"] = np.repeat(rng.integers(0, tasks, n)[:, None], h + 1, 1)
    mask = np.ones((n, h), bool)
    mask[::3, -1] = False
    rows = {
        "observation": observation,
        "action": rng.uniform(-1, 1, (n, h, 2)).astype(np.float32),
        "reward": rng.uniform(0, 1, (n, h)).astype(np.float32),
        "terminated": rng.uniform(size=(n, h)) < 0.1,
        "mask": mask,
        "weight": np.ones(n, np.float32),
        "behaviour_mean": np.zeros((n, h, 2), np.float32),
        "behaviour_log_std": np.full((n, h, 2), -1.0, np.float32),
    }
    return Source(rows if on_host else jax.tree.map(jnp.asarray, rows), on_host)


def algorithm(features=None, policy=None, **fields) -> TDMPC2:
    features = features or FEATURES
    contract = Contract(features, ACTION, 20.0, 1, 1)
    made = TDMPC2Policy(TDMPC2PolicySpec.model_validate({**TINY, **(policy or {})}), contract)
    spec = TDMPC2Spec.model_validate({"batch_size": 8, **fields})
    return TDMPC2(made, Normalizer.identity({**features, "action": ACTION}), spec, total_steps=20)


def initial(made: TDMPC2):
    return jax.jit(made.init)(jax.random.key(0))


def run(made: TDMPC2, calls: list[int], data: Source):
    state = initial(made)
    metrics = {}
    for count in calls:
        state, metrics = made.update("update", state, data, KEY, count, Phase("joint", 0.5))
    return state, metrics


@pytest.fixture(scope="module")
def made() -> TDMPC2:
    """One algorithm for most tests, since compiling takes longer than they do."""
    return algorithm(policy={"episodic": True}, learning_rate=1e-2, tau=0.25, prioritized=True)


def assert_same(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.slow
def test_k_updates_in_one_call_equal_k_calls_of_one(made):
    many, ones = run(made, [2, 2], source())[0], run(made, [1] * 4, source())[0]
    assert int(many.step) == 4
    assert_same(many, ones)


@pytest.mark.slow
def test_steady_state_compiles_nothing(made):
    run(made, [1, 2], source())
    before = made._update._cache_size()
    run(made, [2, 1, 1, 2], source())
    assert made._update._cache_size() == before == 2  # one program for each K


def test_sequences_from_the_host_train_too_and_only_what_is_needed_travels(made):
    state, metrics = run(made, [1], source(on_host=True))
    assert int(state.step) == 1
    assert all(np.isfinite(value).all() for value in metrics.values())


def test_losses_fall_on_a_few_sequences(made):
    data = source(n=8)
    state, first = made.update("update", initial(made), data, KEY, 2)
    first = jax.tree.map(np.asarray, first)
    for _ in range(60):
        state, last = made.update("update", state, data, KEY, 2)
    assert float(last["reward_loss"]) < 0.7 * first["reward_loss"]
    assert float(last["termination_loss"]) < 0.7 * first["termination_loss"]
    assert float(last["total_loss"]) < first["total_loss"]


def test_priorities_come_back_with_the_rows_that_they_are_of(made):
    _, metrics = run(made, [2], source())
    assert metrics["index"].shape == metrics["priority"].shape == (2, 8)
    assert (np.asarray(metrics["priority"]) >= 0).all()


def sequences(made: TDMPC2, data: Source):
    return made._prepare(data.sample(KEY, 8, 2))


def weights(made: TDMPC2):
    """Not where training starts, where rewards and values are all the same."""

    def moved(key):
        leaves, tree = jax.tree.flatten(made.policy.init(key))
        noise = jax.random.normal(key, (sum(x.size for x in leaves),))
        ends = np.cumsum([x.size for x in leaves])[:-1]
        return jax.tree.unflatten(
            tree, [x + 0.3 * n.reshape(x.shape) for x, n in zip(leaves, jnp.split(noise, ends), strict=True)]
        )

    return jax.jit(moved)(KEY)


def losses(made: TDMPC2):
    """Functions (weights, target weights of the heads, batch) -> the two losses of those weights, compiled."""

    def both(params, target, batch):
        policy = made.policy
        model, prior = policy.model(params["model"]), policy.prior(params["prior"])
        slow = policy.model(nnx.State({**params["model"], "heads": target}))
        loss, (metrics, zs) = model_loss(model, slow, prior, batch, KEY, made.spec)
        of_prior, _ = prior_loss(prior, model, zs, batch, jnp.ones(()), KEY, made.spec)
        return loss, metrics, zs, of_prior

    return jax.jit(both)


def test_steps_beyond_the_episodes_end_do_not_change_the_loss():
    """lerobot#1717, openpi#894."""
    made = algorithm(policy={"episodic": True})
    batch = sequences(made, source())
    assert not batch["mask"].all()
    beyond = ~batch["mask"][..., None]
    changed = {
        **batch,
        "action": jnp.where(beyond, 0.77, batch["action"]),
        "reward": jnp.where(beyond[..., 0], 50.0, batch["reward"]),
        "terminated": batch["terminated"] | beyond[..., 0],
        "observation": {k: x.at[1:].set(jnp.where(beyond, 9.0, x[1:])) for k, x in batch["observation"].items()},
    }
    params, both = weights(made), losses(made)
    one, other = (both(params, params["model"]["heads"], b) for b in (batch, changed))
    assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-5)
    assert float(one[3]) == pytest.approx(float(other[3]), rel=1e-5)


def test_the_consistency_loss_is_the_discounted_error_of_the_rolled_out_latents():
    made = algorithm()
    batch, params = sequences(made, source()), weights(made)
    batch["mask"] = jnp.ones_like(batch["mask"])
    _, metrics, zs, _ = losses(made)(params, params["model"]["heads"], batch)

    @jax.jit
    def by_hand(params, batch):
        model, states, total = made.policy.model(params["model"]), [], 0.0
        task = model.task(None, 8)
        z = model.encode({k: x[0] for k, x in batch["observation"].items()}, task)
        for t in range(2):
            z = model.next(z, batch["action"][t], task)
            target = model.encode({k: x[t + 1] for k, x in batch["observation"].items()}, task)
            total += 0.5**t * ((z - target) ** 2).mean() / 2
            states.append(z)
        return total, jnp.stack(states)

    expected, states = by_hand(params, batch)
    assert float(metrics["consistency_loss"]) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(zs[1:], states, rtol=1e-4)


def test_nothing_is_bootstrapped_from_a_terminated_step_and_all_from_a_truncated_one():
    """ray#59958, skrl#449."""
    made = algorithm()
    batch, params, both = sequences(made, source()), weights(made), losses(made)
    target = jax.tree.map(jnp.copy, params["model"]["heads"])
    target["affines"][2][...] = target["affines"][2][...] + 3 * jnp.arange(16.0).reshape(1, 1, 16)

    def value_loss(target, terminated):
        ends = {**batch, "terminated": jnp.full_like(batch["terminated"], terminated)}
        return float(both(params, target, ends)[1]["value_loss"])

    same = params["model"]["heads"]
    assert value_loss(target, True) == pytest.approx(value_loss(same, True), rel=1e-6)
    assert value_loss(target, False) != pytest.approx(value_loss(same, False), rel=1e-3)


def test_the_target_moves_by_tau_and_the_encoder_learns_slower(made):
    before = initial(made)
    old = jax.tree.map(np.asarray, before)
    after, _ = made.update("update", before, source(), KEY, 1)
    values = after.params["model"]["heads"]
    assert_same(after.target, jax.tree.map(lambda t, q: 0.75 * t + 0.25 * np.asarray(q), old.target, values))

    def moved(name: str) -> float:
        kernels = [state.params["model"][name]["kernels"][1][...] for state in (after, old)]
        return float(np.abs(np.asarray(kernels[0]) - kernels[1]).max())

    # Adam's first step is the learning rate, whatever the gradient.
    assert moved("dynamics") == pytest.approx(1e-2, rel=1e-2)
    assert moved("encoder") == pytest.approx(3e-3, rel=1e-2)


def test_the_prior_climbs_the_values():
    made = algorithm(entropy_coef=0.0)
    batch, params, both = sequences(made, source()), weights(made), losses(made)
    loss = lambda prior: both({**params, "prior": prior}, params["model"]["heads"], batch)[3]  # noqa: E731
    before, gradient = jax.value_and_grad(loss)(params["prior"])
    after = loss(jax.tree.map(lambda w, g: w - 1e-2 * g, params["prior"], gradient))
    assert float(after) < float(before)


def test_the_behaviour_term_is_the_likelihood_under_the_planner_that_acted():
    action = jnp.array([[[0.5, -0.5]]])
    batch = {"behaviour_mean": jnp.array([[[0.1, -0.5]]]), "behaviour_log_std": jnp.log(jnp.array([[[0.2, 0.5]]]))}
    normal = lambda x, m, s: -0.5 * ((x - m) / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)  # noqa: E731
    expected = normal(0.5, 0.1, 0.2) + normal(-0.5, -0.5, 0.5)
    assert float(behaviour_log_prob(action, batch, jnp.ones((1, 2)))[0, 0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_policy_regularisation_counts_once_values_are_spread():
    batch, zs = sequences(algorithm(behaviour_coef=1.0), source()), jax.random.uniform(KEY, (3, 8, 8))

    def loss(**fields) -> tuple[float, dict]:
        made = algorithm(**fields)
        model, prior = (
            f(w) for f, w in zip((made.policy.model, made.policy.prior), weights(made).values(), strict=True)
        )
        value, (metrics, _) = prior_loss(prior, model, zs, batch, jnp.ones(()), KEY, made.spec)
        return float(value), metrics

    plain, _ = loss()
    small, _ = loss(behaviour_coef=0.5, behaviour_threshold=1e6)
    spread, metrics = loss(behaviour_coef=0.5, behaviour_threshold=0.0)
    assert small == pytest.approx(plain, rel=1e-6)
    assert spread == pytest.approx(plain + 0.5 * float(metrics["behaviour_loss"]), rel=1e-5)
    assert abs(spread - plain) > 1e-3


def test_the_percentile_is_numpys_over_what_is_masked():
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    mask = np.arange(50) % 3 > 0
    for q in (5, 50, 95):
        got = float(percentile(jnp.asarray(x), jnp.asarray(mask), float(q)))
        assert got == pytest.approx(np.percentile(x[mask], q), rel=1e-4)


def test_a_mean_over_nothing_is_zero():
    x = jnp.array([[1.0, 3.0], [5.0, 7.0]])
    mask = jnp.array([[True, False], [False, False]])
    assert masked_mean(x, mask, jnp.array([0.5, 1.0])).tolist() == [0.5, 0.0]


@pytest.mark.slow
def test_tasks_learn_together_and_their_embeddings_stay_in_the_unit_ball():
    features = {**FEATURES, "task_index": Feature((), "int64")}
    tasks = {"tasks": [{"name": "a", "action_dim": 2}, {"name": "b", "action_dim": 1}], "task_dim": 4}
    made = algorithm(features, tasks, learning_rate=0.7)
    state, metrics = run(made, [1, 1], source(features, tasks=2))
    norms = np.linalg.norm(state.params["model"]["task_embedding"][...], axis=-1)
    assert (norms <= 1 + 1e-5).all()
    assert norms.max() > 0.5
    assert np.isfinite([float(v) for v in metrics.values()]).all()


@pytest.mark.slow
def test_pixels_train():
    features = {"observation.image": Feature((64, 64, 3), "uint8")}
    made = algorithm(features, {"channels": 2}, batch_size=2)
    state, metrics = run(made, [1], source(features, n=4))
    assert int(state.step) == 1
    assert np.isfinite(float(metrics["total_loss"]))


@pytest.mark.slow
def test_tdmpcs_heads_and_free_latents_train_too():
    """The parts of TD-MPC (arXiv:2203.04955) that are configuration."""
    made = algorithm(policy={"bins": 0, "simnorm_dim": None, "num_q": 2})
    _, metrics = run(made, [1], source())
    assert np.isfinite([float(v) for v in metrics.values()]).all()


@pytest.mark.slow
def test_several_seeds_train_as_one_program(made):
    keys, data = jax.random.split(jax.random.key(3), 2), source()
    states = jax.jit(jax.vmap(made.init))(keys)
    batches = jax.vmap(lambda k: data.sample(k, 8, 2))(keys)
    batches = {name: batches[name] for name in made._names}
    many, _ = jax.jit(jax.vmap(made.update_once))(states, batches, keys)
    for i in range(2):
        state, batch = jax.tree.map(lambda x, i=i: x[i], states), jax.tree.map(lambda x, i=i: x[i : i + 1], batches)
        alone, _ = made._update_from_batches(state, batch, keys[i])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, atol=1e-3), many.target, alone.target)
        np.testing.assert_allclose(many.scale[i], alone.scale, rtol=1e-4)


def test_validation_repeats_itself_and_consumes_nothing(made):
    data, state = source(), initial(made)
    first = float(made.validate(state, data, KEY)["loss"])
    assert float(made.validate(state, data, KEY)["loss"]) == first
    made.update("update", state, data, KEY, 1)


def test_an_unknown_hook_is_refused(made):
    with pytest.raises(NotFoundError, match=r"unknown hook of tdmpc2 'updat'\. Did you mean 'update'\?"):
        made.update("updat", initial(made), source(), KEY, 1)


def test_a_replay_without_the_behaviour_is_refused_by_name():
    data = source()
    without = Source({name: x for name, x in data.rows.items() if name != "behaviour_mean"})
    made = algorithm(behaviour_coef=1.0)
    with pytest.raises(DatasetError, match=r"no 'behaviour_mean', which algo\.behaviour_coef > 0 needs"):
        made.update("update", initial(made), without, KEY, 1)
