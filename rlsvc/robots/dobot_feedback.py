"""Dobot's real-time feedback (port 30004): 1440 bytes every 8 ms, and a thread that keeps the newest.

Layout: chapter 4 of Dobot's "TCP/IP Remote Control Interface Guide (V3)" (rlsvc/robots/dobot_wire.py). Angles are
degrees, lengths mm, as on the wire.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass

import numpy as np

from rlsvc.robots.api import ConnectionLost

PACKET_BYTES = 1440
PERIOD_S = 0.008
TEST_VALUE = 0x0123456789ABCDEF
TEST_BYTES = TEST_VALUE.to_bytes(8, "little")
TEST_AT = 48
FIELDS: tuple[tuple[str, str, int], ...] = (
    ("message_size", "<u2", 0),
    ("digital_inputs", "<u8", 8),
    ("digital_outputs", "<u8", 16),
    ("robot_mode", "<u8", 24),
    ("time_stamp", "<u8", 32),  # ms
    ("test_value", "<u8", TEST_AT),
    ("speed_scaling", "<f8", 64),  # percent
    ("q_target", "(6,)<f8", 192),  # deg
    ("qd_target", "(6,)<f8", 240),  # deg/s
    ("q_actual", "(6,)<f8", 432),  # deg
    ("qd_actual", "(6,)<f8", 480),  # deg/s
    ("tool_vector_actual", "(6,)<f8", 624),  # x, y, z mm; rx, ry, rz deg
    ("tool_vector_target", "(6,)<f8", 768),
    ("joint_modes", "(6,)<f8", 912),  # 8: position
    ("run_queued_cmd", "u1", 1014),
    ("velocity_ratio", "u1", 1016),  # percent
    ("enable_status", "u1", 1026),
    ("drag_status", "u1", 1027),
    ("running_status", "u1", 1028),
    ("error_status", "u1", 1029),
    ("robot_type", "u1", 1031),  # 5: CR5
)
"""Name, type and first byte of what is used here; the other bytes are not looked at."""
FEEDBACK = np.dtype(
    {
        "names": [name for name, _, _ in FIELDS],
        "formats": [kind for _, kind, _ in FIELDS],
        "offsets": [at for _, _, at in FIELDS],
        "itemsize": PACKET_BYTES,
    }
)


@dataclass(frozen=True)
class Feedback:
    """One packet. `record`: of type FEEDBACK; `stamp`: time.monotonic() when it came, s."""

    record: np.void
    stamp: float

    @property
    def mode(self) -> int:
        """RobotMode."""
        return int(self.record["robot_mode"])


def split_packets(buffer: bytearray) -> tuple[list[np.void], int]:
    """Take the whole packets from the front of a buffer.

    A packet that lacks bytes shows by a second test value inside it, the next packet's: what came before that one is
    thrown away. Only 56 bytes at its end, which nobody reads here, can be another packet's.

    Args:
        buffer: bytes as they came; what was used is removed.

    Returns:
        The packets, oldest first, and how many bytes were thrown away.
    """
    packets: list[np.void] = []
    lost = 0
    while len(buffer) >= PACKET_BYTES:
        at = buffer.rfind(TEST_BYTES, 0, PACKET_BYTES)
        if at == TEST_AT and int.from_bytes(buffer[:2], "little") == PACKET_BYTES:
            packets.append(np.frombuffer(bytes(buffer[:PACKET_BYTES]), FEEDBACK)[0])
            used = PACKET_BYTES
        else:
            # A test value that is cut by the end of this stretch must not be thrown away with it.
            used = at - TEST_AT if at > TEST_AT else PACKET_BYTES - TEST_AT - len(TEST_BYTES) + 1
            lost += used
        del buffer[:used]
    return packets, lost


class FeedbackStream:
    """Reads the feedback port in a thread and keeps the newest packet.

    Consumes the socket, which it owns; produces the newest packet; waits for nobody. When the peer ends or hangs,
    `newest` says so.

    Attributes:
        lost_bytes: thrown away to find the beginning of a packet again.
    """

    def __init__(self, connection: socket.socket, stale_after_s: float) -> None:
        """`stale_after_s`: age of the newest packet at which the robot counts as gone."""
        host, port = connection.getpeername()[:2]
        self.where, self.stale_after_s, self.lost_bytes = f"{host}:{port}", stale_after_s, 0
        self._connection, self._newest, self._ended = connection, None, ""
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"feedback of {self.where}", daemon=True)
        self._thread.start()

    def first(self, timeout_s: float) -> bool:
        """Wait for the first packet; whether it came. It does not come from a peer of another kind."""
        return self._first.wait(timeout_s) and self._newest is not None

    def newest(self) -> Feedback:
        """The newest packet.

        Raises:
            ConnectionLost: it is older than `stale_after_s`, or the connection ended.
        """
        newest = self._newest
        if self._ended:
            raise ConnectionLost(f"Dobot at {self.where} (feedback): {self._ended}")
        if newest is None:
            raise ConnectionLost(f"Dobot at {self.where} (feedback): no packet yet")
        if (age := time.monotonic() - newest.stamp) > self.stale_after_s:
            raise ConnectionLost(
                f"Dobot at {self.where} (feedback): the newest packet is {age * 1e3:.0f} ms old, expected one every "
                f"{PERIOD_S * 1e3:g} ms"
            )
        return newest

    def close(self) -> None:
        """End the thread and the connection."""
        self._ended = self._ended or "closed"
        with contextlib.suppress(OSError):  # the peer was quicker
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self._connection.close()

    def _read(self) -> None:
        buffer = bytearray()
        self._connection.settimeout(None)  # `newest` judges the age; `close` ends the wait
        while True:
            try:
                chunk = self._connection.recv(16 * PACKET_BYTES)
            except OSError as error:
                self._ended = self._ended or f"{error.strerror or error}"
                break
            stamp = time.monotonic()
            if not chunk:
                self._ended = self._ended or "the controller hung up"
                break
            buffer += chunk
            packets, lost = split_packets(buffer)
            self.lost_bytes += lost
            if packets:
                self._newest = Feedback(packets[-1], stamp)
                self._first.set()
        self._first.set()
