"""The wire codec: what travels, byte compatibility with openpi's client, and hostile bytes."""

import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from openpi_client import msgpack_numpy

from rlsvc.core.wire import Limits, WireError, array_from_bytes, pack, unpack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
DTYPES = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes(sizes=(16, 32, 64))
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
MESSAGES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# What an attacker would send: maps with the protocol's own keys, in any combination with anything.
HOSTILE = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape", "__ndarray__", "data", b"\xff", 3, None]
            ),
            inner
            | st.sampled_from(
                [
                    "<f4",
                    "|O",
                    "|V8",
                    "O",
                    "<U4",
                    "<M8",
                    "<c8",
                    "f4,f4",
                    ">f8",
                    "|b1",
                    "<f16",
                    "<f3",
                    "=i8",
                    b"<f4",
                    "<i0",
                ]
            )
            | st.lists(st.integers(-2, 2**40), max_size=10),
            max_size=6,
        )
    ),
    max_leaves=15,
)


def equal(a, b) -> bool:
    if isinstance(a, np.ndarray):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return same and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and (a == b or a != a)


@given(MESSAGES)
@settings(deadline=None)
def test_every_message_comes_back_as_it_was_sent(message):
    assert equal(unpack(pack(message)), message)


@given(MESSAGES)
@settings(deadline=None)
def test_openpis_client_and_this_codec_write_the_same_bytes(message):
    assert pack(message) == msgpack_numpy.packb(message)


@given(ARRAYS)
@settings(deadline=None)
def test_openpis_client_reads_what_this_codec_writes(array):
    assert equal(msgpack_numpy.unpackb(pack({"actions": array}))["actions"], array)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=500)
def test_random_bytes_give_a_message_or_a_wire_error(data):
    with contextlib.suppress(WireError):
        unpack(data)


@given(HOSTILE, st.data())
@settings(deadline=None, max_examples=500)
def test_hostile_maps_whole_or_damaged_give_a_message_or_a_wire_error(message, draw):
    data = bytearray(msgpack.packb(message))
    if draw.draw(st.booleans()) and data:
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(data)))
    for candidate in (bytes(data), bytes(data[:cut])):
        with contextlib.suppress(WireError):
            unpack(candidate)


def array_map(**changes):
    node = {b"__ndarray__": True, b"data": bytes(16), b"dtype": "<f4", b"shape": [4]}
    return msgpack.packb({"x": {**node, **{key.encode(): value for key, value in changes.items()}}})


@pytest.mark.parametrize(
    "dtype", ["|O", "O", "object", "|V8", "<c8", "<U4", "<M8[s]", "f4,f4", "<f3", "<i0", "", None, 4, b"|O", ["<f4"]]
)
def test_dtypes_that_are_not_plain_numbers_are_refused(dtype):
    with pytest.raises(WireError, match="dtype"):
        unpack(array_map(dtype=dtype))


@pytest.mark.parametrize("shape", [[-1], [-4], [2.0, 2], "4", None, [True, 4], [1] * 9, [2**31], {}])
def test_shapes_that_are_not_lists_of_sizes_are_refused(shape):
    with pytest.raises(WireError, match="shape"):
        unpack(array_map(shape=shape))


@pytest.mark.parametrize(
    "changes", [{"shape": [5]}, {"data": bytes(15)}, {"shape": [2**30, 2**30, 2**30]}, {"shape": []}, {"dtype": "<f8"}]
)
def test_a_byte_count_that_does_not_fit_dtype_and_shape_is_refused(changes):
    with pytest.raises(WireError, match=r"needs .* bytes, got"):
        unpack(array_map(**changes))


def test_a_boolean_that_is_neither_0_nor_1_is_refused():
    assert unpack(array_map(dtype="|b1", shape=[2], data=b"\0\1"))["x"].tolist() == [False, True]
    with pytest.raises(WireError, match="bytes other than 0 and 1"):
        unpack(array_map(dtype="|b1", shape=[2], data=b"\0\2"))


def test_a_truncated_message_is_refused_at_every_length():
    whole = pack({"observation.state": np.arange(6, dtype=np.float32), "task": "push"})
    for length in range(len(whole)):
        with pytest.raises(WireError):
            unpack(whole[:length])
    with pytest.raises(WireError, match="not a msgpack message"):
        unpack(whole + b"\x00")


def test_limits_hold_before_memory_is_spent():
    with pytest.raises(WireError, match="at most 10 are accepted"):
        unpack(pack("x" * 100), Limits(max_bytes=10))
    with pytest.raises(WireError, match="more than 2 arrays"):
        unpack(pack([np.zeros(1)] * 3), Limits(max_arrays=2))
    with pytest.raises(WireError, match="nested deeper than 3"):
        unpack(pack([[[[[1]]]]]), Limits(max_depth=3))
    with pytest.raises(WireError, match="not a msgpack message"):
        unpack(pack(list(range(100))), Limits(max_items=99))
    # A list header that promises four billion elements.
    with pytest.raises(WireError, match="not a msgpack message"):
        unpack(b"\xdd\xff\xff\xff\xff")
    # One byte each on the wire, 64 in memory each.
    with pytest.raises(WireError, match="maps and lists"):
        unpack(msgpack.packb([[{}] * 200] * 200))


@pytest.mark.parametrize("depth", [100, 600, 5_000, 200_000])
def test_deep_nesting_is_a_wire_error_not_a_crash(depth):
    with pytest.raises(WireError):
        unpack(b"\x91" * depth + b"\x00")


@pytest.mark.parametrize("data", [msgpack.packb(msgpack.ExtType(5, b"x")), msgpack.packb(msgpack.Timestamp(1, 2))])
def test_extension_types_are_refused(data):
    with pytest.raises(WireError):
        unpack(data)


@pytest.mark.parametrize(
    ("dtype", "value"), [("|u1", 300), ("|u1", -1), ("<i4", 1.5), ("<i8", 2**64 - 1), ("<f4", "1"), ("<i4", None)]
)
def test_numpy_scalars_that_do_not_fit_their_dtype_are_refused(dtype, value):
    with pytest.raises(WireError):
        unpack(msgpack.packb({b"__npgeneric__": True, b"data": value, b"dtype": dtype}))


@pytest.mark.parametrize(
    "value",
    [np.array([None]), np.array(["a", 1], dtype=object), np.array([1j]), {1, 2}, object(), 2**70, np.datetime64("now")],
)
def test_values_without_a_place_on_the_wire_are_refused_when_sent(value):
    with pytest.raises(WireError):
        pack({"x": value})


def test_texts_travel_as_texts_and_numpy_scalars_keep_their_dtype():
    back = unpack(pack({"task": np.array(["push", "pull"]), "n": np.float32(1.5)}))
    assert back["task"] == ["push", "pull"]
    assert back["n"] == np.float32(1.5)
    assert back["n"].dtype == np.float32


def test_a_key_given_twice_is_refused():
    with pytest.raises(WireError, match="same key"):
        unpack(msgpack.packb({b"x": 1, "x": 2}))


def test_decoded_arrays_are_views_that_cannot_be_written():
    array = array_from_bytes(bytes(8), "<f4", [2])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
