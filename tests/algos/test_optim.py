import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.algos.optim import ema_decay, ema_update, make_optimizer, make_schedule
from rlsvc.spec.optim import EmaSpec, OptimizerSpec, ScheduleSpec


def schedule(total_steps=110, **fields):
    return make_schedule(ScheduleSpec(**fields), 2.0, total_steps)


def test_the_learning_rate_warms_up_from_zero_and_falls_as_a_cosine():
    rate = schedule(warmup_steps=10)
    assert [float(rate(s)) for s in (0, 5, 10)] == pytest.approx([0, 1, 2])
    assert float(rate(60)) == pytest.approx(1)  # half way down
    assert float(rate(35)) == pytest.approx(1 + np.cos(np.pi / 4))
    assert float(rate(110)) == pytest.approx(0, abs=1e-6)


def test_the_cosine_ends_at_its_final_fraction_after_decay_steps():
    rate = schedule(warmup_steps=0, final_fraction=0.25, decay_steps=20)
    assert [float(rate(s)) for s in (0, 20, 100)] == pytest.approx([2, 0.5, 0.5])


def test_a_constant_rate_stays_after_the_warm_up():
    rate = schedule(name="constant", warmup_steps=4)
    assert [float(rate(s)) for s in (0, 2, 4, 1000)] == pytest.approx([0, 1, 2, 2])


def test_a_warm_up_longer_than_the_run_is_cut_to_it():
    rate = schedule(total_steps=5, warmup_steps=500)
    assert float(rate(4)) == pytest.approx(2)


def test_the_averages_decay_is_the_stated_one():
    spec = EmaSpec(power=0.75, max_decay=0.9)
    decays = [float(ema_decay(spec, jnp.int32(step))) for step in (0, 1, 15, 10_000)]
    assert decays == pytest.approx([0, 1 - 2**-0.75, 1 - 16**-0.75, 0.9])


def test_the_average_moves_by_one_minus_decay():
    out = ema_update({"w": jnp.array([1.0])}, {"w": jnp.array([3.0])}, jnp.float32(0.75))
    assert out["w"].tolist() == [1.5]


@pytest.mark.parametrize(("clip", "expected"), [(None, [3.0, 4.0]), (1.0, [0.6, 0.8]), (100.0, [3.0, 4.0])])
def test_the_gradients_global_norm_is_clipped(clip, expected):
    # With eps far above the gradient, Adam's first step is proportional to it.
    spec = OptimizerSpec(name="adam", grad_clip=clip, eps=1e6)
    optimizer = make_optimizer(spec, lambda _: 1e6)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    updates, _ = optimizer.update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, optimizer.init(params), params)
    np.testing.assert_allclose([-updates["a"][0], -updates["b"][0]], expected, rtol=1e-4)


@pytest.mark.parametrize(("name", "expected"), [("adam", 1.0), ("adamw", 1.0 - 0.1 * 0.5)])
def test_weight_decay_is_decoupled_and_adamws_alone(name, expected):
    optimizer = make_optimizer(OptimizerSpec(name=name, weight_decay=0.5), lambda _: 0.1)
    params = jnp.ones(1)
    updates, _ = optimizer.update(jnp.zeros(1), optimizer.init(params), params)
    assert float((params + updates)[0]) == pytest.approx(expected)


def test_adams_first_step_is_the_learning_rate():
    optimizer = make_optimizer(OptimizerSpec(name="adam"), lambda _: 0.1)
    updates, _ = optimizer.update(jnp.array([1e-3, -50.0]), optimizer.init(jnp.zeros(2)), jnp.zeros(2))
    np.testing.assert_allclose(updates, [-0.1, 0.1], rtol=1e-4)
    assert jax.tree.leaves(updates)
