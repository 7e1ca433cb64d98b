"""Environments of gymnasium's registry: classic control, MuJoCo, Box2D, and what a module of yours registers."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import gymnasium
from gymnasium.envs.registration import load_env_creator

from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.envs.adapter import Adapted
from rlsvc.envs.options import apply_options
from rlsvc.spec.env import GymnasiumSpec

# gymnasium's environments say their rate in metadata; for one that does not.
DEFAULT_RATE_HZ = 30.0


def unknown_id(suite: str, got: str, choices: Iterable[str]) -> NotFoundError:
    """The error for an id that a suite does not have: the three nearest, and how many there are."""
    names = sorted(choices)
    close = difflib.get_close_matches(got, names, n=3, cutoff=0.4)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    others = f" Others like it: {', '.join(close[1:])}." if close[1:] else ""
    return NotFoundError(f"unknown {suite} '{got}'.{hint}{others} There are {len(names)}.")


def make_registered(spec: GymnasiumSpec) -> Adapted:
    """An environment of gymnasium's registry.

    Raises:
        NotFoundError: no such id.
        UserError: it needs a package that is not installed, or refuses its arguments.
    """
    try:
        entry = gymnasium.spec(spec.id).entry_point
    except gymnasium.error.Error as error:
        raise unknown_id("gymnasium environment", spec.id, gymnasium.registry) from error
    try:
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
    except ImportError as error:
        raise UserError(f"environment {spec.id} needs a package that is not installed ({error})") from error
    kwargs = dict(spec.kwargs)
    if "rgb_array" in (getattr(creator, "metadata", None) or {}).get("render_modes", ()):
        kwargs.setdefault("render_mode", "rgb_array")
    limit = None if spec.max_steps is None else -1  # ours stands outside of the action repeat
    try:
        env = gymnasium.make(spec.id, max_episode_steps=limit, disable_env_checker=True, **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise UserError(f"environment {spec.id} needs a package that is not installed ({error})") from error
    except Exception as error:
        raise UserError(
            f"environment {spec.id} cannot be made with kwargs {spec.kwargs} ({type(error).__name__}: {error})"
        ) from error
    rate = env.metadata.get("render_fps") or DEFAULT_RATE_HZ
    return apply_options(env, spec, float(rate))
