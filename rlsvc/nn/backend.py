"""Which device JAX uses, and where compiled programs are kept between runs."""

from __future__ import annotations

import jax
from jax.sharding import Sharding, SingleDeviceSharding

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


def for_host() -> Sharding:
    """Where a compiled function puts what the host reads next, as its `out_shardings`.

    Pinned host memory on a GPU, written by the program itself: a copy after the call takes a fifth of a planner's time.
    """
    device = jax.local_devices()[0]
    return SingleDeviceSharding(device, memory_kind="pinned_host" if device.platform == "gpu" else None)


def on_device() -> Sharding:
    """The first device's own memory, as `out_shardings` takes it beside `for_host`."""
    return SingleDeviceSharding(jax.local_devices()[0])
