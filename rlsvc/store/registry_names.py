"""What a registered policy is called, whatever keeps it: names, aliases, targets, versions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rlsvc.core.errors import SpecError

MODEL_URI = re.compile(r"^models:/(?P<name>[^/@:]+)(?:@(?P<alias>[^/@]+)|/(?P<version>[^/@]+))$")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")
ALIAS = re.compile(r"^(?!latest$)(?!v?\d+$)[A-Za-z][A-Za-z0-9_-]{0,99}$")


@dataclass(frozen=True)
class Version:
    """One version of a registered policy.

    Attributes:
        name: of the policy.
        version: 1, 2, ...
        aliases: names that point at this version ("best", "production").
        bundle: the bundle's id, sha256 of its manifest.
        run_id: the MLflow run that made it, "" when it came from none.
        source: URI of the bundle's folder.
        created: unix time in s.
    """

    name: str
    version: int
    bundle: str
    run_id: str
    source: str
    created: float
    aliases: tuple[str, ...] = field(default=())


def check_name(name: str) -> None:
    """Refuse what cannot be a policy's name. Raises SpecError."""
    if not NAME.match(name):
        raise SpecError(f"policy name '{name}': expected letters, digits, '.', '_' and '-' (at most 200)")


def check_alias(alias: str) -> None:
    """Refuse what cannot be an alias (MLflow reserves `latest` and `v1`, `v2`, ...). Raises SpecError."""
    if not ALIAS.match(alias):
        raise SpecError(
            f"alias '{alias}': expected a letter, then letters, digits, '_' or '-'; not 'latest', not 'v<number>'"
        )


def parse_target(target: str) -> tuple[str, str, str]:
    """(name, alias, version) of a `models:/` target; alias or version is "". Raises SpecError."""
    match = MODEL_URI.match(target)
    if match is None:
        raise SpecError(f"'{target}': expected models:/name@alias, models:/name/version or models:/name/latest")
    return match["name"], match["alias"] or "", match["version"] or ""
