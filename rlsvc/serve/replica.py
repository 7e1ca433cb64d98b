"""What runs in each Ray Serve replica: one policy, loaded, compiled, then reachable."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlsvc.serve.app import build_app
from rlsvc.serve.listener import check_listener
from rlsvc.serve.log import log_as_json
from rlsvc.serve.service import PolicyService
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.watch import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastapi import FastAPI

    from rlsvc.runner import ServedRunner
    from rlsvc.serve.keys import Keys
    from rlsvc.serve.watch import Source


class PolicyReplica:
    """A Ray Serve replica: an actor that answers requests for one policy.

    Consumes: HTTP requests and WebSocket messages, which Serve's proxy (HAProxy, or Serve's own) hands it.
    Produces: action chunks, refusals, Prometheus text, JSON lines on standard error; kept between requests are
    counters, and the episodes of clients that keep none (`rlsvc.serve.session`).
    Waits for: the policy's thread, at most `deadline_s` for a request; the event loop itself never waits for the
    policy. When a client dies its request is dropped before its batch starts, or its answer is thrown away. When the
    proxy dies Serve restarts it; clients connect anew and ask again. When this replica dies Serve starts another;
    requests under way are lost, and asking again is harmless, since a request's seed and step decide its answer;
    episodes that it kept are lost too, and their robots are told so. When the Serve controller dies this replica goes
    on answering.
    """

    async def __init__(
        self,
        name: str,
        load: Callable[[], ServedRunner],
        settings: ServeSettings,
        keys: Keys | None = None,
        sources: Mapping[str, Source] | None = None,
        watch_s: float | None = None,
    ) -> None:
        """Load and compile; Serve sends no request before this is over.

        Args:
            name: of the policy.
            load: makes the runner, warm, in this process.
            settings: limits.
            keys: who may use it; None lets everybody who reaches it.
            sources: by role what versions are to be watched.
            watch_s: how often; None looks once, for the canary and the shadow.
        """
        from ray import serve

        # Once more where it counts: Serve may have been started on another host since the application was built.
        await asyncio.to_thread(check_listener, keys=keys is not None)
        log_as_json(settings.log_level)
        runner = await asyncio.to_thread(load)
        self._keys = keys
        self._watch: asyncio.Task[None] | None = None
        self._service = PolicyService(name, runner, settings, replica=serve.get_replica_context().replica_tag)
        if sources:
            watcher = Watcher(self._service, sources, watch_s or 0.0)
            await watcher.look()
            if watch_s is not None:
                self._watch = asyncio.create_task(watcher.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve calls for the application, once `__init__` is over."""
        return build_app(self._service, self._keys, echo_request_id=False)

    def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica.

        Raises:
            RuntimeError: the policy's thread has died, or has been in one batch for too long; or the watch has ended.
        """
        watch = self._watch
        if watch is not None and watch.done():
            raise RuntimeError(f"policy '{self._service.name}' is not watched any more: {watch.exception()}")
        if not self._service.ready:
            raise RuntimeError(f"policy '{self._service.name}' is stuck or its thread has died")
