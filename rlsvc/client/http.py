"""The HTTP link, blocking and asynchronous: one POST with a msgpack body for each request.

Over httpcore, httpx's own engine: what httpx adds (cookies, redirects, decoding) is not used here, and takes longer
than the server does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any
from urllib.parse import quote

import httpcore

from rlsvc.client.protocol import (
    MAX_MESSAGE_BYTES,
    Address,
    ClientOptions,
    ConnectTimeoutError,
    Deadline,
    PolicyUnavailableError,
    RefusedError,
    Served,
    error_from,
    served_from,
)

_MSGPACK = {"content-type": "application/msgpack"}
_IDLE_S = 5.0
"""After which a connection that nobody uses is not used again: servers close theirs after such a time."""
_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ConnectionNotAvailable)


class HttpLink:
    """Keeps connections open between requests; every request has a deadline of its own."""

    def __init__(self, address: Address, options: ClientOptions, policy: str | None) -> None:
        """Ask for this policy, or for the only one."""
        self._address = address
        self._options = options
        self._policy = policy
        self._path = ""
        self._headers = _headers(options)
        self._pool: httpcore.ConnectionPool | None = None

    @property
    def connected(self) -> bool:
        """Whether the server was asked for its policy."""
        return self._pool is not None

    def open(self, deadline: Deadline) -> Served:
        """Ask which policies there are; see WebSocketLink.open."""
        self._pool = httpcore.ConnectionPool(ssl_context=trust(self._address), keepalive_expiry=_IDLE_S)
        try:
            served = choose(self._send("GET", "/v1/policies", None, deadline), self._policy)
        except BaseException:
            self.close()
            raise
        self._path = f"/v1/policies/{quote(served.name, safe='')}/act"
        return served

    def request(self, data: bytes, deadline: Deadline) -> bytes:
        """Send one message and return the one that answers it; see WebSocketLink.request."""
        return self._send("POST", self._path, data, deadline)

    def close(self) -> None:
        """Drop the connections."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _send(self, method: str, path: str, data: bytes | None, deadline: Deadline) -> bytes:
        if self._pool is None:
            raise PolicyUnavailableError(f"the connection to {self._address.http} was lost")
        url, extensions = self._address.http + path, _timeouts(self._options, deadline)
        try:
            with self._pool.stream(method, url, headers=self._headers, content=data, extensions=extensions) as response:
                body = bytearray()
                for piece in response.iter_stream():
                    # A timeout is for one read: a server that trickles must not outlive the deadline.
                    deadline.remaining()
                    _extend(body, piece)
            return _checked(response, bytes(body), self._address)
        except _FAILURES as error:
            raise translate(error, self._address, deadline) from error


class AsyncHttpLink:
    """HttpLink for asyncio."""

    def __init__(self, address: Address, options: ClientOptions, policy: str | None) -> None:
        """Ask for this policy, or for the only one."""
        self._address = address
        self._options = options
        self._policy = policy
        self._path = ""
        self._headers = _headers(options)
        self._pool: httpcore.AsyncConnectionPool | None = None

    @property
    def connected(self) -> bool:
        """Whether the server was asked for its policy."""
        return self._pool is not None

    async def open(self, deadline: Deadline) -> Served:
        """Ask which policies there are; see WebSocketLink.open."""
        self._pool = httpcore.AsyncConnectionPool(ssl_context=trust(self._address), keepalive_expiry=_IDLE_S)
        try:
            served = choose(await self._send("GET", "/v1/policies", None, deadline), self._policy)
        except BaseException:
            await self.close()
            raise
        self._path = f"/v1/policies/{quote(served.name, safe='')}/act"
        return served

    async def request(self, data: bytes, deadline: Deadline) -> bytes:
        """Send one message and return the one that answers it; see WebSocketLink.request."""
        return await self._send("POST", self._path, data, deadline)

    async def close(self) -> None:
        """Drop the connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def _send(self, method: str, path: str, data: bytes | None, deadline: Deadline) -> bytes:
        if self._pool is None:
            raise PolicyUnavailableError(f"the connection to {self._address.http} was lost")
        url, extensions = self._address.http + path, _timeouts(self._options, deadline)
        try:
            async with asyncio.timeout(deadline.remaining()):
                async with self._pool.stream(
                    method, url, headers=self._headers, content=data, extensions=extensions
                ) as response:
                    body = bytearray()
                    async for piece in response.aiter_stream():
                        _extend(body, piece)
            return _checked(response, bytes(body), self._address)
        except _FAILURES as error:
            raise translate(error, self._address, deadline) from error
        except TimeoutError as error:
            raise deadline.error() from error


def choose(body: bytes, wanted: str | None) -> Served:
    """The policy asked for out of GET /v1/policies.

    Raises:
        RefusedError: it is not among them, or several are and none was named.
        PolicyUnavailableError: the body is no such list.
    """
    try:
        listed = [served_from(item) for item in _json(body)["policies"]]
    except (KeyError, TypeError) as error:
        raise PolicyUnavailableError("the server did not list its policies; is it a policy server of rlsvc?") from error
    found = [served for served in listed if wanted in (None, served.name)]
    if len(found) != 1:
        names = ", ".join(served.name for served in listed) or "none"
        raise RefusedError(
            f"policy '{wanted}' is not served" if wanted else f"name one of the policies served: {names}"
        )
    return found[0]


def trust(address: Address) -> ssl.SSLContext | None:
    """The system's certificates, as the WebSocket has it; httpcore brings others, which no administrator adds to."""
    return ssl.create_default_context() if address.secure else None


def translate(error: Exception, address: Address, deadline: Deadline) -> Exception:
    """Exceptions of httpcore as this client's own."""
    if isinstance(error, httpcore.ConnectTimeout):
        return ConnectTimeoutError(f"{address.http} did not complete a connection in time")
    if isinstance(error, httpcore.TimeoutException):
        return deadline.error()
    if isinstance(error, httpcore.ConnectError):
        return PolicyUnavailableError(f"{address.http} cannot be reached: {error}")
    return PolicyUnavailableError(f"the connection to {address.http} was lost: {error or type(error).__name__}")


def _headers(options: ClientOptions) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in {**options.headers, **_MSGPACK}.items()]


def _timeouts(options: ClientOptions, deadline: Deadline) -> dict[str, Any]:
    left = deadline.remaining()
    return {"timeout": {"connect": min(left, options.connect_timeout_s), "read": left, "write": left, "pool": left}}


def _extend(body: bytearray, piece: bytes) -> None:
    body += piece
    if len(body) > MAX_MESSAGE_BYTES:
        raise PolicyUnavailableError(f"the server's answer is larger than {MAX_MESSAGE_BYTES} bytes")


def _checked(response: httpcore.Response, body: bytes, address: Address) -> bytes:
    """The body of a good answer; an error that the policy server itself sent travels in msgpack and is read later."""
    kind = next((value for name, value in response.headers if name.lower() == b"content-type"), b"")
    if 200 <= response.status < 300 or kind.startswith(b"application/msgpack"):
        return body
    message = _json(body)
    if isinstance(message, dict) and "error" in message:
        raise error_from(response.status, str(message["error"]))
    # A proxy in front of the policy answers for it while a replica starts or has died.
    raise PolicyUnavailableError(f"HTTP {response.status} from {address.http}, and not from a policy server")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
