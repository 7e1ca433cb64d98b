"""Arrays in msgpack, byte-compatible with openpi's client, decoded without trust.

An array is the map `{b"__ndarray__": True, b"data": bytes, b"dtype": str, b"shape": [..]}` and a numpy scalar
`{b"__npgeneric__": True, b"data": number, b"dtype": str}` (the layout of openpi-client 0.1.2). dtype, shape and byte
count are checked before an array is made; nothing is ever unpickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgpack
import numpy as np

ARRAY_KINDS = "biuf"
MAX_DIMENSIONS = 8
SESSION_HEADER = "x-session-id"
"""What a client calls its session, at most 64 letters, digits, '.', '_' or '-'; a canary's share is drawn by it."""


class WireError(ValueError):
    """Bytes that are not a message of this protocol; the text says what is wrong and is safe to send back."""


@dataclass(frozen=True)
class Limits:
    """What a decoder accepts.

    Attributes:
        max_bytes: of a whole message.
        max_arrays: in one message.
        max_depth: of nested maps and lists.
        max_items: keys of one map or elements of one list.
        max_containers: maps and lists of one message together: an empty map is one byte on the wire and 64 in memory.
    """

    max_bytes: int = 64 * 2**20
    max_arrays: int = 64
    max_depth: int = 8
    max_items: int = 10_000
    max_containers: int = 10_000


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "U":
            return value.tolist()
        if value.dtype.kind not in ARRAY_KINDS:
            raise WireError(f"dtype {value.dtype} does not travel; send numbers, booleans or texts")
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic):
        if value.dtype.kind not in ARRAY_KINDS:
            raise WireError(f"dtype {value.dtype} does not travel")
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise WireError(f"a {type(value).__name__} does not travel; send numbers, texts, arrays, lists or maps of them")


def pack(message: Any) -> bytes:
    """Encode maps, lists, texts, numbers and numpy arrays.

    Raises:
        WireError: a value that has no place on the wire.
    """
    try:
        packed = msgpack.packb(message, default=_encode)
    except (TypeError, OverflowError) as error:
        raise WireError(str(error)) from error
    assert isinstance(packed, bytes)
    return packed


def unpack(data: bytes, limits: Limits | None = None) -> Any:
    """Decode one message; arrays are read-only views of `data`.

    Raises:
        WireError: too large, too deep, truncated, not msgpack, or an array whose dtype, shape and byte count do not
        agree.
    """
    limits = limits or Limits()
    containers = 0

    def count_container(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > limits.max_containers:
            raise WireError(f"more than {limits.max_containers} maps and lists in one message; send numbers as arrays")
        return container

    if len(data) > limits.max_bytes:
        raise WireError(f"message of {len(data)} bytes; at most {limits.max_bytes} are accepted")
    try:
        tree = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            object_hook=count_container,
            list_hook=count_container,
            max_map_len=limits.max_items,
            max_array_len=limits.max_items,
            max_ext_len=0,
            max_bin_len=limits.max_bytes,
            max_str_len=limits.max_bytes,
        )
    except WireError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError, TypeError) as error:
        raise WireError(f"not a msgpack message: {error or type(error).__name__}") from error
    count = [0]
    return _decode(tree, limits, 0, count)


def _decode(node: Any, limits: Limits, depth: int, count: list[int]) -> Any:
    if depth > limits.max_depth:
        raise WireError(f"nested deeper than {limits.max_depth}")
    if isinstance(node, dict):
        if b"__ndarray__" in node or b"__npgeneric__" in node:
            count[0] += 1
            if count[0] > limits.max_arrays:
                raise WireError(f"more than {limits.max_arrays} arrays in one message")
            if b"__ndarray__" in node:
                return array_from_bytes(node.get(b"data"), node.get(b"dtype"), node.get(b"shape"))
            return _scalar(node)
        decoded = {_key(key): _decode(value, limits, depth + 1, count) for key, value in node.items()}
        if len(decoded) != len(node):
            raise WireError("a map has the same key as text and as bytes")
        return decoded
    if isinstance(node, list):
        return [_decode(item, limits, depth + 1, count) for item in node]
    if isinstance(node, msgpack.Timestamp | msgpack.ExtType):
        raise WireError("msgpack extension types are not accepted")
    return node


def _key(key: Any) -> str:
    if isinstance(key, bytes):
        try:
            return key.decode()
        except UnicodeDecodeError as error:
            raise WireError("a map key is not UTF-8") from error
    if not isinstance(key, str):
        raise WireError(f"a map key is a {type(key).__name__}, expected a text")
    return key


def _dtype(text: Any) -> np.dtype:
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    # Only the short array-interface form ("<f4"): np.dtype() would also take "O", records and comma lists.
    if not (
        isinstance(text, str)
        and 3 <= len(text) <= 4
        and text[0] in "<>|="
        and text[1] in ARRAY_KINDS
        and text[2:].isdigit()
    ):
        raise WireError(f"array dtype {str(text)[:40]!r} is not accepted; expected a number or boolean such as '<f4'")
    try:
        return np.dtype(text)
    except TypeError as error:
        raise WireError(f"array dtype {text!r} is not known") from error


def is_shape(value: Any) -> TypeGuard[list[int]]:
    """Whether a decoded value is a list of sizes that an array may have."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**31 for n in value)
    )


def array_from_bytes(data: Any, dtype_text: Any, shape: Any) -> np.ndarray:
    """An array [*shape] that is a read-only view of `data`, once all three are known to agree.

    Args:
        data: the elements, C order.
        dtype_text: numpy's short form, such as "<f4" or "|u1".
        shape: a list of sizes.

    Raises:
        WireError: a dtype that is not a number or boolean, a bad shape, or another byte count than they need.
    """
    dtype = _dtype(dtype_text)
    if not isinstance(data, bytes):
        raise WireError("array data is not bytes")
    if not is_shape(shape):
        raise WireError(f"array shape {str(shape)[:60]} is not a list of at most {MAX_DIMENSIONS} sizes")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise WireError(f"array of shape {tuple(shape)} and dtype {dtype} needs {expected} bytes, got {len(data)}")
    if dtype.kind == "b" and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise WireError("a boolean array has bytes other than 0 and 1")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _scalar(node: dict[Any, Any]) -> np.generic:
    dtype, data = _dtype(node.get(b"dtype")), node.get(b"data")
    if not isinstance(data, bool | int | float):
        raise WireError("numpy scalar data is not a number")
    if isinstance(data, float) and dtype.kind != "f":
        raise WireError(f"number {data!r:.40} does not fit {dtype}")
    try:
        with np.errstate(over="ignore"):
            return dtype.type(data)
    except (OverflowError, ValueError) as error:
        raise WireError(f"number {data!r:.40} does not fit {dtype}") from error
