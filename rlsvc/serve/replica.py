"""What runs in each Ray Serve replica: a policy, loaded, compiled, then reachable; others when they are asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlsvc.serve.app import build_app
from rlsvc.serve.listener import check_listener
from rlsvc.serve.log import log_as_json
from rlsvc.serve.policies import Policies
from rlsvc.serve.service import PolicyService
from rlsvc.serve.watch import Watcher

if TYPE_CHECKING:
    from fastapi import FastAPI

    from rlsvc.serve.deploy import Deployment


class PolicyReplica:
    """A Ray Serve replica: an actor that answers requests for its policies.

    Consumes: HTTP requests and WebSocket messages, which Serve's proxy (HAProxy, or Serve's own) hands it.
    Produces: action chunks, refusals, Prometheus text, JSON lines on standard error; kept between requests are
    counters, and the episodes of clients that keep none (`rlsvc.serve.session`).
    Waits for: the policy's thread, at most `deadline_s` for a request; the event loop itself waits for a policy only
    while each of its batches is over within half a millisecond (`rlsvc.serve.batcher`). Should such a one hang, Serve's
    own health check goes unanswered, and it replaces this replica. When a client dies its request is dropped before its
    batch starts, or its answer is thrown away. When the proxy dies Serve restarts it; clients connect anew and ask
    again. When this replica dies Serve starts another; requests under way are lost, and asking again is harmless, since
    a request's seed and step decide its answer; episodes that it kept are lost too, and their robots are told so. When
    the Serve controller dies this replica goes on answering.
    """

    async def __init__(self, deployment: Deployment) -> None:
        """Load and compile; Serve sends no request before this is over."""
        from ray import serve

        # Once more where it counts: Serve may have been started on another host since the application was built.
        await asyncio.to_thread(check_listener, keys=deployment.keys is not None)
        settings = deployment.settings
        log_as_json(settings.log_level)
        runner = await asyncio.to_thread(deployment.load)
        replica = serve.get_replica_context().replica_tag
        self._keys = deployment.keys
        self._service = PolicyService(deployment.name, runner, settings, replica=replica)
        self._policies = Policies(
            self._service,
            deployment.also,
            first_bytes=deployment.weight_bytes,
            budget_bytes=deployment.budget_bytes,
            watch_s=deployment.watch_s,
        )
        self._watch: asyncio.Task[None] | None = None
        if deployment.sources:
            watcher = Watcher(self._service, deployment.sources, deployment.watch_s or 0.0)
            await watcher.look()
            if deployment.watch_s is not None:
                self._watch = asyncio.create_task(watcher.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve calls for the application, once `__init__` is over."""
        return build_app(self._policies, self._keys, echo_request_id=False)

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
