"""Which device Torch runs on."""

from __future__ import annotations

import torch

from rlsvc.core.errors import UserError


def choose_device(device: str) -> str:
    """Torch's name, "cpu" or "cuda", for auto, cpu or gpu.

    Raises:
        UserError: a GPU is asked for and Torch sees none.
    """
    found = torch.cuda.is_available()
    if device == "gpu" and not found:
        raise UserError("device: got gpu, but Torch sees none; use device=cpu. `rlsvc doctor` says what is missing.")
    return "cuda" if found and device != "cpu" else "cpu"
