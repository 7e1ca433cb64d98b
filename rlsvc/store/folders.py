"""Folders that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlsvc.core.errors import UserError


def refuse_in_the_way(path: Path) -> None:
    """Refuse a target that is there already, unless it is an empty folder.

    Raises:
        UserError: it holds something, or is no folder.
    """
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: is there already; give another name, or delete it first")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder of a temporary name beside `path`, which gets its final name once it is whole; an error removes it.

    Raises:
        UserError: `path` is there already, and no empty folder, or its place cannot be written.
    """
    refuse_in_the_way(path)
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
