import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from rlsvc.algos.sac import SAC, actor_loss, critic_loss, random_subset, td_target, temperature_loss, weighted_mean
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import DatasetError, NotFoundError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.normalize import Normalizer
from rlsvc.data.replay_table import replay_from_table
from rlsvc.data.sequence import mix
from rlsvc.policies.gaussian import GaussianPolicy
from rlsvc.spec.replay import ReplaySpec
from rlsvc.spec.sac import GaussianPolicySpec, SACSpec

FEATURES = {"observation.state": Feature((3,), "float32")}
ACTION = Feature((2,), "float32")
KEY = jax.random.key(7)


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["on_host"])
@dataclass(frozen=True)
class Source:
    """A fake replay: transitions of noise."""

    rows: dict
    on_host: bool = False

    def sample(self, key, batch_size, length):
        index = jax.random.randint(key, (batch_size,), 0, self.rows["reward"].shape[0])
        return {**jax.tree.map(lambda x: jnp.asarray(x)[index], self.rows), "index": index}

    def sample_many(self, key, count, batch_size, length):
        return jax.vmap(lambda k: self.sample(k, batch_size, length))(jax.random.split(key, count))


def source(features=None, on_host=False, n=32, **changes) -> Source:
    rng = np.random.default_rng(0)
    features = features or FEATURES
    rows = {
        "observation": {name: rng.normal(size=(n, 2, *f.shape)).astype(np.float32) for name, f in features.items()},
        "action": rng.uniform(-1, 1, (n, 1, 2)).astype(np.float32),
        "reward": rng.uniform(0, 1, (n, 1)).astype(np.float32),
        "terminated": rng.uniform(size=(n, 1)) < 0.1,
        "mask": np.ones((n, 1), bool),
        "weight": np.ones(n, np.float32),
        **changes,
    }
    return Source(rows if on_host else jax.tree.map(jnp.asarray, rows), on_host)


def algorithm(features=None, policy=None, **fields) -> SAC:
    features = features or FEATURES
    spec = GaussianPolicySpec.model_validate({"hidden_dims": [8], "channels": 2, "image_dim": 4, **(policy or {})})
    made = GaussianPolicy(spec, Contract(features, ACTION, 20.0, 1, 1))
    algo = SACSpec.model_validate({"critic_dims": [8], "num_critics": 3, "batch_size": 8, **fields})
    return SAC(made, Normalizer.identity({**features, "action": ACTION}), algo, total_steps=20)


def initial(made: SAC):
    return jax.jit(made.init)(jax.random.key(0))


def run(made: SAC, calls: list[int], data: Source):
    state, metrics = initial(made), {}
    for count in calls:
        state, metrics = made.update("update", state, data, KEY, count)
    return state, metrics


@pytest.fixture(scope="module")
def made() -> SAC:
    """One algorithm for most tests, since compiling takes longer than they do."""
    return algorithm(learning_rate=1e-2, tau=0.25, critic_to_actor_ratio=2)


def host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


def largest_change(a, b) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# Losses, by hand


def test_targets_take_the_smallest_critic_and_the_entropy_and_stop_at_termination():
    next_q = jnp.array([[2.0, 5.0], [3.0, 4.0]])
    log_prob, reward, terminated = jnp.array([-1.0, 0.5]), jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0])
    got = td_target(next_q, log_prob, reward, terminated, discount=0.9, alpha=0.2)
    np.testing.assert_allclose(got, [1 + 0.9 * (2 + 0.2), 2.0], rtol=1e-6)  # ray#59958: only termination ends it
    without = td_target(next_q, log_prob, reward, jnp.zeros(2), discount=0.9, alpha=0.0)
    np.testing.assert_allclose(without, [1 + 0.9 * 2, 2 + 0.9 * 4], rtol=1e-6)


def test_the_critics_loss_is_the_mean_square_over_critics_and_rows():
    q, y = jnp.array([[1.0, 2.0], [3.0, 0.0]]), jnp.array([2.0, 0.0])
    assert float(critic_loss(q, y, jnp.ones(2))) == pytest.approx(((1 + 1) / 2 + (4 + 0) / 2) / 2)
    assert float(critic_loss(q, y, jnp.array([1.0, 0.0]))) == pytest.approx(1.0)  # the second is no transition
    assert float(critic_loss(q, y, jnp.array([0.5, 1.0]))) == pytest.approx((0.5 * 1 + 2) / 2)


def test_the_actor_weighs_its_entropy_against_the_mean_of_all_critics():
    q, log_prob = jnp.array([[1.0, 2.0], [3.0, 6.0]]), jnp.array([0.5, -1.0])
    assert float(actor_loss(q, log_prob, 0.1, jnp.ones(2))) == pytest.approx(((0.05 - 2) + (-0.1 - 4)) / 2)


def test_the_temperature_falls_while_there_is_more_entropy_than_wanted():
    log_prob, target = jnp.array([-2.0, -4.0]), -1.0  # an entropy of 3 nats, -1 are wanted
    loss, gradient = jax.value_and_grad(temperature_loss)(jnp.log(0.5), log_prob, target, jnp.ones(2))
    assert float(loss) == pytest.approx(-0.5 * (-3.0 - 1.0))
    assert float(gradient) == pytest.approx(2.0)  # alpha * (entropy - target)
    assert float(jax.grad(temperature_loss)(jnp.log(0.5), jnp.array([3.0, 5.0]), target, jnp.ones(2))) < 0


def test_a_mean_over_nothing_is_zero():
    assert float(weighted_mean(jnp.array([jnp.nan, 1.0]), jnp.zeros(2))) == 0.0


def test_a_subset_has_different_critics_and_every_one_as_often():
    draws = np.asarray(jax.vmap(lambda k: random_subset(k, 5, 2))(jax.random.split(KEY, 5000)))
    assert (draws[:, 0] != draws[:, 1]).all()
    np.testing.assert_allclose(np.bincount(draws.ravel(), minlength=5) / 5000, 0.4, atol=0.03)


# Updates


@pytest.mark.slow
def test_k_updates_in_one_call_equal_k_calls_of_one(made):
    many, ones = run(made, [2, 2], source())[0], run(made, [1] * 4, source())[0]
    assert int(many.step) == 4
    assert_same(many, ones)


def test_steady_state_compiles_nothing(made):
    run(made, [1, 2], source())
    before = made._update._cache_size()
    run(made, [2, 1, 1, 2], source())
    assert made._update._cache_size() == before == 2  # one program for each K


def test_transitions_from_the_host_train_too(made):
    state, metrics = run(made, [2], source(on_host=True))
    assert int(state.step) == 2
    assert all(np.isfinite(value).all() for value in metrics.values())


def test_actor_and_temperature_learn_in_every_second_update_and_the_critics_in_all(made):
    states = [host(initial(made))]
    for _ in range(3):
        state, _ = made.update("update", jax.tree.map(jnp.asarray, states[-1]), source(), KEY, 1)
        states.append(host(state))
    actors = [largest_change(a.params["actor"], b.params["actor"]) for a, b in itertools.pairwise(states)]
    critics = [largest_change(a.critics, b.critics) for a, b in itertools.pairwise(states)]
    assert [change > 0 for change in actors] == [False, True, False]
    assert [float(s.log_alpha) != 0.0 for s in states] == [False, False, True, True]
    assert min(critics) > 0
    assert float(states[3].loss) == float(states[2].loss) != 0.0


def test_the_target_moves_by_tau(made):
    before = initial(made)
    old = host(before)
    after, _ = made.update("update", before, source(), KEY, 1)
    judges = {"encoder": after.params["encoder"], "critics": after.critics}
    assert_same(after.target, jax.tree.map(lambda t, q: 0.75 * t + 0.25 * np.asarray(q), old.target, judges))


def test_what_is_no_transition_changes_nothing(made):
    """lerobot#1717, openpi#894."""
    mask = np.arange(32)[:, None] % 2 == 0
    clean, beyond = source(mask=mask).rows, ~mask
    changed = {**clean, "reward": jnp.where(beyond, 50.0, clean["reward"])}
    changed["observation"] = {k: jnp.where(beyond[:, :, None], 9.0, x) for k, x in clean["observation"].items()}
    one, other = (run(made, [1, 1], Source(rows))[0] for rows in (clean, changed))
    assert_same(one.critics, other.critics)
    assert_same(one.params, other.params)


def test_half_of_a_batch_comes_from_demonstrations(made):
    """RLPD, section 4.1: with real replays, drawn inside the compiled update."""

    def replay(seed: int):
        rng = np.random.default_rng(seed)
        columns = {
            "observation.state": rng.normal(size=(40, 3)).astype(np.float32),
            "action": rng.uniform(-1, 1, (40, 2)).astype(np.float32),
            "reward": rng.uniform(size=40).astype(np.float32),
        }
        table = EpisodeTable(columns, np.array([20, 40]), 10.0, np.zeros(40, np.int32), ["swing"])
        placed = ReplaySpec(placement="device")
        return replay_from_table(table, observation=("observation.state",), reward="reward", spec=placed)

    views = {"replay": replay(0).view(), "demonstrations": replay(1).view()}
    both = mix(views, {"replay": 0.5, "demonstrations": 0.5})
    assert both.sizes(made.spec.batch_size) == {"replay": 4, "demonstrations": 4}
    state, metrics = made.update("update", initial(made), both, KEY, 1)
    assert int(state.step) == 1
    assert all(np.isfinite(float(value)) for value in metrics.values())


def test_only_the_critics_move_the_encoder():
    features = {"observation.image": Feature((40, 40, 3), "uint8")}
    made = algorithm(features, {"shift": 2}, batch_size=2)
    data = source(features, n=4)
    before = initial(made)

    @jax.jit
    def both(state, rows):
        state, metrics = made.update_once(state, rows, KEY)
        # The actor's own step, which leaves the encoder as it is.
        return state, made._improve(state, made._prepare(rows), KEY), metrics

    after, improved, metrics = both(before, data.rows)
    assert largest_change(host(before.params["encoder"]), host(after.params["encoder"])) > 0
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert largest_change(host(after.params["encoder"]), host(improved.params["encoder"])) == 0
    assert largest_change(host(after.params["actor"]), host(improved.params["actor"])) > 0


@pytest.mark.slow
def test_values_of_a_known_problem_are_found():
    """One step, then it is over: a critic is to say the reward of the action, and the actor to find the best one."""
    rng = np.random.default_rng(1)
    action = rng.uniform(-1, 1, (256, 1, 2)).astype(np.float32)
    reward = -((action - np.array([0.5, -0.3])) ** 2).sum(-1).astype(np.float32)
    data = source(n=256, action=action, reward=reward, terminated=np.ones((256, 1), bool))
    made = algorithm(
        policy={"hidden_dims": [16]}, critic_dims=[32], batch_size=64, learning_rate=1e-2, target_entropy=-6.0
    )
    state, metrics = run(made, [100] * 3, data)
    assert float(metrics["critic_loss"]) < 0.05
    z = jnp.asarray(data.rows["observation"]["observation.state"][:, 0])
    mean, _ = made.policy.actor(state.params["actor"])(z)
    np.testing.assert_allclose(np.tanh(np.asarray(mean)).mean(0), [0.5, -0.3], atol=0.15)


def test_without_the_entropy_in_the_backup_the_temperature_does_not_reach_the_targets():
    rows = source().rows
    for backup, same in ((True, False), (False, True)):
        made = algorithm(entropy_backup=backup)
        target = jax.jit(lambda state, made=made: made._target(state, made._prepare(rows), KEY)[0])
        state = initial(made)
        assert np.allclose(target(state), target(replace(state, log_alpha=jnp.log(3.0)))) is same


def test_the_wanted_entropy_is_half_a_nat_below_zero_for_each_action_dimension():
    assert algorithm().target_entropy == -1.0
    assert algorithm(target_entropy=-3.0).target_entropy == -3.0
    assert float(jnp.exp(initial(algorithm(initial_temperature=0.3)).log_alpha)) == pytest.approx(0.3)


def test_validation_repeats_itself(made):
    state = initial(made)
    first = float(made.validate(state, source(), KEY)["loss"])
    assert float(made.validate(state, source(), KEY)["loss"]) == first
    assert math.isfinite(first)


def test_what_does_not_fit_is_refused_by_name(made):
    with pytest.raises(NotFoundError, match=r"unknown hook of sac 'updat'\. Did you mean 'update'"):
        made.update("updat", initial(made), source(), KEY, 1)
    rows = {name: x for name, x in source().rows.items() if name != "reward"}
    with pytest.raises(DatasetError, match="batch: no 'reward'"):
        made._prepare(rows)
    with pytest.raises(ValidationError, match="num_target_critics: got 4, at most num_critics = 3"):
        SACSpec(num_critics=3, num_target_critics=4)
