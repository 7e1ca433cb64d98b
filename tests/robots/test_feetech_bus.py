"""The virtual bus, byte by byte, and against Feetech's own library."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import serial
from hypothesis import given, settings
from hypothesis import strategies as st
from scservo_sdk import COMM_SUCCESS, GroupSyncRead, PacketHandler, PortHandler

from rlsvc.robots import feetech
from rlsvc.robots.feetech import Packet, decode_signed, encode_signed, take_packets
from rlsvc.robots.virtual.feetech import VirtualBus
from rlsvc.robots.virtual.sts3215 import Servo

PING_1 = bytes.fromhex("ff ff 01 02 01 fb")  # the manual's example
STATUS_1 = bytes.fromhex("ff ff 01 02 00 fc")


@pytest.fixture
def bus() -> Iterator[VirtualBus]:
    with VirtualBus([Servo(1), Servo(2, encoder=1000)]) as bus:
        for servo in bus.servos:
            servo.tick(servo.encoder, 0.0, 0.001)
        yield bus


@pytest.fixture
def port(bus: VirtualBus) -> Iterator[serial.Serial]:
    with serial.Serial(bus.port, 1_000_000, timeout=1) as port:
        yield port


def nothing_comes(port: serial.Serial) -> bool:
    port.timeout = 0.1
    return port.read(1) == b""


def test_a_ping_is_answered_byte_for_byte(port: serial.Serial) -> None:
    port.write(PING_1)
    assert port.read(6) == STATUS_1


def test_a_wrong_checksum_is_not_answered(port: serial.Serial) -> None:
    port.write(PING_1[:-1] + b"\xfa")
    assert nothing_comes(port)


def test_a_packet_behind_noise_and_half_a_packet_is_answered(port: serial.Serial) -> None:
    port.write(b"\x13\xff\xff\x01\x04" + PING_1)
    assert port.read(6) == STATUS_1


def test_the_start_of_a_packet_is_forgotten_after_silence(port: serial.Serial) -> None:
    port.write(b"\xff\xff\x01\xf0")
    time.sleep(0.1)
    port.write(PING_1)
    assert port.read(6) == STATUS_1


def test_another_baud_rate_is_not_understood(port: serial.Serial) -> None:
    port.baudrate = 500_000
    port.write(PING_1)
    assert nothing_comes(port)


def test_a_broadcast_ping_is_answered_by_all_and_a_broadcast_write_by_none(
    bus: VirtualBus, port: serial.Serial
) -> None:
    port.write(Packet(feetech.BROADCAST, feetech.PING).encode())
    assert port.read(12) == STATUS_1 + bytes.fromhex("ff ff 02 02 00 fb")
    port.write(Packet(feetech.BROADCAST, feetech.WRITE, bytes([40, 1])).encode())
    assert nothing_comes(port)
    assert [servo.torque for servo in bus.servos] == [True, True]


def test_a_position_is_read_with_its_low_byte_first(port: serial.Serial) -> None:
    # The manual reads two bytes from address 0x38; 1000 is 0x03E8.
    port.write(bytes.fromhex("ff ff 02 04 02 38 02 bd"))
    assert port.read(8) == bytes.fromhex("ff ff 02 04 00 e8 03 0e")


def test_sync_read_is_answered_in_the_order_asked_and_an_absent_id_is_left_out(port: serial.Serial) -> None:
    port.write(Packet(feetech.BROADCAST, feetech.SYNC_READ, bytes([56, 2, 2, 9, 1])).encode())
    buffer = bytearray(port.read(16))
    assert [(packet.id, packet.parameters) for packet in take_packets(buffer)] == [(2, b"\xe8\x03"), (1, b"\x00\x08")]


def test_sync_write_sets_each_servo_and_is_not_answered(bus: VirtualBus, port: serial.Serial) -> None:
    port.write(Packet(feetech.BROADCAST, feetech.SYNC_WRITE, bytes([42, 2, 1, 0x2C, 1, 2, 5, 0x80])).encode())
    assert nothing_comes(port)
    assert [servo.get("Goal_Position") for servo in bus.servos] == [300, -5]


def test_a_registered_write_waits_for_the_action(bus: VirtualBus, port: serial.Serial) -> None:
    port.write(Packet(1, feetech.REG_WRITE, bytes([42, 0x2C, 1])).encode())
    assert port.read(6) == STATUS_1
    assert bus.servos[0].get("Goal_Position") == 2048
    port.write(Packet(feetech.BROADCAST, feetech.ACTION).encode())
    assert nothing_comes(port)
    assert bus.servos[0].get("Goal_Position") == 300


def test_a_silent_servo_answers_to_pings_and_reads_alone(bus: VirtualBus, port: serial.Serial) -> None:
    bus.servos[0].set("Response_Status_Level", 0)
    port.write(Packet(1, feetech.WRITE, bytes([40, 1])).encode())
    assert nothing_comes(port)
    port.timeout = 1
    port.write(PING_1)
    assert port.read(6) == STATUS_1


def test_an_id_that_is_written_is_answered_under_the_old_one_and_obeyed_under_the_new(
    bus: VirtualBus, port: serial.Serial
) -> None:
    port.write(Packet(1, feetech.WRITE, bytes([5, 7])).encode())
    assert port.read(6) == STATUS_1
    port.write(Packet(7, feetech.PING).encode())
    assert port.read(6)[2] == 7


def test_error_bits_ride_on_every_reply(bus: VirtualBus, port: serial.Serial) -> None:
    bus.faults.error[1] = feetech.OVERLOAD
    port.write(PING_1)
    assert port.read(6) == bytes.fromhex("ff ff 01 02 20 dc")
    bus.faults.error.clear()
    bus.servos[0].voltage = 3.0
    port.write(PING_1)
    assert port.read(6)[4] == feetech.VOLTAGE


def test_faults_mute_delay_and_lose(bus: VirtualBus, port: serial.Serial) -> None:
    bus.faults.mute.add(1)
    port.write(PING_1)
    assert nothing_comes(port)
    bus.faults.mute.clear()
    bus.faults.drop_next = 1
    port.write(PING_1)
    assert nothing_comes(port)
    bus.faults.latency = 0.3
    port.write(PING_1)
    assert nothing_comes(port)  # for 0.1 s
    port.timeout = 1
    assert port.read(6) == STATUS_1
    bus.faults.latency, bus.faults.drop_byte = 0.0, 0.3
    port.timeout = 0.05
    answers = []
    for _ in range(20):
        port.reset_input_buffer()
        port.write(PING_1)
        answers.append(port.read(6))
    assert len(set(answers)) > 2  # pieces of it, or none


def test_feetechs_own_library_reads_and_writes_it(bus: VirtualBus) -> None:
    handler, packets = PortHandler(bus.port), PacketHandler(0)
    handler.setPacketTimeout = lambda _: handler.setPacketTimeoutMillis(500)  # the bus's thread answers in its turn
    assert handler.openPort()
    try:
        assert packets.ping(handler, 1)[:2] == (777, COMM_SUCCESS)
        assert packets.write2ByteTxRx(handler, 2, 42, 1234) == (COMM_SUCCESS, 0)
        assert packets.read2ByteTxRx(handler, 2, 42)[:2] == (1234, COMM_SUCCESS)
        group = GroupSyncRead(handler, packets, 56, 2)
        group.addParam(1)
        group.addParam(2)
        assert group.txRxPacket() == COMM_SUCCESS
        assert [group.getData(id, 56, 2) for id in (1, 2)] == [2048, 1000]
    finally:
        handler.closePort()


PACKETS = st.builds(Packet, st.integers(0, 0xFE), st.integers(0, 0xFF), st.binary(max_size=20))


@settings(max_examples=50)
@given(packets=st.lists(PACKETS, max_size=4), cuts=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_packets_arrive_whole_however_they_are_cut(packets: list[Packet], cuts: list[int]) -> None:
    wire, buffer, arrived = b"".join(packet.encode() for packet in packets), bytearray(), []
    for cut in itertools.cycle(cuts):
        if not wire:
            break
        buffer += wire[:cut]
        wire = wire[cut:]
        arrived += take_packets(buffer)
    assert arrived == packets
    assert not buffer


@given(st.binary(max_size=80))
def test_noise_is_never_taken_for_a_packet_with_a_wrong_checksum(noise: bytes) -> None:
    for packet in take_packets(bytearray(noise)):
        assert packet.encode() in noise


def test_signs_are_a_bit_of_their_own() -> None:
    assert [encode_signed(value, 11) for value in (0, 5, -5, -2047, -9999)] == [0, 5, 0x805, 0xFFF, 0xFFF]
    assert [decode_signed(word, 15) for word in (0, 0x8005, 0x7FFF)] == [0, -5, 32767]
