"""One served policy, apart from any protocol: a request is checked, batched, acted on, counted."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rlsvc.core.errors import ContractError
from rlsvc.data.repack import repack
from rlsvc.serve.batcher import Answer, Batcher, NoActionError, OverloadedError
from rlsvc.serve.codec import ActRequest, RequestError
from rlsvc.serve.distribution import Distribution
from rlsvc.serve.log import log_answered, log_internal_error, log_refused, request_id, write
from rlsvc.serve.metrics import Metrics

if TYPE_CHECKING:
    from rlsvc.runner import ServedRunner


@dataclass(frozen=True)
class ServeSettings:
    """Limits of a served policy.

    Attributes:
        max_body_bytes: of one request. uvicorn stops a WebSocket message at 16 MiB, so HTTP stops there too.
        max_batch: most requests in one call of the policy.
        batch_wait_s: longest that a request waits for others to join its batch.
        max_waiting: requests waiting beyond which more are refused with 503.
        deadline_s: longest that a request may take before it is answered with 504.
        stuck_s: a batch that takes longer makes the replica unhealthy, and Serve replaces it.
        log_level: of the lines that a replica writes: debug, info, warning or error.
        chunk_expiry_ms: how long a chunk may be executed from when it is answered; None for as long as its actions last
            at the contract's rate.
    """

    max_body_bytes: int = 16 * 2**20
    max_batch: int = 1
    batch_wait_s: float = 0.002
    max_waiting: int = 256
    deadline_s: float = 30.0
    stuck_s: float = 60.0
    log_level: str = "info"
    chunk_expiry_ms: float | None = None


class PolicyService:
    """One policy under one name.

    Attributes:
        name: under which clients ask for it.
        runner: the policy; `contract` and `version` are what clients see of it.
        settings: the limits.
        metrics: what was counted.
        distribution: how what was asked compares with the training data; None where nothing is known of that.
    """

    def __init__(self, name: str, runner: ServedRunner, settings: ServeSettings, replica: str = "local") -> None:
        """Take a runner that is loaded and warm."""
        self.name = name
        self.replica = replica
        self.runner = runner
        self.settings = settings
        self.distribution = Distribution.of(runner)
        self.metrics = Metrics(replica, name, runner.version, self.distribution)
        self._batcher = Batcher(
            runner, max_batch=settings.max_batch, wait_s=settings.batch_wait_s, max_waiting=settings.max_waiting
        )

    @property
    def ready(self) -> bool:
        """Whether a request would be acted on now."""
        return self._batcher.alive and self._batcher.busy_s() < self.settings.stuck_s

    def describe(self) -> dict[str, Any]:
        """What a client must know before it sends an observation: plain JSON types."""
        robot = self.runner.robot
        return {
            "name": self.name,
            "version": self.runner.version,
            "contract": self.runner.contract.to_json(),
            "robot": None if robot is None else robot.model_dump(mode="json"),
        }

    @property
    def expires_in_ms(self) -> float:
        """How long a chunk may be executed, from when it is answered: clocks of two hosts are never compared."""
        given, contract = self.settings.chunk_expiry_ms, self.runner.contract
        return contract.action_horizon / contract.rate_hz * 1e3 if given is None else given

    def status(self) -> dict[str, Any]:
        """`describe`, and how what this replica was asked compares with the training data."""
        return {**self.describe(), "distribution": None if self.distribution is None else self.distribution.to_json()}

    async def act(self, request: ActRequest, *, read: float) -> Answer:
        """Check and act; `answered` counts it once it is encoded.

        Args:
            request: as decoded.
            read: `perf_counter()` when all of its bytes were there, and decoding began.

        Raises:
            RequestError: the observation does not fit the contract (422), too many requests wait (503), the policy did
                not answer in time (504), said what is no action (500, with the reason), or failed (500, with an id that
                is in the log beside the traceback).
        """
        try:
            contract, robot = self.runner.contract, self.runner.robot
            asked = request.observation if robot is None else repack(request.observation, robot, contract)
            observation = contract.check_observation(asked)
        except ContractError as error:
            raise RequestError(422, "observation", str(error)) from error
        self._watch(observation)
        preprocess_s = perf_counter() - read
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                answer = await self._batcher.act(observation, request.seed, request.step or 0)
        except OverloadedError as error:
            raise RequestError(503, "overloaded", f"{error}; try again later") from error
        except NoActionError as error:
            self.metrics.malformed(error.reason)
            raise RequestError(500, "malformed_action", str(error)) from error
        except TimeoutError as error:
            raise RequestError(
                504, "deadline", f"the policy did not answer within {self.settings.deadline_s:g} s"
            ) from error
        except Exception as error:
            raise internal_error(error) from error
        if answer.malformed:
            self.metrics.malformed(answer.malformed)
        return replace(answer, preprocess_s=preprocess_s)

    def answered(self, answer: Answer, transport: str, received: float) -> None:
        """Count an answer that is encoded.

        Args:
            answer: what was sent.
            transport: "http", "websocket" or "oip".
            received: `perf_counter()` when the request began to arrive.
        """
        self.metrics.answered(transport, parts(answer, perf_counter() - received), answer.batch_size)
        log_answered()

    def _watch(self, observation: dict[str, Any]) -> None:
        if self.distribution is None:
            return
        for name in self.distribution.observe(observation):
            watched = self.distribution.features[name]
            event = ("out_of_distribution", "back_in_distribution")[not watched.alarm]
            level = logging.WARNING if watched.alarm else logging.INFO
            write(level, event, {**self.about(), "request_id": request_id(), "feature": name, **watched.to_json()})

    def refused(self, reason: str, status: int) -> None:
        """Count and log a request that is refused; see `Metrics.refused`."""
        self.metrics.refused(reason)
        log_refused(reason, status)

    def about(self) -> dict[str, str]:
        """What each line of the log says of it."""
        return {"policy": self.name, "version": self.runner.version, "replica": self.replica}

    def close(self) -> None:
        """Answer what waits and end the thread."""
        self._batcher.close()


def internal_error(error: Exception) -> RequestError:
    """Log a bug with its traceback, and give the client the request's id alone."""
    identity = log_internal_error(error)
    return RequestError(500, "internal", f"internal error; request id {identity} is in the server's log")


def parts(answer: Answer, total_s: float) -> dict[str, float]:
    """Seconds of an answer by each of `metrics.PARTS`; together they are `total_s`."""
    known = {"preprocess": answer.preprocess_s, "queue": answer.queue_s, "model": answer.model_s}
    return {**known, "wire": max(0.0, total_s - sum(known.values()))}


def timing(answer: Answer, received: float) -> dict[str, float]:
    """Milliseconds since `received` (perf_counter), split as the metrics are.

    An answer cannot hold the time of its own encoding: its wire_ms lacks that, and the metrics' has it.
    """
    total_s = perf_counter() - received
    split = {f"{name}_ms": seconds * 1e3 for name, seconds in parts(answer, total_s).items()}
    return {"total_ms": total_s * 1e3, **split, "batch_size": answer.batch_size}
