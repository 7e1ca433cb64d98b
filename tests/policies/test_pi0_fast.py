"""pi0-FAST: equal to openpi's own model, what its masks and its cache promise, and what becomes of bad tokens."""

from __future__ import annotations

import ast
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlsvc.algos.imitation import trained
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import ContractError, UserError
from rlsvc.nn.params import flatten_params, leaf_names, unflatten_params
from rlsvc.policies.api import PROMPT_AR_MASK, PROMPT_LOSS_MASK, PROMPT_MASK, PROMPT_TOKENS
from rlsvc.policies.pi0_fast import END, Pi0FastPolicy, decode, token_loss
from rlsvc.policies.pi0_weights import from_lerobot, from_openpi, to_lerobot, to_openpi
from rlsvc.spec.pi0 import GemmaSpec, SiglipSpec
from rlsvc.spec.pi0_fast import Pi0FastSpec

GOLDEN = Path(__file__).parent.parent / "data" / "pi0_golden" / "pi0_fast.npz"
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
NO_FIT = {"path": "unused"}


def golden_weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What the golden arrays were made with: a function of the weight's name."""
    x = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)
    scale = 0.1 if "norm" in name.lower() or "bias" in name else shape[-2] ** -0.5
    x = x * np.float32(0.2 * scale if name.endswith("input_embedding") else scale)
    is_scale = name.endswith("scale") and name.split("/")[-2].startswith(("LayerNorm", "encoder_norm"))
    return x + 1 if is_scale else x


def contract_of(spec: Pi0FastSpec, width: int = 3) -> Contract:
    """The specification's cameras with masks, a state, and a prompt."""
    image = Feature((*spec.image_size, 3), "uint8")
    names = spec.cameras or ()
    observation = dict.fromkeys(names, image) | {f"{name}_mask": Feature((), "bool") for name in names}
    observation |= {"observation.state": Feature((width,), "float32"), "task": Feature((), "str")}
    return Contract(observation, Feature((width,), "float32"), 20.0, 1, spec.n_action_steps)


@pytest.fixture(scope="module")
def openpi():
    """openpi's model: the golden arrays, and from them a policy, its weights, and the images of two rows."""
    golden = np.load(GOLDEN)
    theirs = {
        str(name): golden_weight(str(name), ast.literal_eval(str(shape)))
        for name, shape in zip(golden["names"], golden["shapes"], strict=True)
    }
    spec = Pi0FastSpec(
        vision="dummy", backbone="dummy", image_size=(56, 56), cameras=OPENPI_CAMERAS, horizon=8, n_action_steps=8,
        tokenizer={"name": "byte", "action_tokens": 41}, action_tokenizer=NO_FIT, max_tokens=24, augment=None,
        remat=False,
    )  # fmt: skip
    policy = Pi0FastPolicy(spec, contract_of(spec))
    taken = from_openpi(theirs, spec)
    assert taken.used == set(theirs)
    params = unflatten_params(taken.weights, jax.eval_shape(policy.init, jax.random.key(0)))
    back = to_openpi(flatten_params(params), spec)
    assert back.keys() == theirs.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, theirs[name])
    images = {}
    for camera, there in zip(OPENPI_CAMERAS, golden["there"], strict=True):
        pixels = np.random.default_rng(zlib.crc32(camera.encode())).integers(0, 256, (2, 56, 56, 3), np.uint8)
        images[camera] = jnp.asarray((pixels.astype(np.float32) / 127.5 - 1).astype(np.float32))
        images[f"{camera}_mask"] = jnp.asarray(there, jnp.float32)
    return golden, policy, params, images


def sequence(golden: np.lib.npyio.NpzFile) -> dict[str, jax.Array]:
    return {
        PROMPT_TOKENS: jnp.asarray(golden["tokens"]),
        PROMPT_MASK: jnp.asarray(golden["mask"]),
        PROMPT_AR_MASK: jnp.asarray(golden["postfix"]),
        PROMPT_LOSS_MASK: jnp.asarray(golden["postfix"]),
    }


def test_the_loss_is_that_of_openpis_own_model(openpi):
    golden, policy, params, images = openpi
    batch = {"observation": {**images, **sequence(golden)}}
    loss, metrics = jax.jit(lambda p: token_loss(policy.net(p), batch, None))(params)
    assert float(loss) == pytest.approx(float(golden["loss"].mean()), abs=1e-5)
    assert 0 <= float(metrics["token_accuracy"]) <= 1


@pytest.mark.parametrize(("positions", "expected"), [("openpi", "sampled"), ("trained", "whole")])
def test_greedy_tokens_are_those_of_openpis_sampler_and_of_its_training_pass(openpi, positions, expected):
    golden, policy, params, images = openpi
    if positions == "openpi":  # with all cameras: its sampler looks at the wrong places when one is not there
        images = {name: jnp.ones(2) if name.endswith("_mask") else x for name, x in images.items()}
    policy = Pi0FastPolicy(policy.spec.replace(decode_positions=positions), policy.contract)
    tokens = jnp.where(jnp.asarray(golden["prompt"]), jnp.asarray(golden["tokens"]), 0)
    observation = {**images, PROMPT_TOKENS: tokens, PROMPT_MASK: jnp.asarray(golden["prompt"])}
    most = golden[expected].shape[1]
    got = jax.jit(lambda p: decode(policy.net(p), observation, jax.random.split(jax.random.key(0), 2), most, 0.0))(
        params
    )
    np.testing.assert_array_equal(got, golden[expected])


CAMERAS = ("base", "wrist")
GEMMA = GemmaSpec(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8)
LENGTH = 12


def small(**fields: object) -> Pi0FastSpec:
    """The smallest pi0_fast with every part."""
    chosen = {
        "vision": SiglipSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=8),
        "backbone": GEMMA,
        "tokenizer": {"name": "byte", "action_tokens": 256},
        "action_tokenizer": {"fit": {"vocab_size": 256}},
        "image_size": (16, 16),
        "cameras": CAMERAS,
        "max_tokens": LENGTH,
        "max_action_tokens": 6,
        "horizon": 4,
        "n_action_steps": 4,
        "augment": None,
        **fields,
    }
    return Pi0FastSpec.model_validate(chosen)


@pytest.fixture(scope="module")
def tiny():
    """A policy, random weights, two rows of a sequence, and compiled `predict`.

    The rows' prompts have 4 and 6 tokens, their actions follow up to token 10 and 8; the second has one camera.
    """
    policy = Pi0FastPolicy(small(), contract_of(small()))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32),
        jax.eval_shape(policy.init, jax.random.key(0)),
    )
    at = jnp.arange(LENGTH)[None]
    postfix = (at >= jnp.asarray([[4], [6]])) & (at < jnp.asarray([[10], [8]]))
    observation = {name: jnp.asarray(rng.uniform(-1, 1, (2, 16, 16, 3)), jnp.float32) for name in CAMERAS}
    observation |= {
        "base_mask": jnp.ones(2),
        "wrist_mask": jnp.asarray([1.0, 0.0]),
        PROMPT_TOKENS: jnp.asarray(rng.integers(2, 500, (2, LENGTH)), jnp.int32),
        PROMPT_MASK: at < jnp.asarray([[10], [8]]),
        PROMPT_AR_MASK: postfix,
        PROMPT_LOSS_MASK: postfix,
    }
    return policy, params, observation, jax.jit(lambda p, o: policy.net(p).predict(o, None))


def changed(observation: dict[str, jax.Array], row: int, token: int) -> dict[str, jax.Array]:
    tokens = observation[PROMPT_TOKENS]
    return {**observation, PROMPT_TOKENS: tokens.at[row, token].set((tokens[row, token] + 7) % 500)}


def test_an_action_token_changes_what_follows_it_alone_and_the_prompt_changes_everything(tiny):
    _, params, observation, predict = tiny
    before = predict(params, observation)
    # Prediction i is of token i + 1. Row 0: tokens 0 to 3 are the prompt, 4 to 9 actions, 10 and 11 padding.
    after = predict(params, changed(observation, 0, 6))
    np.testing.assert_array_equal(after[0, :6], before[0, :6])
    assert (jnp.abs(after[0, 6:9] - before[0, 6:9]).max(-1) > 1e-3).all()
    np.testing.assert_array_equal(after[1], before[1])
    after = predict(params, changed(observation, 0, 3))
    assert (jnp.abs(after[0, :9] - before[0, :9]).max(-1) > 1e-4).all()
    after = predict(params, changed(observation, 0, 11))
    np.testing.assert_array_equal(after[0, :9], before[0, :9])


def test_an_image_that_is_not_there_changes_nothing(tiny):
    _, params, observation, predict = tiny
    before = predict(params, observation)
    after = predict(params, {**observation, "wrist": -observation["wrist"]})
    assert (jnp.abs(after[0, :9] - before[0, :9]).max(-1) > 1e-4).all()
    np.testing.assert_array_equal(after[1, :7], before[1, :7])


def test_the_loss_is_the_mean_over_the_action_tokens_of_a_row_and_over_rows(tiny):
    policy, params, observation, predict = tiny
    log_p = np.asarray(jax.nn.log_softmax(predict(params, observation)), np.float64)
    tokens = np.asarray(observation[PROMPT_TOKENS])
    rows = [
        -np.mean([log_p[row, i - 1, tokens[row, i]] for i in range(*span)]) for row, span in ((0, (4, 10)), (1, (6, 8)))
    ]
    loss, _ = jax.jit(lambda p: token_loss(policy.net(p), {"observation": observation}, None))(params)
    assert float(loss) == pytest.approx((rows[0] + rows[1]) / 2, abs=1e-5)


def prompts(observation: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What acting sees of the same rows."""
    there = observation[PROMPT_MASK] & ~observation[PROMPT_AR_MASK]
    return {**observation, PROMPT_TOKENS: jnp.where(there, observation[PROMPT_TOKENS], 0), PROMPT_MASK: there}


def test_decoding_over_the_cache_says_what_one_pass_over_all_tokens_says(tiny):
    policy, params, observation, predict = tiny
    keys = jax.random.split(jax.random.key(0), 2)
    said = jax.jit(lambda p: decode(policy.net(p), prompts(observation), keys, 4, 0.0))(params)
    assert len(np.unique(said)) > 2
    tokens, start = np.array(prompts(observation)[PROMPT_TOKENS]), np.array([4, 6])
    for row in range(2):
        tokens[row, start[row] : start[row] + 4] = said[row]
    at = jnp.arange(LENGTH)[None]
    postfix = (at >= start[:, None]) & (at < start[:, None] + 4)
    whole = predict(
        params,
        {
            **observation,
            PROMPT_TOKENS: jnp.asarray(tokens),
            PROMPT_MASK: at < start[:, None] + 4,
            PROMPT_AR_MASK: postfix,
        },
    )
    for row in range(2):
        np.testing.assert_array_equal(whole[row, start[row] - 1 : start[row] + 3].argmax(-1), said[row])


def test_a_row_is_drawn_by_its_own_key_and_ends_by_itself(tiny):
    policy, params, observation, _ = tiny
    observation = prompts(observation)
    act = jax.jit(lambda p, o, keys: decode(policy.net(p), o, keys, 6, 2.0))
    # The odds of the end are raised, so that rows end at several places.
    params = jax.tree.map(lambda x: x.at[END].mul(4.0) if x.shape[0] == 515 else x, params)
    keys = jax.random.split(jax.random.key(3), 2)
    both = act(params, observation, keys)
    swapped = act(params, jax.tree.map(lambda x: x[::-1], observation), keys[::-1])
    np.testing.assert_array_equal(swapped[::-1], both)
    other = act(params, observation, jax.random.split(jax.random.key(4), 2))
    assert (other != both).any()
    for row in np.concatenate([both, other]):
        ends = np.flatnonzero(row == END)
        if len(ends):
            assert (row[ends[0] + 1 :] == 0).all()


def test_weights_come_back_from_lerobots_names_and_an_output_of_its_own_is_refused(tiny):
    policy, params, _, _ = tiny
    ours = flatten_params(params)
    theirs = to_lerobot(ours, policy.spec)
    back = from_lerobot(theirs, policy.spec)
    assert back.used == set(theirs)
    assert back.weights.keys() == ours.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(back.weights[name], value)
    head = "model.paligemma_with_expert.paligemma.lm_head.weight"
    from_lerobot({**theirs, head: ours["embedding"]}, policy.spec)
    with pytest.raises(UserError, match=r"lm_head\.weight' differs from .*embed_tokens"):
        from_lerobot({**theirs, head: ours["embedding"] + 1}, policy.spec)


def test_an_adapted_backbone_is_frozen_and_merged_for_acting(tiny):
    whole, params, observation, predict = tiny
    policy = Pi0FastPolicy(small(lora_backbone={"rank": 2}), whole.contract)
    like = jax.eval_shape(policy.init, jax.random.key(0))
    names = leaf_names(like)
    learnt = {name for name, kept in zip(names, trained(names, (), policy.frozen), strict=True) if kept}
    assert {name for name in learnt if not name.startswith("vision")} == {name for name in names if "lora" in name}
    shapes = dict(zip(names, (leaf.shape for leaf in jax.tree.leaves(like)), strict=True))
    lora = {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items() if "lora" in name}
    adapted = unflatten_params({**flatten_params(params), **lora}, like)
    got = jax.jit(lambda p: policy.net(p).predict(observation, None))(adapted)
    np.testing.assert_allclose(predict(policy.merged(adapted), observation), got, rtol=1e-3, atol=1e-3)
    assert policy.merged_spec == whole.spec


def test_an_action_that_holds_still_must_fit_the_robot():
    with pytest.raises(ContractError, match=r"policy\.hold_action: got 2 numbers, the action has 3"):
        Pi0FastPolicy(small(hold_action=[0, 0]), contract_of(small()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_tokenizer": {}}, "got neither fit nor path"),
        ({"action_tokenizer": {"fit": {}, "path": "x"}}, "got both fit and path"),
        ({"tokenizer": {"name": "byte", "action_tokens": 255}}, r"tokenizer\.action_tokens: got 255, at least"),
    ],
)
def test_a_specification_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small(**fields)
