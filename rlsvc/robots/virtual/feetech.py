"""A bus of Feetech servos on a pseudo-terminal: what opens its port can't tell it from a serial adapter.

Half duplex at the servos' baud rate: a packet at another rate, with a wrong checksum or for an id that is not there is
not answered. Replies come after the return delay, the time of their bytes on the wire, and whatever `Faults` adds.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import termios
import threading
import time
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from rlsvc.robots import feetech
from rlsvc.robots.feetech import Packet, take_packets
from rlsvc.robots.virtual.sts3215 import Servo

BAUD = {getattr(termios, f"B{rate}"): rate for rate in feetech.BAUD_RATES if hasattr(termios, f"B{rate}")}
PERIOD = 0.002
"""s."""
GAP = 0.01
"""Of silence, s, after which the start of a packet is forgotten."""


@dataclass
class Faults:
    """What goes wrong on the bus; all may be changed while it runs.

    Attributes:
        latency: of every reply, s.
        drop_next: so many replies are lost from now on.
        drop_reply: share of replies that are lost.
        drop_byte: share of the bytes lost, in both directions.
        mute: ids that do not answer (a loose cable); they do not obey either.
        error: error bits that replies carry besides the servo's own, by id.
    """

    latency: float = 0.0
    drop_next: int = 0
    drop_reply: float = 0.0
    drop_byte: float = 0.0
    mute: set[int] = field(default_factory=set)
    error: dict[int, int] = field(default_factory=dict)


class VirtualBus:
    """Servos on one wire. A context manager; a thread answers while it is open.

    Attributes:
        port: path of the serial port, "/dev/pts/N".
        servos: in the order of their places, not by id, since an id can be written.
        faults: see Faults.
    """

    def __init__(
        self,
        servos: Sequence[Servo],
        faults: Faults | None = None,
        seed: int = 0,
        move: Callable[[], bool] | None = None,
    ) -> None:
        """`move` is called in the bus's thread, every PERIOD and between packets.

        It lets time pass for what the servos move, in small portions, and returns whether it has caught up with the
        clock. One thread for both: a packet never waits for physics that was interrupted in the middle.
        """
        self.servos = list(servos)
        self._move = move
        self._free = 0.0  # when the wire is
        self.faults = faults or Faults()
        self._random = random.Random(seed)
        self._master, slave = os.openpty()
        tty.setraw(slave)
        self.port = os.ttyname(slave)
        # Nobody but clients hold the port open, so that one can see who uses it.
        os.close(slave)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._serve, name=f"feetech bus {self.port}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        for fd in (self._master, self._wake, self._waker):
            os.close(fd)

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._master, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        buffer, heard = bytearray(), 0.0
        while True:
            caught_up = self._move is None or self._move()
            pause = 0.0 if not caught_up else PERIOD if self._move else GAP if buffer else 1.0
            events = dict(poll.poll(1000 * pause))
            if self._wake in events:
                return
            state = events.get(self._master, 0)
            if state & select.POLLIN:
                data = b""
                with contextlib.suppress(OSError):
                    data = os.read(self._master, 4096)
                if time.monotonic() - heard > GAP:
                    buffer.clear()
                self._free = heard = time.monotonic()
                buffer += self._lossy(data)
                for packet in take_packets(buffer):
                    self._answer(packet)
            elif state & select.POLLHUP:
                buffer.clear()
                time.sleep(0.002)  # nobody has the port open

    def _wait(self, seconds: float) -> None:
        """Until the wire has been busy for so long; what an earlier wait took too much is made good."""
        self._free += seconds
        while (left := self._free - time.monotonic()) > 0:
            time.sleep(min(left, PERIOD))
            if self._move is not None:
                self._move()

    def _lossy(self, data: bytes) -> bytes:
        rate = self.faults.drop_byte
        return bytes(byte for byte in data if self._random.random() >= rate) if rate else data

    def _answer(self, packet: Packet) -> None:
        """Let the servos do what a packet says, and send what they answer, in order."""
        baud = BAUD.get(termios.tcgetattr(self._master)[4])
        there = [
            servo
            for servo in self.servos
            if servo.get("ID") not in self.faults.mute and feetech.BAUD_RATES[servo.get("Baud_Rate") & 7] == baud
        ]
        for_all = packet.id == feetech.BROADCAST
        addressed = [servo for servo in there if for_all or servo.get("ID") == packet.id]
        given = packet.parameters
        match packet.code:
            case feetech.PING:
                for servo in sorted(addressed, key=lambda servo: servo.get("ID")):
                    self._reply(servo)
            case feetech.READ if len(given) == 2 and not for_all:
                for servo in addressed:
                    self._reply(servo, servo.read(given[0], given[1]))
            case feetech.SYNC_READ if len(given) >= 3:
                by_id = {servo.get("ID"): servo for servo in there}
                for id in given[2:]:
                    if id in by_id:
                        self._reply(by_id[id], by_id[id].read(given[0], given[1]))
            case feetech.SYNC_WRITE if len(given) >= 2:
                by_id = {servo.get("ID"): servo for servo in there}
                for start in range(2, len(given) - given[1], given[1] + 1):
                    if servo := by_id.get(given[start]):
                        servo.write(given[0], given[start + 1 : start + 1 + given[1]])
            case feetech.WRITE | feetech.REG_WRITE if given:
                for servo in addressed:
                    id, (address, data) = servo.get("ID"), (given[0], given[1:])
                    if packet.code == feetech.WRITE:
                        servo.write(address, data)
                    else:
                        servo.register_write(address, data)
                    self._acknowledge(servo, id, for_all)
            case feetech.ACTION | feetech.RESET:
                for servo in addressed:
                    if packet.code == feetech.ACTION:
                        servo.action()
                    else:
                        servo.factory_reset()
                    self._acknowledge(servo, servo.get("ID"), for_all)
            case _:
                pass  # an instruction that the servo does not know, or one without its parameters

    def _acknowledge(self, servo: Servo, id: int, for_all: bool) -> None:
        if not for_all and servo.get("Response_Status_Level"):
            self._reply(servo, id=id)

    def _reply(self, servo: Servo, data: bytes = b"", id: int | None = None) -> None:
        id = servo.get("ID") if id is None else id
        answer = Packet(id, servo.error | self.faults.error.get(id, 0), data).encode()
        delay = (
            2e-6 * servo.get("Return_Delay_Time") + 10 * len(answer) / feetech.BAUD_RATES[servo.get("Baud_Rate") & 7]
        )
        self._wait(delay + self.faults.latency)
        if self.faults.drop_next > 0:
            self.faults.drop_next -= 1
        elif self._random.random() >= self.faults.drop_reply:
            with contextlib.suppress(OSError):  # the client has gone
                os.write(self._master, self._lossy(answer))
