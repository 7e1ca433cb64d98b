"""Requests and answers as bytes: JSON for curl and programs, msgpack for robots. The same message in both.

A request is `{"observation": {key: array}, "seed": int, "step": int, "session": bool, "carry": bytes}`; only the
observation must be there. In JSON an array is nested lists or `{"b64": base64 of the C-order bytes, "dtype": "uint8",
"shape": [..]}`, and bytes are base64; an answer's arrays are nested lists.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rlsvc.core.contract import DTYPES, TEXT
from rlsvc.core.errors import UserError, nearest
from rlsvc.core.wire import Limits, WireError, array_from_bytes, pack, unpack

JSON = "application/json"
MSGPACK = "application/msgpack"
# A request's seed and step are below this, so that they fit a signed 32-bit integer on any device.
MAX_INTEGER = 2**31
_FIELDS = ("observation", "seed", "step", "session", "carry")


class RequestError(UserError):
    """A request that is answered with a message instead of actions.

    Attributes:
        status: HTTP status, 4xx or 5xx.
        reason: one word for the metrics, from a fixed set; never a client's text.
        retry_after_s: whole seconds after which asking again may help; None where it does not.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int | None = None) -> None:
        """Keep the status and the reason beside the message."""
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = 1 if status == 503 and retry_after_s is None else retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """What its answer has in its headers."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        # There may be more of a body that is too large than was read.
        return {**headers, "Connection": "close"} if self.status == 413 else headers


@dataclass(frozen=True)
class ActRequest:
    """One request for actions, decoded but not yet held against a contract.

    Attributes:
        observation: by key whatever was sent.
        seed: of the caller's randomness, [0, 2**31).
        step: of the caller's episode, [0, 2**31); None when not sent.
        session: whether the server keeps the episode: see `rlsvc.serve.session`.
        carry: of the answer before, where the client keeps it (rlsvc.serve.carry); empty begins anew, None gives none.
    """

    observation: dict[str, Any]
    seed: int = 0
    step: int | None = None
    session: bool = False
    carry: bytes | None = None


def media_type(content_type: str | None) -> str:
    """JSON or MSGPACK out of a Content-Type header.

    Raises:
        RequestError: 415, anything else.
    """
    kind = (content_type or "").split(";", 1)[0].strip().lower()
    if kind in (MSGPACK, "application/x-msgpack", "application/vnd.msgpack"):
        return MSGPACK
    if kind == JSON:
        return JSON
    raise RequestError(415, "media_type", f"content type '{kind[:60]}' is not spoken here; send {JSON} or {MSGPACK}")


def decode_request(body: bytes, kind: str, max_bytes: int) -> ActRequest:
    """The request in a body.

    Args:
        body: at most `max_bytes` long.
        kind: JSON or MSGPACK.
        max_bytes: limit of a message.

    Raises:
        RequestError: 400, it is not a message of this kind or not a request.
    """
    return as_request(decode_message(body, kind, max_bytes))


def decode_message(body: bytes, kind: str, max_bytes: int) -> Any:
    """The message in a body, arrays made; see `decode_request`."""
    if kind == MSGPACK:
        try:
            return unpack(body, Limits(max_bytes=max_bytes))
        except WireError as error:
            raise RequestError(400, "malformed", str(error)) from error
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, "malformed", f"the body is not JSON: {error}") from error


def as_request(message: Any) -> ActRequest:
    """A decoded message as a request.

    Raises:
        RequestError: 400, a field is missing, unknown or of the wrong type.
    """
    if not isinstance(message, dict):
        raise RequestError(
            400, "malformed", f"the message is a {type(message).__name__}, expected a map with 'observation'"
        )
    for key in message:
        if key not in _FIELDS:
            guess = nearest(str(key), _FIELDS)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise RequestError(400, "malformed", f"unknown field '{key[:60]}'{hint}; expected: {', '.join(_FIELDS)}")
    observation = message.get("observation")
    if not isinstance(observation, dict):
        got = "nothing" if observation is None else type(observation).__name__
        raise RequestError(400, "malformed", f"'observation': got {got}, expected a map of arrays by name")
    step = message.get("step")
    session = message.get("session", False)
    if not isinstance(session, bool):
        raise RequestError(400, "malformed", f"'session': got {str(session)[:40]}, expected true or false")
    carry = message.get("carry")
    if session and carry is not None:
        raise RequestError(
            400, "malformed", "'carry' and 'session': the server keeps an episode's carry; leave one out"
        )
    return ActRequest(
        {key: _array(key, value) for key, value in observation.items()},
        seed=as_integer("seed", message.get("seed", 0)),
        step=None if step is None else as_integer("step", step),
        session=session,
        carry=None if carry is None else _bytes(carry),
    )


def encode(message: dict[str, Any], kind: str) -> bytes:
    """An answer or an error as bytes."""
    return pack(message) if kind == MSGPACK else orjson.dumps(message, _base64, orjson.OPT_SERIALIZE_NUMPY)


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def _bytes(value: Any) -> bytes:
    """A carry as it travels. What it holds is judged when it is used; raises RequestError, 400, for no bytes."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise RequestError(400, "malformed", f"'carry': got {type(value).__name__}, expected that of the answer before")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(409, "session", "'carry': not that of an answer; begin anew with an empty one") from error


def as_integer(name: str, value: Any) -> int:
    """A request's seed or step. Raises RequestError, 400."""
    if isinstance(value, np.integer):
        value = int(value)
    if type(value) is not int or not 0 <= value < MAX_INTEGER:
        raise RequestError(
            400, "malformed", f"'{name}': got {str(value)[:40]}, expected an integer from 0 to {MAX_INTEGER - 1}"
        )
    return value


def _array(key: str, value: Any) -> Any:
    """A `{"b64", "dtype", "shape"}` map as an array; anything else as it is, for the contract to judge."""
    if not isinstance(value, dict):
        return value
    where = f"observation '{key[:60]}'"
    if value.keys() != {"b64", "dtype", "shape"}:
        raise RequestError(
            400,
            "malformed",
            f"{where}: a map must have exactly 'b64', 'dtype' and 'shape'; got {', '.join(value)[:80]}",
        )
    # In msgpack it may be an array, which has no place in a comparison.
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES or value["dtype"] == TEXT:
        allowed = ", ".join(name for name in DTYPES if name != TEXT)
        raise RequestError(400, "malformed", f"{where}: dtype '{str(value['dtype'])[:40]}' is not one of {allowed}")
    try:
        data = base64.b64decode(value["b64"], validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise RequestError(400, "malformed", f"{where}: 'b64' is not base64") from error
    try:
        # Byte order on the wire is little-endian, whatever the machine.
        return array_from_bytes(data, np.dtype(value["dtype"]).newbyteorder("<").str, value["shape"])
    except WireError as error:
        raise RequestError(400, "malformed", f"{where}: {error}") from error
