"""Limits of a served policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServeSettings:
    """Limits of a served policy.

    Attributes:
        max_body_bytes: of one request. uvicorn stops a WebSocket message at 16 MiB, so HTTP stops there too.
        max_batch: most requests in one call of the policy.
        batch_wait_s: how long a request waits for others to join its batch (`rlsvc.serve.batcher`); 0 never.
        max_waiting: requests waiting beyond which more are refused with 503.
        deadline_s: longest that a request may take before it is answered with 504.
        stuck_s: a batch that takes longer makes the replica unhealthy, and Serve replaces it.
        log_level: of the lines that a replica writes: debug, info, warning or error.
        chunk_expiry_ms: how long a chunk may be executed from when it is answered; None for as long as its actions last
            at the contract's rate.
        session_expiry_s: how long the server keeps a session's history, chunk and carry after its last request.
        drain_s: longest that a session keeps a version that another has taken the place of.
        canary_share: of the sessions that a canary takes, [0, 1].
    """

    max_body_bytes: int = 16 * 2**20
    max_batch: int = 1
    batch_wait_s: float = 0.002
    max_waiting: int = 256
    deadline_s: float = 30.0
    stuck_s: float = 60.0
    log_level: str = "info"
    chunk_expiry_ms: float | None = None
    session_expiry_s: float = 60.0
    drain_s: float = 600.0
    canary_share: float = 0.0
