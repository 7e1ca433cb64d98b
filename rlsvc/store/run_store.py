"""A run on a storage without folders: worked on in a folder here, committed there as a whole.

    <root>/<project>/<run>/manifest.json      {"run": id, "files": {path: [sha256, bytes]}, "step": clock}, written last
    <root>/<project>/<run>/objects/<sha256>   the files, by what is in them

Objects never change and a manifest names only objects that are there, so what the manifest says is always whole, at
whatever moment a process dies. A commit uploads what is new, writes the manifest, and deletes what nothing names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlsvc.core.cache import cache_dir
from rlsvc.core.errors import NotFoundError, UserError
from rlsvc.store.storage import Storage, StorageError, join

MANIFEST = "manifest.json"
OBJECTS = "objects"
RUN_ID = ".run_id"
"""In the folder: which run of this name it is of, as the manifest says it too."""
LEFT_OUT = ("replay",)
"""Folders of a run that are made again from the rest of it (the journal)."""
log = logging.getLogger(__name__)


def work_root(url: str) -> Path:
    """The folder on this machine in which runs of a root that is a URL are worked on."""
    return cache_dir() / "work" / hashlib.sha256(url.encode()).hexdigest()[:16]


def sha256_of(file: Path) -> str:
    """Of a file's bytes, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class RunStore:
    """One run, in its folder here and on its storage.

    Attributes:
        folder: where it is worked on.
        url: where it is committed.
    """

    def __init__(self, root: str, project: str, name: str) -> None:
        self.url = join(root, project, name)
        self.folder = work_root(root) / project / name
        self._storage = Storage(self.url)
        self._known: dict[str, tuple[int, int, str]] = {}

    def manifest(self) -> dict[str, Any] | None:
        """What was committed last; None before the first commit."""
        data = self._storage.read(MANIFEST)
        return None if data is None else json.loads(data)

    def fetch(self) -> None:
        """Bring the folder to what was committed last, unless it is further: then what could not be uploaded is there.

        Raises:
            NotFoundError: nothing was committed, and there is nothing here.
            StorageError: the storage cannot be reached.
            UserError: an object is missing or damaged, or what is further here is another run of this name.
        """
        found = self.manifest()
        if found is None:
            if not (self.folder / "spec.yaml").exists():
                raise NotFoundError(f"--resume: there is no run at {self.url}; start it without --resume")
            return
        here = max((int(p.name) for p in self.folder.glob("checkpoints/[0-9]*")), default=-1)
        if here > int(found["step"]):
            if self._id() != found["run"]:
                raise UserError(
                    f"{self.folder} is at step {here} of another run of this name than {self.url}; move that folder "
                    "away to go on with what was committed, or choose another name=..."
                )
            log.warning("%s is at step %d, %s at step %s: going on from the folder", self.folder, here, self.url,
                        found["step"])  # fmt: skip
            return
        self._id(found["run"])
        files: dict[str, list[Any]] = found["files"]
        for path in list(_files(self.folder)):
            if str(path.relative_to(self.folder)) not in files:
                path.unlink()
        for name in files:
            self._bring(name, files[name], self.folder / name)
        for folder in sorted((p for p in self.folder.rglob("*") if p.is_dir()), reverse=True):
            if not any(folder.iterdir()):
                folder.rmdir()

    def commit(self, step: int) -> None:
        """Upload what is new in the folder, then say that it is there.

        Raises:
            StorageError: it cannot be written; all of it lies in the folder.
        """
        files: dict[str, list[Any]] = {}
        before = self.manifest()
        there = {digest for digest, _ in before["files"].values()} if before else set()
        try:
            for path in _files(self.folder):
                digest, size = self._digest(path)
                if digest not in there:
                    self._storage.upload(path, f"{OBJECTS}/{digest}")
                    there.add(digest)
                files[str(path.relative_to(self.folder))] = [digest, size]
            self._storage.write(MANIFEST, json.dumps({"run": self._id(), "step": step, "files": files}).encode())
            named = {digest for digest, _ in files.values()}
            for digest in there - named:
                self._storage.delete(f"{OBJECTS}/{digest}")
        except StorageError as error:
            raise StorageError(
                f"{error}. The run is whole in {self.folder} on this machine; once the storage works, go on with "
                "--resume here, and it is uploaded. Elsewhere the run goes on from its last commit"
            ) from error

    def _id(self, given: str | None = None) -> str:
        """The id of the folder's run, which is made where there is none; or have it this one."""
        file = self.folder / RUN_ID
        if given is not None or not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(given or uuid.uuid4().hex)
        return file.read_text()

    def delete(self) -> None:
        """Delete the run, here and there; its manifest first."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._storage.delete(MANIFEST)
        self._storage.delete_folder(OBJECTS)

    def pull(self, prefix: str, target: Path) -> None:
        """Files of the last commit below a path of the run, into a new folder.

        Raises:
            NotFoundError: there are none.
        """
        found = self.manifest() or {"files": {}}
        files = {name: entry for name, entry in found["files"].items() if name.startswith(f"{prefix}/")}
        if not files:
            raise NotFoundError(f"{join(self.url, prefix)}: nothing was committed there")
        for name, entry in files.items():
            self._bring(name, entry, target / name.removeprefix(f"{prefix}/"))

    def _bring(self, name: str, entry: list[Any], file: Path) -> None:
        digest, size = entry
        if file.is_file() and self._digest(file) == (digest, size):
            return
        if self._storage.size(f"{OBJECTS}/{digest}") is None:
            raise UserError(f"{self.url}: {name} is missing ({OBJECTS}/{digest}), although it was committed")
        self._storage.download(f"{OBJECTS}/{digest}", file, digest)

    def _digest(self, file: Path) -> tuple[str, int]:
        stat = file.stat()
        known = self._known.get(str(file))
        if known is None or known[:2] != (stat.st_size, stat.st_mtime_ns):
            known = (stat.st_size, stat.st_mtime_ns, sha256_of(file))
            self._known[str(file)] = known
        return known[2], stat.st_size


def _files(folder: Path) -> Iterator[Path]:
    """The files of a run that are kept: not what is being written, nor what can be made again."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if (
            path.is_file()
            and parts[0] not in LEFT_OUT
            and not any(p.startswith(".") or p.endswith(".tmp") for p in parts)
        ):
            yield path


def fetch_bundle(url: str) -> Path:
    """The folder, in the cache, of a bundle of a run on a storage: `s3://bucket/runs/rlsvc/pusht/bundles/1000`.

    Raises:
        NotFoundError: nothing was committed there.
    """
    base, _, query = url.partition("?")
    run, between, step = base.rstrip("/").rpartition("/bundles/")
    parts = run.rsplit("/", 2)
    if not between or len(parts) < 3:
        raise NotFoundError(f"'{url}': expected ROOT/PROJECT/RUN/bundles/STEP, or models:/name@alias with --root")
    store = RunStore(parts[0] + (f"?{query}" if query else ""), parts[1], parts[2])
    name = f"bundles/{step}"
    found = (store.manifest() or {"files": {}})["files"]
    content = json.dumps(sorted((k, v) for k, v in found.items() if k.startswith(f"{name}/")))
    target = cache_dir() / "bundles" / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if not target.is_dir():
        bring_folder(lambda folder: store.pull(name, folder), target)
    return target


def bring_folder(fill: Callable[[Path], None], target: Path) -> None:
    """Have a folder filled under a temporary name, then give it its own."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        fill(partial)
        partial.rename(target)
    except OSError:  # another process brought it in between
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
