"""The HTTP link, blocking and asynchronous: one POST with a msgpack body for each request."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import quote

import httpx

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


class HttpLink:
    """Keeps connections open between requests; every request has a deadline of its own."""

    def __init__(self, address: Address, options: ClientOptions, policy: str | None) -> None:
        """Ask for this policy, or for the only one."""
        self._address = address
        self._options = options
        self._policy = policy
        self._path = ""
        self._client: httpx.Client | None = None

    @property
    def connected(self) -> bool:
        """Whether the server was asked for its policy."""
        return self._client is not None

    def open(self, deadline: Deadline) -> Served:
        """Ask which policies there are; see WebSocketLink.open."""
        self._client = httpx.Client(
            base_url=self._address.http, headers=self._options.headers, trust_env=False, verify=trust(self._address)
        )
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
        if self._client is not None:
            self._client.close()
            self._client = None

    def _send(self, method: str, path: str, data: bytes | None, deadline: Deadline) -> bytes:
        if self._client is None:
            raise PolicyUnavailableError(f"the connection to {self._address.http} was lost")
        try:
            timeout = _timeout(self._options, deadline)
            with self._client.stream(method, path, content=data, headers=_MSGPACK, timeout=timeout) as response:
                body = bytearray()
                for piece in response.iter_bytes():
                    # httpx's timeout is for one read: a server that trickles must not outlive the deadline.
                    deadline.remaining()
                    _extend(body, piece)
            return _checked(response, bytes(body))
        except httpx.HTTPError as error:
            raise translate(error, self._address, deadline) from error


class AsyncHttpLink:
    """HttpLink for asyncio."""

    def __init__(self, address: Address, options: ClientOptions, policy: str | None) -> None:
        """Ask for this policy, or for the only one."""
        self._address = address
        self._options = options
        self._policy = policy
        self._path = ""
        self._client: httpx.AsyncClient | None = None

    @property
    def connected(self) -> bool:
        """Whether the server was asked for its policy."""
        return self._client is not None

    async def open(self, deadline: Deadline) -> Served:
        """Ask which policies there are; see WebSocketLink.open."""
        self._client = httpx.AsyncClient(
            base_url=self._address.http, headers=self._options.headers, trust_env=False, verify=trust(self._address)
        )
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
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _send(self, method: str, path: str, data: bytes | None, deadline: Deadline) -> bytes:
        if self._client is None:
            raise PolicyUnavailableError(f"the connection to {self._address.http} was lost")
        try:
            async with asyncio.timeout(deadline.remaining()):
                timeout = _timeout(self._options, deadline)
                async with self._client.stream(
                    method, path, content=data, headers=_MSGPACK, timeout=timeout
                ) as response:
                    body = bytearray()
                    async for piece in response.aiter_bytes():
                        _extend(body, piece)
            return _checked(response, bytes(body))
        except httpx.HTTPError as error:
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


def trust(address: Address) -> ssl.SSLContext | bool:
    """The system's certificates, as the WebSocket has it; httpx brings others, which no administrator adds to."""
    return ssl.create_default_context() if address.secure else True


def translate(error: httpx.HTTPError, address: Address, deadline: Deadline) -> Exception:
    """Exceptions of httpx as this client's own."""
    if isinstance(error, httpx.ConnectTimeout):
        return ConnectTimeoutError(f"{address.http} did not complete a connection in time")
    if isinstance(error, httpx.TimeoutException):
        return deadline.error()
    if isinstance(error, httpx.ConnectError):
        return PolicyUnavailableError(f"{address.http} cannot be reached: {error}")
    return PolicyUnavailableError(f"the connection to {address.http} was lost: {error or type(error).__name__}")


def _timeout(options: ClientOptions, deadline: Deadline) -> httpx.Timeout:
    left = deadline.remaining()
    return httpx.Timeout(left, connect=min(left, options.connect_timeout_s))


def _extend(body: bytearray, piece: bytes) -> None:
    body += piece
    if len(body) > MAX_MESSAGE_BYTES:
        raise PolicyUnavailableError(f"the server's answer is larger than {MAX_MESSAGE_BYTES} bytes")


def _checked(response: httpx.Response, body: bytes) -> bytes:
    """The body of a good answer; an error that the policy server itself sent travels in msgpack and is read later."""
    ours = response.headers.get("content-type", "").startswith("application/msgpack")
    if response.is_success or ours:
        return body
    message = _json(body)
    if isinstance(message, dict) and "error" in message:
        raise error_from(response.status_code, str(message["error"]))
    # A proxy in front of the policy answers for it while a replica starts or has died.
    raise PolicyUnavailableError(f"HTTP {response.status_code} from {response.url}, and not from a policy server")


def _json(body: bytes) -> Any:
    try:
        return httpx.Response(200, content=body).json()
    except ValueError:
        return None
