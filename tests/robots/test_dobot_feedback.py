"""The feedback's layout, and finding packets again in a stream that was torn."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsvc.robots.dobot_feedback import split_packets
from rlsvc.robots.virtual.cr5_arm import CR5Arm


def packet(number: int) -> bytes:
    """A packet whose joints, speeds and status bytes all tell its number; made from the published byte positions."""
    data = bytearray(1440)
    struct.pack_into("<H", data, 0, 1440)
    struct.pack_into("<Q", data, 24, 5)
    struct.pack_into("<Q", data, 48, 0x0123456789ABCDEF)
    struct.pack_into("<6d", data, 432, *[float(number)] * 6)
    struct.pack_into("<6d", data, 480, *[float(number)] * 6)
    struct.pack_into("<6d", data, 624, *[float(number)] * 6)
    data[1026] = number % 256
    return bytes(data)


def test_fields_lie_at_the_published_byte_positions():
    arm = CR5Arm(np.array([1.0, 2, 3, 4, 5, 6]), enabled=True)
    arm.outputs[2] = 1
    data = arm.packet()
    assert len(data) == 1440
    assert struct.unpack_from("<H", data, 0) == (1440,)
    assert struct.unpack_from("<Q", data, 16) == (0b10,)  # DigitalOutputs
    assert struct.unpack_from("<Q", data, 24) == (5,)  # RobotMode
    assert data[48:56] == bytes.fromhex("efcdab8967452301")  # TestValue, little-endian
    assert struct.unpack_from("<6d", data, 192) == (1, 2, 3, 4, 5, 6)  # QTarget
    assert struct.unpack_from("<6d", data, 432) == (1, 2, 3, 4, 5, 6)  # QActual
    np.testing.assert_allclose(struct.unpack_from("<6d", data, 624), arm.pose)  # ToolVectorActual
    assert (data[1026], data[1028], data[1029], data[1031]) == (1, 0, 0, 5)  # enabled, running, error, CR5


def test_packets_are_read_from_the_published_byte_positions():
    (record,), lost = split_packets(bytearray(packet(7)))
    assert lost == 0
    assert int(record["robot_mode"]) == 5
    for name in ("q_actual", "qd_actual", "tool_vector_actual"):
        np.testing.assert_array_equal(record[name], np.full(6, 7.0))


@given(
    st.lists(st.tuples(st.integers(0, 1440), st.binary(max_size=80)), min_size=1, max_size=6),
    st.lists(st.integers(1, 4000), min_size=1, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_a_torn_stream_gives_only_whole_packets_and_finds_its_beginning_again(
    damage: list[tuple[int, bytes]], chunks: list[int]
):
    stream = b"".join(packet(i)[:kept] + noise for i, (kept, noise) in enumerate(damage))
    good = range(100, 104)
    stream += b"".join(packet(i) for i in good)
    buffer, numbers, at = bytearray(), [], 0
    for size in [*chunks, len(stream)]:
        buffer += stream[at : at + size]
        at += size
        for record in split_packets(buffer)[0]:
            values = {*record["q_actual"], *record["qd_actual"], *record["tool_vector_actual"]}
            assert len(values) == 1  # never joints of one moment and speeds of another
            assert int(record["enable_status"]) == values.pop()
            numbers.append(int(record["q_actual"][0]))
    # The first whole packets may go with the torn one before them; the last two cannot.
    assert numbers[-2:] == list(good)[-2:]
    assert numbers == sorted(numbers)
