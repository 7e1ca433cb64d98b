"""Dobot's TCP/IP protocol as text: the ports, the form of commands and replies, and one question over the dashboard.

Protocol V3, that of CR robots with a motion port (controllers V3.5.2 and newer; V4 controllers have no port 30003).
Source: Dobot, "TCP/IP Remote Control Interface Guide (V3)", github.com/Dobot-Arm/TCP-IP-Protocol-6AXis-V3 @ 0ca34f8,
chapters 2, 3, 5 and 6; the two notices without an ErrorID are those of github.com/Dobot-Arm/TCP-IP-Python-V4.

A port takes one client at a time, so the dashboard is never held: it is needed by whoever must stop a robot whose
driver hangs.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rlsvc.core.errors import BusyError, UserError
from rlsvc.robots.api import ConnectionLost

DASHBOARD_PORT, MOTION_PORT, FEEDBACK_PORT = 29999, 30003, 30004
OCCUPIED = "Connection refused, IP:Port has been occupied"
NOT_TCP = "Control Mode Is Not Tcp"
MODES = {
    1: "initialising",
    2: "a brake is released",
    4: "disabled",
    5: "enabled, idle",
    6: "dragged",
    7: "running",
    8: "recording a drag",
    9: "in error",
    10: "paused",
    11: "jogging",
}
"""RobotMode: section 3.8 of the guide."""
DISABLED, IDLE, RUNNING, ERROR = 4, 5, 7, 9
ERRORS = {-1: "failed to execute", -10000: "no such command", -20000: "wrong number of parameters"}
"""ErrorID: chapter 6 of the guide; -3000n is the type of parameter n, -4000n its range."""
MAX_REPLY = 4096
RETRY_S = 0.02
GREETING_S = 0.05
"""Time in which an occupied port tells a new client so."""
_REPLY = re.compile(r"\s*(-?\d+),\{(.*)\},([^;]*);", re.DOTALL)


class HungUp(ConnectionLost):
    """The controller ended the connection."""


@dataclass(frozen=True)
class Reply:
    """`ErrorID,{value,...},Command(...);` taken apart. `values`: what stood between the braces."""

    error: int
    values: str
    command: str

    def __str__(self) -> str:
        return f"{self.command} was answered with ErrorID {self.error} ({error_text(self.error)})"


def error_text(error: int) -> str:
    """What an ErrorID says."""
    kind, parameter = divmod(-error, 10000)
    if parameter and kind in (3, 4):
        return f"parameter {parameter} has a wrong {'type' if kind == 3 else 'value'}"
    return ERRORS.get(error, "unknown")


def call(name: str, *args: object, **options: object) -> str:
    """A command's text: `name(1,2,option=3)`; floats with 6 digits after the point."""
    texts = [f"{arg:.6f}" if isinstance(arg, float) else str(arg) for arg in args]
    return f"{name}({','.join([*texts, *(f'{key}={value:g}' for key, value in options.items())])})"


def split_replies(text: str) -> tuple[list[Reply], str]:
    """The whole replies at the beginning of a text, and the rest of it."""
    replies: list[Reply] = []
    while found := _REPLY.match(text):
        replies.append(Reply(int(found[1]), found[2], found[3]))
        text = text[found.end() :]
    return replies, text


def connect(host: str, port: int, timeout_s: float, what: str) -> socket.socket:
    """A connection with a deadline on every call and keepalive, so that a peer that is gone is noticed.

    Args:
        host: address or name.
        port: TCP port.
        timeout_s: for connecting, and for every later call.
        what: of the controller's ports it is, for messages.

    Raises:
        UserError: nobody is there.
    """
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise UserError(
            f"Dobot at {host}:{port} ({what}): {error.strerror or error}; expected a CR controller with protocol V3. "
            "Check the address, that the control cabinet is on, and that DobotStudio Pro has remote control set to "
            "'TCP/IP secondary development'"
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 2000)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def connect_free(host: str, port: int, timeout_s: float, what: str) -> tuple[socket.socket, bytes]:
    """A connection to a port that nobody else has; one that is occupied is tried again until the deadline.

    The controller forgets a client a moment after it has gone.

    Args:
        host: as `connect`.
        port: as `connect`.
        timeout_s: as `connect`.
        what: as `connect`.

    Returns:
        The connection, and the first bytes that the peer sent by itself, if any; they are still to be received.

    Raises:
        UserError: nobody is there.
        BusyError: another client has it.
    """
    until = time.monotonic() + timeout_s
    while True:
        connection = connect(host, port, timeout_s, what)
        connection.settimeout(GREETING_S)
        try:
            first = connection.recv(MAX_REPLY, socket.MSG_PEEK)
            taken = not first or OCCUPIED.encode() in first
        except TimeoutError:
            first, taken = b"", False
        except ConnectionError:
            first, taken = b"", True
        connection.settimeout(timeout_s)
        if not taken:
            return connection, first
        connection.close()
        if time.monotonic() > until:
            raise busy(f"{host}:{port} ({what})")
        time.sleep(RETRY_S)


def busy(where: str) -> BusyError:
    """The error for a port that has a client already."""
    return BusyError(
        f"Dobot at {where}: in use by another client, and the controller takes one at a time; end the other program "
        "first (another run, DobotStudio Pro)"
    )


def ask(connection: socket.socket, command: str) -> Reply:
    """Send one command and wait for its reply, as long as the connection's timeout.

    Raises:
        BusyError: the port has another client.
        UserError: the controller is in another mode, or the peer does not speak the protocol.
        ConnectionLost: no answer in time, or the connection ended.
    """
    host, port = connection.getpeername()[:2]
    where, timeout_s = f"{host}:{port}", connection.gettimeout() or 0.0
    until, text = time.monotonic() + timeout_s, ""
    try:
        connection.sendall(command.encode())
        # A reply begins with its ErrorID and ends with a semicolon; a notice does neither.
        while ";" not in text and not (text.strip() and text.strip()[0] not in "-0123456789") and len(text) < MAX_REPLY:
            connection.settimeout(max(until - time.monotonic(), 1e-3))
            chunk = connection.recv(MAX_REPLY)
            if not chunk:
                raise ConnectionResetError("the controller hung up")
            text += chunk.decode("latin-1")
    except TimeoutError as error:
        raise ConnectionLost(f"Dobot at {where}: no answer to {command} within {timeout_s:g} s") from error
    except OSError as error:
        lost = HungUp if isinstance(error, ConnectionError) else ConnectionLost
        raise lost(f"Dobot at {where}: {error.strerror or error}, at {command}") from error
    finally:
        connection.settimeout(timeout_s)
    if OCCUPIED in text:
        raise busy(where)
    if NOT_TCP in text:
        raise UserError(
            f"Dobot at {where}: '{NOT_TCP}'; set remote control to 'TCP/IP secondary development' in DobotStudio Pro"
        )
    replies, _ = split_replies(text)
    if not replies:
        raise UserError(
            f"{where} does not speak Dobot's protocol V3: it answered {command} with {text[:60]!r}, expected "
            f"'ErrorID,{{...}},{command};'. Check the address and the port"
        )
    return replies[0]


@contextlib.contextmanager
def dashboard(host: str, port: int, timeout_s: float) -> Iterator[socket.socket]:
    """The dashboard for the length of a `with` block; a port that is occupied is tried again until the deadline.

    Raises:
        BusyError, UserError, ConnectionLost: as `ask`.
    """
    until = time.monotonic() + timeout_s
    while True:
        connection = connect(host, port, timeout_s, "dashboard")
        try:
            ask(connection, "RobotMode()")
            break
        except (BusyError, HungUp):
            connection.close()
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)
        except BaseException:
            connection.close()
            raise
    with connection:
        yield connection
