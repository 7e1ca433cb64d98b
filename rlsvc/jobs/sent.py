"""What this computer has sent: jobs and their working trees, in the cache, so that they can be sent again.

A cluster forgets the working tree of a job some minutes after its end, and all of it with its head.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlsvc.core.cache import cache_dir
from rlsvc.jobs.package import Package
from rlsvc.jobs.types import Submission

KEPT = 20
"""Jobs, the newest."""


def remember(submission: Submission, package: Package | None) -> None:
    """Keep a job; its environment may hold secrets, so it is for this user's eyes alone."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if package is not None:
        _write(folder / f"{submission.name}.zip", package.data)
    _write(folder / f"{submission.name}.json", json.dumps(submission.to_json()).encode())
    for old in sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)[KEPT:]:
        old.with_suffix(".zip").unlink(missing_ok=True)
        old.unlink(missing_ok=True)


def recall(name: str) -> tuple[Submission | None, Package | None]:
    """A job that this computer sent and its working tree; None for what it did not, or no longer has."""
    path = _folder() / f"{name}.json"
    if not path.is_file():
        return None, None
    tree = _folder() / f"{name}.zip"
    package = Package(tree.read_bytes(), 0) if tree.is_file() else None
    return Submission.from_json(json.loads(path.read_text())), package


def _folder() -> Path:
    return cache_dir() / "jobs"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
        stream.write(data)
    partial.replace(path)
