"""A policy's carry on the client: bytes that it hands back unread, so that no server needs to know its episode.

What a policy hands from one chunk to the next (a planner's warm start, the chunk before) goes out with an answer and
comes back with the next request, over any transport and to any replica. It belongs to the version that made it: to
another it is refused with 409 and the reason `session`, and the client begins anew with an empty one. It is data from
outside: shapes, dtypes and finite numbers are checked before it reaches the policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsvc.core.wire import Limits, WireError, pack, unpack
from rlsvc.serve.codec import RequestError

MAX_BYTES = 16 * 2**20


def encode_carry(carry: Any, version: str) -> bytes:
    """The carry of one row, arrays [1, ...] in any tree, as bytes; none for a policy that hands on nothing."""
    import jax

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(carry)]
    return pack({"version": version, "leaves": leaves}) if leaves else b""


def decode_carry(data: bytes, runner: Any) -> Any:
    """The carry for the runner that made it; None for empty bytes, which begin anew.

    Raises:
        RequestError: 409, they are no carry of this version's.
    """
    import jax

    if not data:
        return None
    try:
        message = unpack(data, Limits(max_bytes=MAX_BYTES))
    except WireError as error:
        raise _refused("it cannot be read") from error
    if not isinstance(message, dict) or message.keys() != {"version", "leaves"}:
        raise _refused("it is none")
    # In msgpack it may be an array, which has no place in a comparison.
    if not isinstance(message["version"], str) or message["version"] != runner.version:
        raise _refused("another version made it")
    expected, tree = jax.tree.flatten(jax.device_get(runner.initial_carry(1)))
    leaves = message["leaves"]
    if not isinstance(leaves, list) or len(leaves) != len(expected):
        raise _refused("it has not the arrays of this policy's")
    for leaf, own in zip(leaves, expected, strict=True):
        if not isinstance(leaf, np.ndarray) or (leaf.shape, leaf.dtype) != (own.shape, own.dtype):
            raise _refused("it has not the arrays of this policy's")
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            raise _refused("it has numbers that are not finite")
    return jax.tree.unflatten(tree, leaves)


def _refused(why: str) -> RequestError:
    return RequestError(409, "session", f"'carry': {why}; begin anew with an empty one")
