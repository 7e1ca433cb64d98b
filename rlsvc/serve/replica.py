"""What runs in each Ray Serve replica: one policy, loaded, compiled, then reachable."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rlsvc.serve.app import build_app
from rlsvc.serve.listener import check_listener
from rlsvc.serve.log import log_as_json
from rlsvc.serve.service import PolicyService, ServeSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from rlsvc.runner import ServedRunner
    from rlsvc.serve.keys import Keys


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The shapes that are compiled for batches of up to `max_batch` rows: powers of two, and `max_batch` itself."""
    sizes = {2**k for k in range(max_batch.bit_length()) if 2**k < max_batch}
    return tuple(sorted(sizes | {max_batch}))


class BundleLoader:
    """Loads a bundle in the replica's process, where the device is; the path must be readable there."""

    def __init__(self, path: Path, max_batch: int, device: str, group: str | None = None) -> None:
        """Remember what to load; nothing is imported yet, since the replica's environment decides about devices."""
        self._path = path
        self._options = {"batch_sizes": batch_sizes(max_batch), "device": device, "group": group}

    def __call__(self) -> ServedRunner:
        """The runner, verified and ready to be warmed up."""
        from rlsvc.runner import PolicyRunner

        return PolicyRunner.load(self._path, **self._options)


class PolicyReplica:
    """A Ray Serve replica: an actor that answers requests for one policy.

    Consumes: HTTP requests and WebSocket messages, which Serve's proxy (HAProxy, or Serve's own) hands it.
    Produces: action chunks, refusals, Prometheus text, JSON lines on standard error; nothing is kept between
    requests but counters.
    Waits for: the policy's thread, at most `deadline_s` for a request; the event loop itself never waits for the
    policy. When a client dies its request is dropped before its batch starts, or its answer is thrown away. When the
    proxy dies Serve restarts it; clients connect anew and ask again. When this replica dies Serve starts another;
    requests under way are lost, and asking again is harmless, since a request's seed and step decide its answer. When
    the Serve controller dies this replica goes on answering.
    """

    async def __init__(
        self, name: str, load: Callable[[], ServedRunner], settings: ServeSettings, keys: Keys | None = None
    ) -> None:
        """Load and compile; Serve sends no request before this is over.

        Args:
            name: of the policy.
            load: makes the runner, in this process.
            settings: limits.
            keys: who may use it; None lets everybody who reaches it.
        """
        from ray import serve

        # Once more where it counts: Serve may have been started on another host since the application was built.
        await asyncio.to_thread(check_listener, keys=keys is not None)
        log_as_json(settings.log_level)
        runner = await asyncio.to_thread(load)
        await asyncio.to_thread(runner.warm_up)
        self._keys = keys
        self._service = PolicyService(name, runner, settings, replica=serve.get_replica_context().replica_tag)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve calls for the application, once `__init__` is over."""
        return build_app(self._service, self._keys, echo_request_id=False)

    def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica.

        Raises:
            RuntimeError: the policy's thread has died, or has been in one batch for too long.
        """
        if not self._service.ready:
            raise RuntimeError(f"policy '{self._service.name}' is stuck or its thread has died")
