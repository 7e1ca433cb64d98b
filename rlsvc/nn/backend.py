"""Which device JAX uses, and where compiled programs are kept between runs."""

from __future__ import annotations

import jax

from rlsvc.core.cache import cache_dir
from rlsvc.core.errors import UserError


def setup_jax(device: str = "auto") -> str:
    """Choose the platform and switch the persistent compilation cache on.

    Args:
        device: "cpu", "gpu", or "auto" for the best there is.

    Returns:
        The platform, "cpu" or "gpu".

    Raises:
        UserError: a GPU is asked for and JAX sees none.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return "cpu"
    platform = jax.default_backend()
    if device == "gpu" and platform != "gpu":
        raise UserError(
            f"device: got gpu, but JAX sees only {platform}. Install rlsvc[cuda] on a machine with an NVIDIA driver, "
            "or use device=cpu; `rlsvc doctor` says what is missing."
        )
    return platform
