"""Messages between a worker and a simulator's process: over a socket pair a length, then msgpack (core/wire.py)."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

from rlsvc.core.wire import Limits, pack, unpack

_HEADER = struct.Struct("<Q")
_LIMITS = Limits(max_bytes=2**30)


class ChannelClosedError(Exception):
    """The other side has gone."""


class Channel:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: nobody is there.
            TimeoutError: nobody reads.
        """
        body = pack(message)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_HEADER.pack(len(body)) + body)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, deadline: float | None = None) -> Any:
        """The next message; arrays in it are read-only.

        Args:
            deadline: by `time.monotonic()`; None waits for ever.

        Raises:
            ChannelClosedError: nobody is there.
            TimeoutError: nothing came by then.
            WireError: bytes that are no message.
        """
        (size,) = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        return unpack(bytes(self._exactly(size, deadline)), _LIMITS)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, size: int, deadline: float | None) -> bytearray:
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            if deadline is not None:
                # What has come already is taken, also after the deadline: another's answer was waited for until then.
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                count = self._socket.recv_into(view[got:])
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if count == 0:
                raise ChannelClosedError("end of stream")
            got += count
        return buffer
