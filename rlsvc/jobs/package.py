"""What a job is sent: a git working tree as a zip, what is not committed in it, and the packages of its lock file."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsvc.core.errors import UserError

MAX_PACKAGE_BYTES = 100 * 2**20
"""Ray's dashboard takes no larger request (DASHBOARD_CLIENT_MAX_SIZE)."""


LOCK = "uv.lock"


class JobError(UserError):
    """A cluster cannot be reached, refuses a request, or a working tree cannot be sent."""


@dataclass(frozen=True)
class Package:
    """A working tree as a zip. The same files give the same bytes, so that a tree is uploaded once."""

    data: bytes
    files: int

    @property
    def name(self) -> str:
        """Its name in the cluster's store."""
        return f"_rlsvc_{hashlib.sha256(self.data).hexdigest()[:32]}.zip"

    @property
    def uri(self) -> str:
        """What a runtime environment's `working_dir` names."""
        return f"gcs://{self.name}"


def pack(tree: Path, extra: Mapping[str, bytes] | None = None, limit: int = MAX_PACKAGE_BYTES) -> Package:
    """Zips what git knows of a working tree (tracked, changed, and new files that are not ignored).

    Args:
        tree: a folder inside a git working tree.
        extra: further files by their path in the package.
        limit: of the zip, in bytes.

    Raises:
        JobError: no git tree, or too large; the message names the largest files.
    """
    sizes: dict[str, int] = {}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes, mode: int) -> None:
            # A fixed time: the same tree must give the same bytes. The mode keeps scripts executable.
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            before = buffer.tell()
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            sizes[name] = buffer.tell() - before
            if buffer.tell() > limit:
                raise _too_large(tree, sizes, limit)

        for name in _git_files(tree):
            path = tree / name
            if path.is_file():  # a deleted file is still listed; a submodule is a folder
                if path.stat().st_size > 20 * limit:
                    raise _too_large(tree, {**sizes, name: path.stat().st_size}, limit)
                add(name, path.read_bytes(), path.stat().st_mode & 0o777)
        for name, data in sorted((extra or {}).items()):
            add(name, data, 0o644)
    return Package(buffer.getvalue(), len(sizes))


def _git_files(tree: Path) -> list[str]:
    command = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise JobError(f"{tree}: git is not installed, and says which files belong to the working tree") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise JobError(
            f"{tree}: expected a git working tree, to know which files to send ({''.join(reason)}). Run in one, or "
            "name one by --working-dir"
        ) from error
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _too_large(tree: Path, sizes: Mapping[str, int], limit: int) -> JobError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    return JobError(
        f"{tree}: the working tree is over {limit / 2**20:.0f} MiB as a zip, the most that a Ray dashboard takes. The "
        f"largest so far: {named}. Put data on storage that the cluster reaches and name it in "
        "data.datasets, or add it to .gitignore"
    )


@dataclass(frozen=True)
class GitState:
    """What a working tree is.

    Attributes:
        commit: the full hash, "" before the first commit.
        uncommitted: paths that differ from it (changed, new, deleted), within the tree.
    """

    commit: str
    uncommitted: tuple[str, ...]

    def __str__(self) -> str:
        where = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
        if not self.uncommitted:
            return where
        shown = ", ".join(self.uncommitted[:5])
        more = f" and {len(self.uncommitted) - 5} more" if len(self.uncommitted) > 5 else ""
        count = len(self.uncommitted)
        return f"{where}, {count} file{'s' if count > 1 else ''} not committed: {shown}{more}"


def git_state(tree: Path) -> GitState:
    """The commit of a working tree, and which of its files are not in it.

    Raises:
        JobError: no git tree.
    """
    _git_files(tree)
    head = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--verify", "--quiet", "HEAD"], capture_output=True, check=False
    )
    status = subprocess.run(
        ["git", "-C", str(tree), "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--", "."],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    # Paths are from the top of the repository, wherever in it `tree` is.
    top = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--show-prefix"], capture_output=True, check=True
    ).stdout.strip()  # fmt: skip
    names = (os.fsdecode(entry[3:].removeprefix(top)) for entry in status.split(b"\0") if entry)
    return GitState(head.stdout.decode().strip(), tuple(sorted(names)))


@dataclass(frozen=True)
class PythonEnv:
    """How a job comes to its packages.

    Attributes:
        runtime_env: fields of Ray's runtime environment.
        env_vars: environment variables besides.
        python: what the job's command begins with.
    """

    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"


def python_env(packages: str, tree: Path, extras: Sequence[str]) -> PythonEnv:
    """What a job's runtime environment needs for its packages.

    cluster: nothing, the nodes have them. uv: `uv run` makes the environment of the tree's lock file, under a name that
    is the hash of what it is made from, so that a node makes it once; the driver starts in it, and Ray starts the
    workers of a driver in `uv run` the same way. What uv has to say is in the job's log so. pip: the lock file's
    packages as pinned requirements in Ray's own `pip` field, which caches by their hash.

    Args:
        packages: "cluster", "uv" or "pip".
        tree: the working tree, with pyproject.toml and uv.lock.
        extras: of the project that are to be installed.

    Raises:
        JobError: the tree has no lock file, or it does not fit pyproject.toml.
    """
    if packages == "cluster":
        return PythonEnv()
    missing = [name for name in ("pyproject.toml", LOCK) if not (tree / name).is_file()]
    if missing:
        raise JobError(
            f"--packages {packages}: {tree} has no {missing[0]}, which says what to install. Write it (uv lock), or "
            "take --packages cluster: what the nodes have"
        )
    flags = [word for extra in extras for word in ("--extra", extra)]
    if packages == "pip":
        return PythonEnv({"pip": {"packages": requirements(tree, flags), "pip_check": False}})
    requirements(tree, flags)  # is refused here rather than on the cluster
    made_from = [(tree / LOCK).read_bytes(), (tree / "pyproject.toml").read_bytes(), "\0".join(extras).encode()]
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in made_from)).hexdigest()[:16]
    run = " ".join(["uv", "run", "--frozen", "--no-dev", *flags, "python"])
    # The latter, since rlsvc itself, and its images, keep Ray from doing so for whoever uses uv by himself.
    folder = f"${{HOME}}/.cache/rlsvc/environments/{digest}"
    return PythonEnv({}, {"UV_PROJECT_ENVIRONMENT": folder, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}, run)


def requirements(tree: Path, flags: Sequence[str]) -> list[str]:
    """The pinned requirements of a lock file, Ray itself left out, which the cluster has.

    Raises:
        JobError: uv is not installed, or the lock file does not give them.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        raise JobError("--packages: uv is not installed, which reads the lock file: pip install uv")
    command = [uv, "export", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes", "--no-header"]
    command += ["--no-annotate", "--no-emit-package", "ray", "--quiet", *flags]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or "no reason given"
        raise JobError(f"--packages: {tree / LOCK} gives no requirements: {reason}")
    return [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("#")]
