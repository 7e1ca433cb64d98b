from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError
from rlsvc.policies import ActOptions, make_policy
from rlsvc.policies.tdmpc2 import Task, TDMPC2Policy, random_pair, ranks
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec

TINY = {"encoder_dim": 8, "hidden_dim": 8, "latent_dim": 8, "simnorm_dim": 4, "bins": 11, "num_q": 3,
        "samples": 16, "policy_samples": 4, "elites": 4, "iterations": 2}  # fmt: skip
STATE = {"observation.state": Feature((3,), "float32")}
EXPLORE, ACT = ActOptions(explore=True), ActOptions()


def contract(observation=None, action=2) -> Contract:
    return Contract(observation or STATE, Feature((action,), "float32"), 20.0, 1, 1)


def make(observation=None, **changes) -> tuple[TDMPC2Policy, dict]:
    policy = TDMPC2Policy(TDMPC2PolicySpec.model_validate({**TINY, **changes}), contract(observation))

    def weights(key):
        # Not where training starts, where rewards and values are all the same.
        leaves, tree = jax.tree.flatten(policy.init(key))
        noise = jax.random.normal(key, (sum(x.size for x in leaves),))
        ends = np.cumsum([x.size for x in leaves])[:-1]
        moved = [x + 0.3 * n.reshape(x.shape) for x, n in zip(leaves, jnp.split(noise, ends), strict=True)]
        return jax.tree.unflatten(tree, moved)

    return policy, jax.jit(weights)(jax.random.key(0))


@partial(jax.jit, static_argnums=(0, 1))
def compiled(policy, options, params, observation, carry, keys):
    return policy.act(params, observation, carry, keys, options)


def act(policy, params, rows, keys, options=ACT, carry=None, **more):
    observation = {"observation.state": jnp.asarray(rows, jnp.float32)[:, None], **more}
    carry = policy.initial_carry(len(rows)) if carry is None else carry
    return compiled(policy, options, params, observation, carry, keys)


@pytest.fixture(scope="module")
def made():
    return make()


ROWS = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(5), 3)


def test_an_action_does_not_depend_on_the_rest_of_its_batch(made):
    together = act(*made, ROWS, KEYS, EXPLORE)
    alone = act(*made, ROWS[1:2], KEYS[1:2], EXPLORE)
    np.testing.assert_allclose(together[0][1:2], alone[0], atol=1e-4)
    np.testing.assert_allclose(together[1][1:2], alone[1], atol=1e-4)


def test_the_planner_has_a_precision_of_its_own_and_learning_keeps_the_runs(made):
    """bf16 rounds to three digits; without a planner the prior acts, so that actions can be compared."""
    params = made[1]
    exact, rounded = (make(plan=False, plan_precision=precision)[0] for precision in ("fp32", "bf16"))
    here, there = (np.asarray(act(policy, params, ROWS, KEYS)[0]) for policy in (exact, rounded))
    assert not np.array_equal(here, there)
    np.testing.assert_allclose(here, there, atol=0.05)
    assert rounded.dtype == exact.dtype == jnp.float32
    plain = make(plan=False)[0]
    np.testing.assert_array_equal(act(plain, params, ROWS, KEYS)[0], here)


def test_actions_stay_in_their_range_and_the_carry_is_the_plan(made):
    action, carry, extras = act(*made, ROWS, KEYS, EXPLORE)
    assert action.shape == (3, 1, 2)
    assert carry.shape == (3, 3, 2)
    assert np.abs(action).max() <= 1
    assert {k: v.shape for k, v in extras.items()} == {"behaviour_mean": (3, 2), "behaviour_log_std": (3, 2)}
    log_std = np.asarray(extras["behaviour_log_std"])
    assert (log_std >= np.log(0.05) - 1e-5).all()
    assert (log_std <= np.log(2) + 1e-5).all()


def test_exploring_adds_the_recorded_noise_to_the_recorded_mean(made):
    plain, _, extras = act(*made, ROWS, KEYS)
    noisy, _, same = act(*made, ROWS, KEYS, EXPLORE)
    np.testing.assert_allclose(plain[:, 0], extras["behaviour_mean"], atol=1e-6)
    np.testing.assert_allclose(same["behaviour_mean"], extras["behaviour_mean"], atol=1e-6)
    assert (np.abs(noisy - plain).max((1, 2)) > 0).all()


def test_the_plan_goes_on_where_the_last_one_stood_one_step_later(made):
    policy, params = made
    # With one elite and a narrow Gaussian the plan stays near its start.
    narrow = TDMPC2Policy(policy.spec.replace(policy_samples=0, min_std=1e-4, max_std=2e-4), policy.contract)
    carry = jnp.tile(jnp.array([[0.1, 0.1], [0.5, -0.5], [0.9, 0.2]])[None], (3, 1, 1))
    action, after, _ = act(narrow, params, ROWS, KEYS, carry=carry)
    np.testing.assert_allclose(action[:, 0], [[0.5, -0.5]] * 3, atol=2e-3)
    np.testing.assert_allclose(after[0], [[0.5, -0.5], [0.9, 0.2], [0, 0]], atol=2e-3)


@partial(jax.jit, static_argnums=0)
def value_of(policy, params, z, actions, eps, pair):
    """Value of sequences [H, N, A] by the planner's own function."""
    model, prior = policy.model(params["model"]), policy.prior(params["prior"])
    one = Task(*(x[0] for x in model.task(None, 1)))
    return policy._value_function(model, prior, z, one)(actions, eps, pair)


@partial(jax.jit, static_argnums=0)
def value_by_hand(policy, params, z, actions, eps, pair):
    """Discounted rewards and the final value of one sequence [H, A], by the model's public methods."""
    model, prior = policy.model(params["model"]), policy.prior(params["prior"])
    task, state, total = model.task(None, 1), z[None], 0.0
    for t, a in enumerate(actions):
        logits = model.reward_and_q(state, a[None], task, None)
        total += 0.99**t * model.two_hot.mean(logits[0])[0]
        state = model.next(state, a[None], task)
    logits = model.reward_and_q(state, prior.sample(state, eps[None], task), task, None)
    return total + 0.99**3 * model.two_hot.mean(logits[1:])[pair, 0].mean()


def sequences_of_noise():
    draw = lambda seed, *shape: jax.random.uniform(jax.random.key(seed), shape, minval=-1)  # noqa: E731
    return draw(0, 8), draw(1, 3, 16, 2), draw(2, 16, 2)


def test_a_sequence_is_worth_its_rewards_and_the_value_at_its_end(made):
    z, actions, eps = sequences_of_noise()
    pair = jnp.array([2, 0])
    values = value_of(*made, z, actions, eps, pair)
    expected = [value_by_hand(*made, z, actions[:, i], eps[i], pair) for i in range(3)]
    np.testing.assert_allclose(values[:3], expected, rtol=1e-4)


class Valley:
    """A policy whose sequences are worth minus the squared distance to a target: the planner must find it."""

    def __init__(self, target, **changes) -> None:
        self.policy, self.params = make(
            **{"samples": 256, "elites": 16, "iterations": 8, "policy_samples": 0, **changes}
        )
        self.policy._value_function = lambda *_: lambda actions, eps, pair: -((actions - target) ** 2).sum((0, 2))


def test_the_planner_finds_the_best_sequence():
    target = jnp.array([[0.5, -0.3], [-0.7, 0.2], [0.1, 0.9]])[:, None]
    valley = Valley(target, evaluation="mean", temperature=20.0)
    action, plan, _ = act(valley.policy, valley.params, ROWS, KEYS)
    np.testing.assert_allclose(action[:, 0], [[0.5, -0.3]] * 3, atol=0.1)
    np.testing.assert_allclose(plan[0], target[:, 0], atol=0.1)


def test_a_value_that_is_not_a_number_counts_as_zero():
    valley = Valley(jnp.zeros((3, 1, 2)))
    valley.policy._value_function = lambda *_: lambda actions, eps, pair: jnp.full(actions.shape[1], jnp.nan)
    assert np.isfinite(act(valley.policy, valley.params, ROWS, KEYS)[0]).all()


def test_ranks_are_those_of_a_stable_descending_sort():
    x = jnp.array([3.0, 7.0, 3.0, -1.0, 7.0])
    assert ranks(x).tolist() == [2, 0, 3, 4, 1]


def test_every_pair_of_value_functions_is_as_likely_as_any_other():
    pairs = np.sort(jax.vmap(lambda k: random_pair(k, 4))(jax.random.split(jax.random.key(0), 6000)), axis=1)
    _, counts = np.unique(pairs, axis=0, return_counts=True)
    assert len(counts) == 6
    assert (np.abs(counts - 1000) < 130).all()


def test_without_planning_the_prior_acts():
    policy, params = make(plan=False)
    plain, carry, extras = act(policy, params, ROWS, KEYS)
    np.testing.assert_allclose(plain[:, 0], np.tanh(extras["behaviour_mean"]), rtol=1e-5)
    assert carry.shape == (3, 3, 2)
    noisy, _, _ = act(policy, params, ROWS, KEYS, EXPLORE)
    assert np.abs(noisy - plain).min() > 0


def test_a_sequence_that_terminates_earns_nothing_after_it():
    policy, params = make(episodic=True)
    z, actions, eps = sequences_of_noise()

    def with_end(logit):
        ending = params["model"]["ending"]
        ending["affines"][2][...] = jnp.full((1, 1, 8), logit)
        return value_of(policy, params, z, actions, eps, jnp.array([0, 1]))

    ends, also_ends = with_end(50.0), value_of(policy, params, z, actions.at[1:].set(0.3), -eps, jnp.array([1, 2]))
    np.testing.assert_allclose(ends, also_ends, rtol=1e-5)
    assert np.abs(with_end(-50.0) - ends).min() > 1e-3


TASKS = {
    "tasks": [{"name": "a", "action_dim": 2, "episode_length": 100}, {"name": "b", "action_dim": 1}],
    "task_dim": 4,
}
TASK_STATE = {**STATE, "task_index": Feature((), "int64")}


def test_a_task_holds_the_action_dimensions_that_it_does_not_use_at_zero():
    policy, params = make(TASK_STATE, **TASKS)
    index = jnp.array([[0], [1], [1]])
    action, plan, extras = act(policy, params, ROWS, KEYS, EXPLORE, task_index=index)
    assert (np.asarray(action)[1:, 0, 1] == 0).all()
    assert (np.asarray(plan)[1:, :, 1] == 0).all()
    assert (np.abs(np.asarray(action)[:, 0, 0]) > 0).all()
    assert np.abs(action[0, 0, 1]) > 0
    assert np.isfinite(extras["behaviour_log_std"]).all()


def test_the_same_observation_means_another_thing_in_another_task():
    policy, params = make(TASK_STATE, **TASKS)
    model = policy.model(params["model"])
    same = {"observation.state": jnp.tile(ROWS[:1], (2, 1))}
    z = model.encode(same, model.task(jnp.array([0, 1]), 2))
    assert np.abs(z[0] - z[1]).max() > 1e-3
    np.testing.assert_allclose(model.task(jnp.array([0, 1]), 2).discount, [0.95, 0.99])


def test_pixels_are_shifted_in_training_and_left_alone_when_acting():
    camera = {"observation.image": Feature((64, 64, 3), "uint8")}
    policy, params = make(camera, channels=2, latent_dim=32, simnorm_dim=8)
    model = policy.model(params["model"])
    image = {"observation.image": jax.random.uniform(jax.random.key(3), (2, 64, 64, 3), minval=-1)}
    task = model.task(None, 2)
    z = model.encode(image, task)
    assert z.shape == (2, 32)
    np.testing.assert_allclose(z.reshape(2, 4, 8).sum(-1), 1, rtol=1e-5)
    assert np.abs(model.encode(image, task, jax.random.key(0)) - z).max() > 0
    np.testing.assert_array_equal(model.encode(image, task), z)


def test_images_and_vectors_are_encoded_together():
    both = {**STATE, "observation.image": Feature((64, 64, 3), "uint8")}
    policy, params = make(both, channels=2)
    model = policy.model(params["model"])
    image = jax.random.uniform(jax.random.key(3), (2, 64, 64, 3), minval=-1)

    def encode(rows, image):
        return model.encode({"observation.state": rows, "observation.image": image}, model.task(None, 2))

    z = encode(ROWS[:2], image)
    assert z.shape == (2, 8)
    assert np.abs(encode(ROWS[1:], image) - z).max() > 0
    assert np.abs(encode(ROWS[:2], -image) - z).max() > 0


@pytest.mark.parametrize(("size", "millions"), [("1M", 1.2), ("5M", 5), ("19M", 19), ("48M", 48), ("317M", 317)])
def test_a_size_has_as_many_parameters_as_its_name_says(size, millions):
    observation = {"observation.state": Feature((24,), "float32")}
    policy = TDMPC2Policy(TDMPC2PolicySpec(size=size), contract(observation, 6))
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(policy.init, jax.random.key(0))))
    assert count / 1e6 == pytest.approx(millions, rel=0.15)


def test_the_discount_follows_from_the_episodes_length():
    lengths = {500: 0.99, 50: 0.95, 10_000: 0.995}
    assert {n: TDMPC2PolicySpec(episode_length=n).discounts[0] for n in lengths} == pytest.approx(lengths)
    assert TDMPC2PolicySpec(episode_length=50, discount=0.9).discounts == (0.9,)


def test_large_action_spaces_are_planned_for_longer():
    spec = TDMPC2PolicySpec.model_validate({**TINY, "iterations": None})
    assert [TDMPC2Policy(spec, contract(action=a)).iterations for a in (19, 20)] == [6, 8]


def test_bf16_acts_with_float32_weights():
    policy, params = make()
    half = make_policy(policy.spec.model_dump(mode="json"), policy.contract, "bf16")
    action = act(half, params, ROWS, KEYS)[0]
    assert action.dtype == jnp.float32
    assert np.isfinite(action).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (SimpleNamespace(observation={"prompt": Feature((), "str")}), "observation 'prompt' is a text"),
        (SimpleNamespace(action=Feature((), "int64")), "action: got int64"),
        (SimpleNamespace(n_obs_steps=2), "n_obs_steps = 2"),
        (SimpleNamespace(observation={**STATE, "task_index": Feature((), "int64")}), "the policy has 0 tasks"),
    ],
)
def test_a_contract_that_the_policy_cannot_take_is_refused_by_name(bad, message):
    fields = {"observation": STATE, "action": Feature((2,), "float32"), "n_obs_steps": 1, **vars(bad)}
    made = Contract(fields["observation"], fields["action"], 20.0, fields["n_obs_steps"], 1)
    with pytest.raises(ContractError, match=message):
        TDMPC2Policy(TDMPC2PolicySpec.model_validate(TINY), made)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"latent_dim": 12}, "not a multiple of simnorm_dim"),
        ({"elites": 600}, "at most samples"),
        ({"policy_samples": 600}, "at most samples"),
        ({"min_std": 3.0}, "expected the smaller one first"),
        ({"bins": 1}, "expected 2 or more"),
        ({"size": "7M"}, "size"),
    ],
)
def test_a_specification_that_does_not_fit_together_is_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TDMPC2PolicySpec.model_validate(fields)
