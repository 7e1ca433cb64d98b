"""The WebSocket link, blocking and asynchronous. Connections are direct: a control loop goes through no HTTP proxy."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque

import websockets.asyncio.client
import websockets.client
import websockets.exceptions
import websockets.frames
import websockets.protocol
import websockets.uri

from rlsvc.client.protocol import (
    MAX_MESSAGE_BYTES,
    Address,
    ClientOptions,
    ConnectTimeoutError,
    Deadline,
    PolicyUnavailableError,
    RefusedError,
    Served,
    decode_served,
)

POLICY_VIOLATION = websockets.frames.CloseCode.POLICY_VIOLATION
"""With which a server closes a connection that it will not have, such as one for a policy that it does not serve."""
_CHUNK = 2**18
_DATA = (websockets.frames.Opcode.TEXT, websockets.frames.Opcode.BINARY, websockets.frames.Opcode.CONT)


class WebSocketLink:
    """One connection that blocks, over websockets' protocol without its threads: every socket call has a deadline.

    (Its own blocking client sends without a timeout, so that a stopped server and a full socket buffer would hold a
    robot for ever, and hands each message from thread to thread.)
    """

    def __init__(self, address: Address, options: ClientOptions, policy: str | None = None) -> None:
        """Not connected yet; ask for this policy, or for the first."""
        self._address = address
        self._url = address.websocket_of(policy)
        self._options = options
        self._socket: socket.socket | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._socket is not None

    def open(self, deadline: Deadline) -> Served:
        """Connect and read the server's first frame.

        Raises:
            PolicyUnavailableError: nothing listens there, or it is no policy server (yet).
            ConnectTimeoutError: it listens and says nothing.
        """
        seconds = min(self._options.connect_timeout_s, deadline.remaining())
        handshake = Deadline(seconds, self._address.websocket)
        try:
            self._connect(handshake)
            try:
                return decode_served(self._receive(handshake))
            except PolicyUnavailableError:
                closed = self._protocol.close_rcvd
                if closed is not None and closed.code == POLICY_VIOLATION:
                    raise _refused(self._address, closed.reason) from None
                raise
        except TimeoutError as error:
            self.close()
            raise ConnectTimeoutError(
                f"{self._address.websocket} did not complete a connection within {seconds:.3g} s"
            ) from error
        except BaseException:
            self.close()
            raise

    def request(self, data: bytes, deadline: Deadline) -> bytes | str:
        """Send one message and wait for the one that answers it.

        Raises:
            PolicyUnavailableError: the connection is lost.
            TimeoutError: no answer in time. The link is closed, since an answer that came late would be taken for the
            next.
        """
        try:
            self._notice_close()
            self._protocol.send_binary(data)
            self._flush(deadline)
            return self._receive(deadline)
        except TimeoutError as error:
            self.close()
            raise deadline.error() from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Say goodbye where that takes no waiting, and drop the connection."""
        if self._socket is None:
            return
        connection, self._socket = self._socket, None
        try:
            if self._protocol.state is websockets.protocol.State.OPEN:
                self._protocol.send_close(websockets.frames.CloseCode.NORMAL_CLOSURE)
                connection.settimeout(0)
                connection.sendall(b"".join(self._protocol.data_to_send()))
        except OSError:
            pass  # it is gone already
        finally:
            connection.close()

    def _connect(self, deadline: Deadline) -> None:
        uri = websockets.uri.parse_uri(self._url)
        try:
            connection = socket.create_connection((uri.host, uri.port), timeout=deadline.remaining())
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Room for a few images, so that sending them is one system call and not a dialogue with the server.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            if uri.secure:
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=uri.host)
        except TimeoutError:
            raise
        except OSError as error:
            raise PolicyUnavailableError(f"{self._address.websocket} cannot be reached: {error}") from error
        self._socket = connection
        self._messages: deque[bytes | str] = deque()
        self._parts: list[bytes] = []
        self._is_text = False
        self._protocol = websockets.client.ClientProtocol(uri, max_size=MAX_MESSAGE_BYTES)
        handshake = self._protocol.connect()
        handshake.headers.update(self._options.headers)
        self._protocol.send_request(handshake)
        self._flush(deadline)
        while self._protocol.state is websockets.protocol.State.CONNECTING and self._protocol.handshake_exc is None:
            self._read(deadline.remaining())
        if self._protocol.handshake_exc is not None:
            raise _refused_handshake(self._address, self._protocol.handshake_exc)

    def _receive(self, deadline: Deadline) -> bytes | str:
        while not self._messages:
            if self._protocol.state is not websockets.protocol.State.OPEN:
                raise _lost(self._address)
            self._read(deadline.remaining())
            self._flush(deadline)
        return self._messages.popleft()

    def _notice_close(self) -> None:
        """Read what came since the last request, without waiting: the goodbye of a server that pinged in vain."""
        if self._socket is None:
            raise _lost(self._address)
        while self._protocol.state is websockets.protocol.State.OPEN:
            try:
                self._read(0)
            except (BlockingIOError, ssl.SSLWantReadError):
                break
        if self._protocol.state is not websockets.protocol.State.OPEN or self._messages:
            raise _lost(self._address)

    def _read(self, timeout_s: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_CHUNK)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            raise
        except OSError as error:
            raise _lost(self._address) from error
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, websockets.frames.Frame) and event.opcode in _DATA:
                self._assemble(event)

    def _assemble(self, frame: websockets.frames.Frame) -> None:
        if frame.opcode is not websockets.frames.Opcode.CONT:
            self._parts, self._is_text = [], frame.opcode is websockets.frames.Opcode.TEXT
        self._parts.append(bytes(frame.data))
        if frame.fin:
            data = b"".join(self._parts)
            self._messages.append(data.decode("utf-8", "replace") if self._is_text else data)

    def _flush(self, deadline: Deadline) -> None:
        assert self._socket is not None
        for data in self._protocol.data_to_send():
            self._socket.settimeout(deadline.remaining())
            try:
                if data:
                    self._socket.sendall(data)
                else:
                    self._socket.shutdown(socket.SHUT_WR)
            except TimeoutError:
                raise
            except OSError as error:
                raise _lost(self._address) from error


class AsyncWebSocketLink:
    """One connection for asyncio; websockets' keepalive pings notice a dead peer between requests."""

    def __init__(self, address: Address, options: ClientOptions, policy: str | None = None) -> None:
        """Not connected yet; ask for this policy, or for the first."""
        self._address = address
        self._url = address.websocket_of(policy)
        self._options = options
        self._connection: websockets.asyncio.client.ClientConnection | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None

    async def open(self, deadline: Deadline) -> Served:
        """Connect and read the server's first frame; see WebSocketLink.open."""
        seconds = min(self._options.connect_timeout_s, deadline.remaining())
        try:
            async with asyncio.timeout(seconds):
                self._connection = await websockets.asyncio.client.connect(
                    self._url,
                    additional_headers=self._options.headers,
                    compression=None,
                    max_size=MAX_MESSAGE_BYTES,
                    proxy=None,
                    open_timeout=None,
                    ping_interval=5,
                    ping_timeout=5,
                    close_timeout=1,
                )
                return decode_served(await self._connection.recv())
        except TimeoutError as error:
            await self.close()
            raise ConnectTimeoutError(
                f"{self._address.websocket} did not complete a connection within {seconds:.3g} s"
            ) from error
        except (websockets.exceptions.InvalidHandshake, websockets.exceptions.ConnectionClosed) as error:
            await self.close()
            closed = error.rcvd if isinstance(error, websockets.exceptions.ConnectionClosed) else None
            if closed is not None and closed.code == POLICY_VIOLATION:
                raise _refused(self._address, closed.reason) from error
            raise _refused_handshake(self._address, error) from error
        except OSError as error:
            await self.close()
            if isinstance(error, PolicyUnavailableError):
                raise
            raise PolicyUnavailableError(f"{self._address.websocket} cannot be reached: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def request(self, data: bytes, deadline: Deadline) -> bytes | str:
        """Send one message and wait for the one that answers it; see WebSocketLink.request."""
        if self._connection is None:
            raise _lost(self._address)
        try:
            async with asyncio.timeout(deadline.remaining()):
                await self._connection.send(data)
                return await self._connection.recv()
        except TimeoutError as error:
            await self.close()
            raise deadline.error() from error
        except websockets.exceptions.ConnectionClosed as error:
            await self.close()
            raise _lost(self._address) from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Drop the connection, without waiting for a peer that may be stopped."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()


def _refused(address: Address, reason: str | None) -> RefusedError:
    return RefusedError(f"{address.websocket} refuses the connection: {reason or 'no reason given'}")


def _lost(address: Address) -> PolicyUnavailableError:
    return PolicyUnavailableError(f"the connection to {address.websocket} was lost")


def _refused_handshake(address: Address, error: Exception) -> Exception:
    status = error.response.status_code if isinstance(error, websockets.exceptions.InvalidStatus) else None
    if status in (401, 403):
        return RefusedError(
            f"{address.websocket} refuses the connection: HTTP {status}; it asks for an API key with the role 'act'"
        )
    return PolicyUnavailableError(f"{address.websocket} did not open a WebSocket: {error}")
