"""What the clients of both transports share: messages, answers, errors, retries. No I/O here.

Letters: T observation steps, H action steps, A action dimensions.
"""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from rlsvc.core.contract import Contract
from rlsvc.core.errors import ContractError, UserError
from rlsvc.core.wire import SESSION_HEADER, Limits, WireError, pack, unpack

# uvicorn, which answers WebSockets in a Ray Serve replica, stops a message there.
MAX_MESSAGE_BYTES = 16 * 2**20
TRANSPORTS = ("ws", "http")


class PolicyUnavailableError(ConnectionError):
    """The server cannot be reached, or cannot act now; asking again is harmless and may help."""


class ConnectTimeoutError(PolicyUnavailableError, TimeoutError):
    """The server took the connection and then said nothing."""


class RefusedError(UserError):
    """The server refuses this request; asking again gives the same answer."""


class SessionLostError(RefusedError):
    """The server does not have the episode that a step belongs to, expected another step, or cannot use a carry.

    Begin anew: with step 0, or with an empty carry.
    """


class ServerFaultError(RuntimeError):
    """The server failed on this request; its message has the id under which the server's log tells why."""


@dataclass(frozen=True)
class Reply:
    """A chunk of actions.

    Attributes:
        action: [H, A] float32, in the contract's units, finite; [A] where the server keeps the episode.
        version: of the policy that made it.
        timing: the server's. total_ms is the sum of preprocess_ms (decoding, checking), queue_ms (waiting for a
            batch), model_ms (the batch) and wire_ms (the rest, its answer's encoding excepted); and batch_size.
        expires_in_ms: how long the actions may be executed, counted from when this came; None where the server did not
            say it.
        carry: of the policy, for the next request; None where this one had none.
    """

    action: np.ndarray
    version: str
    timing: dict[str, float] = field(default_factory=dict)
    expires_in_ms: float | None = None
    carry: bytes | None = None


@dataclass(frozen=True)
class Served:
    """What a server says about a policy before the first observation.

    Attributes:
        name, version, contract: of the policy.
        execute: actions of a chunk that the policy's robot executes before it asks again; None for all of them.
    """

    name: str
    version: str
    contract: Contract
    execute: int | None = None


@dataclass(frozen=True)
class ClientOptions:
    """How long and how often a client tries.

    Attributes:
        timeout_s: of one `act`, all attempts together; then TimeoutError. A server whose HAProxy dies is back within
            ten seconds.
        connect_timeout_s: of one attempt to connect.
        retries: attempts after the first, when the server is unreachable or overloaded. Sending a request again is
            harmless: the same seed and step give the same answer.
        backoff_s: pause before the first retry; doubles up to a second.
        key: API key of a server that asks for one; None sends none.
        session: what the client calls itself, by which a server with a canary decides who answers: at most 64 letters,
            digits, '.', '_' or '-'. None draws a name for each client.
    """

    timeout_s: float = 15.0
    connect_timeout_s: float = 5.0
    retries: int = 18
    backoff_s: float = 0.05
    key: str | None = field(default=None, repr=False)
    session: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What every request and handshake carries."""
        headers = {} if self.session is None else {SESSION_HEADER: self.session}
        return headers if self.key is None else {**headers, "authorization": f"Bearer {self.key}"}

    def named(self) -> ClientOptions:
        """These, with a session's name."""
        return self if self.session is not None else dataclasses.replace(self, session=uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.session is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.session):
            raise UserError(f"session '{self.session[:80]}': expected at most 64 letters, digits, '.', '_' or '-'")
        if self.timeout_s <= 0 or self.connect_timeout_s <= 0 or self.retries < 0 or self.backoff_s < 0:
            raise UserError(f"client options out of range: {self}")


class Deadline:
    """A moment after which nothing is waited for."""

    def __init__(self, seconds: float, what: str) -> None:
        """Start now; `what` is for the message."""
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._what = what

    def remaining(self) -> float:
        """Seconds left.

        Raises:
            TimeoutError: none.
        """
        left = self.left()
        if left <= 0:
            raise self.error()
        return left

    def left(self) -> float:
        """Seconds left, 0 or less when it has passed."""
        return self._end - time.monotonic()

    def error(self) -> TimeoutError:
        """What to raise when it has passed."""
        return TimeoutError(
            f"{self._what} did not answer within {self._seconds:g} s; it may be stopped, overloaded or cut off"
        )


def pauses(options: ClientOptions) -> Iterator[float]:
    """Seconds to wait before each retry."""
    for attempt in range(options.retries):
        yield min(1.0, options.backoff_s * 2**attempt)


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    Attributes:
        host: name or address, with the port where one was given, as in a URL.
        secure: TLS or not.
    """

    host: str
    secure: bool

    @classmethod
    def parse(cls, url: str) -> Address:
        """Read "127.0.0.1:8000", "ws://robot-server:8000", "https://policies.example.org", ...

        Raises:
            UserError: another scheme, no host, a bad port, or a path.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        expected = f"server address '{url}': expected host:port, http(s)://host:port or ws(s)://host:port"
        try:
            valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError as error:
            raise UserError(f"{expected} ({error})") from error
        if (
            not valid
            or parts.username is not None
            or parts.scheme not in ("http", "https", "ws", "wss")
            or parts.path not in ("", "/")
            or parts.query
        ):
            raise UserError(expected)
        return cls(parts.netloc, parts.scheme in ("https", "wss"))

    @property
    def http(self) -> str:
        """Base URL over HTTP."""
        return f"{'https' if self.secure else 'http'}://{self.host}"

    @property
    def websocket(self) -> str:
        """URL of the WebSocket."""
        return f"{'wss' if self.secure else 'ws'}://{self.host}/"

    def websocket_of(self, policy: str | None) -> str:
        """URL of the WebSocket for a policy; None for the first."""
        return self.websocket if policy is None else f"{self.websocket}?policy={quote(policy, safe='')}"


def encode_request(
    contract: Contract,
    observation: Mapping[str, Any],
    seed: int,
    step: int,
    *,
    session: bool = False,
    carry: bytes | None = None,
) -> bytes:
    """An observation window, held against the contract, as a message.

    Args:
        contract: of the policy.
        observation: by key an array [T, ...]; of one control step where the server keeps the episode.
        seed: of the request.
        step: of the request.
        session: whether the server keeps the episode.
        carry: of the reply before, empty to begin anew; None keeps none.

    Raises:
        ContractError: it does not fit, or is too large to travel.
    """
    seen = dataclasses.replace(contract, n_obs_steps=1) if session else contract
    message: dict[str, Any] = {"observation": seen.check_observation(observation), "seed": seed, "step": step}
    if session:
        message["session"] = True
    if carry is not None:
        message["carry"] = carry
    data = pack(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ContractError(
            f"the observation takes {len(data)} bytes, a message at most {MAX_MESSAGE_BYTES}; send smaller images"
        )
    return data


def decode_served(data: bytes | str) -> Served:
    """A description of a policy: the WebSocket's first frame.

    Raises:
        PolicyUnavailableError: it is not one.
    """
    return served_from(_decode(data))


def served_from(message: Any) -> Served:
    """Likewise, from a message that is decoded already."""
    try:
        robot = message.get("robot")
        execute = None if robot is None or robot["execute"] is None else int(robot["execute"])
        return Served(str(message["name"]), str(message["version"]), Contract.from_json(message["contract"]), execute)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PolicyUnavailableError(
            "the server did not say which contract its policy has; is it a policy server of rlsvc?"
        ) from error


def check_served(before: Served | None, now: Served, wanted: str | None) -> None:
    """Refuse a policy of another name, or one whose contract changed while the client was connected.

    Raises:
        RefusedError: the server serves another policy than the one asked for.
        ContractError: the contract is not the one that this client began with.
    """
    if wanted is not None and now.name != wanted:
        raise RefusedError(f"the server serves '{now.name}', not '{wanted}'")
    if before is not None and now.contract != before.contract:
        raise ContractError(
            f"the server's policy '{now.name}' changed its contract; connect anew and check your observations"
        )


def decode_reply(data: bytes | str, contract: Contract, *, session: bool = False) -> Reply:
    """The actions in an answer; one action where the server keeps the episode.

    Raises:
        RefusedError: the server refused the observation.
        SessionLostError: it does not have the episode.
        ServerFaultError: the server failed, or its actions do not fit the contract.
        PolicyUnavailableError: it is overloaded, or what came is no answer.
    """
    message = _decode(data)
    if not isinstance(message, dict):
        raise PolicyUnavailableError(f"the server answered with a {type(message).__name__}, not with actions")
    if "error" in message:
        status = message.get("status")
        raise error_from(status if isinstance(status, int) else 500, str(message["error"]))
    action = message.get("action")
    shape = contract.action.shape if session else (contract.action_horizon, *contract.action.shape)
    if not isinstance(action, np.ndarray) or action.dtype.kind != "f" or action.shape != shape:
        got = f"{action.dtype} {action.shape}" if isinstance(action, np.ndarray) else type(action).__name__
        raise ServerFaultError(f"the server's action is {got}, the contract says float {shape}")
    if not np.isfinite(action).all():
        raise ServerFaultError("the server's action has values that are not finite")
    spent, carry = message.get("timing"), message.get("carry")
    return Reply(
        action.astype(np.float32),
        str(message.get("version", "")),
        spent if isinstance(spent, dict) else {},
        _expiry(message.get("expires_in_ms")),
        carry if isinstance(carry, bytes) else None,
    )


def _expiry(value: Any) -> float | None:
    if value is None:
        return None
    # NaN is no number of milliseconds either: no chunk would ever expire by it.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ServerFaultError(f"the server's expires_in_ms is {str(value)[:40]}, expected a number from 0 up")
    return float(value)


def error_from(status: int, message: str) -> Exception:
    """The exception for an error that the server sent as such."""
    if status in (429, 503):
        return PolicyUnavailableError(message)
    if status == 409:
        return SessionLostError(message)
    return ServerFaultError(message) if status >= 500 else RefusedError(message)


def _decode(data: bytes | str) -> Any:
    if isinstance(data, str):
        raise RefusedError(data[:500])
    try:
        return unpack(data, Limits(max_bytes=MAX_MESSAGE_BYTES))
    except WireError as error:
        raise PolicyUnavailableError(f"the server sent what is no message of this protocol: {error}") from error
