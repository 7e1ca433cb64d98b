"""Ray Train backend that joins the ranks of a group into one JAX process group, on CPU and GPU.

Ray 2.60's own JaxConfig overwrites CUDA_VISIBLE_DEVICES with 0..n-1, which hands two ranks of one host the same card,
and starts no process group on CPUs. Here every rank keeps the devices that Ray gave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig


@dataclass
class JaxBackendConfig(BackendConfig):
    """Takes nothing: ranks and devices are those of the group."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend."""
        return _JaxBackend


def _join(coordinator: str, count: int, rank: int) -> None:
    import jax
    from jax.experimental import multihost_utils

    jax.distributed.initialize(coordinator, count, rank, heartbeat_timeout_seconds=60)
    # The first collective waits at most 30 s for the other ranks; here they are abreast, later one may load for longer.
    multihost_utils.sync_global_devices("joined")


def _leave() -> None:
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


class _JaxBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Wait until every rank has joined. One rank alone needs no group."""
        del backend_config
        count = len(worker_group)
        if count == 1:
            return
        host, port = worker_group.execute_single(0, get_address_and_port)
        ray.get(
            [worker_group.execute_single_async(rank, _join, f"{host}:{port}", count, rank) for rank in range(count)]
        )

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Leave; a rank that died is not waited for."""
        del backend_config
        if len(worker_group) > 1:
            ray.wait(
                [worker_group.execute_single_async(rank, _leave) for rank in range(len(worker_group))],
                timeout=10,
                num_returns=len(worker_group),
            )
