"""What the OpenAPI page says beyond the routes: bodies and paths out of the contract, every answer, keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.serve.keys import ROLES, role_of
from rlsvc.serve.version import ROLES as VERSION_ROLES

# An example array with more elements than this is shown as base64 text cut short: the page stays readable.
MAX_EXAMPLE_ELEMENTS = 256

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_INTEGER = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "default": 0}
_BEARER = "key"


def _map(required: Sequence[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT: Schema = {"type": "string"}
_ERROR = _map(
    ("error", "reason"),
    error={"type": "string", "description": "What was got, what was expected."},
    reason={"type": "string", "description": "One word, as in /metrics."},
    status={"type": "integer"},
    request_id={"type": "string", "description": "As X-Request-Id, which is taken from the request where it has one."},
)
_OIP_ERROR = _map(("error",), error={"type": "string", "description": "What was got, what was expected."})
_POLICY = _map(
    ("name", "version", "contract", "versions"),
    name=_TEXT,
    version=_TEXT,
    contract=_map(("observation", "action", "rate_hz", "n_obs_steps", "action_horizon")),
    robot={"type": ["object", "null"]},
    distribution={
        "type": ["object", "null"],
        "description": "How what the replica was asked compares with the training data; null where that is not known.",
        "required": ["alarm", "features", "left_out"],
        "properties": {
            "alarm": {"type": "boolean", "description": "Whether that of any feature is on."},
            "features": {
                "type": "object",
                "additionalProperties": _map(
                    ("outside_share", "dimension", "alarm"),
                    outside_share={"type": "number", "description": "Of the worst dimension, in recent requests."},
                    dimension={"type": ["string", "null"], "description": "The worst one."},
                    alarm={"type": "boolean"},
                ),
            },
            "left_out": {"type": "array", "items": _TEXT, "description": "Features without statistics, images."},
        },
    },
    versions={
        "type": "array",
        "description": "Of the replica that answers.",
        "items": _map(
            ("version", "role", "sessions", "answered"),
            version=_TEXT,
            role={"enum": list(VERSION_ROLES), "description": "Takes sessions, a share, none but is compared, ends."},
            sessions={"type": "integer", "minimum": 0},
            answered={"type": "integer", "minimum": 0},
        ),
    },
    shadow={
        "type": ["object", "null"],
        "description": "How a candidate's actions compare with the answers; null where there is none.",
        "required": ["version", "compared", "skipped", "failed", "action"],
        "properties": {
            "version": _TEXT,
            **{name: {"type": "integer", "minimum": 0} for name in ("compared", "skipped", "failed")},
            "action": {
                "type": "object",
                "additionalProperties": _map(
                    ("rms_difference", "std"), rms_difference={"type": "number"}, std={"type": "number"}
                ),
            },
        },
    },
)
_TIMING: Schema = {
    "type": "object",
    "description": "Milliseconds: total, and of that preprocess, queue, model and wire; and the batch's size.",
    "additionalProperties": {"type": "number"},
}
_ACTION = _map(
    ("action", "version", "expires_in_ms", "timing"),
    action={
        "type": "array",
        "description": "[H, A], H actions at the contract's rate.",
        "items": {"type": "array", "items": {"type": "number"}},
    },
    version=_TEXT,
    expires_in_ms={
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Milliseconds from this answer on in which its actions may be executed.",
    },
    timing=_TIMING,
    carry={
        "type": "string",
        "contentEncoding": "base64",
        "description": "For the next request, where this one had one.",
    },
)
_READY = _map(("ready",), ready={"type": "boolean"})
_TENSOR = _map(
    ("name", "datatype", "shape"), name=_TEXT, datatype=_TEXT, shape={"type": "array", "items": {"type": "integer"}}
)
_MODEL = _map(
    ("name", "versions", "platform", "inputs", "outputs"),
    name=_TEXT,
    versions={"type": "array", "items": _TEXT},
    platform=_TEXT,
    inputs={"type": "array", "items": _TENSOR},
    outputs={"type": "array", "items": _TENSOR},
)
_OUTPUTS = _map(
    ("model_name", "model_version", "outputs"),
    model_name=_TEXT,
    model_version=_TEXT,
    id=_TEXT,
    outputs={"type": "array", "minItems": 1, "maxItems": 1, "items": _TENSOR},
    parameters=_TIMING,
)
_REFUSALS = {
    400: "No request; says what was got and what was expected.",
    404: "No such policy; the message lists those served.",
    413: "The body is over the limit.",
    415: "An encoding that is not spoken here.",
    422: "The observation does not fit the contract.",
    500: "What the policy said is no action, or a bug here, whose id is in the log.",
    503: "Too many requests wait.",
    504: "The policy did not answer in time.",
}
_RETRY_AFTER = {"Retry-After": {"required": True, "schema": _TEXT, "description": "Seconds."}}
_BYTES: Schema = {"type": "string", "format": "binary"}


def _answer(description: str, schema: Schema, *also: str, **more: Any) -> dict[str, Any]:
    """An answer in JSON, and in other media types."""
    return {
        "description": description,
        "content": {kind: {"schema": schema} for kind in ("application/json", *also)},
    } | more


def _refusals(schema: Schema, *also: str) -> Responses:
    """Of a route that acts."""
    answers: Responses = {status: _answer(text, schema, *also) for status, text in _REFUSALS.items()}
    answers[503]["headers"] = _RETRY_AFTER
    return answers


def _link(operation: str, **parameters: str) -> dict[str, Any]:
    return {operation: {"operationId": operation, "parameters": parameters}}


ACT_RESPONSES: Responses = {
    200: _answer("The actions.", _ACTION, "application/msgpack"),
    409: _answer("The carry is none of this version's; begin anew.", _ERROR, "application/msgpack"),
    **_refusals(_ERROR, "application/msgpack"),
}
_OF_POLICY = {"name": "$response.body#/name"}
LIST_RESPONSES: Responses = {
    200: _answer(
        "The policies.",
        _map(("policies",), policies={"type": "array", "items": _POLICY}),
        links=_link("policy", name="$response.body#/policies/0/name")
        | _link("act", name="$response.body#/policies/0/name"),
    ),
}
DESCRIBE_RESPONSES: Responses = {
    200: _answer(
        "The policy.", _POLICY, links=_link("act", **_OF_POLICY) | _link("metadata", model=_OF_POLICY["name"])
    ),
    404: _answer(_REFUSALS[404], _ERROR),
}
READY_RESPONSES: Responses = {200: _answer("Ready.", _READY), 503: _answer("Not ready.", _READY)}
METRICS_RESPONSES: Responses = {
    200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": _TEXT}}},
}
_OF_MODEL = {"model": "$response.body#/name", "version": "$response.body#/versions/0"}
SERVER_RESPONSES: Responses = {
    200: _answer(
        "The server.",
        _map(
            ("name", "version", "extensions"),
            name=_TEXT,
            version=_TEXT,
            extensions={"type": "array", "items": _TEXT},
        ),
    ),
}
MODEL_RESPONSES: Responses = {
    200: _answer(
        "The model.",
        _MODEL,
        links=_link("infer", model=_OF_MODEL["model"])
        | _link("model_ready", model=_OF_MODEL["model"])
        | _link("metadata_of_version", **_OF_MODEL)
        | _link("model_ready_of_version", **_OF_MODEL)
        | _link("infer_of_version", **_OF_MODEL),
    ),
    404: _answer(_REFUSALS[404], _OIP_ERROR),
}
_MODEL_READY = _map(("name", "ready"), name=_TEXT, ready={"type": "boolean"})
MODEL_READY_RESPONSES: Responses = {
    200: _answer("Ready.", _MODEL_READY),
    404: _answer(_REFUSALS[404], _OIP_ERROR),
    503: _answer("Not ready.", _MODEL_READY),
}
INFER_RESPONSES: Responses = {
    200: {
        "description": "The actions; as bytes behind the JSON where the request asked for that.",
        "content": {"application/json": {"schema": _OUTPUTS}, "application/octet-stream": {"schema": _BYTES}},
    },
    **_refusals(_OIP_ERROR),
}
HELD_RESPONSES: Responses = {
    200: _answer("Numbers of the episodes.", _map(("held",), held={"type": "array", "items": {"type": "integer"}})),
    404: _answer("No id of a dataset.", _ERROR),
}
SEND_RESPONSES: Responses = {
    200: _answer("It is held.", _map(("held",), held={"type": "integer"})),
    404: _answer("No id of a dataset, or no number of an episode.", _ERROR),
    413: _answer(_REFUSALS[413], _ERROR),
    422: _answer("No episode, or one that is of no use to this learner.", _ERROR),
    500: _answer("A bug here, whose id is in the log.", _ERROR),
    503: _answer("The disk is full.", _ERROR),
}
SEND_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/x-tar": {"schema": _BYTES | {"description": "As rlsvc collect packs it."}}},
    },
}


def page(app: FastAPI, names: Sequence[str], version: str, *, keys: bool) -> dict[str, Any]:
    """The OpenAPI page of an application.

    Args:
        app: whose routes say their answers.
        names: of the policies served.
        version: served now, as an example.
        keys: whether callers are asked for one.
    """
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _finish(operation, names, version)
            role = role_of(method.upper(), path)
            if keys and role is not None:
                operation["security"] = [{_BEARER: []}]
                operation["responses"] |= {
                    "401": _answer("No key, or one that does not hold.", _ERROR),
                    "403": _answer(f"The key has not the role '{role}': it {ROLES[role]}.", _ERROR),
                    "429": _answer("The key has asked too often.", _ERROR, headers=_RETRY_AFTER),
                }
    document["components"] = {}
    if keys:
        bearer = {"type": "http", "scheme": "bearer", "description": "A key made by rlsvc keys add."}
        document["components"] = {"securitySchemes": {_BEARER: bearer}}
    return document


def _finish(operation: dict[str, Any], names: Sequence[str], version: str) -> None:
    schemas = {
        "name": {"type": "string", "enum": list(names)},
        "model": {"type": "string", "enum": list(names)},
        "version": {"type": "string", "examples": [version]},
        "dataset": {"type": "string", "pattern": "^[0-9a-f]{32}$", "description": "Its id."},
        "number": {"type": "integer", "minimum": 0, "maximum": 999_999, "description": "Of the episode."},
    }
    # FastAPI adds an answer of its own to every route with a parameter; ours are texts, which it never refuses.
    if "HTTPValidationError" in str(operation["responses"].get("422")):
        del operation["responses"]["422"]
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["schema"] = schemas[parameter["name"]]


def act_request(contract: Contract, *, of_one: bool = True) -> dict[str, Any]:
    """The request body of `act`, with an example that fits the contract (large arrays are cut short in it).

    Args:
        contract: of the policy, or of the first of several.
        of_one: whether there is one policy; the observations of several differ.
    """
    observation: Schema = {"type": "object", "description": "By the names of the policy's contract."}
    if of_one:
        observation = {
            "type": "object",
            "required": list(contract.observation),
            "properties": {key: _array(feature, contract.n_obs_steps) for key, feature in contract.observation.items()},
            "additionalProperties": False,
        }
    schema = {
        "type": "object",
        "required": ["observation"],
        "properties": {
            "observation": observation,
            "seed": _INTEGER,
            "step": {"anyOf": [_INTEGER, {"type": "null"}]},
            "session": {"const": False, "description": "True on the WebSocket alone: the server keeps the episode."},
            "carry": {
                "anyOf": [{"type": "string", "contentEncoding": "base64"}, {"type": "null"}],
                "description": "That of the answer before, empty for the first; then the answer has the next one.",
            },
        },
        "additionalProperties": False,
    }
    example = {"observation": example_observation(contract), "seed": 0, "step": 0}
    msgpack = {"description": "The same map; arrays also as openpi's msgpack has them."}
    content = {
        "application/json": {
            "schema": schema,
            "examples": {"zeros": {"summary": "An observation of zeros", "value": example}},
        },
        "application/msgpack": {"schema": deepcopy(schema) | msgpack},
    }
    return {"requestBody": {"required": True, "content": content}}


def infer_request(contract: Contract, datatypes: Mapping[str, str], *, of_one: bool = True) -> dict[str, Any]:
    """The request body of `infer`.

    Args:
        contract: of the policy, or of the first of several.
        datatypes: the protocol's names, by a contract's.
        of_one: whether there is one policy; the tensors of several differ.
    """
    lead = contract.n_obs_steps
    tensors = [
        _tensor(key, datatypes[feature.dtype], _element(feature.dtype), (lead, *feature.shape))
        for key, feature in contract.observation.items()
    ]
    binary = {"type": "boolean", "description": "Whether actions come back as bytes."}
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"anyOf": [{"type": "string", "maxLength": 256}, {"type": "null"}]},
            "inputs": {
                "type": "array",
                "description": "In any order.",
                "prefixItems": tensors,
                "minItems": len(tensors),
                "maxItems": len(tensors),
            }
            if of_one
            else {"type": "array", "items": {"type": "object"}},
            "parameters": {
                "type": ["object", "null"],
                "properties": {"seed": _INTEGER, "step": _INTEGER, "binary_data_output": binary},
            },
            "outputs": {
                "type": ["array", "null"],
                "maxItems": 64,
                "items": _map(
                    ("name",),
                    name={"const": "action"},
                    parameters={"type": ["object", "null"], "properties": {"binary_data": binary}},
                ),
            },
        },
    }
    length = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 0},
        "description": "Bytes of the JSON, where bytes of tensors follow it (the binary tensor extension).",
    }
    with_bytes = _BYTES | {"description": "The JSON, then the bytes of each tensor that has a binary_data_size."}
    content = {"application/json": {"schema": schema}, "application/octet-stream": {"schema": with_bytes}}
    return {"parameters": [length], "requestBody": {"required": True, "content": content}}


def example_observation(contract: Contract) -> dict[str, Any]:
    """The contract's example observation in JSON types."""
    example: dict[str, Any] = {}
    for key, array in contract.example_observation().items():
        if contract.observation[key].dtype == TEXT:
            example[key] = "a task"
        elif array.size <= MAX_EXAMPLE_ELEMENTS:
            example[key] = np.asarray(array).tolist()
        else:
            example[key] = {
                "b64": f"(base64 of {array.nbytes} bytes)",
                "dtype": str(array.dtype),
                "shape": list(array.shape),
            }
    return example


def _array(feature: Feature, steps: int) -> Schema:
    """A feature's window in JSON: nested lists or base64, without the steps' axis where there is one step."""
    shapes = [(steps, *feature.shape)] + ([feature.shape] if steps == 1 else [])
    choices = [_lists(_element(feature.dtype), shape) for shape in shapes]
    if feature.dtype == TEXT:
        return {"anyOf": [_element(TEXT), _lists(_element(TEXT), (steps,))]}
    return {"anyOf": choices + [_base64(feature.dtype, shape) for shape in shapes]}


def _lists(element: Schema, shape: Sequence[int]) -> Schema:
    for size in reversed(shape):
        element = {"type": "array", "items": element, "minItems": size, "maxItems": size}
    return element


def _element(dtype: str) -> Schema:
    if dtype == TEXT:
        return {"type": "string", "pattern": r"\S"}
    if dtype == "bool":
        return {"type": "boolean"}
    kind = np.dtype(dtype)
    if dtype == "float32":
        # A number half a step beyond the largest float32 is rounded to it.
        limit = float(np.finfo(kind).max) + 2.0**103
        return {"type": "number", "exclusiveMinimum": -limit, "exclusiveMaximum": limit}
    if kind.kind == "f":
        return {"type": "number", "minimum": float(np.finfo(kind).min), "maximum": float(np.finfo(kind).max)}
    return {"type": "integer", "minimum": int(np.iinfo(kind).min), "maximum": int(np.iinfo(kind).max)}


def _base64(dtype: str, shape: Sequence[int]) -> Schema:
    length = 4 * math.ceil(math.prod(shape) * np.dtype(dtype).itemsize / 3)
    return {
        "type": "object",
        "required": ["b64", "dtype", "shape"],
        "properties": {
            "b64": {
                "type": "string",
                "format": "byte",
                "minLength": length,
                "maxLength": length,
                "description": "Base64 of the elements, little-endian, in C order.",
            },
            "dtype": {"type": "string", "const": dtype},
            "shape": {"type": "array", "const": list(shape)},
        },
        "additionalProperties": False,
    }


def _tensor(name: str, datatype: str, element: Schema, shape: Sequence[int]) -> Schema:
    count = math.prod(shape)
    flat = {"type": "array", "items": element, "minItems": count, "maxItems": count}
    data = flat if len(shape) == 1 else {"anyOf": [flat, _lists(element, shape)]}
    return {
        "type": "object",
        "required": ["name", "datatype", "shape", "data"],
        "properties": {
            "name": {"const": name},
            "datatype": {"const": datatype},
            "shape": {"const": list(shape)},
            "data": data,
            "parameters": {
                "type": ["object", "null"],
                "description": "A tensor whose bytes follow the JSON has a binary_data_size here, and no data.",
            },
        },
    }
