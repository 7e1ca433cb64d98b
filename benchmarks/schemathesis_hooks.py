"""What Schemathesis must be told of the served policy beside its OpenAPI page; benchmarks/schemathesis_run.py.

Three things have no words in OpenAPI: how a map becomes msgpack, which base64 text holds finite numbers, and that a
header gives the length of a part of the body.
"""

from __future__ import annotations

import base64
import json

import hypothesis.extra.numpy as hnp
import numpy as np
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.wire import WireError, pack, unpack
from rlsvc.serve.oip import DATATYPES, HEADER_LENGTH

CONTRACT = Contract(
    observation={
        "observation.state": Feature((5,), "float32"),
        "observation.image": Feature((2, 2, 3), "uint8"),
        "observation.joints": Feature((3,), "float64"),
        "observation.ticks": Feature((), "int32"),
        "observation.clock": Feature((), "int64"),
        "observation.gripper": Feature((1,), "bool"),
        "task": Feature((), TEXT),
    },
    action=Feature((2,), "float32"),
    rate_hz=10.0,
    n_obs_steps=1,
    action_horizon=4,
)
"""A feature of every dtype, each of another length in base64: the page tells base64 texts apart by that alone."""
OCTETS = "application/octet-stream"


def arrays(feature: Feature) -> st.SearchStrategy[np.ndarray]:
    """Windows of a feature that a policy takes."""
    dtype = np.dtype(feature.dtype)
    finite = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    return hnp.arrays(dtype, (1, *feature.shape), elements=hnp.from_dtype(dtype, **finite))


NUMBERS = {key: feature for key, feature in CONTRACT.observation.items() if feature.dtype != TEXT}


@schemathesis.serializer("application/msgpack")
def as_msgpack(context: schemathesis.SerializationContext, value: object) -> bytes:
    """The map in msgpack; what has no place there (an integer of 100 digits) as bytes that are no message."""
    try:
        return pack(value)
    except (WireError, ValueError):
        return b"\xc1"


@schemathesis.deserializer("application/msgpack")
def from_msgpack(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> object:
    """An answer in msgpack as the JSON that it would have been."""
    return as_lists(unpack(response.content))


def as_lists(value: object) -> object:
    """The same, with lists in the place of arrays, and base64 in that of bytes."""
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.tolist() if isinstance(value, np.ndarray) else value


schemathesis.openapi.format(
    "byte", st.one_of([arrays(x).map(lambda a: base64.b64encode(a.tobytes()).decode()) for x in NUMBERS.values()])
)


def whole(value: object) -> object:
    """1.0 as 1: an integer to JSON Schema, but what is written as a float is never taken for an image."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def binary_request(arrays: dict[str, np.ndarray], task: str) -> bytes:
    """A request to infer whose tensors are bytes behind the JSON."""
    text = task.encode()
    parts = {key: array.tobytes() for key, array in arrays.items()}
    parts["task"] = len(text).to_bytes(4, "little") + text
    inputs = [
        {
            "name": key,
            "datatype": DATATYPES[feature.dtype],
            "shape": [1, *feature.shape],
            "parameters": {"binary_data_size": len(parts[key])},
        }
        for key, feature in CONTRACT.observation.items()
    ]
    return json.dumps({"inputs": inputs}).encode() + b"".join(parts[key] for key in CONTRACT.observation)


schemathesis.openapi.media_type(
    OCTETS,
    st.builds(
        binary_request,
        st.fixed_dictionaries({key: arrays(feature) for key, feature in NUMBERS.items()}),
        st.text(min_size=1).filter(str.strip).filter(lambda text: text.isprintable()),
    ),
)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict) -> None:
    """Give a request that is meant to be good the length of its JSON, and whole numbers without a fraction."""
    header = next((key for key in case.headers if key.lower() == HEADER_LENGTH), HEADER_LENGTH)
    meta = case.meta
    meant_well = meta is None or meta.generation.mode == GenerationMode.POSITIVE
    if not meant_well:
        return
    case.body = whole(case.body)
    if not case.path.endswith("/infer"):
        return
    case.headers.pop(header, None)
    if case.media_type == OCTETS and isinstance(case.body, bytes):
        end = json.JSONDecoder().raw_decode(case.body.decode("latin-1"))[1]
        case.headers[HEADER_LENGTH] = str(end)
