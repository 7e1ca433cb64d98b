"""pi0 and pi0.5 beside openpi's and LeRobot's own models: the same weights, inputs and noise, in float32 on a CPU.

    python benchmarks/pi0_parity.py

openpi's side are arrays that its JAX model gave at the dummy size (tests/data/pi0_golden says how they were made);
LeRobot's is its PyTorch model, run here. The figure is the lowest cosine of the sampled actions, of both variants.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from common import ROOT, write_result

sys.path.append(str(ROOT / "tests" / "policies"))
import test_pi0
import test_pi0_lerobot

PACKAGES = ("rlsvc", "jax", "flax", "torch", "lerobot", "transformers")


def cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of the two as vectors, in float64."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (ours, theirs))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def main() -> None:
    """Measure, print, store."""
    jax.config.update("jax_platforms", "cpu")
    found = {}
    for variant in ("pi0", "pi05"):
        found[f"openpi's {variant}"] = cosine(*test_pi0.sampled_by_both(variant))
        with pytest.MonkeyPatch.context() as patch:
            found[f"LeRobot's {variant}"] = cosine(*test_pi0_lerobot.sampled_by_both(variant, patch))
    for name, value in found.items():
        print(f"{name}: cosine {value:.9f}")
    name, least = min(found.items(), key=lambda item: item[1])
    write_result(
        "pi0_parity_cosine",
        least,
        "cosine",
        high=max(found.values()),
        low=least,
        peer=name,
        packages=PACKAGES,
        seeds=[0],
    )


if __name__ == "__main__":
    main()
