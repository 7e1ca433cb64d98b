"""V(s) by a vision-language model: what it sees, what it does not, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pi0_inputs import CAMERAS, contract_of, random_observation

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError, UserError
from rlsvc.nn.distributions import HLGauss
from rlsvc.nn.params import flatten_params
from rlsvc.policies import make_value_function
from rlsvc.policies.api import PROMPT_MASK, PROMPT_TOKENS, Policy, ValueFunction
from rlsvc.policies.pi0_weights import to_openpi
from rlsvc.policies.value_vlm import ValueVlm
from rlsvc.spec.value_function import ValueVlmSpec
from rlsvc.spec.weights import WeightsSpec
from rlsvc.store.weights import load_weights


def spec_of(**fields: object) -> ValueVlmSpec:
    """The smallest one with every part."""
    chosen = {
        "vision": {"width": 8, "depth": 1, "mlp_dim": 16, "heads": 2, "patch": 8},
        "backbone": {"width": 16, "depth": 1, "mlp_dim": 32, "heads": 2, "head_dim": 8},
        "tokenizer": {"name": "byte"},
        "image_size": (16, 16),
        "max_tokens": 6,
        "state_in_prompt": True,
        "augment": None,
        "head": {"name": "hl_gauss", "bins": 7},
        **fields,
    }
    return ValueVlmSpec.model_validate(chosen)


@pytest.fixture(scope="module")
def tiny():
    """Its compiled logits with random weights, and two rows; the second has no third camera and a shorter prompt."""
    spec = spec_of()
    function = ValueVlm(spec, contract_of(spec, 3))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(scale=0.3, size=x.shape), jnp.float32),
        jax.eval_shape(function.init, jax.random.key(0)),
    )
    observation = random_observation(rng, spec, 3)

    @jax.jit
    def logits(observation: dict[str, jax.Array]) -> jax.Array:
        return function.logits(params, {"observation": {name: x[:, None] for name, x in observation.items()}})

    return observation, logits


def test_the_value_follows_from_images_and_prompt(tiny):
    observation, logits = tiny
    before = logits(observation)
    assert before.shape == (2, 7)
    tokens = observation[PROMPT_TOKENS]
    for change in ({CAMERAS[0]: -observation[CAMERAS[0]]}, {PROMPT_TOKENS: tokens.at[:, 1].set(tokens[:, 1] + 1)}):
        assert (jnp.abs(logits({**observation, **change}) - before).max(-1) > 1e-4).all()


def test_padding_and_a_camera_that_is_not_there_change_nothing(tiny):
    observation, logits = tiny
    tokens = jnp.where(observation[PROMPT_MASK], observation[PROMPT_TOKENS], 9)
    hidden = {CAMERAS[-1]: observation[CAMERAS[-1]].at[1].set(0.7), PROMPT_TOKENS: tokens}
    np.testing.assert_array_equal(logits({**observation, **hidden}), logits(observation))


@pytest.mark.parametrize(("head", "width"), [({"name": "hl_gauss", "bins": 7}, 7), ({"name": "regression"}, 1)])
def test_a_fresh_one_says_the_middle_of_the_scale_everywhere(head, width):
    spec = spec_of(head=head)
    function = make_value_function(spec.model_dump(mode="json"), contract_of(spec, 3))
    assert isinstance(function, ValueFunction)
    assert not isinstance(function, Policy)
    assert isinstance(function.head, HLGauss) == (width == 7)
    observation = {name: x[:, None] for name, x in random_observation(np.random.default_rng(0), spec, 3).items()}
    logits = jax.jit(lambda key: function.logits(function.init(key), {"observation": observation}))(jax.random.key(0))
    assert logits.shape == (2, width)
    np.testing.assert_allclose(function.head.mean(logits), [0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "without", "message"),
    [
        (
            {"state_in_prompt": False},
            (),
            r"'observation\.state': value_vlm reads numbers in its prompt alone; set policy",
        ),
        ({}, ("observation.state",), r"policy\.state_in_prompt: the observation has no numbers to tell"),
        ({}, ("task",), r"value_vlm needs one prompt: the contract has 0 texts \(none\)"),
        ({"cameras": ("front",)}, (), r"policy\.cameras names 'front', which is no image of the contract"),
    ],
)
def test_a_contract_that_does_not_fit_is_refused_by_name(fields, without, message):
    spec = spec_of(**fields)
    whole = contract_of(spec, 3)
    seen = {name: feature for name, feature in whole.observation.items() if name not in without}
    with pytest.raises(ContractError, match=message):
        ValueVlm(spec, Contract(seen, whole.action, 20.0, 1, 0))


def test_it_begins_with_paligemmas_weights_and_says_what_those_lack(tmp_path):
    spec, rng = spec_of(), np.random.default_rng(0)
    like = jax.eval_shape(ValueVlm(spec, contract_of(spec, 3)).init, jax.random.key(0))
    ours = flatten_params(jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), like))
    theirs = to_openpi(ours, spec)
    path = tmp_path / "pt_224.npz"
    np.savez(path, **{f"params/{name.removeprefix('PaliGemma/')}": x for name, x in theirs.items()})
    loaded, report = load_weights(WeightsSpec(path=str(path), may_lack=("judge", "value.*")), spec, like)
    assert set(report.fresh) == {"judge", "value", "value_bias"}
    assert loaded.keys() == ours.keys() - set(report.fresh)
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, ours[name])
    with pytest.raises(UserError, match="lacks 'judge' and 2 more"):
        load_weights(WeightsSpec(path=str(path)), spec, like)


def test_an_image_of_no_whole_number_of_patches_is_refused():
    with pytest.raises(ValueError, match=r"image_size: \[16, 15\] is not a multiple of vision\.patch = 8"):
        spec_of(image_size=(16, 15))
