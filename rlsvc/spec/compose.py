"""From words on a command line or a YAML file to a validated RunSpec.

    rlsvc train experiment=pusht_diffusion algo.learning_rate=3e-4      an experiment that ships, with changes
    rlsvc train my_run.yaml seed=3                                      a file of one's own, or a run's spec.yaml

A file may begin with `defaults: [/experiment: pusht_diffusion]` like the files in rlsvc/configs/experiment. Arithmetic
is written `${add:1,2}`, `${mul:...}`, `${sub:...}`, `${div:...}`, `${max:...}`, `${min:...}`,
`${pow:...}`, `${int:...}`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from rlsvc.core.errors import SpecError, nearest, unknown_name
from rlsvc.spec.run import RunSpec

CONFIGS = Path(__file__).parent.parent / "configs"

_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda *x: sum(x),
    "sub": lambda a, b: a - b,
    "mul": lambda *x: math.prod(x),
    "div": lambda a, b: a / b if a % b else a // b,
    "max": max,
    "min": min,
    "pow": lambda a, b: a**b,
    "int": int,
}


def register_arithmetic() -> None:
    """Makes `${add:1,2}` and the others known to OmegaConf."""
    for name, function in _ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def experiments() -> list[str]:
    """Names of the experiments that ship."""
    return sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))


def robots() -> list[str]:
    """Names of the robots that ship."""
    return sorted(file.stem for file in (CONFIGS / "robot").glob("*.yaml"))


def compose(words: Sequence[str]) -> RunSpec:
    """The RunSpec that these words describe.

    Args:
        words: an optional YAML file first, then `key=value` overrides (Hydra's grammar). Any key of RunSpec may be set,
            whether or not the experiment names it.

    Raises:
        SpecError: names the key or value, where it stands, what was expected, and the nearest name.
    """
    return validate(RunSpec, compose_dict(words), _places(words))


def compose_file[S: BaseModel](model: type[S], file: Path, overrides: Sequence[str] = ()) -> S:
    """The specification that one YAML file describes, with changes.

    Args:
        model: its class.
        file: the file; it may hold interpolations, and needs no Hydra.
        overrides: `key=value`, dotted keys.

    Raises:
        SpecError: as `compose`.
    """
    if bad := next((word for word in overrides if "=" not in word), None):
        raise SpecError(f"command line: got '{bad}', expected key=value")
    try:
        node = OmegaConf.load(file)
        if not isinstance(node, DictConfig):
            raise SpecError(f"{file}: expected a mapping of keys to values")
        value = OmegaConf.to_container(OmegaConf.merge(node, OmegaConf.from_dotlist(list(overrides))), resolve=True)
    except FileNotFoundError as error:
        raise SpecError(f"{file}: no such file") from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: not a YAML file ({' '.join(str(error).split())})") from error
    assert isinstance(value, dict)
    places = yaml_places(file) | {tuple(word.split("=", 1)[0].split(".")): "command line" for word in overrides}
    return validate(model, {str(key): item for key, item in value.items()}, places)


def compose_dict(words: Sequence[str]) -> dict[str, Any]:
    """The resolved values of `compose`, not validated."""
    register_arithmetic()
    words = list(words)
    file = Path(words.pop(0)) if words and _is_file_word(words[0]) else None
    overrides = [_override(word) for word in words]
    named = [word.split("=", 1)[1] for word in words if word.startswith("experiment=")]
    if file is not None:
        if named:
            raise SpecError(
                f"got both the file {file} and experiment={named[0]}; write the experiment into the file's defaults"
            )
        overrides.insert(0, f"+experiment={_store(file)}")
    elif not named:
        raise SpecError(
            f"no experiment: name one with experiment=NAME or give a YAML file. There are: {', '.join(experiments())}."
        )
    elif named[0] not in experiments():
        raise unknown_name("experiment", named[0], experiments())
    for robot in [word.split("=", 1)[1] for word in words if word.startswith("robot=")]:
        if robot not in (*robots(), "null"):
            raise unknown_name("robot", robot, robots())
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = hydra_compose("config", overrides=overrides)
        value = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise SpecError(f"{file or 'command line'}: {_reason(error)}") from error
    assert isinstance(value, dict)
    return {str(key): item for key, item in value.items()}


def _reason(error: Exception) -> str:
    """Hydra's message on one line, without its list of search paths and links."""
    lines = [line.strip() for line in str(error).split("\nSee ")[0].strip().splitlines()[:2]]
    return " ".join(line for line in lines if line).replace("'++", "'")


def _is_file_word(word: str) -> bool:
    return "=" not in word


def _override(word: str) -> str:
    """Group choices and deletions (`~key`) as they are; any other key may be added, since RunSpec knows which exist."""
    key, separator, _ = word.partition("=")
    if key.startswith("~"):
        return word
    if not separator:
        raise SpecError(f"command line: got '{word}', expected key=value")
    if key.startswith("+") or (CONFIGS / key.split("@")[0]).is_dir():
        return f"+{word}" if key == "experiment" else word
    return f"++{word}"


def _store(file: Path) -> str:
    """Make a person's file an experiment of this process."""
    try:
        node = OmegaConf.load(file)
    except FileNotFoundError as error:
        raise SpecError(
            f"{file}: no such file. Give a YAML file, or experiment=NAME with one of: {', '.join(experiments())}."
        ) from error
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: not a YAML file ({' '.join(str(error).split())})") from error
    if not isinstance(node, DictConfig):
        raise SpecError(f"{file}: expected a mapping of keys to values")
    if OmegaConf.is_list(node.get("defaults")):
        node["defaults"] = [_by_name(entry) for entry in node["defaults"]]
    name = f"file_{file.stem}"
    ConfigStore.instance().store(name=name, group="experiment", package="_global_", node=node)
    return name


def _by_name(entry: Any) -> Any:
    """`/experiment: NAME` in a defaults list as NAME: the file joins that group, whose members go by name alone."""
    if OmegaConf.is_dict(entry) and list(entry) in (["/experiment"], ["experiment"]):
        entry = next(iter(entry.values()))
    if isinstance(entry, str) and entry not in ("_self_", *experiments()):
        raise unknown_name("experiment", entry, experiments())
    return entry


def _places(words: Sequence[str]) -> dict[tuple[str, ...], str]:
    """Where a key was written: a line of the file, or the command line."""
    places: dict[tuple[str, ...], str] = {}
    file = None
    if words and _is_file_word(words[0]):
        file = Path(words[0])
    else:
        for word in words:
            if word.startswith("experiment="):
                file = CONFIGS / "experiment" / f"{word.split('=', 1)[1]}.yaml"
    if file is not None and file.is_file():
        places |= yaml_places(file)
    for word in words:
        if "=" in word:
            places[tuple(word.lstrip("+~").split("=", 1)[0].split("."))] = "command line"
    return places


def yaml_places(file: Path) -> dict[tuple[str, ...], str]:
    """`file:line` of every key of a YAML file, by path."""
    places: dict[tuple[str, ...], str] = {}

    def walk(node: yaml.Node | None, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = (*path, str(key.value))
                places[here] = f"{file.name}:{key.start_mark.line + 1}"
                walk(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                walk(value, (*path, str(index)))

    walk(yaml.compose(file.read_text()), ())
    return places


def validate[S: BaseModel](
    model: type[S], value: Mapping[str, Any], places: Mapping[tuple[str, ...], str] | None = None
) -> S:
    """Validate plain values.

    Args:
        model: the specification class.
        value: plain values.
        places: where keys were written, by path.

    Raises:
        SpecError: one line for each fault.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        lines = [_explain(model, fault, places or {}) for fault in error.errors()]
        raise SpecError("\n".join(lines)) from error


def _explain(model: type[BaseModel], fault: Any, places: Mapping[tuple[str, ...], str]) -> str:
    path = tuple(str(part) for part in fault["loc"])
    shown = _without_tags(model, path)
    place = next((places[shown[:n]] for n in range(len(shown), 0, -1) if shown[:n] in places), None)
    where = f"{place}: " if place else ""
    key = ".".join(shown)
    if fault["type"] == "extra_forbidden":
        choices = _field_names(model, path[:-1])
        guess = nearest(path[-1], choices)
        hint = f" Did you mean '{guess}'?" if guess else ""
        return f"{where}unknown key '{key}'.{hint} There are: {', '.join(choices)}."
    if fault["type"] == "missing":
        return f"{where}'{key}' is missing"
    if fault["type"] == "value_error":
        return f"{where}{key + ': ' if key else ''}{fault['msg'].removeprefix('Value error, ')}"
    got = fault["input"]
    if fault["type"] == "union_tag_invalid":
        choices = [tag.strip(" '") for tag in fault["ctx"]["expected_tags"].split(",")]
        tag = str(fault["ctx"]["tag"])
        guess = nearest(tag, choices)
        hint = f" Did you mean '{guess}'?" if guess else ""
        return f"{where}'{key}.name': got '{tag}', expected one of {fault['ctx']['expected_tags']}.{hint}"
    if fault["type"] == "union_tag_not_found":
        return f"{where}'{key}.name' is missing"
    return f"{where}'{key}': got {got!r}, {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models(argument)]


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("name")
    values = get_args(field.annotation) if field else ()
    return str(values[0]) if len(values) == 1 else None


def _walk(model: type[BaseModel], path: tuple[str, ...]) -> tuple[list[type[BaseModel]], tuple[str, ...]]:
    """The models at a pydantic error path, and the path without the tags that pydantic adds for tagged unions."""
    current, shown = [model], []
    for part in path:
        tagged = [m for m in current if len(current) > 1 and _tag(m) == part]
        if tagged:
            current = tagged
            continue
        shown.append(part)
        fields = [m.model_fields[part] for m in current if part in m.model_fields]
        if fields:
            current = _models(fields[0].annotation)
    return current, tuple(shown)


def _without_tags(model: type[BaseModel], path: tuple[str, ...]) -> tuple[str, ...]:
    return _walk(model, path)[1]


def _field_names(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    models = _walk(model, path)[0]
    return sorted(functools.reduce(lambda names, m: names | set(m.model_fields), models, set()))


def to_yaml(spec: BaseModel) -> str:
    """The resolved specification as YAML; `compose([file])` reads it back."""
    return yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False)
