"""Python environments of simulators' own, built once on each machine and kept in the cache.

A half-built one has no mark and is never used: the next builder, of whom there is one at a time, begins anew.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rlsvc
from rlsvc.core.cache import cache_dir
from rlsvc.core.errors import UserError
from rlsvc.spec.env import RuntimeSpec

log = logging.getLogger(__name__)

# What the simulator's process imports of rlsvc (rlsvc/envs/child.py) stands on these.
OURS = ("numpy", "gymnasium>=1.1", "pydantic>=2.12", "msgpack>=1.1")
MARK = "rlsvc-runtime.json"


def ensure_runtime(spec: RuntimeSpec) -> str:
    """The Python of a runtime, which is built if it is not there; another builder is waited for.

    Raises:
        UserError: uv is missing, or cannot install the packages; with its reason.
    """
    folder = _folder(spec)
    if not (folder / MARK).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.with_suffix(".lock")):
            if not (folder / MARK).exists():
                _build(spec, folder)
    return str(folder / "bin" / "python")


def runtime_environment(spec: RuntimeSpec) -> dict[str, str]:
    """Environment variables of a process in a runtime: of rlsvc's own packages it sees rlsvc alone."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
    alone = {"PYTHONPATH": str(_package_folder()), "PYTHONNOUSERSITE": "1"}
    return {"OMP_NUM_THREADS": "1", **kept, **alone, **spec.variables}


def _folder(spec: RuntimeSpec) -> Path:
    content = json.dumps([spec.python, list(spec.packages), OURS])
    return cache_dir() / "runtimes" / hashlib.sha256(content.encode()).hexdigest()[:16]


def _build(spec: RuntimeSpec, folder: Path) -> None:
    uv = find_uv()
    log.warning("building an environment for %s in %s (once)", ", ".join(spec.packages), folder)
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    python = sys.executable if spec.python == own else spec.python
    _run([uv, "venv", "--quiet", "--no-project", "--python", python, str(folder)], spec, folder)
    packages = [*spec.packages, *OURS]
    _run([uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *packages], spec, folder)
    (folder / f"{MARK}.new").write_text(json.dumps(spec.model_dump(mode="json"), indent=1))
    (folder / f"{MARK}.new").rename(folder / MARK)
    log.warning("built in %.0f s", time.monotonic() - started)


def _run(command: list[str], spec: RuntimeSpec, folder: Path) -> None:
    # Not in the working folder, whose pyproject.toml may have settings for another project.
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent)
    if done.returncode:
        reason = " ".join(done.stderr.split())[-1500:]
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"env.runtime: cannot install {', '.join(spec.packages)} for Python {spec.python}: {reason}. "
            "Change env.runtime.packages so that they fit together, and see that the package index can be reached."
        )


def find_uv() -> str:
    """The program uv, beside this Python or on PATH.

    Raises:
        UserError: there is none.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise UserError("env.runtime: uv is not installed; it builds the simulator's environment: pip install uv")
    return found


@functools.cache
def _package_folder() -> Path:
    """A folder in which nothing but the package rlsvc can be imported (its own may be a site-packages)."""
    package = Path(rlsvc.__file__).resolve().parent
    folder = cache_dir() / "runtimes" / f"package-{hashlib.sha256(str(package).encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "rlsvc"
    if not link.is_symlink():
        fresh = folder / f"rlsvc.{os.getpid()}"
        fresh.symlink_to(package)
        fresh.rename(link)
    return folder


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.warning("waiting for another process that builds %s", lock.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
