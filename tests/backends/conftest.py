"""Tiny policies of LeRobot's, saved by LeRobot itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlsvc.backends.torch_lerobot import from_folder
from rlsvc.store.bundle import LEROBOT_WEIGHTS, write_bundle

torch.set_num_threads(1)

STATE, ENV, IMAGE = "observation.state", "observation.environment_state", "observation.image"
SHAPES = {STATE: (2,), ENV: (18,), IMAGE: (3, 96, 96), "action": (2,)}
KINDS = {STATE: "STATE", ENV: "ENV", IMAGE: "VISUAL", "action": "ACTION"}
VISION = {"pretrained_backbone_weights": None}
SIZES = {
    "act": {
        "chunk_size": 6, "n_action_steps": 4, "dim_model": 16, "n_heads": 2, "dim_feedforward": 16,
        "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4, **VISION,
    },
    "diffusion": {
        "horizon": 8, "n_action_steps": 4, "down_dims": (8, 8), "n_groups": 2, "diffusion_step_embed_dim": 8,
        "num_train_timesteps": 4, **VISION,
    },
    "vqbet": {
        "n_obs_steps": 2, "n_action_pred_token": 2, "action_chunk_size": 3, "n_vqvae_training_steps": 2,
        "vqvae_embedding_dim": 8, "vqvae_enc_hidden_dim": 8, "gpt_block_size": 16, "gpt_input_dim": 16,
        "gpt_output_dim": 16, "gpt_n_layer": 1, "gpt_n_head": 2, "gpt_hidden_dim": 16, **VISION,
    },
}  # fmt: skip
SEES = {"act": (STATE, ENV), "diffusion": (STATE, ENV), "vqbet": (STATE, IMAGE)}


def lerobot_policy(kind: str):
    """A policy of LeRobot's with its processors, whose statistics are no identity."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

    torch.manual_seed(0)
    features = {name: PolicyFeature(FeatureType(KINDS[name]), SHAPES[name]) for name in (*SEES[kind], "action")}
    inputs = {name: features[name] for name in SEES[kind]}
    config = make_policy_config(
        kind, input_features=inputs, output_features={"action": features["action"]}, device="cpu", **SIZES[kind]
    )
    rng = np.random.default_rng(0)
    stats = {}
    for name, shape in SHAPES.items():
        low = torch.tensor(rng.normal(size=shape[:1] + (1,) * (len(shape) - 1)), dtype=torch.float32)
        stats[name] = {"min": low, "max": low + 2, "mean": low + 1, "std": low.abs() + 0.5}
    policy = get_policy_class(kind)(config).eval()
    return policy, *make_pre_post_processors(config, dataset_stats=stats)


def save(kind: str, folder: Path) -> Path:
    """A folder as lerobot-train writes it."""
    for part in lerobot_policy(kind):
        part.save_pretrained(folder)
    return folder


def observation(contract, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Windows by name [B, T, ...]."""
    rng, made = np.random.default_rng(seed), {}
    for name, feature in contract.observation.items():
        shape = (rows, contract.n_obs_steps, *feature.shape)
        image = feature.dtype == "uint8"
        made[name] = rng.integers(0, 256, shape).astype("uint8") if image else rng.normal(size=shape).astype("float32")
    return made


@pytest.fixture(scope="session")
def lerobot_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind."""
    root = tmp_path_factory.mktemp("lerobot")
    return {kind: save(kind, root / kind) for kind in SIZES}


@pytest.fixture(scope="session")
def bundles(lerobot_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundles of these folders."""
    root = tmp_path_factory.mktemp("bundles")
    return {
        kind: write_bundle(root / kind, **from_folder(folder, 10.0), weights=LEROBOT_WEIGHTS)
        for kind, folder in lerobot_folders.items()
    }
