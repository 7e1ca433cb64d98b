"""Trained weights from the files of others: what is loaded is told, and nothing is loaded in part unseen."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from pi0_inputs import contract_of
from safetensors.numpy import save_file

from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.params import leaf_names
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.policies.pi0_weights import to_lerobot, to_openpi
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec, SiglipSpec
from rlsvc.spec.weights import WeightsSpec
from rlsvc.store.bundle import write_bundle
from rlsvc.store.weights import load_weights

GEMMA = GemmaSpec(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8)
SPEC = Pi0Spec.model_validate(
    {
        "vision": SiglipSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=8),
        "backbone": GEMMA,
        "expert": GEMMA.replace(width=12, mlp_dim=24),
        "tokenizer": {"name": "byte"},
        "image_size": (16, 16),
        "horizon": 4,
        "n_action_steps": 4,
        "action_dim": 5,
    }
)
EXPERT = ["expert.*", "state_in.*", "action_.*", "time.*"]


def shapes_of(spec: Pi0Spec) -> Any:
    return jax.eval_shape(Pi0Policy(spec, contract_of(spec, 3)).init, jax.random.key(0))


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    """Random ones by our names."""
    rng, like = np.random.default_rng(0), shapes_of(SPEC)
    return {
        name: rng.normal(size=leaf.shape).astype(np.float32)
        for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)
    }


def write_openpi(folder: Path, theirs: Mapping[str, Any], *, value: bool = True) -> Path:
    """A checkpoint as openpi's training leaves it (`value`), or as its published ones are."""
    tree: dict[str, Any] = {}
    for name, x in theirs.items():
        at = tree
        *path, last = name.split("/")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = {"value": jnp.asarray(x)} if value else jnp.asarray(x)
    with ocp.PyTreeCheckpointer(use_ocdbt=True) as checkpointer:
        checkpointer.save(folder / "params", {"params": tree})
    assert (folder / "params" / "manifest.ocdbt").is_file()
    return folder


def load(path: Path, spec: Pi0Spec = SPEC, contract: Contract | None = None, **fields: Any):
    return load_weights(WeightsSpec(path=str(path), **fields), spec, shapes_of(spec), contract)


def check_whole(loaded: dict[str, np.ndarray], weights: dict[str, np.ndarray]) -> None:
    assert loaded.keys() == weights.keys()
    for name, x in weights.items():
        assert loaded[name].dtype == np.float32
        np.testing.assert_array_equal(loaded[name], x)


@pytest.fixture(scope="module")
def openpi(weights, tmp_path_factory) -> Path:
    return write_openpi(tmp_path_factory.mktemp("openpi"), to_openpi(weights, SPEC))


def test_a_checkpoint_of_openpis_training_is_loaded_whole_from_its_folder_or_its_params(openpi, weights):
    for path in (openpi, openpi / "params"):
        loaded, report = load(path)
        check_whole(loaded, weights)
        assert str(report) == f"{path} (openpi): {len(weights)} weights loaded, 0 fresh, 0 ignored"


def test_a_published_checkpoint_in_bf16_is_loaded_as_the_same_numbers_in_float32(weights, tmp_path):
    rounded = {name: jnp.asarray(x, jnp.bfloat16) for name, x in weights.items()}
    theirs = to_openpi({name: np.asarray(x) for name, x in rounded.items()}, SPEC)
    loaded, _ = load(write_openpi(tmp_path, theirs, value=False))
    check_whole(loaded, {name: np.asarray(x, np.float32) for name, x in rounded.items()})


def test_what_a_checkpoint_lacks_or_has_besides_is_an_error_that_names_it_unless_it_may(weights, tmp_path):
    theirs = to_openpi(weights, SPEC)
    theirs["value_head/kernel"] = theirs.pop("state_proj/kernel")
    del theirs["state_proj/bias"]
    path = write_openpi(tmp_path, theirs)
    with pytest.raises(UserError, match=r"\(openpi\) lacks 'state_in\.\w+' and 1 more; .*algo.weights.may_lack"):
        load(path)
    with pytest.raises(UserError, match=r"does not know, 'value_head/kernel'; .*algo.weights.may_ignore"):
        load(path, may_lack=["state_in.*"])
    loaded, report = load(path, may_lack=["state_in.*"], may_ignore=["value_head/.*"])
    assert set(report.fresh) == {"state_in.kernel", "state_in.bias"}
    assert report.ignored == ("value_head/kernel",)
    assert set(loaded) == set(weights) - set(report.fresh)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action_dim": 6}, r"'action_in.kernel' has shape \(5, 12\), the policy \(6, 12\)"),
        ({"expert": GEMMA.replace(width=14, mlp_dim=24)}, r"weight 'expert.layers.qkv': .*of another width"),
        ({"vision": SPEC.vision.replace(width=10)}, r"of another width than the policy"),
        ({"tokenizer": {"name": "byte", "action_tokens": 4}}, r"'embedding' has shape \(259, 16\), the policy \(263,"),
    ],
)
def test_a_checkpoint_of_another_width_is_refused_by_weight_and_both_shapes(openpi, fields, message):
    with pytest.raises(UserError, match=message):
        load(openpi, Pi0Spec.model_validate({**SPEC.model_dump(), **fields}))


def test_weights_of_a_pattern_alone_are_taken(openpi, weights):
    loaded, report = load(openpi, only=["vision.*"], may_ignore=[])
    assert set(loaded) == {name for name in weights if name.startswith("vision")}
    assert not report.ignored
    with pytest.raises(UserError, match=r"algo.weights.only: \['visoin.*'\] matches no weight"):
        load(openpi, only=["visoin.*"])


def test_a_folder_that_lerobot_wrote_is_loaded_with_its_own_prefix(weights, tmp_path):
    save_file(to_lerobot(weights, SPEC), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        check_whole(load(path)[0], weights)
    extra = {"model.value_head.weight": np.ones(1, np.float32)}
    save_file({**to_lerobot(weights, SPEC), **extra}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"\(LeRobot\) has weights .* 'model.value_head.weight'"):
        load(tmp_path)


def test_paligemmas_npz_fills_what_it_has_where_the_rest_may_be_fresh(weights, tmp_path):
    theirs = {
        f"params/{name.removeprefix('PaliGemma/')}": x
        for name, x in to_openpi(weights, SPEC).items()
        if name.startswith("PaliGemma/") and not ("/llm/" in name and "_1" in name)
    }
    np.savez(tmp_path / "pt_224.npz", **theirs)
    loaded, report = load(tmp_path / "pt_224.npz", may_lack=EXPERT)
    check_whole(
        loaded, {name: x for name, x in weights.items() if name.startswith(("vision", "backbone", "embedding"))}
    )
    assert all(name.split(".")[0] not in ("vision", "backbone") for name in report.fresh)
    with pytest.raises(UserError, match=r"\(PaliGemma\) lacks '\w+\.[\w.]+' and \d+ more"):
        load(tmp_path / "pt_224.npz")


def test_a_bundle_that_saw_another_number_of_cameras_is_refused_unless_they_are_named(weights, tmp_path):
    contract = contract_of(SPEC, 3)
    features = {**contract.observation, "action": contract.action}
    path = write_bundle(
        tmp_path / "bundle", policy=SPEC.model_dump(mode="json"), contract=contract,
        normalizer=Normalizer.identity(features), params=weights,
    )  # fmt: skip
    check_whole(load(path, contract=contract)[0], weights)
    two = replace(contract, observation={k: f for k, f in contract.observation.items() if "right_wrist" not in k})
    with pytest.raises(
        UserError, match=r"sees 3 cameras \(.*\), the run 2 .*'.*right_wrist' in algo.weights.may_ignore"
    ):
        load(path, contract=two)
    check_whole(load(path, contract=two, may_ignore=[".*right_wrist"])[0], weights)


@pytest.mark.parametrize(
    ("made", "message"), [(False, "no such file or folder"), (True, "expected a bundle, an openpi")]
)
def test_a_path_without_weights_is_refused_with_what_may_stand_there(made, message, tmp_path):
    path = tmp_path / "weights"
    if made:
        path.mkdir()
    with pytest.raises(UserError, match=message):
        load(path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_of_which_a_part_is_gone_is_refused_by_name(openpi, tmp_path):
    shutil.copytree(openpi, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "params" / "d")
    with pytest.raises(UserError, match=r"params: not readable \(.*copy it again"):
        load(tmp_path / "part")
