"""Sweeps on disk: where they lie, what they were made of, what they have used. Needs no Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlsvc.core.errors import NotFoundError
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec

STORED, METER = "sweep.json", "meter.json"


def sweep_folder(root: str, name: str) -> Path:
    """Where a sweep lies."""
    return Path(root).absolute() / "sweeps" / name


def missing(folder: Path, what: str = "") -> NotFoundError:
    """The error for a sweep that never was; it lists those that were."""
    others = sorted(each.parent.name for each in folder.parent.glob(f"*/{STORED}"))
    return NotFoundError(
        f"no sweep '{folder.name}'{what} in {folder.parent}. There are: {', '.join(others) or 'none'}."
    )


def load_stored(root: str, name: str) -> tuple[Path, SweepSpec, RunSpec]:
    """A sweep that ran or is running: its folder, its specification and its base run.

    Raises:
        NotFoundError: there is none of that name.
    """
    folder = sweep_folder(root, name)
    if not (folder / STORED).exists():
        raise missing(folder)
    found = json.loads((folder / STORED).read_text())
    return folder, SweepSpec.model_validate(found["sweep"]), RunSpec.model_validate(found["base"])


def load_meter(folder: Path) -> dict[str, Any]:
    """`seconds` and `gpu_seconds` used, and the rule by which the sweep `ended`; empty before it began."""
    path = folder / METER
    return json.loads(path.read_text()) if path.exists() else {}


def ended_by(folder: Path) -> str:
    """The rule that ended a sweep early, "" for none."""
    return load_meter(folder).get("ended", "")
