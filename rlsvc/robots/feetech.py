"""The wire protocol of Feetech's STS servos: packets, checksums, and the addresses that this package writes to.

A packet is `FF FF id length code parameters... checksum`, where length counts what follows it, code is the instruction
or, in a servo's reply, its error bits, and the checksum is the inverted low byte of the sum of all between header and
itself. Words are little-endian; signed ones carry their sign in a bit of their own. It stands alone and is small, since
the stopper (rlsvc/robots/stop_feetech.py) is loaded with it.

Source: Feetech, "Communication protocol of SMS/STS servos" and the memory table of the STS3215.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BROADCAST = 0xFE
"""Every servo obeys; none answers, except to a ping."""

PING, READ, WRITE, REG_WRITE, ACTION, RESET, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x82, 0x83

TORQUE_ENABLE = (40, 1)
"""(address, bytes). 0 lets go, 1 holds the goal, 128 makes the present position the middle (2048)."""
GOAL_POSITION = (42, 2)
PRESENT_POSITION = (56, 2)

VOLTAGE, SENSOR, TEMPERATURE, CURRENT, OVERLOAD = 0x01, 0x02, 0x04, 0x08, 0x20
"""Error bits of a reply."""

BAUD_RATES = (1_000_000, 500_000, 250_000, 128_000, 115_200, 57_600, 38_400, 19_200)
"""By the value of the register `Baud_Rate`, bit/s."""


@dataclass(frozen=True)
class Packet:
    """One packet.

    Attributes:
        id: of the servo, or BROADCAST.
        code: an instruction, or the error bits of a reply.
        parameters: the rest, 0 to 250 bytes.
    """

    id: int
    code: int
    parameters: bytes = b""

    def encode(self) -> bytes:
        """The bytes on the wire."""
        body = bytes([self.id, len(self.parameters) + 2, self.code]) + self.parameters
        return b"\xff\xff" + body + bytes([checksum(body)])


def checksum(body: Iterable[int]) -> int:
    """Of everything between header and checksum."""
    return ~sum(body) & 0xFF


def take_packets(buffer: bytearray) -> list[Packet]:
    """Remove all whole packets from the front of `buffer`; noise and packets with a wrong checksum are dropped."""
    packets = []
    while (start := buffer.find(b"\xff\xff")) >= 0:
        del buffer[:start]
        if len(buffer) < 4:
            return packets
        # No id is FF, and the shortest packet has length 2: what else follows two FF is not a header.
        if buffer[2] == 0xFF or buffer[3] < 2:
            del buffer[:1]
            continue
        end = 4 + buffer[3]
        if len(buffer) < end:
            return packets
        if buffer[end - 1] == checksum(buffer[2 : end - 1]):
            packets.append(Packet(buffer[2], buffer[4], bytes(buffer[5 : end - 1])))
            del buffer[:end]
        else:
            del buffer[:2]
    del buffer[: -1 if buffer.endswith(b"\xff") else None]
    return packets


def encode_signed(value: int, bit: int) -> int:
    """Sign and magnitude: bit number `bit` is the sign; magnitudes beyond it are cut to the largest."""
    return min(abs(value), (1 << bit) - 1) | ((value < 0) << bit)


def decode_signed(word: int, bit: int) -> int:
    """Inverse of `encode_signed`."""
    magnitude = word & ((1 << bit) - 1)
    return -magnitude if word >> bit & 1 else magnitude
