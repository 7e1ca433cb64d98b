"""Plain LeRobot and the stand-in hub: it loads what was pushed here, and what it saved is pulled here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec
from rlsvc.store.bundle import read_bundle

ROOT = Path(__file__).parents[2]
PUSHT = ROOT / "datasets" / "pusht_human"
LOAD = """
import json, sys
from lerobot.datasets import LeRobotDataset
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from safetensors.torch import save_file
dataset = LeRobotDataset("mylab/pusht")
item = dataset[len(dataset) - 1]
policy = get_policy_class("act").from_pretrained("mylab/act", strict=True)
make_pre_post_processors(policy.config, pretrained_path="mylab/act")
save_file({name: value.contiguous() for name, value in policy.state_dict().items()}, sys.argv[1])
print(json.dumps({
    "episodes": dataset.num_episodes, "frames": len(dataset), "fps": dataset.fps, "task": item["task"],
    "state": item["observation.state"].tolist(), "action": item["action"].tolist(), "root": str(dataset.root),
}))
"""


def lerobot(code: str, argument: Path, home: Path, **environment: str) -> str:
    """Run plain LeRobot in a process of its own, whose home is empty."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(argument)], capture_output=True, text=True, check=False, timeout=300,
        env=clean | {"HF_HOME": str(home), "HF_LEROBOT_HOME": str(home / "lerobot"), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a tiny ACT as LeRobot saves it."""
    import torch
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

    torch.manual_seed(0)
    seen = {
        "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
        "observation.environment_state": PolicyFeature(FeatureType.ENV, (18,)),
    }
    done = {"action": PolicyFeature(FeatureType.ACTION, (2,))}
    config = make_policy_config(
        "act", device="cpu", chunk_size=6, n_action_steps=4, dim_model=16, n_heads=2, dim_feedforward=16,
        n_encoder_layers=1, n_vae_encoder_layers=1, latent_dim=4, pretrained_backbone_weights=None,
        input_features=seen, output_features=done,
    )  # fmt: skip
    ones = {name: torch.ones(feature.shape) for name, feature in {**seen, **done}.items()}
    stats = {name: {"mean": one, "std": 2 * one, "min": -one, "max": one} for name, one in ones.items()}
    folder = tmp_path_factory.mktemp("lerobot") / "act"
    for part in (get_policy_class("act")(config), *make_pre_post_processors(config, dataset_stats=stats)):
        part.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_lerobot_loads_a_dataset_and_a_policy_that_were_pushed(rlsvc, hub, saved, token_file, tmp_path):
    rlsvc("policies", "import", saved, tmp_path / "act", "--rate", 10)
    rlsvc("policies", "push", tmp_path / "act", "mylab/act", "--token-file", token_file)
    assert "library_name: lerobot" in hub.files("model", "mylab/act")["README.md"].decode()
    rlsvc("dataset", "push", PUSHT, "mylab/pusht", "--token-file", token_file)
    hub.requests.clear()
    home = tmp_path / "elsewhere"
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    found = json.loads(lerobot(LOAD, tmp_path / "loaded.safetensors", home, **environment).splitlines()[-1])
    table = load_table(DatasetSpec.model_validate({"path": str(PUSHT)}))
    assert (found["episodes"], found["frames"], found["fps"]) == (206, 25650, 10)
    assert found["task"] == "Push the T-shaped block onto the T-shaped target."
    np.testing.assert_array_equal(np.float32(found["state"]), table.columns["observation.state"][-1])
    np.testing.assert_array_equal(np.float32(found["action"]), table.columns["action"][-1])
    assert found["root"].startswith(str(home))
    assert any("/datasets/mylab/pusht/resolve/" in path for _, path, _ in hub.requests)
    mine, theirs = read_bundle(tmp_path / "act").params, load_file(tmp_path / "loaded.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(value, theirs[name]) for name, value in mine.items())


def test_a_lerobot_policy_on_the_hub_becomes_a_bundle_when_its_rate_is_said(rlsvc, hub, saved, tmp_path):
    files = {file.name: file.read_bytes() for file in saved.iterdir()}
    hub.put("model", "lerobot/act", {**files, "optimizer_state.safetensors": b"large", "run.py": b"boom"})
    printed = rlsvc("policies", "pull", "lerobot/act", tmp_path / "act", code=2)
    assert "--rate HZ makes a bundle of it" in printed
    assert "rlsvc policies import" in printed
    assert not (tmp_path / "act").exists()
    hub.requests.clear()
    printed = rlsvc("policies", "pull", "lerobot/act", tmp_path / "act", "--rate", 10)
    commit = hub.repos["model", "lerobot/act"].branches["main"]
    assert f"lerobot/act at commit {commit}" in printed
    bundle = read_bundle(tmp_path / "act")
    assert (bundle.policy["type"], bundle.contract.rate_hz) == ("act", 10)
    assert bundle.run == {"converted_from": "lerobot/act", "commit": commit}
    asked = [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert asked
    assert not [path for path in asked if "optimizer" in path or path.endswith(".py")]
    assert {entry.name for entry in tmp_path.iterdir()} == {"act", "objects"}


def test_a_bundle_needs_no_rate_and_other_models_are_none(rlsvc, hub, tmp_path, bundle, token_file):
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    assert "is a bundle already" in rlsvc("policies", "pull", "mylab/demo", tmp_path / "x", "--rate", 10, code=2)
    hub.put("model", "mylab/text", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    for words in ((), ("--rate", 10)):
        printed = rlsvc("policies", "pull", "mylab/text", tmp_path / "x", *words, code=2)
        assert "is no policy of rlsvc" in printed
    assert not (tmp_path / "x").exists()
