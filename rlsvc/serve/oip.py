"""The Open Inference Protocol v2 (KServe's, Triton's) over HTTP, with its binary tensor extension.

A policy is a model. Its inputs are the contract's observations, [T, ...] each; its output is `action`, [H, A]. Seed and
step of a request are its `parameters`. A text is a BYTES tensor.

    https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol

Letters: T observation steps, H actions of a chunk, A action dimensions.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

import rlsvc
from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import nearest, unknown_name
from rlsvc.core.wire import MAX_DIMENSIONS, WireError, array_from_bytes, is_shape
from rlsvc.serve import openapi
from rlsvc.serve.body import read_body
from rlsvc.serve.codec import ActRequest, RequestError, as_integer
from rlsvc.serve.keys import body_limit
from rlsvc.serve.policies import Policies
from rlsvc.serve.service import PolicyService, internal_error, timing
from rlsvc.serve.session import session_key

HEADER_LENGTH = "inference-header-content-length"
ACTION = "action"
MAX_TENSORS = 64
DATATYPES = {
    "float32": "FP32",
    "float64": "FP64",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
    TEXT: "BYTES",
}
"""The protocol's names, by a contract's."""
_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Infer:
    """A request to infer.

    Attributes:
        asked: its observation, seed and step.
        id: to be given back; None when it has none.
        binary: whether actions are to come back as bytes.
    """

    asked: ActRequest
    id: str | None
    binary: bool


def model_metadata(name: str, versions: list[str], contract: Contract) -> dict[str, Any]:
    """What the protocol says of a model."""
    lead = contract.n_obs_steps
    inputs = [_tensor(key, feature, (lead, *feature.shape)) for key, feature in contract.observation.items()]
    output = _tensor(
        ACTION, Feature(contract.action.shape, "float32"), (contract.action_horizon, *contract.action.shape)
    )
    return {"name": name, "versions": versions, "platform": "rlsvc", "inputs": inputs, "outputs": [output]}


def decode_infer(body: bytes, header_length: str | None) -> Infer:
    """The request in a body.

    Args:
        body: JSON, with bytes of tensors after it where `header_length` is given.
        header_length: the header of that name: bytes of the JSON.

    Raises:
        RequestError: 400, it is not one; says what.
    """
    head, rest = _split(body, header_length)
    try:
        message = orjson.loads(head)
    except orjson.JSONDecodeError as error:
        raise _malformed(f"the request is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise _malformed(f"the request is a {type(message).__name__}, expected a map with 'inputs'")
    inputs = message.get("inputs")
    if not isinstance(inputs, list) or not inputs or len(inputs) > MAX_TENSORS:
        raise _malformed(f"'inputs': expected a list of 1 to {MAX_TENSORS} tensors")
    observation: dict[str, Any] = {}
    for tensor in inputs:
        name, array, rest = _input(tensor, rest)
        if name in observation:
            raise _malformed(f"input '{name[:60]}' comes twice")
        observation[name] = array
    if rest:
        raise _malformed(f"{len(rest)} bytes follow the last tensor")
    parameters = _map("parameters", message.get("parameters"))
    asked = ActRequest(
        observation,
        seed=as_integer("parameters.seed", parameters.get("seed", 0)),
        step=as_integer("parameters.step", parameters.get("step", 0)),
    )
    identity = message.get("id")
    if identity is not None and (not isinstance(identity, str) or len(identity) > 256):
        raise _malformed("'id': expected a text of at most 256 letters")
    return Infer(asked, identity, _binary_output(message.get("outputs"), parameters))


def encode_infer(infer: Infer, name: str, version: str, action: np.ndarray, spent: dict[str, float]) -> Response:
    """The answer."""
    action = np.ascontiguousarray(action, "<f4")
    output: dict[str, Any] = {"name": ACTION, "datatype": "FP32", "shape": list(action.shape)}
    body: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": [output], "parameters": spent}
    if infer.id is not None:
        body["id"] = infer.id
    if not infer.binary:
        output["data"] = action.ravel().tolist()
        return JSONResponse(body)
    output["parameters"] = {"binary_data_size": action.nbytes}
    head = orjson.dumps(body)
    headers = {HEADER_LENGTH: str(len(head))}
    return Response(head + action.tobytes(), media_type="application/octet-stream", headers=headers)


def add_oip_routes(app: FastAPI, policies: Policies) -> None:
    """Let an application speak the protocol."""
    first = policies.first

    def check(model: str, version: str | None) -> Contract:
        """The contract of a model that there is, in this version."""
        if model not in policies.names:
            raise RequestError(404, "unknown_policy", str(unknown_name("model", model[:80], policies.names)))
        versions, contract = policies.model(model)
        if version not in (None, *versions):
            served = ", ".join(one[:12] for one in versions)
            raise RequestError(404, "unknown_policy", f"model '{model}' is served in version {served} alone")
        return contract

    @app.get("/v2", responses=openapi.SERVER_RESPONSES)
    async def server() -> dict[str, Any]:
        """The server's name and what it speaks of the protocol."""
        return {"name": "rlsvc", "version": rlsvc.__version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether this server answers at all."""
        return {"live": True}

    @app.get("/v2/health/ready", responses=openapi.READY_RESPONSES)
    async def ready() -> Response:
        """Whether the policy would act now."""
        return JSONResponse({"ready": first.ready}, 200 if first.ready else 503)

    @app.get("/v2/models/{model}", responses=openapi.MODEL_RESPONSES)
    @app.get(
        "/v2/models/{model}/versions/{version}",
        responses=openapi.MODEL_RESPONSES,
        operation_id="metadata_of_version",
    )
    async def metadata(model: str, version: str | None = None) -> Response:
        """A model's inputs and outputs."""
        try:
            contract = check(model, version)
        except RequestError as refusal:
            return _refused(first, refusal)
        return JSONResponse(model_metadata(model, policies.model(model)[0], contract))

    @app.get("/v2/models/{model}/ready", responses=openapi.MODEL_READY_RESPONSES)
    @app.get(
        "/v2/models/{model}/versions/{version}/ready",
        responses=openapi.MODEL_READY_RESPONSES,
        operation_id="model_ready_of_version",
    )
    async def model_ready(model: str, version: str | None = None) -> Response:
        """Whether a model would act now."""
        try:
            check(model, version)
        except RequestError as refusal:
            return _refused(first, refusal)
        ready = policies.ready(model)
        return JSONResponse({"name": model, "ready": ready}, 200 if ready else 503)

    request_body = openapi.infer_request(first.contract, DATATYPES, of_one=len(policies.names) == 1)

    @app.post("/v2/models/{model}/infer", responses=openapi.INFER_RESPONSES, openapi_extra=request_body)
    @app.post(
        "/v2/models/{model}/versions/{version}/infer",
        responses=openapi.INFER_RESPONSES,
        openapi_extra=request_body,
        operation_id="infer_of_version",
    )
    async def infer(request: Request, model: str, version: str | None = None) -> Response:
        """A chunk of actions for an observation."""
        received = perf_counter()
        service = first
        try:
            check(model, version)
            service = await policies.get(model)
            check(model, version)  # once more: an alias may mean another version by now
            named = None if version is None else service.loaded(version)
            if encoding := request.headers.get("content-encoding"):
                raise RequestError(415, "media_type", f"content encoding '{encoding[:40]}' is not spoken here")
            body = await read_body(request, body_limit(request.scope, service.settings.max_body_bytes))
            read = perf_counter()
            asked = decode_infer(body, request.headers.get(HEADER_LENGTH))
            answer = await service.act(asked.asked, read=read, key=session_key(request), version=named)
        except RequestError as refusal:
            return _refused(service, refusal)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return _refused(service, internal_error(error))
        spent = {**timing(answer, received), "expires_in_ms": service.expires_in_ms}
        response = encode_infer(asked, service.name, answer.version, answer.action, spent)
        service.answered(answer, "oip", received)
        return response


def _refused(service: PolicyService, refusal: RequestError) -> Response:
    service.refused(refusal.reason, refusal.status)
    return JSONResponse({"error": str(refusal)}, status_code=refusal.status, headers=refusal.headers)


def _tensor(name: str, feature: Feature, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": DATATYPES[feature.dtype], "shape": list(shape)}


def _malformed(message: str) -> RequestError:
    return RequestError(400, "malformed", message)


def _map(what: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _malformed(f"'{what}': got a {type(value).__name__}, expected a map")
    return value


def _split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON, and the bytes after it."""
    if header_length is None:
        return body, b""
    if not header_length.isascii() or not header_length.isdigit() or int(header_length) > len(body):
        raise _malformed(f"{HEADER_LENGTH}: got '{header_length[:40]}', expected at most the body's {len(body)} bytes")
    return body[: int(header_length)], body[int(header_length) :]


def _input(tensor: Any, rest: bytes) -> tuple[str, Any, bytes]:
    """A tensor's name and array, and the bytes that are left after it."""
    if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
        raise _malformed("'inputs': expected maps with a name")
    name = tensor["name"]
    where = f"input '{name[:60]}'"
    dtype = _DTYPES.get(tensor["datatype"]) if isinstance(tensor.get("datatype"), str) else None
    if dtype is None:
        raise _malformed(f"{where}: datatype {str(tensor.get('datatype'))[:40]}, expected {', '.join(_DTYPES)}")
    shape = tensor.get("shape")
    if not is_shape(shape):
        raise _malformed(f"{where}: shape {str(shape)[:60]} is not a list of at most {MAX_DIMENSIONS} sizes")
    size = _map(f"{where}: parameters", tensor.get("parameters")).get("binary_data_size")
    if size is None:
        return name, _from_json(where, tensor.get("data"), dtype, shape), rest
    if type(size) is not int or not 0 <= size <= len(rest):
        raise _malformed(f"{where}: binary_data_size {str(size)[:40]}, but {len(rest)} bytes are left")
    data, rest = rest[:size], rest[size:]
    if dtype == TEXT:
        return name, _texts(where, data, shape), rest
    try:
        return name, array_from_bytes(data, np.dtype(dtype).newbyteorder("<").str, shape), rest
    except WireError as error:
        raise _malformed(f"{where}: {error}") from error


def _from_json(where: str, data: Any, dtype: str, shape: list[int]) -> np.ndarray:
    """A tensor out of lists, flat or nested, in row-major order."""
    if not isinstance(data, list):
        raise _malformed(f"{where}: 'data': expected a list of numbers or texts")
    flat = _flatten(data, shape) if any(isinstance(value, list) for value in data) else data
    if flat is None:
        raise _malformed(f"{where}: 'data': nested lists that have not the shape {shape}; a flat list is taken too")
    if len(flat) != math.prod(shape):
        raise _malformed(f"{where}: {len(flat)} elements, shape {shape} needs {math.prod(shape)}")
    kinds = {TEXT: (str,), "bool": (bool,)}.get(dtype, (int, float) if dtype.startswith("float") else (int,))
    if any(not isinstance(value, kinds) or (isinstance(value, bool) and dtype != "bool") for value in flat):
        raise _malformed(f"{where}: an element is no {DATATYPES[dtype]}")
    try:
        with np.errstate(over="ignore"):
            return np.array(flat, object if dtype == TEXT else dtype).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise _malformed(f"{where}: an element does not fit {DATATYPES[dtype]}") from error


def _flatten(nested: list[Any], shape: list[int]) -> list[Any] | None:
    """Elements of nested lists in row-major order; None where those have another shape."""
    if len(nested) != next(iter(shape), None):
        return None
    for size in shape[1:]:
        if not all(isinstance(row, list) and len(row) == size for row in nested):
            return None
        nested = list(chain.from_iterable(nested))
    return nested


def _texts(where: str, data: bytes, shape: list[int]) -> np.ndarray:
    """BYTES elements: each its length, four bytes little-endian, and its UTF-8."""
    texts: list[str] = []
    at, count = 0, math.prod(shape)
    while at < len(data):
        if at + _LENGTH.size > len(data) or len(texts) >= count:
            raise _malformed(f"{where}: {len(data)} bytes are not {count} texts with their lengths")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if length > len(data) - at:
            raise _malformed(f"{where}: a text of {length} bytes, of which {len(data) - at} are there")
        try:
            texts.append(data[at : at + length].decode())
        except UnicodeDecodeError as error:
            raise _malformed(f"{where}: a text is not UTF-8") from error
        at += length
    if len(texts) != count:
        raise _malformed(f"{where}: {len(texts)} texts, shape {shape} needs {count}")
    return np.array(texts, object).reshape(shape)


def _binary_output(outputs: Any, parameters: dict[str, Any]) -> bool:
    binary = _flag("binary_data_output", parameters, False)
    if outputs is None:
        return binary
    if not isinstance(outputs, list) or len(outputs) > MAX_TENSORS:
        raise _malformed("'outputs': expected a list")
    for output in outputs:
        name = output.get("name") if isinstance(output, dict) else None
        if name != ACTION:
            guess = nearest(str(name), [ACTION])
            raise _malformed(
                f"output '{str(name)[:60]}'{f' (did you mean {guess!r}?)' if guess else ''}: there is '{ACTION}' alone"
            )
        binary = _flag("binary_data", _map("outputs: parameters", output.get("parameters")), binary)
    return binary


def _flag(name: str, parameters: dict[str, Any], default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise _malformed(f"'{name}': got {str(value)[:40]}, expected true or false")
    return value
