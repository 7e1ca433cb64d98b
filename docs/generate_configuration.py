"""Writes docs/configuration.md from the specification classes (rlsvc/spec): every key with type, default and meaning.

And tune_spaces/schema.json, by which editors complete search spaces.

python docs/generate_configuration.py
"""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlsvc.spec.compose import CONFIGS, experiments, robots
from rlsvc.spec.run import RunSpec
from rlsvc.spec.serve import ServeConfigSpec
from rlsvc.spec.sweep import SweepSpec
from rlsvc.spec.sweep_schema import sweep_schema

BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
PAGE = Path(__file__).with_name("configuration.md")
SCHEMA = Path(__file__).parent.parent / "tune_spaces" / "schema.json"
INTRODUCTION = """\
# Configuration

Written by `python docs/generate_configuration.py` from the classes in `rlsvc/spec`; do not edit this page.

A run is a `RunSpec`. `rlsvc train` takes an experiment or a YAML file first and then `key=value` overrides in Hydra's
grammar, with the dotted keys of this page; any key may be set, whether or not the experiment names it. An unknown key,
a wrong type or a value out of range ends with the place, what was got and the nearest name. `--cfg` prints the resolved
specification.

- A section is merged key by key. To put another kind in its place, delete it first:
  `'~policy.backbone' 'policy.backbone={name: transformer}'` (a search space replaces a section whole).
- An element of a list is named by its number: `data.datasets.0.path=...`.
- Values may be computed: `${add:1,2}`, `${sub:5,2}`, `${mul:2,3}`, `${div:7,2}`, `${max:1,2}`, `${min:1,2}`,
  `${pow:2,3}`, `${int:2.7}`;
  `${algo.batch_size}` refers to another key.
"""


def render() -> str:
    """The page."""
    files = [(name, (CONFIGS / "experiment" / f"{name}.yaml").read_text()) for name in experiments()]
    rows = [f"| `{name}` | {' '.join(_comment(text))} |" for name, text in files]
    parts = [INTRODUCTION, "## Experiments that ship\n\n| `experiment=` | |\n| --- | --- |", *rows]
    files = [(name, (CONFIGS / "robot" / f"{name}.yaml").read_text()) for name in robots()]
    rows = [f"| `{name}` | {' '.join(_comment(text.split('name:')[0]))} |" for name, text in files]
    parts += ["\n## Robots that ship\n\n| `robot=` | |\n| --- | --- |", *rows, "\n## RunSpec\n"]
    _section(RunSpec, "", parts)
    parts.append("\n## SweepSpec: what `rlsvc sweep` takes\n")
    _section(SweepSpec, "", parts)
    parts.append("\n## ServeConfigSpec: what `rlsvc serve FILE.yaml` and `serve deploy FILE.yaml` take\n")
    _section(ServeConfigSpec, "", parts)
    return "\n".join(parts) + "\n"


def _comment(text: str) -> list[str]:
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return [line for line in lines if not line.startswith("@")]


def _section(model: type[BaseModel], path: str, parts: list[str]) -> None:
    """One table for a class, then one for each class below it."""
    parts.append(" ".join((model.__doc__ or "").split()) + "\n")
    parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
    below = []
    for name, field in model.model_fields.items():
        key = f"{path}{name}"
        models = _models(field.annotation)
        cells = (f"`{key}`", _type(field), _default(field), _meaning(field))
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        index = ".0" if typing.get_origin(field.annotation) is tuple else ".<key>" if _is_map(field.annotation) else ""
        below += [(child, f"{key}{index}", len(models) > 1) for child in models]
    for child, key, is_choice in below:
        tag = child.model_fields.get("name")
        chosen = f", name: {tag.default}" if is_choice and tag else f", {child.__name__}" if is_choice else ""
        parts.append(f"\n### `{key}`{chosen}\n")
        _section(child, f"{key}.", parts)


def _meaning(field: FieldInfo) -> str:
    """Its docstring; a name with one possible value only says which kind of section this is."""
    if field.description is None and len(typing.get_args(field.annotation)) == 1:
        return "Says which one this section is."
    return " ".join((field.description or "").split())


def _is_map(annotation: Any) -> bool:
    return typing.get_origin(annotation) is dict


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(item, name)}" for item in field.metadata for name, sign in BOUNDS if hasattr(item, name)
    ]
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Annotated:
        return _name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_name(argument) for argument in arguments))
    if origin is tuple:
        inner = [_name(argument) for argument in arguments if argument is not ...]
        return f"list of {inner[0]}" if ... in arguments else f"[{', '.join(inner)}]"
    if origin is dict:
        return f"map of {_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        named = getattr(value, "name", None)
        return f"`{named}`, see below" if named else "see below"
    return f"`{json.dumps(value)}`"


def render_schema() -> str:
    """The JSON schema of search spaces."""
    return json.dumps(sweep_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
    SCHEMA.write_text(render_schema())
