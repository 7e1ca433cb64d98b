"""What the OpenAPI page says beyond the routes: bodies, examples out of the contract, answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Contract

# An example array with more elements than this is shown as base64 text cut short: the page stays readable.
MAX_EXAMPLE_ELEMENTS = 256

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error", "reason"],
    "properties": {
        "error": {"type": "string", "description": "What was got, what was expected."},
        "reason": {"type": "string", "description": "One word, as in /metrics."},
        "status": {"type": "integer"},
    },
}
_POLICY_SCHEMA = {
    "type": "object",
    "required": ["name", "version", "contract"],
    "properties": {"name": {"type": "string"}, "version": {"type": "string"}, "contract": {"type": "object"}},
}
_ACTION_SCHEMA = {
    "type": "object",
    "required": ["action", "version", "timing"],
    "properties": {
        "action": {
            "type": "array",
            "description": "[H, A], H actions at the contract's rate.",
            "items": {"type": "array", "items": {"type": "number"}},
        },
        "version": {"type": "string"},
        "timing": {
            "type": "object",
            "description": "Milliseconds: total, queue, model, wire; and the batch's size.",
            "additionalProperties": {"type": "number"},
        },
    },
}
_ARRAY_SCHEMA = {
    "oneOf": [
        {"type": ["array", "number", "string", "boolean"], "description": "Nested lists, a number or a text."},
        {
            "type": "object",
            "required": ["b64", "dtype", "shape"],
            "properties": {
                "b64": {"type": "string"},
                "dtype": {"type": "string"},
                "shape": {"type": "array", "items": {"type": "integer"}},
            },
            "additionalProperties": False,
        },
    ]
}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ACT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _answer("The actions.", _ACTION_SCHEMA),
    400: _answer("Not JSON, not msgpack, or not a request.", _ERROR_SCHEMA),
    404: _answer("No such policy; the message lists those served.", _ERROR_SCHEMA),
    413: _answer("The body is over the limit.", _ERROR_SCHEMA),
    415: _answer("Neither JSON nor msgpack.", _ERROR_SCHEMA),
    422: _answer("The observation does not fit the contract.", _ERROR_SCHEMA),
    500: _answer("What the policy said is no action, or a bug here, whose id is in the log.", _ERROR_SCHEMA),
    503: _answer("Too many requests wait; see Retry-After.", _ERROR_SCHEMA),
    504: _answer("The policy did not answer in time.", _ERROR_SCHEMA),
}
LIST_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _answer(
        "The policies.", {"type": "object", "properties": {"policies": {"type": "array", "items": _POLICY_SCHEMA}}}
    ),
}
DESCRIBE_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _answer("The policy.", _POLICY_SCHEMA),
    404: _answer("No such policy.", _ERROR_SCHEMA),
}
READY_RESPONSES: dict[int | str, dict[str, Any]] = {
    503: _answer("Not ready.", {"type": "object", "properties": {"ready": {"type": "boolean"}}}),
}
METRICS_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}},
}


def act_request(contract: Contract) -> dict[str, Any]:
    """The request body of `act`, with an example that fits the contract (large arrays are cut short in it)."""
    schema = {
        "type": "object",
        "required": ["observation"],
        "properties": {
            "observation": {
                "type": "object",
                "required": list(contract.observation),
                "properties": dict.fromkeys(contract.observation, _ARRAY_SCHEMA),
                "additionalProperties": False,
            },
            "seed": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "default": 0},
            "step": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1, "default": 0},
        },
        "additionalProperties": False,
    }
    example = {"observation": example_observation(contract), "seed": 0, "step": 0}
    content = {
        "application/json": {
            "schema": schema,
            "examples": {"zeros": {"summary": "An observation of zeros", "value": example}},
        },
        "application/msgpack": {
            "schema": {"type": "string", "format": "binary", "description": "The same map; arrays as openpi's msgpack."}
        },
    }
    return {"requestBody": {"required": True, "content": content}}


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
