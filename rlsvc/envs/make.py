"""The table of environments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium

from rlsvc.core.errors import UserError
from rlsvc.spec.env import SPECS, EnvBase, plugin

ENVIRONMENTS: dict[str, type[EnvBase]] = SPECS


def make_env(spec: EnvBase) -> Any:
    """The environment of a specification, a `gymnasium.Env` with `contract`.

    One with `isolation: process` or a `runtime` is stepped in a process of its own.

    Raises:
        NotFoundError: an unknown name, id or task; the message has the nearest ones.
        UserError: its simulator is not installed, cannot be made, or does not allow one of its options.
    """
    if spec.own_process:
        from rlsvc.envs.process import ProcessEnv

        return ProcessEnv(spec)
    return make_here(spec)


def make_here(spec: EnvBase) -> Any:
    """The environment in this process, whatever its specification says of isolation."""
    if spec.import_module is not None:
        try:
            importlib.import_module(spec.import_module)
        except Exception as error:
            raise UserError(
                f"env.import_module: '{spec.import_module}' cannot be imported ({type(error).__name__}: {error})"
            ) from error
    name: str = spec.name  # pyright: ignore[reportAttributeAccessIssue] - every environment's class has one
    make = _MAKERS.get(name, _make_plugin)
    try:
        return make(spec)
    except ImportError as error:
        raise UserError(
            f"environment '{name}' needs a package that is not installed ({error}); install "
            f"rlsvc[{'maniskill' if name == 'maniskill' else 'sim'}]"
        ) from error


def _make_pusht(spec: Any) -> Any:
    from rlsvc.envs.pusht import PushT

    return PushT.with_options(spec)


def _make_registered(spec: Any) -> Any:
    from rlsvc.envs.registered import make_registered

    return make_registered(spec)


def _make_dm_control(spec: Any) -> Any:
    from rlsvc.envs.dm_control import make_dm_control

    return make_dm_control(spec)


def _make_maniskill(spec: Any) -> Any:
    from rlsvc.envs.maniskill import make_maniskill

    return make_maniskill(spec)


def _make_libero(spec: Any) -> Any:
    from rlsvc.envs.libero import make_libero

    return make_libero(spec)


def _make_aloha(spec: Any) -> Any:
    from rlsvc.envs.aloha import make_aloha

    return make_aloha(spec)


def _make_robot(spec: Any) -> Any:
    from rlsvc.envs.robot import make_robot

    return make_robot(spec)


def _make_plugin(spec: Any) -> Any:
    env = plugin(spec.name).make(spec)
    if hasattr(env, "contract"):
        return env
    if not isinstance(env, gymnasium.Env):
        raise UserError(f"environment '{spec.name}': its `make` gave {type(env).__name__}, expected a gymnasium.Env")
    from rlsvc.envs.options import apply_options
    from rlsvc.envs.registered import DEFAULT_RATE_HZ

    return apply_options(env, spec, float(env.metadata.get("render_fps") or DEFAULT_RATE_HZ))


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "pusht": _make_pusht,
    "gymnasium": _make_registered,
    "dm_control": _make_dm_control,
    "maniskill": _make_maniskill,
    "libero": _make_libero,
    "aloha": _make_aloha,
    "robot": _make_robot,
}
