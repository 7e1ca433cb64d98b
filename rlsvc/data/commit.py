"""Files that belong together, put into a folder so that a kill at any moment leaves them all in, or none.

They are written into a staging folder that mirrors the target and fsynced there. Renaming the staging folder is the
one step that decides: before it nothing has happened, after it the files are moved into place, one rename each, by
whoever lives to do it. Every state in between is a readable dataset as long as ORDER puts what is pointed at before
what points at it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the operating system says of a disk that is full, or of a share of it that is used up."""
STAGING = ".recording"
UNDER_WAY, COMMITTED = "episode", "commit"
ORDER = ("videos", "data", "meta/tasks.parquet", "meta/episodes", "meta/stats.json", "meta/info.json")
"""LeRobot believes meta/info.json last of all: rows, videos and tasks that it does not count do not exist for it."""


def begin(root: Path) -> Path:
    """An empty staging folder; what was left in it is deleted."""
    stage = root / STAGING / UNDER_WAY
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    return stage


def commit(root: Path, *, durable: bool = True) -> None:
    """Put the staged files in.

    Args:
        root: the target.
        durable: survive the machine's death too; without it only the process's.

    Raises:
        OSError: nothing has happened if it comes from `seal`, which this calls first; else `recover` ends it.
    """
    seal(root, durable=durable)
    recover(root, durable=durable)


def seal(root: Path, *, durable: bool = True) -> None:
    """Decide that the staged files are in: the point after which `recover` moves them.

    Raises:
        OSError: nothing has happened.
    """
    stage = root / STAGING / UNDER_WAY
    files = [file for file in stage.rglob("*") if file.is_file()]
    targets = {folder for file in files for folder in (root / file.relative_to(stage)).parents if folder != root.parent}
    for folder in sorted(folder for folder in targets if folder.is_relative_to(root)):
        folder.mkdir(exist_ok=True)
    if durable:
        for path in [*files, stage, *(p for p in stage.rglob("*") if p.is_dir()), *targets]:
            if path.is_relative_to(root):
                sync(path)
    os.rename(stage, root / STAGING / COMMITTED)
    if durable:
        sync(root / STAGING)


def recover(root: Path, *, durable: bool = True) -> bool:
    """Move sealed files into place, if there are any; gives whether there were.

    Raises:
        OSError: it may be called again.
    """
    sealed = root / STAGING / COMMITTED
    if not sealed.exists():
        return False
    for part in ORDER:
        at = sealed / part
        for file in sorted(at.rglob("*")) if at.is_dir() else [at]:
            if file.is_file():
                target = root / file.relative_to(sealed)
                os.replace(file, target)
                if durable:
                    sync(target.parent)
    shutil.rmtree(sealed)
    return True


def clear(root: Path) -> None:
    """Delete what is staged and not sealed. Never raises."""
    shutil.rmtree(root / STAGING / UNDER_WAY, ignore_errors=True)
    with contextlib.suppress(OSError):  # something sealed is in it
        (root / STAGING).rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
