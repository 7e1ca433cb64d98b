"""Errors that are meant for a person.

A message names the thing, what was got, what was expected, and what to do. The command line prints it alone and exits
with 2; a server answers 4xx with it.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something that a person gave does not fit. Everything else is a bug and keeps its traceback."""

    exit_code = 2
    """Of the command; another one for what may be well by itself later on."""


class SpecError(UserError):
    """A run specification or a search space is wrong."""


class ContractError(UserError):
    """An observation, an action, a dataset or an environment does not fit a policy's contract."""


class DatasetError(UserError):
    """A dataset cannot be used rightly."""


class BundleError(UserError):
    """A policy bundle is damaged, incomplete or of another schema."""


class NotFoundError(UserError):
    """A name that does not exist; the message lists those that do."""


class BusyError(UserError):
    """A resource (a port, a run folder, a robot) is taken."""


def nearest(got: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like `got`, or None when none does."""
    found = difflib.get_close_matches(got, list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown_name(kind: str, got: str, choices: Iterable[str]) -> NotFoundError:
    """The error for a name that is not in a table: the list, and the nearest match first."""
    names = sorted(choices)
    guess = nearest(got, names)
    hint = f" Did you mean '{guess}'?" if guess else ""
    return NotFoundError(f"unknown {kind} '{got}'.{hint} There are: {', '.join(names) or 'none'}.")
