"""LeRobot's pi0 and pi0.5 at small sizes; its published ones are written into its code."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig

from rlsvc.spec.pi0 import GemmaSpec, SiglipSpec

CLASSES = {"pi0": ("PI0Config", "PI0Policy", "PI0Pytorch"), "pi05": ("PI05Config", "PI05Policy", "PI05Pytorch")}


def shrink(
    variant: str, vision: SiglipSpec, gemma: dict[str, GemmaSpec], side: int, vocab: int, patch: pytest.MonkeyPatch
) -> tuple[type, type, type]:
    """Give LeRobot these sizes.

    Args:
        variant: pi0 or pi05.
        vision: of the vision tower.
        gemma: by the names of LeRobot's configurations, the backbone's first.
        side: height and width of images.
        vocab: rows of the embedding.
        patch: undoes it.

    Returns:
        Classes of the configuration, the policy and the model in it.
    """
    module: ModuleType = importlib.import_module(f"lerobot.policies.{variant}.modeling_{variant}")
    width = next(iter(gemma.values())).width
    sizes = {
        name: SimpleNamespace(
            width=g.width, depth=g.depth, mlp_dim=g.mlp_dim, num_heads=g.heads, num_kv_heads=g.kv_heads,
            head_dim=g.head_dim,
        )
        for name, g in gemma.items()
    }  # fmt: skip

    def keep(config: type, **kept: int) -> None:
        """LeRobot writes published sizes over what its configurations hold; these stay."""
        write = config.__setattr__
        patch.setattr(config, "__setattr__", lambda self, name, x: write(self, name, kept.get(name, x)))

    keep(SiglipVisionConfig, intermediate_size=vision.mlp_dim, projection_dim=width)
    keep(GemmaConfig, vocab_size=vocab)

    def paligemma() -> PaliGemmaConfig:
        tower = SiglipVisionConfig(
            hidden_size=vision.width, num_hidden_layers=vision.depth, num_attention_heads=vision.heads,
            patch_size=vision.patch, intermediate_size=vision.mlp_dim, image_size=side, projection_dim=width,
            vision_use_head=False,
        )  # fmt: skip
        return PaliGemmaConfig(vision_config=tower, text_config=GemmaConfig(), projection_dim=width)

    patch.setattr(module, "get_gemma_config", lambda name: sizes[name])
    patch.setattr(module, "CONFIG_MAPPING", {"paligemma": paligemma, "gemma": GemmaConfig})
    config, policy, model = CLASSES[variant]
    configuration = importlib.import_module(f"lerobot.policies.{variant}.configuration_{variant}")
    return getattr(configuration, config), getattr(module, policy), getattr(module, model)


def randomize(model: torch.nn.Module) -> None:
    """Weights of which none is zero or alike another, drawn from seed 0."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(torch.randn_like(x) * (0.1 if "norm" in name or "bias" in name else x.shape[-1] ** -0.5))
            if "layernorm" in name and "vision" in name and name.endswith("weight"):
                x.add_(1)
