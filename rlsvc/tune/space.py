"""Search spaces: from YAML to a SweepSpec, and from there to Ray Tune's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import validate, yaml_places
from rlsvc.spec.sweep import Choice, Distribution, Grid, LogUniform, RandInt, SweepSpec, Uniform


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepSpec:
    """Reads a search space.

    Args:
        path: of the YAML file.
        overrides: `key=value`. The sweep's own keys (`samples=8`, `scheduler.grace=9`, `space.<key>={uniform: [0, 1]}`)
            change the sweep; every other one goes to the run, after those in the file.

    Raises:
        SpecError: no such file, no YAML, or not a search space.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file. Search spaces lie in tune_spaces/") from None
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise SpecError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: expected a mapping with run, space and metric, got {type(tree).__name__}")
    own, runs = {}, []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise SpecError(f"override '{override}': expected key=value")
        if key.split(".")[0] in SweepSpec.model_fields:
            own[key] = value
        else:
            runs.append(override)
    tree = {str(key): value for key, value in tree.items()}
    for key, value in own.items():
        _set(tree, key, _parse_value(key, value))
    if runs:
        run = tree.get("run", [])
        tree["run"] = [*([run] if isinstance(run, str) else run), *runs]
    elif isinstance(tree.get("run"), str):
        tree["run"] = [tree["run"]]
    places = yaml_places(path)
    for key in own:
        head, _, rest = key.partition(".")
        places[(head, rest) if head == "space" else tuple(key.split("."))] = "command line"
    return validate(SweepSpec, tree, places)


def to_tune(space: Mapping[str, Distribution]) -> dict[str, Any]:
    """The space as Ray Tune's search domains, under the same dotted keys."""
    from ray import tune

    domains: dict[str, Any] = {}
    for key, distribution in space.items():
        match distribution:
            case Uniform(uniform=(low, high)):
                domains[key] = tune.uniform(low, high)
            case LogUniform(loguniform=(low, high)):
                domains[key] = tune.loguniform(low, high)
            case RandInt(randint=(low, high)):
                domains[key] = tune.randint(low, high)
            case Choice(choice=values):
                domains[key] = tune.choice(list(values))
            case Grid(grid=values):
                domains[key] = tune.grid_search(list(values))
    return domains


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if not rest:
        tree[key] = value
    elif head == "space":
        tree.setdefault("space", {})[rest] = value  # the keys of a space are dotted themselves
    else:
        section = tree.setdefault(head, {})
        if not isinstance(section, dict):
            raise SpecError(f"override '{key}': {head} is {section!r} and has no keys")
        _set(section, rest, value)


def _parse_value(key: str, text: str) -> Any:
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))
        return parsed["value"]
    except (YAMLError, OmegaConfBaseException) as error:
        raise SpecError(f"override '{key}={text}': the value is not YAML: {error}") from error
