"""pi0 and pi0.5: equal to openpi's own model, and what their masks, padding and adaptations promise."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_inputs import CAMERAS, contract_of, random_observation

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, UserError
from rlsvc.nn.gemma import block_mask
from rlsvc.nn.params import flatten_params, leaf_names, unflatten_params
from rlsvc.policies.pi0 import Pi0Policy, flow_loss, sample, sample_from, soft_mask
from rlsvc.policies.pi0_weights import from_openpi, to_openpi
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec, SiglipSpec

GOLDEN = Path(__file__).parent.parent / "data" / "pi0_golden"
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
GEMMA = GemmaSpec(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8)


def small(**fields: object) -> Pi0Spec:
    """The smallest pi0 with every part."""
    chosen = {
        "vision": SiglipSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=8),
        "backbone": GEMMA,
        "expert": GEMMA.replace(width=12, mlp_dim=24),
        "tokenizer": {"name": "byte"},
        "image_size": (16, 16),
        "max_tokens": 6,
        "horizon": 4,
        "n_action_steps": 4,
        "action_dim": 5,
        "augment": None,
        **fields,
    }
    return Pi0Spec.model_validate(chosen)


def made(spec: Pi0Spec, width: int = 3):
    """A policy, random weights (also where fresh ones are zero), and an observation of two rows."""
    policy = Pi0Policy(spec, contract_of(spec, width))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32),
        jax.eval_shape(policy.init, jax.random.key(0)),
    )
    return policy, params, random_observation(np.random.default_rng(0), spec, width)


def fresh(policy, names: list[str]) -> dict[str, np.ndarray]:
    """These of a policy's fresh weights."""
    init = jax.jit(lambda key: {n: x for n, x in flat(policy.init(key)).items() if n in names})
    return {name: np.asarray(x) for name, x in init(jax.random.key(2)).items()}


def flat(params) -> dict[str, jax.Array]:
    return dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))


@pytest.fixture(scope="module")
def tiny():
    """`made(small())` and its compiled sampling: (params, observation) to actions, and to keys and values."""
    policy, params, observation = made(small())
    noise = jnp.ones((2, 4, 5))

    @jax.jit
    def act(params, observation):
        net = policy.net(params)
        return sample(net, observation, noise, 2), net.read(observation)[0][:, 0]

    return policy, params, observation, act


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What tests/data/pi0_golden was made with: a function of the weight's name."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
    x = x * np.float32(0.1 if "norm" in name.lower() or "bias" in name else shape[-2] ** -0.5)
    is_scale = name.endswith("scale") and name.split("/")[-2].startswith(("LayerNorm", "encoder_norm"))
    return x + 1 if is_scale else x


def beside_openpi(variant: str):
    """A policy with the golden weights, these, the golden arrays, and their observation."""
    golden = np.load(GOLDEN / f"{variant}.npz")
    theirs = {
        str(name): golden_weight(str(name), ast.literal_eval(str(shape)))
        for name, shape in zip(golden["names"], golden["shapes"], strict=True)
    }
    names = [f"observation.images.{camera}" for camera in OPENPI_CAMERAS]
    spec = Pi0Spec(
        variant=variant, vision="dummy", backbone="dummy", expert="dummy", horizon=8, n_action_steps=8, action_dim=7,
        tokenizer={"name": "byte", "action_tokens": 41}, max_tokens=12, cameras=tuple(names), remat=False,
    )  # fmt: skip
    features = dict.fromkeys(names, Feature((224, 224, 3), "uint8"))
    features |= {f"{name}_mask": Feature((), "bool") for name in names}
    features |= {"observation.state": Feature((7,), "float32"), "task": Feature((), "str")}
    policy = Pi0Policy(spec, Contract(features, Feature((7,), "float32"), 20.0, 1, 8))
    observation = {
        "observation.state": jnp.asarray(golden["state"]),
        "prompt_tokens": jnp.asarray(golden["tokens"]),
        "prompt_mask": jnp.asarray(golden["mask"]),
    }
    for name, camera, there in zip(names, OPENPI_CAMERAS, golden["there"], strict=True):
        pixels = np.random.default_rng(zlib.crc32(camera.encode())).integers(0, 256, (2, 224, 224, 3), np.uint8)
        observation[name] = jnp.asarray((pixels.astype(np.float32) / 127.5 - 1).astype(np.float32))
        observation[f"{name}_mask"] = jnp.asarray(there, jnp.float32)
    taken = from_openpi(theirs, spec)
    assert taken.used == set(theirs)
    params = unflatten_params(taken.weights, jax.eval_shape(policy.init, jax.random.key(0)))
    return policy, params, theirs, golden, observation


def sampled_by_both(variant: str) -> tuple[np.ndarray, np.ndarray]:
    """Our actions and openpi's."""
    policy, params, _, golden, observation = beside_openpi(variant)
    run = jax.jit(lambda p: sample(policy.net(p), observation, jnp.asarray(golden["noise"]), 10))
    return np.asarray(run(params)), golden["sampled"]


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_actions_and_loss_are_those_of_openpis_own_model(variant):
    actions, expected = sampled_by_both(variant)
    assert (actions * expected).sum() / np.linalg.norm(actions) / np.linalg.norm(expected) >= 0.99999
    np.testing.assert_allclose(actions, expected, atol=2e-4)
    policy, params, theirs, golden, observation = beside_openpi(variant)
    back = to_openpi(flatten_params(params), policy.spec)
    assert back.keys() == theirs.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, theirs[name])
    batch = {"observation": observation, "action": jnp.asarray(golden["actions"]), "mask": jnp.ones((2, 8), bool)}
    noise, t = jnp.asarray(golden["loss_noise"]), jnp.asarray(golden["loss_t"])
    loss, _ = jax.jit(lambda p: flow_loss(policy.net(p), batch, noise, t, None))(params)
    assert float(loss) == pytest.approx(float(golden["loss"].mean()), abs=1e-5)


def test_a_token_sees_its_own_block_and_those_before_it_and_nobody_sees_padding():
    valid = jnp.asarray([[True, False, True, True, True]])
    mask = block_mask(valid, jnp.asarray([False, False, True, True, False]))
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 1],
        [1, 0, 1, 1, 1],
    ]


def test_images_and_prompt_never_see_state_or_actions(tiny):
    _, params, observation, act = tiny
    actions, keys = act(params, observation)
    moved, same = act(params, {**observation, "observation.state": observation["observation.state"] * 3})
    np.testing.assert_array_equal(keys, same)
    assert np.abs(actions - moved).max() > 1e-4


def test_a_camera_that_is_not_there_and_padding_of_the_prompt_change_nothing(tiny):
    _, params, observation, act = tiny
    tokens, there = observation["prompt_tokens"], observation["prompt_mask"]
    hidden = {CAMERAS[-1]: observation[CAMERAS[-1]].at[1].set(0.7), "prompt_tokens": jnp.where(there, tokens, 9)}
    actions, _ = act(params, observation)
    np.testing.assert_array_equal(actions, act(params, {**observation, **hidden})[0])
    seen = {**observation, CAMERAS[0]: observation[CAMERAS[0]].at[1].set(0.7)}
    assert np.abs(actions - act(params, seen)[0]).max() > 1e-5


def test_padded_actions_have_no_loss_and_do_not_thin_it_out(tiny):
    policy, params, observation, _ = tiny
    noise, t = jnp.ones((2, 4, 5)), jnp.asarray([0.5, 0.8])

    @jax.jit
    def loss(mask: jax.Array) -> jax.Array:
        batch = {"observation": observation, "action": jnp.zeros((2, 4, 3)), "mask": mask}
        return flow_loss(policy.net(params), batch, noise, t, None)[0]

    none = jnp.zeros((2, 4), bool)
    one, two = (float(loss(none.at[0, i].set(True))) for i in (0, 1))
    assert one != pytest.approx(two, rel=1e-3)
    assert float(loss(none.at[0, :2].set(True))) == pytest.approx((one + two) / 2, rel=1e-5)
    assert float(loss(none)) == 0.0


def test_a_chunk_in_real_time_goes_on_from_the_one_before_and_is_free_beyond_it():
    spec = small(real_time={"delay": 1}, n_action_steps=2)
    policy, params, observation = made(spec)
    noise = jnp.ones((2, 4, 5))
    old = jnp.stack([jnp.full((4, 5), 0.5), jnp.full((4, 5), -0.5)])

    @jax.jit
    def act(weight: jax.Array) -> jax.Array:
        return sample_from(policy.net(params), observation, noise, 8, old, weight, 5.0)

    free = jax.jit(lambda: sample(policy.net(params), observation, noise, 8))()
    np.testing.assert_allclose(act(jnp.zeros((2, 4))), free, atol=1e-6)
    held = act(jnp.zeros((2, 4)).at[:, 0].set(1.0))
    assert np.abs(held - old)[:, 0].mean() < 0.5 * np.abs(free - old)[:, 0].mean()


def test_the_hold_on_the_old_chunk_falls_from_one_to_nothing():
    # horizon 6, 2 executed between chunks, 1 while the new one is computed: c = 3/4, 2/4, 1/4 for steps 1, 2, 3.
    c = np.array([0.75, 0.5, 0.25])
    expected = [1.0, *(c * (np.exp(c) - 1) / (np.e - 1)), 0.0, 0.0]
    np.testing.assert_allclose(soft_mask(6, 2, 1), expected)


def test_low_rank_adaptation_starts_as_the_model_that_it_adapts_and_is_merged_for_acting(tiny):
    spec = small(lora_backbone={"rank": 2}, lora_expert={"rank": 3, "targets": ["attention"]})
    policy = Pi0Policy(spec, contract_of(spec, 3))
    like = jax.eval_shape(policy.init, jax.random.key(0))
    names = leaf_names(like)
    adapted = [name for name in names if "lora" in name]
    assert {name.split(".")[0] for name in adapted} == {"backbone", "expert"}
    assert not any("expert.layers.down_lora" in name for name in names)
    _, params, observation, act = tiny
    whole = unflatten_params({**flatten_params(params), **fresh(policy, adapted)}, like)
    noise = jnp.ones((2, 4, 5))
    run = jax.jit(lambda p: sample(policy.net(p), observation, noise, 2))
    np.testing.assert_allclose(run(whole), act(params, observation)[0], atol=1e-6)
    # Trained, it is the model with both factors' product added: what is merged acts in the same way.
    trained = jax.tree.map(lambda x: x + 0.05, whole)
    np.testing.assert_allclose(run(trained), act(policy.merged(trained), observation)[0], atol=1e-4)
    assert policy.merged_spec == tiny[0].spec


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"cameras": ("observation.images.front",)}, {}, "policy.cameras names 'observation.images.front'"),
        ({"cameras": CAMERAS[:2]}, {}, r"2 cameras, the contract 3: 'observation.images.right_wrist' is not named"),
        ({"prompt": "go"}, {}, "not both"),
        ({}, {"task": None}, r"0 texts \(none\)"),
        ({"action_dim": 2}, {}, "state: 3 numbers do not fit into policy.action_dim = 2"),
    ],
)
def test_a_contract_that_does_not_fit_is_refused_by_name(fields, change, message):
    spec = small(**fields)
    contract = contract_of(spec, 3)
    features = {k: f for k, f in contract.observation.items() if k not in change}
    with pytest.raises(ContractError, match=message):
        Pi0Policy(spec, Contract(features, contract.action, 20.0, 1, 4))


def test_a_state_that_is_to_be_told_and_has_no_numbers_is_refused():
    spec = small(variant="pi05", action_dim=None)
    contract = contract_of(spec, 3)
    features = {k: f for k, f in contract.observation.items() if k != "observation.state"}
    with pytest.raises(ContractError, match="state_in_prompt: the observation has no numbers to tell"):
        Pi0Policy(spec, Contract(features, contract.action, 20.0, 1, 4))


def test_sizes_that_cannot_share_their_attention_are_refused_by_name():
    with pytest.raises(ValueError, match=r"expert.heads: got 4, the backbone has 2"):
        small(expert=GEMMA.replace(heads=4))
    with pytest.raises(ValueError, match=r"no Gemma transformer is called 'gemma_2bb'; did you mean 'gemma_2b'"):
        small(backbone="gemma_2bb")


def test_weights_of_another_width_or_with_adaptations_are_refused_by_name(tiny):
    policy, params, *_ = tiny
    theirs = to_openpi(flatten_params(params), policy.spec)
    with pytest.raises(UserError, match="of another width than the policy"):
        from_openpi({**theirs, "PaliGemma/llm/layers/mlp/gating_einsum": np.zeros((2, 2, 3, 7))}, policy.spec)
    with pytest.raises(UserError, match="low-rank"):
        from_openpi({**theirs, "PaliGemma/llm/layers/attn/q_einsum/lora_a": np.zeros(1)}, policy.spec)
    without = {name: x for name, x in theirs.items() if "kv_einsum_1" not in name}
    with pytest.raises(UserError, match=r"'.*q_einsum_1/w' is there and '.*kv_einsum_1/w' is not"):
        from_openpi(without, policy.spec)


def test_a_row_alone_is_given_the_actions_that_it_is_given_among_others(tiny):
    """One row's queries, keys and values are made in another way than those of several."""
    policy, params, observation, act = tiny
    noise = jnp.ones((1, 4, 5))
    first = {name: x[:1] for name, x in observation.items()}
    alone = jax.jit(lambda params, observation: sample(policy.net(params), observation, noise, 2))(params, first)
    np.testing.assert_allclose(alone[0], act(params, observation)[0][0], rtol=1e-4, atol=1e-5)
