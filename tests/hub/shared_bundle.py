"""A small bundle to share, and the token of who may."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.data.normalize import Normalizer
from rlsvc.store.bundle import write_bundle

TOKEN = "hf_aliceSecretToken"
CONTRACT = Contract(
    {
        "observation.state": Feature((2,), "float32", "px", ("x", "y"), (0.0,), (512.0,)),
        "observation.image": Feature((8, 8, 3), "uint8"),
        "task": Feature((), "str"),
    },
    Feature((2,), "float32", "px"),
    10.0,
    2,
    8,
)


def make_bundle(path: Path, **changes) -> Path:
    """A small bundle."""
    columns = {
        "observation.state": np.array([[0.1, 1], [3, 4 / 3]], np.float32),
        "action": np.array([[0, 0], [1 / 3, 1]], np.float32),
    }
    features = {**CONTRACT.observation, "action": CONTRACT.action}
    fields = {
        "policy": {"name": "diffusion", "horizon": 16},
        "contract": CONTRACT,
        "normalizer": Normalizer.fit({"default": columns}, features, {}),
        "params": {"net.kernel": np.arange(6, dtype=np.float32).reshape(2, 3) / 7},
        "run": {"project": "pusht", "name": "demo", "seed": 0, "step": 30, "updates": 30},
    }
    return write_bundle(path, **{**fields, **changes})
