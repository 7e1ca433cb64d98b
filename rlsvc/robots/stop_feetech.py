"""Stops Feetech motors with pyserial alone, from a process other than the one that drives them.

It writes to the port beside the process that has it open, which is dead or hangs: a packet of that process in the same
moment may spoil one of these, so everything is confirmed and said again. What holds a claim on the port (port.py) does
not keep it out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import serial

from rlsvc.robots import feetech
from rlsvc.robots.api import ConnectionLost, Torque
from rlsvc.robots.feetech import Packet, take_packets

TIMEOUT = 0.5
"""s, over which everything is said again to motors that have not confirmed."""
WAIT = 0.03
"""For the answers of all motors, s; at 1 Mbit/s they take 1 ms, a USB adapter holds them for up to 16."""


def stop(buses: Sequence[Mapping[str, Any]], torque: Torque) -> None:
    """Stop the motors of every bus.

    Args:
        buses: each with `port` (path), `ids` of its motors, and `baudrate`, bit/s.
        torque: "hold" makes each motor's present position its goal and switches torque on; "release" switches it off.

    Raises:
        ConnectionLost: motors that did not confirm; the others have stopped.
    """
    failed = []
    for bus in buses:
        try:
            with serial.Serial(bus["port"], bus["baudrate"], timeout=0) as port:
                silent = _stop(port, tuple(bus["ids"]), torque)
        except (OSError, serial.SerialException) as error:
            failed.append(f"{bus['port']}: {error}")
            continue
        if silent:
            failed.append(f"{bus['port']}: motors {', '.join(map(str, silent))} do not answer")
    if failed:
        raise ConnectionLost(f"the robot could not be stopped ({torque}): {'; '.join(failed)}")


def _stop(port: serial.Serial, ids: tuple[int, ...], torque: Torque) -> list[int]:
    """Returns the ids of the motors that did not confirm."""
    left = list(ids)
    on = torque == "hold"
    until = time.monotonic() + TIMEOUT
    while True:
        obeying = left
        if on:
            positions = _read(port, left, feetech.PRESENT_POSITION)
            _write(port, feetech.GOAL_POSITION, positions)
            obeying = list(positions)
        _write(port, feetech.TORQUE_ENABLE, dict.fromkeys(obeying, bytes([on])))
        switched = _read(port, left, feetech.TORQUE_ENABLE)
        left = [id for id in left if id not in obeying or switched.get(id) != bytes([on])]
        if not left or time.monotonic() > until:
            return left


def _write(port: serial.Serial, register: tuple[int, int], values: Mapping[int, bytes]) -> None:
    if values:
        body = b"".join(bytes([id]) + value for id, value in values.items())
        port.write(Packet(feetech.BROADCAST, feetech.SYNC_WRITE, bytes(register) + body).encode())
        port.flush()


def _read(port: serial.Serial, ids: Sequence[int], register: tuple[int, int]) -> dict[int, bytes]:
    """The register of each motor that answers in time."""
    port.reset_input_buffer()
    port.write(Packet(feetech.BROADCAST, feetech.SYNC_READ, bytes([*register, *ids])).encode())
    buffer, found = bytearray(), {}
    until = time.monotonic() + WAIT
    while len(found) < len(ids) and time.monotonic() < until:
        buffer += port.read(256)
        for packet in take_packets(buffer):
            if packet.id in ids and len(packet.parameters) == register[1]:
                found[packet.id] = packet.parameters
        time.sleep(0.0005)
    return found


def refuse(what: str, torque: Literal["hold", "release"]) -> None:
    """For a robot that only the process which drives it can stop.

    Raises:
        ConnectionLost: always; `what` says which robot.
    """
    raise ConnectionLost(f"{what} can't be stopped ({torque}) from outside: use its emergency stop")
