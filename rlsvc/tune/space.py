"""Search spaces: from YAML to a SweepSpec, and from there to Ray Tune's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import validate, yaml_places
from rlsvc.spec.space import Choice, Grid, Space, Value
from rlsvc.spec.sweep import SweepSpec


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
        config = OmegaConf.load(path)
        # What is computed is computed for each trial, not here.
        space = config.pop("space") if isinstance(config, DictConfig) and "space" in config else None
        tree = OmegaConf.to_container(config, resolve=True)
        if isinstance(tree, dict) and space is not None:
            tree["space"] = OmegaConf.to_container(space) if OmegaConf.is_config(space) else space
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
    places = yaml_places(path)
    for key in own:
        head, _, rest = key.partition(".")
        places[(head, rest) if head == "space" else tuple(key.split("."))] = "command line"
    return validate(SweepSpec, tree, places)


def to_tune(space: Space) -> dict[str, Any]:
    """The space as Ray Tune's search domains, under the same dotted keys; what is computed has none."""
    from ray import tune

    domains: dict[str, Any] = {}
    for key, domain in space.items():
        if isinstance(domain, Value):
            continue
        name = type(domain).__name__.lower()
        arguments = getattr(domain, name)
        if isinstance(domain, Choice):
            domains[key] = tune.choice(list(arguments))
        elif isinstance(domain, Grid):
            domains[key] = tune.grid_search(list(arguments))
        else:
            domains[key] = getattr(tune, name)(*arguments)
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
