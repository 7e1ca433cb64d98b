"""One served policy, apart from any protocol: a request is checked, batched, acted on, counted.

A policy has a current version, which takes new sessions; it may have a canary, which takes a share of them, and a
shadow, whose actions are compared and given to nobody. A version that another takes the place of answers the sessions
that it has until they end or begin another episode, `drain_s` at most, and is then let go. A request over HTTP is a
session of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from rlsvc.core.errors import ContractError
from rlsvc.data.repack import repack
from rlsvc.serve.batcher import Answer, NoActionError, OverloadedError
from rlsvc.serve.carry import decode_carry, encode_carry
from rlsvc.serve.codec import ActRequest, RequestError
from rlsvc.serve.distribution import Distribution
from rlsvc.serve.log import log_answered, log_internal_error, log_refused, request_id, write
from rlsvc.serve.metrics import Loaded, Metrics
from rlsvc.serve.session import Session
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.shadow import Shadow
from rlsvc.serve.version import CANARY, CURRENT, DRAINING, SHADOW, Version

if TYPE_CHECKING:
    from rlsvc.core.contract import Contract
    from rlsvc.runner import ServedRunner
    from rlsvc.spec.robot import RobotSpec


class PolicyService:
    """One policy under one name. All of it but the policy's calls happens on one event loop.

    Attributes:
        name: under which clients ask for it.
        contract: what every version sees and does.
        settings: the limits.
        metrics: what was counted.
        current: the version that takes new sessions.
        canary: one that takes `settings.canary_share` of them; None where there is none.
        shadow: comparisons with a candidate; None where there are none.
    """

    def __init__(self, name: str, runner: ServedRunner, settings: ServeSettings, replica: str = "local") -> None:
        """Take a runner that is loaded and warm."""
        self.name = name
        self.replica = replica
        self.contract: Contract = runner.contract
        self.settings = settings
        self.current = Version(runner, settings)
        self.canary: Version | None = None
        self.shadow: Shadow | None = None
        self._draining: list[Version] = []
        self._sessions: set[Session] = set()
        self.metrics = Metrics(replica, name, self._loaded)

    @property
    def version(self) -> str:
        """The current one's id."""
        return self.current.id

    @property
    def distribution(self) -> Distribution | None:
        """How what the current version was asked compares with its training data; None where that is not known."""
        return self.current.distribution

    @property
    def ready(self) -> bool:
        """Whether a request would be acted on now."""
        taking = [self.current] if self.canary is None else [self.current, self.canary]
        return all(version.healthy(self.settings.stuck_s) for version in taking)

    # Versions

    def versions(self) -> list[tuple[str, Version]]:
        """All that are loaded, each with what it is; a draining one may be the canary of before, or the current one."""
        shadow = None if self.shadow is None else self.shadow.version
        taken = [(CURRENT, self.current), (CANARY, self.canary), (SHADOW, shadow)]
        return [(role, version) for role, version in taken if version] + [(DRAINING, one) for one in self._draining]

    def role(self, role: str) -> Version | None:
        """The current one, the canary or the shadow; None where there is none."""
        return next((one for taken, one in self.versions() if taken == role), None)

    def loaded(self, version: str) -> Version | None:
        """The version of this id, where it is loaded."""
        return next((one for _, one in self.versions() if one.id == version), None)

    def assign(self, role: str, version: Version | ServedRunner | None) -> None:
        """Make a version the current one, the canary or the shadow, or let there be none of these.

        Args:
            role: of `rlsvc.serve.version.ROLES`.
            version: one that is loaded, or a runner that is loaded and warm; None ends a canary or a shadow.

        Raises:
            ContractError: it sees or does something else than the version before, so that clients could not go on.
        """
        if version is not None and not isinstance(version, Version):
            check_same_contract(version.contract, self.contract, version.version)
            version = Version(version, self.settings)
        before = {one for role, one in self.versions() if role != DRAINING}
        if role == CURRENT:
            assert version is not None
            self.current = version
            if self.canary is version:
                self.canary = None
        elif role == CANARY:
            self.canary = None if version is self.current else version
        else:
            self.shadow = None if version is None else Shadow(version, self.contract)
        self._release(before)

    def _release(self, before: set[Version]) -> None:
        after = {one for role, one in self.versions() if role != DRAINING}
        self._draining = [one for one in self._draining if one not in after]
        for one in after:
            one.retired = None
        for one in before - after:
            one.retired = time.monotonic()
            self._draining.append(one)
        self.reap()

    def reap(self) -> None:
        """Let go of versions that nobody keeps to any more."""
        for version in [one for one in self._draining if one.idle]:
            self._draining.remove(version)
            version.close(0.0)
            write(logging.INFO, "version_ended", {**self.about(), "ended": version.id})

    def _loaded(self) -> Loaded:
        return Loaded(self.versions(), self.distribution, self.shadow)

    def _choose(self, key: str) -> Version:
        """For a new session: the same key is answered by the same version in every replica."""
        if self.canary is None:
            return self.current
        drawn = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) / 2**64
        return self.canary if drawn < self.settings.canary_share else self.current

    # Sessions

    def open(self, key: str | None = None) -> Session:
        """A connection begins; `key` as of `Session`, drawn here where the client gave none."""
        key = key or uuid.uuid4().hex
        session = Session(key, self._choose(key))
        session.version.sessions += 1
        self._sessions.add(session)
        return session

    def close_session(self, session: Session) -> None:
        """A connection ended."""
        self._sessions.discard(session)
        session.version.sessions -= 1
        self.reap()

    def tidy(self) -> None:
        """What is due by now, also where nothing is asked: episodes expire, and sessions leave versions that end."""
        for session in self._sessions:
            session.expire(self.settings.session_expiry_s)
            self._renew(session, begins=False)
        self.reap()

    def _renew(self, session: Session, *, begins: bool) -> None:
        """Let a session change its version where an episode begins, or where its own has waited for long enough."""
        retired = session.version.retired
        if not begins and (retired is None or time.monotonic() - retired < self.settings.drain_s):
            return
        version = self._choose(session.key)
        if version is not session.version:
            session.version.sessions -= 1
            version.sessions += 1
            session.version, session.episode = version, None

    # Requests

    def describe(self, version: Version | None = None) -> dict[str, Any]:
        """What a client must know before it sends an observation: plain JSON types."""
        version = version or self.current
        return described(self.name, version.id, self.contract, version.runner.robot)

    @property
    def idle(self) -> bool:
        """Whether no version of it has a session or a request under way."""
        return all(version.idle for _, version in self.versions())

    @property
    def expires_in_ms(self) -> float:
        """How long a chunk may be executed, from when it is answered: clocks of two hosts are never compared."""
        given, contract = self.settings.chunk_expiry_ms, self.contract
        return contract.action_horizon / contract.rate_hz * 1e3 if given is None else given

    def status(self) -> dict[str, Any]:
        """`describe`, and what this replica knows of its versions."""
        return {
            **self.describe(),
            "distribution": None if self.distribution is None else self.distribution.to_json(),
            "versions": [
                {"version": one.id, "role": role, "sessions": one.sessions, "answered": one.answered}
                for role, one in self.versions()
            ],
            "shadow": None if self.shadow is None else self.shadow.to_json(),
        }

    async def act(
        self, request: ActRequest, *, read: float, session: Session | None = None, key: str | None = None,
        version: Version | None = None,
    ) -> Answer:  # fmt: skip
        """Check and act; `answered` counts it once it is encoded.

        Args:
            request: as decoded.
            read: `perf_counter()` when all of its bytes were there, and decoding began.
            session: of the connection on which it came; None for a request that is a session of its own.
            key: of that, as of `Session`; its seed where there is none.
            version: that it asks for by name, in the place of the session's or the key's.

        Returns:
            A chunk, with its carry as bytes where the request has one; one action [A] where the session keeps the
            episode (`request.session`).

        Raises:
            RequestError: the observation does not fit the contract (422), the episode is not kept here (409), too many
                requests wait (503), the policy did not answer in time (504), said what is no action (500, with the
                reason), or failed (500, with an id that is in the log beside the traceback).
        """
        if session is not None:
            self._renew(session, begins=request.step == 0)
            self.reap()
            session.expire(self.settings.session_expiry_s)
            version = session.version
        version = version or self._choose(key or f"seed {request.seed}")
        if request.session:
            return await self._act_in_session(request, session, version, read)
        observation = self._check(request.observation, version, self.contract)
        self._watch(observation, version)
        carry = None if request.carry is None else decode_carry(request.carry, version.runner)
        preprocess_s, keep = perf_counter() - read, request.carry is not None
        answer = await self._ask(version, observation, request.seed, request.step or 0, carry, keep=keep)
        handed = encode_carry(answer.carry, answer.version) if keep else None
        return replace(answer, preprocess_s=preprocess_s, carry=handed)

    async def _act_in_session(
        self, request: ActRequest, session: Session | None, version: Version, read: float
    ) -> Answer:
        if session is None:
            raise RequestError(400, "session", "episodes are kept for a WebSocket alone; leave 'session' out over HTTP")
        if request.step is None:
            raise RequestError(400, "session", "'step': got none, expected the control step, counted from 0")
        one_step = replace(self.contract, n_obs_steps=1)
        now = {name: x[0] for name, x in self._check(request.observation, version, one_step).items()}
        episode = session.episode_for(request.seed, request.step, self.contract.n_obs_steps)
        history = episode.history.copy()
        window = history.append(now)
        self._watch({name: x[-1:] for name, x in window.items()}, version)
        preprocess_s = perf_counter() - read
        if episode.chunk and time.monotonic() < episode.until:
            answer = Answer(episode.went_on(history), version.id, 0.0, 0.0, 0)
        else:
            answer = await self._ask(version, window, request.seed, request.step, episode.carry, keep=True)
            robot = version.runner.robot
            execute = None if robot is None else robot.execute
            episode.chunk.clear()
            episode.chunk.extend(answer.action[:execute])
            episode.carry, episode.until = answer.carry, time.monotonic() + self.expires_in_ms / 1e3
            answer = replace(answer, action=episode.went_on(history))
        left_ms = max(0.0, episode.until - time.monotonic()) * 1e3
        return replace(answer, preprocess_s=preprocess_s, carry=None, expires_in_ms=left_ms)

    def _check(self, observation: dict[str, Any], version: Version, contract: Contract) -> dict[str, np.ndarray]:
        robot = version.runner.robot
        try:
            named = observation if robot is None else repack(observation, robot, contract)
            return contract.check_observation(named)
        except ContractError as error:
            raise RequestError(422, "observation", str(error)) from error

    async def _ask(
        self,
        version: Version,
        observation: dict[str, np.ndarray],
        seed: int,
        step: int,
        carry: Any = None,
        *,
        keep: bool = False,
    ) -> Answer:
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                answer = await version.ask(observation, seed, step, carry, keep=keep)
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
        finally:
            if version.retired is not None:
                self.reap()
        if answer.malformed:
            self.metrics.malformed(answer.malformed)
        if self.shadow is not None and self.shadow.version is not version:
            self.shadow.offer(observation, seed, step, answer)
        return answer

    def answered(self, answer: Answer, transport: str, received: float) -> None:
        """Count an answer that is encoded.

        Args:
            answer: what was sent.
            transport: "http", "websocket" or "oip".
            received: `perf_counter()` when the request began to arrive.
        """
        self.metrics.answered(transport, parts(answer, perf_counter() - received), answer.batch_size)
        log_answered()

    def _watch(self, observation: dict[str, Any], version: Version) -> None:
        distribution = version.distribution
        if distribution is None:
            return
        for name in distribution.observe(observation):
            watched = distribution.features[name]
            event = ("out_of_distribution", "back_in_distribution")[not watched.alarm]
            level = logging.WARNING if watched.alarm else logging.INFO
            about = {**self.about(), "version": version.id}
            write(level, event, {**about, "request_id": request_id(), "feature": name, **watched.to_json()})

    def refused(self, reason: str, status: int) -> None:
        """Count and log a request that is refused; see `Metrics.refused`."""
        self.metrics.refused(reason)
        log_refused(reason, status)

    def about(self) -> dict[str, str]:
        """What each line of the log says of it."""
        return {"policy": self.name, "version": self.version, "replica": self.replica}

    def close(self) -> None:
        """Answer what waits and end the threads."""
        for _, version in self.versions():
            version.close()


def described(name: str, version: str, contract: Contract, robot: RobotSpec | None) -> dict[str, Any]:
    """What a client must know of a policy: plain JSON types."""
    spoken = None if robot is None else robot.model_dump(mode="json")
    return {"name": name, "version": version, "contract": contract.to_json(), "robot": spoken}


def check_same_contract(contract: Contract, served: Contract, version: str) -> None:
    """Refuse a version that clients of another could not go on with.

    Raises:
        ContractError: what it sees or does is not what is served; names the first difference.
    """
    if contract == served:
        return
    mine, theirs = contract.to_json(), served.to_json()
    part = next(name for name in theirs if mine[name] != theirs[name])
    raise ContractError(
        f"version {version[:12]} has another contract: its {part} is {mine[part]}, served is {theirs[part]}; serve it "
        "under another name"
    )


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
