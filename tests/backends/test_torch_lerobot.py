"""Policies that LeRobot saved, imported, acting, served and evaluated here; and read by LeRobot again."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from conftest import SIZES, lerobot_policy, observation

from rlsvc.backends.torch_lerobot import from_folder, make_config
from rlsvc.backends.torch_noise import RowNoise, seed_of
from rlsvc.backends.torch_runner import TorchRunner
from rlsvc.cli import app
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, NotFoundError, SpecError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.params import flatten_params
from rlsvc.policies.diffusion import DiffusionPolicy
from rlsvc.runner import PolicyRunner
from rlsvc.serve.app import build_app
from rlsvc.serve.policies import Offered, Policies
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.source import PolicySource
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.env import PushTSpec
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec
from rlsvc.store.bundle import LEROBOT_WEIGHTS, read_bundle, write_bundle
from rlsvc.train.standalone import evaluate_bundle

KINDS = sorted(SIZES)


def runner_of(path: Path, **options) -> TorchRunner:
    made = PolicyRunner.load(path, device="cpu", **options)
    assert isinstance(made, TorchRunner)
    return made


def chosen_by_lerobot(kind: str, seen: dict[str, np.ndarray], seed: int, count: int) -> np.ndarray:
    """What LeRobot's own loop executes after the window [1, T, ...]: its processors and select_action, step by step."""
    from lerobot.policies.utils import populate_queues

    policy, before, after = lerobot_policy(kind)
    policy.reset()
    steps = next(iter(seen.values())).shape[1]
    actions = []
    with RowNoise([seed_of(seed, 0)]):
        for step in range(steps + count - 1):
            now = {name: torch.as_tensor(x[:, min(step, steps - 1)]) for name, x in seen.items()}
            now = {n: x.movedim(-1, 1).float() / 255 if x.dtype == torch.uint8 else x for n, x in now.items()}
            batch = before({**now, "task": [""]})
            batch = {name: value for name, value in batch.items() if name.startswith("observation.")}
            if step < steps - 1:  # of the past the policy only keeps what it saw
                images = [batch[name] for name in policy.config.image_features]
                stacked = {"observation.images": torch.stack(images, dim=-4)} if images else {}
                policy._queues = populate_queues(policy._queues, {**batch, **stacked}, exclude_keys=["action"])
            else:
                actions.append(after(policy.select_action(batch)))
    return torch.stack(actions, 1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_policy_executes_what_lerobots_own_loop_does(bundles, kind):
    runner = runner_of(bundles[kind])
    seen = observation(runner.contract, 1)
    action = runner.act(seen, np.array([7]), np.zeros(1)).action
    wanted = chosen_by_lerobot(kind, seen, 7, runner.contract.action_horizon)
    assert action.shape == wanted.shape
    np.testing.assert_allclose(action, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_acts_alone_as_in_a_batch(bundles, kind):
    runner = runner_of(bundles[kind])
    seen, seeds, steps = observation(runner.contract, 3), np.array([5, 5, 9]), np.array([0, 8, 0])
    together = runner.act(seen, seeds, steps).action
    alone = [runner.act({k: x[[i]] for k, x in seen.items()}, seeds[[i]], steps[[i]]).action[0] for i in range(3)]
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_the_noise_of_a_row_follows_from_seed_and_step(bundles):
    runner = runner_of(bundles["diffusion"])
    seen = {name: x[[0, 0, 0]] for name, x in observation(runner.contract, 1).items()}
    action = runner.act(seen, np.array([5, 5, 9]), np.array([0, 8, 0])).action
    assert not np.allclose(action[0], action[1])
    assert not np.allclose(action[0], action[2])
    np.testing.assert_array_equal(runner.act(seen, np.array([5, 5, 9]), np.array([0, 8, 0])).action, action)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_lerobot_loads_the_bundle(bundles, lerobot_folders, kind):
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    wanted = get_policy_class(kind).from_pretrained(lerobot_folders[kind]).state_dict()
    policy = get_policy_class(kind).from_pretrained(bundles[kind], strict=True)
    assert policy.state_dict().keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in policy.state_dict().items())
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(bundles[kind]))
    action = torch.tensor([[0.5, -0.5]])
    again = before({"action": after(action), "observation.state": torch.zeros(1, 2), "task": [""]})["action"]
    np.testing.assert_allclose(again, action, atol=1e-5)


def test_a_served_policy_answers_over_http(bundles):
    runner = runner_of(bundles["act"], batch_sizes=(1, 2))
    runner.warm_up()
    seen = {name: x[0] for name, x in observation(runner.contract, 1).items()}
    service = PolicyService("arm", runner, ServeSettings())
    with TestClient(build_app(service)) as client:
        body = {"observation": {name: x.tolist() for name, x in seen.items()}, "seed": 3}
        answer = client.post("/v1/policies/arm/act", json=body)
    service.close()
    assert answer.status_code == 200, answer.text
    assert answer.json()["version"] == read_bundle(bundles["act"]).id
    wanted = runner.act({name: x[None] for name, x in seen.items()}, np.array([3]), np.zeros(1)).action[0]
    np.testing.assert_allclose(answer.json()["action"], wanted, atol=1e-6)


def test_a_jax_and_a_torch_policy_share_a_replica(bundles, tmp_path):
    spec = DiffusionSpec.model_validate(
        {"n_obs_steps": 1, "horizon": 4, "n_action_steps": 3, "train_steps": 10, "sample_steps": 2,
         "backbone": {"name": "unet1d", "down_dims": [8], "step_embed_dim": 8}}
    )  # fmt: skip
    contract = Contract({"state": Feature((2,), "float32")}, Feature((1,), "float32"), 10.0, 1, 3)
    path = write_bundle(
        tmp_path / "jax",
        policy=spec.model_dump(mode="json"),
        contract=contract,
        normalizer=Normalizer.identity({**contract.observation, "action": contract.action}),
        params=flatten_params(jax.jit(DiffusionPolicy(spec, contract).init)(jax.random.key(0))),
    )
    source = PolicySource(str(bundles["act"]))
    torch_contract = read_bundle(bundles["act"]).contract
    offered = Offered("act", source, torch_contract, None, source.find(), 1)
    service = PolicyService("jax", PolicySource(str(path))(), ServeSettings())
    with TestClient(build_app(Policies(service, (offered,)))) as client:
        for name, seen in (("jax", contract), ("act", torch_contract), ("jax", contract)):
            window = {key: x[0].tolist() for key, x in observation(seen, 1).items()}
            answer = client.post(f"/v1/policies/{name}/act", json={"observation": window})
            assert answer.status_code == 200, answer.text
            assert np.shape(answer.json()["action"]) == (seen.action_horizon, *seen.action.shape)
    service.close()


def test_a_request_far_from_the_training_data_is_noticed(bundles):
    service = PolicyService("arm", runner_of(bundles["act"]), ServeSettings())
    service.close()
    assert service.distribution is not None
    assert set(service.distribution.features) == {"observation.state", "observation.environment_state"}


def test_the_command_writes_a_bundle_that_evaluation_runs(lerobot_folders, tmp_path):
    words = ["policies", "import", str(lerobot_folders["act"]), str(tmp_path / "bundle"), "--rate", "10"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    env = PushTSpec(observation="keypoints", max_steps=12)
    found = evaluate_bundle(str(tmp_path / "bundle"), env, episodes=2, parallel=2, local=True, device="cpu")
    assert [len(episode.rewards) for episode in found.episodes] == [12, 12]


def test_denoising_steps_are_the_callers_where_a_policy_denoises(bundles):
    quick = runner_of(bundles["diffusion"], sample_steps=1)
    seen = observation(quick.contract, 1)
    once, all_of_them = (r.act(seen, np.zeros(1), np.zeros(1)).action for r in (quick, runner_of(bundles["diffusion"])))
    assert not np.allclose(once, all_of_them)
    with pytest.raises(UserError, match="sample_steps: LeRobot's act does not denoise"):
        runner_of(bundles["act"], sample_steps=1)


def test_weights_of_another_bundle_of_the_policy_are_taken_and_of_another_policy_refused(bundles, tmp_path):
    folder = shutil.copytree(bundles["act"], tmp_path / "source")
    weights = load_file(folder / "model.safetensors")
    save_file({name: x * 1.5 for name, x in weights.items()}, folder / "model.safetensors")
    (folder / "bundle.json").unlink()
    other = write_bundle(tmp_path / "other", **from_folder(folder, 10.0), weights=LEROBOT_WEIGHTS)
    runner = runner_of(bundles["act"])
    seen = observation(runner.contract, 1)
    runner.set_weights(read_bundle(other))
    np.testing.assert_array_equal(
        runner.act(seen, np.zeros(1), np.zeros(1)).action, runner_of(other).act(seen, np.zeros(1), np.zeros(1)).action
    )
    with pytest.raises(BundleError, match="its contract is not that of"):
        runner.set_weights(read_bundle(bundles["diffusion"]))


def damaged(folder: Path, at: Path, what: str) -> Path:
    shutil.copytree(folder, at)
    file = at / "policy_preprocessor.json"
    steps = json.loads(file.read_text())
    weights = load_file(at / "model.safetensors")
    if what == "class":
        steps["steps"].insert(0, {"class": "subprocess.Popen", "config": {"args": ["true"]}})
    elif what == "unknown":
        steps["steps"].insert(0, {"registry_name": "teleport_processor", "config": {}})
    elif what == "missing":
        weights.pop("model.action_head.bias")
    elif what == "shape":
        weights["model.action_head.bias"] = torch.zeros(3)
    elif what == "more":
        weights["model.tail.bias"] = torch.zeros(3)
    elif what == "gone":
        (at / "policy_postprocessor.json").unlink()
    elif what == "field":
        config = json.loads((at / "config.json").read_text())
        (at / "config.json").write_text(json.dumps({**config, "colour": "red"}))
    file.write_text(json.dumps(steps))
    save_file(weights, at / "model.safetensors")
    return at


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("class", "step 'subprocess.Popen' is none of LeRobot's registered ones"),
        ("unknown", "step 'teleport_processor' is none of LeRobot's registered ones"),
        ("missing", "'model.action_head.bias' is missing"),
        ("shape", r"'model.action_head.bias' has shape \(3,\), expected \(2,\)"),
        ("more", "'model.tail.bias' is no weight of LeRobot's act"),
        ("gone", "policy_postprocessor.json: not readable"),
        ("field", "LeRobot's act refuses it: .*colour"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(lerobot_folders, tmp_path, what, message):
    with pytest.raises(UserError, match=message):
        from_folder(damaged(lerobot_folders["act"], tmp_path / what, what), 10.0)


def test_a_policy_that_keeps_chunks_between_requests_is_refused(bundles, tmp_path):
    bundle = read_bundle(bundles["act"])
    config = json.loads((bundle.path / "config.json").read_text())
    folder = shutil.copytree(bundle.path, tmp_path / "ensemble")
    (folder / "config.json").write_text(json.dumps({**config, "n_action_steps": 1, "temporal_ensemble_coeff": 0.01}))
    with pytest.raises(BundleError, match="temporal_ensemble_coeff is set"):
        TorchRunner(replace(bundle, path=folder), device="cpu")


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"type": "actt"}, NotFoundError, "unknown policy of LeRobot 'actt'. Did you mean 'act'?"),
        (
            {"type": "act", "config": {"chunk_sise": 4}},
            SpecError,
            r"no field 'chunk_sise' \(did you mean 'chunk_size'\?\)",
        ),
        ({"type": "act", "config": {"chunk_size": 4}}, SpecError, "LeRobot's act refuses it: .*n_action_steps"),
        ({"type": "act", "n_obs_steps": 2}, SpecError, "Multiple observation steps not handled"),
        ({"type": "vqbet", "n_obs_steps": 5}, SpecError, "policy.n_action_steps: got 8, LeRobot's vqbet has 5"),
        ({"type": "tdmpc", "n_action_steps": 1}, SpecError, "LeRobot's tdmpc learns from"),
    ],
)
def test_a_specification_that_lerobot_refuses_says_where(fields, kind, message):
    with pytest.raises(kind, match=message):
        make_config(LeRobotPolicySpec(**fields), None)


PLUGIN = {
    "__init__": "from lerobot_policy_small import configuration_small",
    "configuration_small": """
from dataclasses import dataclass
from lerobot.configs import PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig

@PreTrainedConfig.register_subclass("small")
@dataclass
class SmallConfig(ACTConfig):
    pass
""",
    "modeling_small": """
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot_policy_small.configuration_small import SmallConfig

class SmallPolicy(ACTPolicy):
    config_class, name = SmallConfig, "small"
""",
    "processor_small": """
from lerobot.policies.act.processor_act import make_act_pre_post_processors as make_small_pre_post_processors
""",
}


def test_a_policy_of_an_installed_plugin_is_imported_and_acts(lerobot_folders, tmp_path, monkeypatch):
    package = tmp_path / "lerobot_policy_small"
    package.mkdir()
    for name, text in PLUGIN.items():
        (package / f"{name}.py").write_text(text)
    installed = tmp_path / "lerobot_policy_small-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: lerobot_policy_small\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = shutil.copytree(lerobot_folders["act"], tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "type": "small"}))
    path = write_bundle(tmp_path / "bundle", **from_folder(folder, 10.0), weights=LEROBOT_WEIGHTS)
    runner = runner_of(path)
    assert runner.name == "small"
    assert runner.act(observation(runner.contract, 1), np.zeros(1), np.zeros(1)).action.shape == (1, 4, 2)


def test_a_contract_that_a_policy_cannot_read_is_refused(bundles):
    contract = read_bundle(bundles["act"]).contract
    spec = LeRobotPolicySpec(type="vqbet", n_obs_steps=5, n_action_steps=5)
    with pytest.raises(ContractError, match="You must provide only one image among the inputs"):
        make_config(spec, contract)
    with pytest.raises(ValueError, match=r"config.n_obs_steps: is policy.n_obs_steps here"):
        LeRobotPolicySpec(type="act", config={"n_obs_steps": 1})
