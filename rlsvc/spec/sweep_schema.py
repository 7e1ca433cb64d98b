"""The JSON schema of a search space, by which editors complete and check it: tune_spaces/schema.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec


def sweep_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a SweepSpec's YAML.

    `space` names the dotted keys of the RunSpec; others, such as those of lists (`phases.0.duration_steps`) and of
    tables with free names, may be written too.
    """
    schema = SweepSpec.model_json_schema()
    space = schema["properties"]["space"]
    distribution = space.pop("additionalProperties")
    schema["$defs"]["Distribution"] = distribution
    reference = {"$ref": "#/$defs/Distribution"}
    space["properties"] = {
        key: {**reference, **({"description": meaning} if meaning else {})} for key, meaning in sorted(_keys(RunSpec))
    }
    space["additionalProperties"] = reference
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _keys(model: type[BaseModel], path: str = "", above: tuple[type[BaseModel], ...] = ()) -> Iterator[tuple[str, str]]:
    """Every dotted key with its meaning; a section that is a choice has the keys of each of its kinds."""
    seen: set[str] = set()
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        yield key, " ".join((field.description or "").split())
        for section in _sections(field.annotation):
            if section in above or section is model:
                continue
            for child, meaning in _keys(section, f"{key}.", (*above, model)):
                if child not in seen:
                    seen.add(child)
                    yield child, meaning


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The classes of a section; those inside of lists and tables have other keys."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if getattr(annotation, "__origin__", None) in (tuple, dict, list):
        return []
    return [section for argument in get_args(annotation) for section in _sections(argument)]
