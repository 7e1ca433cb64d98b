"""Files on any storage that pyarrow or fsspec knows: a folder, s3://, gs://, abfs://, hdfs://, ...

As in Ray: pyarrow's own file systems first, fsspec's for other schemes. Keys are paths below the URL. An object is
there whole or not at all; what fails is tried again, then raised. S3 takes its credentials, region and endpoint from
the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL) or from the query of
the URL (`s3://bucket/runs?endpoint_override=http://127.0.0.1:5000`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlsvc.core.errors import SpecError, UserError

URL = re.compile(r"^[a-z][a-z0-9+.-]+://")
TRIES = 4
PAUSE_S = 1.0
"""Before the second try; twice as long before each further one."""
BLOCK = 8 * 2**20
log = logging.getLogger(__name__)


class StorageError(UserError):
    """A storage cannot be reached, or refuses. It may do so no longer later on, so a job's next attempt is worth it."""

    exit_code = 75


def is_url(root: str | Path) -> bool:
    """Whether this names a storage rather than a folder; `file://` names a folder."""
    text = str(root)
    return bool(URL.match(text)) and not text.startswith("file://")


def local_folder(root: str | Path) -> str:
    """A folder as a path: `file:///shared/runs` is /shared/runs."""
    return str(root).removeprefix("file://")


def join(url: str, *parts: str) -> str:
    """Parts below a URL, before its query."""
    base, mark, query = url.partition("?")
    return "/".join([base.rstrip("/"), *parts]) + mark + query


class Storage:
    """The objects below a folder or URL.

    Raises:
        SpecError: from the constructor, for a scheme that nothing installed knows.
        StorageError: from every method, after TRIES tries.
    """

    def __init__(self, url: str, *, pause_s: float = PAUSE_S) -> None:
        self.url, self._pause_s = url, pause_s
        self._fs, self._base = _open(url)

    def read(self, key: str) -> bytes | None:
        """The object's bytes; None when there is none."""
        if self.size(key) is None:
            return None
        return self._try("read", key, lambda path: self._read(path))

    def write(self, key: str, data: bytes) -> None:
        """Write an object, over one that is there."""
        self._try("write", key, lambda path: self._write(path, data))

    def upload(self, file: Path, key: str) -> None:
        """Write a file as an object."""
        self._try("write", key, lambda path: self._upload(path, file))

    def download(self, key: str, file: Path, sha256: str) -> None:
        """An object as a file, which is there only once its bytes are right.

        Raises:
            UserError: its hash is another one.
        """
        partial = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            got = self._try("read", key, lambda path: self._download(path, partial))
            if got != sha256:
                raise UserError(f"{self.url}: {key} is damaged: its SHA-256 is {got[:12]}, expected {sha256[:12]}")
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when there is none."""
        from pyarrow.fs import FileType

        info = self._try("look for", key, lambda path: self._fs.get_file_info(path))
        return info.size if info.type == FileType.File else None

    def names(self, prefix: str) -> list[str]:
        """What lies right below a prefix: the last parts of objects' and folders' keys, in alphabetical order."""
        from pyarrow.fs import FileSelector

        def listed(path: str) -> list[str]:
            selector = FileSelector(path, allow_not_found=True, recursive=False)
            return sorted(info.base_name for info in self._fs.get_file_info(selector))

        return self._try("list", prefix, listed)

    def delete(self, key: str) -> None:
        """Delete an object; one that is not there is fine."""
        if self.size(key) is not None:
            self._try("delete", key, lambda path: self._fs.delete_file(path))

    def delete_folder(self, prefix: str) -> None:
        """Delete all below a prefix."""
        if self.names(prefix):
            self._try("delete", prefix, lambda path: self._fs.delete_dir_contents(path, missing_dir_ok=True))

    def _path(self, key: str) -> str:
        return "/".join(part for part in (self._base.rstrip("/"), key) if part)

    def _read(self, path: str) -> bytes:
        with self._fs.open_input_stream(path) as stream:
            return stream.read()

    def _write(self, path: str, data: bytes) -> None:
        self._make_parent(path)
        with self._fs.open_output_stream(self._partial(path)) as stream:
            stream.write(data)
        self._commit(path)

    def _upload(self, path: str, file: Path) -> None:
        self._make_parent(path)
        with file.open("rb") as source, self._fs.open_output_stream(self._partial(path)) as stream:
            shutil.copyfileobj(source, stream, BLOCK)
        self._commit(path)

    def _download(self, path: str, file: Path) -> str:
        digest = hashlib.sha256()
        with self._fs.open_input_stream(path) as source, file.open("wb") as target:
            while block := source.read(BLOCK):
                digest.update(block)
                target.write(block)
            target.flush()
            os.fsync(target.fileno())
        return digest.hexdigest()

    @property
    def _folders(self) -> bool:
        """Whether this storage has folders that must be made, and shows a file before it is whole."""
        return self._fs.type_name not in ("s3", "gcs")

    def _make_parent(self, path: str) -> None:
        if self._folders:
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)

    def _partial(self, path: str) -> str:
        return f"{path}.{os.getpid()}.tmp" if self._folders else path

    def _commit(self, path: str) -> None:
        if self._folders:
            self._fs.move(self._partial(path), path)

    def _try(self, what: str, key: str, call: Callable[[str], Any]) -> Any:
        path = self._path(key)
        for count in range(1, TRIES + 1):
            try:
                return call(path)
            except OSError as error:
                if count == TRIES:
                    raise StorageError(
                        f"{self.url}: cannot {what} {key or 'it'}, {TRIES} times: {_first_line(error)}"
                    ) from error
                pause = self._pause_s * 2 ** (count - 1)
                log.warning("%s: cannot %s %s (%s); again in %g s", self.url, what, key, _first_line(error), pause)
                time.sleep(pause)
        raise AssertionError


def _open(url: str) -> tuple[Any, str]:
    """A pyarrow file system and the path in it."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    if not is_url(url):
        return LocalFileSystem(), str(Path(local_folder(url)).absolute())
    try:
        return FileSystem.from_uri(url)
    except (ArrowException, ValueError, OSError) as error:
        scheme, reason = urlsplit(url).scheme, _first_line(error)
    try:
        import fsspec

        filesystem, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise SpecError(
            f"{url}: no file system for '{scheme}://' ({_first_line(error)}; pyarrow: {reason}). Expected a folder, "
            "s3://, gs://, abfs://, hdfs://, or a scheme of an installed fsspec package"
        ) from error
    return PyFileSystem(FSSpecHandler(filesystem)), path


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
