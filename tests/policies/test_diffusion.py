import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, NotFoundError
from rlsvc.nn.vision import SMALLEST, ImageEncoder
from rlsvc.policies import ActOptions, diffusion, make_policy
from rlsvc.policies.diffusion import DiffusionPolicy, diffusion_loss, masked_mse, sample, squared_cosine_alpha_bar
from rlsvc.spec.diffusion import DiffusionSpec, VisionSpec

TINY = {
    "n_obs_steps": 2,
    "horizon": 4,
    "n_action_steps": 2,
    "train_steps": 10,
    "sample_steps": 3,
    "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8, "n_groups": 2},
}


def contract(n_obs_steps=2, action_horizon=2, **more) -> Contract:
    observation = {"observation.state": Feature((3,), "float32"), **more}
    return Contract(observation, Feature((2,), "float32"), 10.0, n_obs_steps, action_horizon)


def spec(**changes) -> DiffusionSpec:
    return DiffusionSpec.model_validate({**TINY, **changes})


@pytest.fixture(scope="module")
def policy() -> tuple[DiffusionPolicy, object]:
    made = DiffusionPolicy(spec(condition_dropout=0.1, target="v", clip_sample=10.0), contract())
    return made, jax.jit(made.init)(jax.random.key(0))


def act(policy, observation, keys, **options):
    made, params = policy
    call = jax.jit(lambda p, o, k: made.act(p, {"observation.state": o}, (), k, ActOptions(**options))[0])
    return np.asarray(call(params, observation, keys))


class Denoiser:
    """Stands for a net: predicts the target of the chunk that the observation holds, exactly."""

    def __init__(self, spec: DiffusionSpec, null=None) -> None:
        self.spec, self.null = spec, null
        self.alpha_bar = squared_cosine_alpha_bar(spec.train_steps)
        self.backbone = self
        self.action_dim = 2

    def encode(self, observation, key):
        return observation["chunk"].reshape(observation["chunk"].shape[0], 1, 2 * self.spec.horizon)

    def x0(self, x, cond, a):
        return cond.reshape(x.shape)

    def __call__(self, x, t, cond):
        a = jnp.asarray(self.alpha_bar, jnp.float32)[t][:, None, None]
        x0 = self.x0(x, cond, a)
        eps = (x - jnp.sqrt(a) * x0) / jnp.sqrt(1 - a)
        return eps if self.spec.target == "epsilon" else jnp.sqrt(a) * eps - jnp.sqrt(1 - a) * x0


def transformer_spec(**changes) -> DiffusionSpec:
    return spec(backbone={"name": "transformer", "embed_dim": 8}, **changes)


def denoise(net: Denoiser, chunk, steps: int, scale: float = 1.0):
    keys = jax.random.split(jax.random.key(0), len(chunk))
    call = jax.jit(lambda c, k: sample(net, {"chunk": c}, k, net.alpha_bar, steps, scale))
    return np.asarray(call(jnp.asarray(chunk, jnp.float32), keys))


def test_the_schedule_is_the_papers_squared_cosine():
    """arXiv:2102.09672, eq. 17, with its cap of 0.999 on beta."""
    alpha_bar = squared_cosine_alpha_bar(100)

    def f(t: float) -> float:
        return math.cos((t / 100 + 0.008) / 1.008 * math.pi / 2) ** 2

    for t in (1, 2, 50, 99):
        assert alpha_bar[t - 1] == pytest.approx(f(t) / f(0), rel=1e-9)
    assert alpha_bar[99] == pytest.approx(alpha_bar[98] * 0.001)
    assert alpha_bar[49] == pytest.approx(0.49371, abs=5e-4)
    assert (np.diff(alpha_bar) < 0).all()


def test_the_loss_is_the_mean_over_the_actions_that_are_not_padded():
    prediction = jnp.array([[[1.0, 3.0], [9.0, 9.0]], [[2.0, 0.0], [0.0, 4.0]]])
    mask = jnp.array([[True, False], [True, True]])
    # Squared errors, averaged over the two action dimensions: 5, (padded), 2, 8.
    assert float(masked_mse(prediction, jnp.zeros((2, 2, 2)), mask)) == pytest.approx((5 + 2 + 8) / 3)


def test_padded_actions_have_no_gradient():
    """lerobot#1717, openpi#894."""
    mask = jnp.array([[True, False, False]])
    gradient = jax.grad(lambda p: masked_mse(p, jnp.ones((1, 3, 2)), mask))(jnp.zeros((1, 3, 2)))
    assert gradient[0].tolist() == [[-1, -1], [0, 0], [0, 0]]


def test_a_batch_of_padding_alone_gives_zero_not_nan():
    value, gradient = jax.value_and_grad(lambda p: masked_mse(p, jnp.ones((1, 2, 2)), jnp.zeros((1, 2), bool)))(
        jnp.zeros((1, 2, 2))
    )
    assert (float(value), float(jnp.abs(gradient).max())) == (0, 0)


@pytest.mark.parametrize("target", ["epsilon", "v"])
def test_the_training_target_is_what_turns_the_noisy_chunk_back(target):
    class Recorder(Denoiser):
        def predict(self, x, t, cond, key):
            return self(x, t, cond)

    net = Recorder(transformer_spec(target=target))
    chunk = jax.random.uniform(jax.random.key(1), (8, 4, 2), minval=-1)
    batch = {"observation": {"chunk": chunk}, "action": chunk, "mask": jnp.ones((8, 4), bool)}
    loss, metrics = diffusion_loss(net, batch, jax.random.key(2), jnp.asarray(net.alpha_bar, jnp.float32))
    assert float(loss) < 1e-6
    assert metrics["loss"] == loss


@pytest.mark.parametrize("target", ["epsilon", "v"])
@pytest.mark.parametrize(("sampler", "steps"), [("ddim", 1), ("ddim", 4), ("ddim", 10), ("ddpm", 10)])
def test_a_perfect_denoiser_gives_the_chunk_back(target, sampler, steps):
    chunk = np.random.default_rng(0).uniform(-0.9, 0.9, (3, 4, 2))
    out = denoise(Denoiser(transformer_spec(target=target, sampler=sampler)), chunk, steps)
    np.testing.assert_allclose(out, chunk, atol=1e-4)


@pytest.mark.parametrize(("sampler", "steps"), [("ddpm", 100), ("ddim", 100)])
def test_sampling_gives_the_distribution_that_the_denoiser_is_optimal_for(sampler, steps):
    """For data N(m, s^2) the optimal denoiser is known: E[x0 | x_t] is linear in x_t."""
    m, s = 0.4, 0.25

    class Optimal(Denoiser):
        def x0(self, x, cond, a):
            return m + s**2 * jnp.sqrt(a) / (a * s**2 + 1 - a) * (x - jnp.sqrt(a) * m)

    net = Optimal(transformer_spec(sampler=sampler, train_steps=100, clip_sample=10.0))
    out = denoise(net, np.zeros((500, 4, 2)), steps)
    # 4000 numbers: 5 standard errors, and what 100 steps leave of a discretisation error.
    assert out.mean() == pytest.approx(m, abs=5 * s / math.sqrt(4000))
    assert out.std() == pytest.approx(s, rel=0.08)


def test_denoised_actions_are_clipped():
    out = denoise(Denoiser(transformer_spec(clip_sample=0.5)), np.full((1, 4, 2), 3.0), 5)
    np.testing.assert_allclose(out, 0.5, atol=1e-5)


def test_guidance_moves_away_from_the_unconditional_prediction():
    """arXiv:2207.12598: eps_null + s (eps_cond - eps_null), so for exact denoisers x0_null + s (x0_cond - x0_null)."""
    net = Denoiser(transformer_spec(clip_sample=10.0), null=jnp.full((1, 8), 0.2))
    np.testing.assert_allclose(denoise(net, np.full((2, 4, 2), 0.3), 4, scale=3.0), 0.2 + 3 * 0.1, atol=1e-4)


def test_guidance_scale_one_is_plain_conditional_sampling(policy):
    keys, state = jax.random.split(jax.random.key(0), 2), jnp.ones((2, 2, 3))
    plain = act(policy, state, keys)
    assert np.array_equal(plain, act(policy, state, keys, guidance_scale=1.0))
    assert np.abs(plain - act(policy, state, keys, guidance_scale=2.0)).max() > 1e-4


def test_guidance_needs_a_policy_that_was_trained_for_it():
    made = DiffusionPolicy(spec(), contract())
    with pytest.raises(
        ContractError, match=r"guidance_scale: got 2\.0, but the policy was trained with condition_dropout = 0"
    ):
        made.act(None, {}, (), jax.random.split(jax.random.key(0), 1), ActOptions(guidance_scale=2.0))


@pytest.mark.parametrize("steps", [11, -1])
def test_sampling_steps_outside_the_training_steps_are_refused(policy, steps):
    with pytest.raises(ContractError, match=f"sample_steps: got {steps}, expected 1 to 10"):
        act(policy, jnp.ones((1, 2, 3)), jax.random.split(jax.random.key(0), 1), sample_steps=steps)


def test_a_rows_actions_depend_on_its_own_key_and_observation_alone(policy):
    keys = jax.random.split(jax.random.key(0), 4)
    state = jax.random.normal(jax.random.key(1), (4, 2, 3))
    out = act(policy, state, keys)
    order = jnp.array([2, 0, 3, 1])
    np.testing.assert_array_equal(act(policy, state[order], keys[order]), out[order])
    alone = act(policy, state[:1], keys[:1])
    np.testing.assert_allclose(alone, out[:1], atol=1e-4)
    assert np.abs(out[0] - act(policy, state[:1], keys[1:2])).max() > 1e-3


def test_the_chunk_begins_at_the_present(policy, monkeypatch):
    steps = jnp.broadcast_to(jnp.arange(4.0)[None, :, None], (1, 4, 2))
    monkeypatch.setattr(diffusion, "sample", lambda *_: steps)
    made, params = policy
    action, carry, extras = made.act(
        params, {}, made.initial_carry(1), jax.random.split(jax.random.key(0), 1), ActOptions()
    )
    # Two observations: action 0 belongs to the older one, the present is action 1.
    assert action[0, :, 0].tolist() == [1, 2]
    assert (carry, extras) == ((), {})


def test_the_null_observation_is_learned_at_the_stated_share():
    made = DiffusionPolicy(spec(condition_dropout=0.9), contract())
    params = jax.jit(made.init)(jax.random.key(0))
    batch = {
        "observation": {"observation.state": jnp.ones((8, 2, 3))},
        "action": jnp.zeros((8, 4, 2)),
        "mask": jnp.ones((8, 4), bool),
    }
    gradient = jax.jit(jax.grad(lambda p: made.loss(p, batch, jax.random.key(0))[0]))(params)
    assert float(jnp.abs(gradient["null"][...]).max()) > 0


@pytest.mark.parametrize(
    "backbone", [TINY["backbone"], {"name": "transformer", "embed_dim": 8, "heads": 2, "layers": 1}]
)
def test_weights_are_float32_by_unique_names_and_the_loss_is_finite(backbone):
    made = DiffusionPolicy(spec(backbone=backbone), contract(), jnp.bfloat16)
    params = jax.jit(made.init)(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    batch = {
        "observation": {"observation.state": jnp.ones((2, 2, 3))},
        "action": jnp.zeros((2, 4, 2)),
        "mask": jnp.ones((2, 4), bool),
    }
    loss, _ = jax.jit(made.loss)(params, batch, jax.random.key(0))
    assert loss.dtype == jnp.float32
    # The target is unit noise, and a fresh net predicts next to nothing.
    assert 0.2 < float(loss) < 5


@pytest.mark.parametrize(
    ("features", "crop", "message"),
    [
        ({"task": Feature((), "str")}, None, "'task' is a text, which the diffusion policy does not read"),
        ({"image": Feature((64, 96, 3), "uint8")}, [84, 84], r"'image' is 64x96, smaller than .*crop = \[84, 84\]"),
        ({"image": Feature((96, 96, 3), "uint8")}, [32, 40], r"'image': the encoder gets 32x40 pixels, .*expected 33"),
        ({"image": Feature((32, 96, 3), "uint8")}, None, r"'image': the encoder gets 32x96 pixels, .*expected 33"),
    ],
)
def test_what_the_policy_cannot_see_is_refused_by_key(features, crop, message):
    with pytest.raises(ContractError, match=message):
        DiffusionPolicy(spec(vision={"crop": crop}), contract(**features))


def test_the_smallest_image_that_is_taken_has_features_that_depend_on_it():
    encoder = ImageEncoder(3, VisionSpec(crop=None, width=8, keypoints=2), dtype=jnp.float32, rngs=nnx.Rngs(0))
    images = jax.random.uniform(jax.random.key(1), (2, SMALLEST, SMALLEST, 3), minval=-1)
    assert float(jnp.abs(jnp.diff(encoder(images), axis=0)).min()) > 1e-5
    smaller = encoder(images[:, : SMALLEST - 1, : SMALLEST - 1])
    np.testing.assert_array_equal(*smaller)


def test_step_counts_that_differ_from_the_contracts_are_refused():
    with pytest.raises(
        ContractError, match="contract has n_obs_steps = 1, action_horizon = 2; the policy has n_obs_steps = 2"
    ):
        DiffusionPolicy(spec(), contract(n_obs_steps=1))


def test_the_table_of_policies_names_the_nearest():
    assert make_policy(spec().model_dump(mode="json"), contract()).contract == contract()
    with pytest.raises(NotFoundError, match=r"unknown policy 'difusion'\. Did you mean 'diffusion'\?"):
        make_policy({"name": "difusion"}, contract())


def test_images_are_augmented_in_training_alone():
    image = Feature((48, 48, 3), "uint8")
    made = DiffusionPolicy(
        spec(vision={"crop": [40, 40], "width": 8, "keypoints": 2, "brightness": 0.5}),
        contract(**{"observation.image": image}),
    )
    seen = SimpleNamespace(keys=[])

    def augment(image, spec, key):
        seen.keys.append(key is not None)
        return image[:, :, :40, :40]

    params = jax.eval_shape(made.init, jax.random.key(0))
    observation = {"observation.state": jnp.ones((1, 2, 3)), "observation.image": jnp.zeros((1, 2, 48, 48, 3))}
    batch = {"observation": observation, "action": jnp.zeros((1, 4, 2)), "mask": jnp.ones((1, 4), bool)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "augment_window", augment)
        jax.eval_shape(made.loss, params, batch, jax.random.key(0))
        keys = jax.random.split(jax.random.key(0), 1)
        out = jax.eval_shape(lambda p: made.act(p, observation, (), keys, ActOptions())[0], params)
    assert seen.keys == [True, False]
    assert out.shape == (1, 2, 2)
