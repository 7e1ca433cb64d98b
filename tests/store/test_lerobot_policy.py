"""`rlsvc policies convert`: a bundle becomes a folder that LeRobot's own classes load and act with, and comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from lerobot.processor import PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from lerobot_dummy import shrink
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from rlsvc.commands.policies import app
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, DatasetError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.data.text_tokenizer import PaliGemmaTokenizer
from rlsvc.nn.params import leaf_names
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.policies.prompt import Pi0Prompter
from rlsvc.runner import PolicyRunner
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec, SiglipSpec
from rlsvc.spec.tokenizer import PaliGemmaTokenizerSpec
from rlsvc.store import lerobot_config
from rlsvc.store.bundle import Bundle, read_bundle, write_bundle
from rlsvc.store.lerobot_policy import from_lerobot_folder, to_lerobot_folder

DATA = Path(__file__).parent.parent / "data"
TOKENIZER = DATA / "pi_tokens" / "small.model"
VISION = SiglipSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=14)
GEMMA = {
    "gemma_2b": GemmaSpec(width=16, depth=2, mlp_dim=32, heads=2, head_dim=8),
    "gemma_300m": GemmaSpec(width=12, depth=2, mlp_dim=24, heads=2, head_dim=8),
}
VOCAB, SIDE, WIDTH = 1120, 28, 5
CAMERAS = ("observation.images.base", "observation.images.wrist")
MODES = {"pi0": "mean_std", "pi05": "quantile"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The published sizes are these, here as in LeRobot."""
    monkeypatch.setattr(lerobot_config, "GEMMA", GEMMA)
    monkeypatch.setattr(lerobot_config, "VISION", {"So400m/14": VISION})
    monkeypatch.setattr(PaliGemmaTokenizerSpec, "vocab_size", VOCAB)


def spec_of(variant: str, **fields: object) -> Pi0Spec:
    chosen = {
        "variant": variant,
        "vision": VISION,
        "backbone": GEMMA["gemma_2b"],
        "expert": GEMMA["gemma_300m"],
        "image_size": (SIDE, SIDE),
        "tokenizer": {"name": "paligemma", "path": str(TOKENIZER)},
        "max_tokens": 40,
        "horizon": 4,
        "n_action_steps": 3,
        "action_dim": WIDTH,
        "sample_steps": 2,
        **fields,
    }
    return Pi0Spec.model_validate(chosen)


def bundle_of(path: Path, variant: str = "pi0", change: dict[str, Feature] | None = None, **fields: object) -> Bundle:
    """Random weights; the last number of the state never moves."""
    spec = spec_of(variant, **fields)
    observation = dict.fromkeys(CAMERAS, Feature((SIDE, SIDE, 3), "uint8")) | {
        "observation.state": Feature((3,), "float32"),
        **({} if spec.prompt else {"task": Feature((), "str")}),
        **(change or {}),
    }
    contract = Contract(observation, Feature((2,), "float32"), 20.0, 1, 3)
    rng = np.random.default_rng(0)
    numbers = {name: f for name, f in {**observation, "action": contract.action}.items() if f.dtype != "str"}
    columns = {name: rng.normal(2, 3, (50, *f.shape)).astype(np.float32) for name, f in numbers.items()}
    columns["observation.state"][:, -1] = 0.7
    modes = {name: MODES[variant] for name, f in numbers.items() if not f.is_image}
    like = jax.eval_shape(Pi0Policy(spec, contract).init, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)}
    return read_bundle(
        write_bundle(
            path,
            policy=spec.model_dump(mode="json"),
            contract=contract,
            normalizer=Normalizer.fit({"default": columns}, numbers, modes),
            params={name: (0.3 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()},
            files=Pi0Prompter(spec).files(),
        )
    )


class Tokenizer:
    """What LeRobot's processor asks of PaliGemma's tokenizer."""

    def __init__(self, *_: object) -> None:
        self.pieces = PaliGemmaTokenizer.load(TOKENIZER)

    @classmethod
    def from_pretrained(cls, _: str) -> Tokenizer:
        return cls()

    def __call__(self, texts: list[str], max_length: int, **_: object) -> dict[str, torch.Tensor]:
        rows = [[self.pieces.bos_id, *self.pieces.encode(text)] for text in texts]
        ids = torch.zeros(len(rows), max_length, dtype=torch.long)
        for row, found in zip(ids, rows, strict=True):
            row[: len(found)] = torch.tensor(found)
        mask = torch.arange(max_length)[None] < torch.tensor([[len(row)] for row in rows])
        return {"input_ids": ids, "attention_mask": mask}


def observation_of(batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    state = rng.normal(2, 3, (batch, 3)).astype(np.float32)
    state[:, -1] = 0.7
    images = {name: rng.integers(0, 256, (batch, SIDE, SIDE, 3), np.uint8) for name in CAMERAS}
    return {**images, "observation.state": state, "task": np.asarray(["pick up the cube", "go"][:batch])}


def processors(folder: Path) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """LeRobot's, loaded from a folder."""
    before = PolicyProcessorPipeline.from_pretrained(
        folder,
        config_filename="policy_preprocessor.json",
        overrides={"tokenizer_processor": {"tokenizer": Tokenizer()}},
    )
    after = PolicyProcessorPipeline.from_pretrained(
        folder, config_filename="policy_postprocessor.json",
        to_transition=policy_action_to_transition, to_output=transition_to_policy_action,
    )  # fmt: skip
    return before, after


def lerobot_batch() -> dict[str, object]:
    seen = observation_of(2)
    images = {name: torch.from_numpy(seen[name].transpose(0, 3, 1, 2).copy()).float() / 255 for name in CAMERAS}
    return {**images, "observation.state": torch.from_numpy(seen["observation.state"]), "task": list(seen["task"])}


def bundle_acts(bundle: Bundle) -> tuple[np.ndarray, np.ndarray]:
    """Actions of a bundle, and the noise that it began with."""
    runner = PolicyRunner(bundle, batch_sizes=(2,), device="cpu")
    seeds, steps = np.asarray([3, 4]), np.asarray([0, 7])
    keys = [jax.random.fold_in(jax.random.key(s), t) for s, t in zip(seeds, steps, strict=True)]
    noise = np.stack([np.asarray(jax.random.normal(key, (4, WIDTH))) for key in keys])
    return runner.act({name: x[:, None] for name, x in observation_of(2).items()}, seeds, steps).action, noise


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_lerobots_own_policy_loads_the_folder_whole_and_acts_as_the_bundle(variant, tmp_path, monkeypatch, capsys):
    folder, bundle = tmp_path / "lerobot", bundle_of(tmp_path / "bundle", variant)
    assert to_lerobot_folder(bundle, folder) == []
    _, policy_class, _ = shrink(variant, VISION, GEMMA, SIDE, VOCAB, monkeypatch)
    policy, (before, after) = policy_class.from_pretrained(folder), processors(folder)
    assert "All keys loaded successfully" in capsys.readouterr().out
    ours, noise = bundle_acts(bundle)
    theirs = after(policy.predict_action_chunk(before(lerobot_batch()), noise=torch.from_numpy(noise))).numpy()
    np.testing.assert_allclose(theirs[:, :3], ours, atol=1e-3)


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_a_folder_that_lerobot_wrote_becomes_a_bundle_with_its_weights_and_its_maps(variant, tmp_path, monkeypatch):
    folder, bundle = tmp_path / "lerobot", bundle_of(tmp_path / "given", variant)
    to_lerobot_folder(bundle, tmp_path / "first")
    rewrite_by_lerobot(tmp_path / "first", folder, variant, monkeypatch)
    assert from_lerobot_folder(folder, tmp_path / "bundle", rate_hz=20.0, tokenizer=TOKENIZER) == []
    made = read_bundle(tmp_path / "bundle")
    assert load_file(folder / "model.safetensors").keys() == load_file(tmp_path / "first" / "model.safetensors").keys()
    assert made.contract == bundle.contract
    for name, value in bundle.params.items():
        np.testing.assert_array_equal(made.params[name], value)
    before, after = processors(folder)
    batch, said = lerobot_batch(), np.random.default_rng(2).normal(size=(2, 3, 2)).astype(np.float32)
    state = np.asarray(batch["observation.state"])
    np.testing.assert_allclose(
        made.normalizer.normalize("observation.state", state), before(batch)["observation.state"], atol=1e-5
    )
    np.testing.assert_allclose(made.normalizer.unnormalize("action", said), after(torch.from_numpy(said)), atol=1e-5)


def rewrite_by_lerobot(source: Path, target: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder as LeRobot's training leaves it, with statistics of a dataset in which a number never moves."""
    import importlib

    _, policy_class, _ = shrink(variant, VISION, GEMMA, SIDE, VOCAB, monkeypatch)
    policy = policy_class.from_pretrained(source)
    policy.save_pretrained(target)
    monkeypatch.setattr("lerobot.processor.tokenizer_processor.AutoTokenizer", Tokenizer)
    made = importlib.import_module(f"lerobot.policies.{variant}.processor_{variant}")
    fields = {"mean": 2.0, "std": 3.0, "min": -4.0, "max": 9.0, "q01": -3.0, "q99": 8.0}
    stats = {
        name: {field: torch.full((width,), x) for field, x in fields.items()}
        for name, width in (("observation.state", 3), ("action", 2))
    }
    for field in fields:
        stats["observation.state"][field][-1] = 0.0 if field == "std" else 0.7
    for pipeline in getattr(made, f"make_{variant}_pre_post_processors")(policy.config, stats):
        pipeline.save_pretrained(target)


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_there_and_back_is_bit_for_bit(variant, tmp_path):
    bundle = bundle_of(tmp_path / "bundle", variant)
    to_lerobot_folder(bundle, tmp_path / "lerobot")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "lerobot"), str(tmp_path / "back"), "--rate", "20"])
    assert done.exit_code == 0, done.exception
    back = read_bundle(tmp_path / "back")
    assert back.params.keys() == bundle.params.keys()
    for name, value in bundle.params.items():
        assert back.params[name].dtype == np.float32
        np.testing.assert_array_equal(back.params[name], value)
    assert (back.contract, back.precision) == (bundle.contract, bundle.precision)
    assert (back.path / "tokenizer.model").read_bytes() == TOKENIZER.read_bytes()
    x = np.asarray([[-1.0, 2.5, 0.7], [4.0, 0.0, 0.9]], np.float32)
    for name, values in (("observation.state", x), ("action", x[:, :2])):
        np.testing.assert_allclose(
            back.normalizer.normalize(name, values), bundle.normalizer.normalize(name, values), atol=1e-6
        )
        np.testing.assert_allclose(
            back.normalizer.unnormalize(name, values), bundle.normalizer.unnormalize(name, values), rtol=1e-6
        )
    to_lerobot_folder(back, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "lerobot" / "model.safetensors"
    ).read_bytes()


def test_weights_in_bf16_become_the_same_numbers_in_float32(tmp_path):
    bundle = bundle_of(tmp_path / "bundle")
    to_lerobot_folder(bundle, tmp_path / "lerobot")
    file = tmp_path / "lerobot" / "model.safetensors"
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(file).items()}
    save_file(rounded, file)
    from_lerobot_folder(tmp_path / "lerobot", tmp_path / "back", rate_hz=20.0)
    back = read_bundle(tmp_path / "back").params
    for name, value in bundle.params.items():
        np.testing.assert_array_equal(back[name], value.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_what_lerobot_has_to_be_told_otherwise_is_said(tmp_path):
    bundle = bundle_of(tmp_path / "bundle", prompt="stack", horizon=5, n_action_steps=3, real_time={"delay": 1})
    notes = to_lerobot_folder(bundle, tmp_path / "lerobot", processors=False)
    assert notes == [
        "policy.prompt: give LeRobot the task 'stack'",
        "policy.real_time: LeRobot's is rtc_config, set when it acts",
    ]
    assert not (tmp_path / "lerobot" / "policy_preprocessor.json").exists()


def test_an_empty_camera_of_lerobots_is_left_out_and_told(tmp_path):
    to_lerobot_folder(bundle_of(tmp_path / "bundle"), tmp_path / "lerobot")
    image = {"type": "VISUAL", "shape": [3, SIDE, SIDE]}
    edit(tmp_path / "lerobot", lambda c: c["input_features"].update({"observation.images.empty_camera_0": image}))
    (note,) = from_lerobot_folder(tmp_path / "lerobot", tmp_path / "back", rate_hz=20.0)
    assert note.startswith("observation.images.empty_camera_0")
    assert "observation.images.empty_camera_0" not in read_bundle(tmp_path / "back").contract.observation


def edit(folder: Path, change, file: str = "config.json") -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        (
            {"backbone": GEMMA["gemma_2b"].replace(width=18)},
            {},
            r"policy.backbone: .*LeRobot has gemma_2b and gemma_30",
        ),
        ({"vision": VISION.replace(depth=2)}, {}, r"policy.vision: .*LeRobot has So400m/14"),
        ({"tokenizer": {"name": "byte", "action_tokens": 0}}, {}, r"policy.tokenizer: byte; LeRobot has PaliGemma's"),
        ({"image_size": (SIDE, 14)}, {}, r"policy.image_size: \[28, 14\]; LeRobot's are square"),
        ({}, {"observation.extra": Feature((1,), "float32")}, r"the state is observation.extra, observation.state"),
        ({}, {f"{CAMERAS[0]}_mask": Feature((), "bool")}, r"observation.images.base_mask; LeRobot has no masks"),
        ({"advantage_in_prompt": True}, {}, r"policy.advantage_in_prompt: true"),
        ({"variant": "pi05", "state_in_prompt": False}, {}, r"policy.state_in_prompt: false"),
    ],
)
def test_a_bundle_that_lerobot_has_no_place_for_is_refused_by_field(fields, change, message, tmp_path):
    bundle = bundle_of(tmp_path / "bundle", change=change, **fields)
    with pytest.raises(BundleError, match=message):
        to_lerobot_folder(bundle, tmp_path / "lerobot")
    assert not (tmp_path / "lerobot").exists()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of pi0, and a way to have a copy of it."""
    folder = tmp_path_factory.mktemp("lerobot")
    with pytest.MonkeyPatch.context() as patch:
        small.__wrapped__(patch)
        to_lerobot_folder(bundle_of(folder / "bundle"), folder / "lerobot")
    return folder / "lerobot"


def without_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.state_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def with_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.extra.weight": np.zeros(1)}, folder / "model.safetensors")


def without_quantiles(folder: Path) -> None:
    edit(folder, lambda c: c["steps"][4]["config"]["norm_map"].update(STATE="QUANTILE10"), "policy_preprocessor.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: edit(f, lambda c: c.update(type="act")), r"config.json: type is 'act', expected pi0 or pi05"),
        (lambda f: edit(f, lambda c: c.pop("chunk_size")), r"config.json: has no 'chunk_size'"),
        (lambda f: edit(f, lambda c: c.update(use_relative_actions=True)), r"use_relative_actions is True, here it is"),
        (lambda f: edit(f, lambda c: c.update(max_state_dim=9)), r"max_state_dim is 9, max_action_dim 5"),
        (lambda f: edit(f, lambda c: c.update(n_action_steps=9)), r"n_action_steps: got 9, at most horizon = 4"),
        (lambda f: edit(f, lambda c: c["input_features"].pop("observation.state")), r"has no 'observation.state'"),
        (
            lambda f: edit(f, lambda c: c.update(max_state_dim=6, max_action_dim=6)),
            r"weight 'action_in.kernel': got shape \(5, 12\), the policy has \(6, 12\)",
        ),
        (
            lambda f: edit(f, lambda c: c.update(paligemma_variant="gemma_300m")),
            r"got shape \(2, 16\), the policy has \(2, 12\)",
        ),
        (without_weight, r"weight 'state_in.kernel' is missing"),
        (with_weight, r"'model.extra.weight' is no weight of pi0"),
        (without_quantiles, r"policy_preprocessor.json: normalises STATE by QUANTILE10; expected one of MEAN_STD"),
        (lambda f: (f / "policy_preprocessor.json").unlink(), r"policy_preprocessor.json: not there"),
        (lambda f: (f / "tokenizer.model").unlink(), r"tokenizer.model': not readable"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), r"model.safetensors: not readable"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(change, message, written, tmp_path):
    folder = tmp_path / "lerobot"
    shutil.copytree(written, folder)
    change(folder)
    with pytest.raises(UserError, match=message):
        from_lerobot_folder(folder, tmp_path / "bundle", rate_hz=20.0)
    assert not (tmp_path / "bundle").exists()


def test_statistics_of_another_robot_are_refused_by_key_and_width(written, tmp_path):
    stats = DATA / "openpi_norm_stats" / "zwbx_pi05_libero.json"
    with pytest.raises(
        DatasetError, match=r"statistics 'state' for 'observation.state': got \d+ dimensions, the contr"
    ):
        from_lerobot_folder(written, tmp_path / "bundle", rate_hz=20.0, norm_stats=stats)


def test_openpis_statistics_take_the_place_of_the_folders(written, tmp_path):
    zeros, ones = [0.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0]
    stats = {"mean": zeros, "std": ones, "q01": zeros, "q99": zeros}
    actions = {**stats, "mean": [7.0, 8.0, 0.0, 0.0, 0.0], "std": [2.0, 2.0, 0.0, 0.0, 0.0]}
    (tmp_path / "norm_stats.json").write_text(json.dumps({"norm_stats": {"state": stats, "actions": actions}}))
    from_lerobot_folder(written, tmp_path / "bundle", rate_hz=20.0, norm_stats=tmp_path / "norm_stats.json")
    made = read_bundle(tmp_path / "bundle").normalizer
    np.testing.assert_allclose(made.normalize("action", np.asarray([[9.0, 8.0]], np.float32)), [[1.0, 0.0]], atol=1e-6)
    assert made.modes["action"] == "mean_std"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{lerobot}", "new"], "--rate: give the control rate"),
        (["{lerobot}", "new", "--rate", "20", "--weights-only"], "--weights-only: is for a bundle"),
        (["{bundle}", "new", "--rate", "20"], "--rate: is for a LeRobot folder"),
        (["{bundle}", "{bundle}"], "is there already"),
        (["nowhere", "new"], "nowhere: no such folder"),
    ],
)
def test_the_command_ends_with_two_and_one_message(words, message, written, monkeypatch, capsys):
    from rlsvc.cli import main

    places = {"lerobot": str(written), "bundle": str(written.parent / "bundle")}
    monkeypatch.setattr("sys.argv", ["rlsvc", "policies", "convert", *(word.format(**places) for word in words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
