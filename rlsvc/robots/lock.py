"""One process drives a robot at a time, on this machine, with or without Ray."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType

from rlsvc.core.errors import BusyError


def robots_folder() -> Path:
    """What processes of this user on this machine know of robots."""
    folder = Path(tempfile.gettempdir()) / f"rlsvc-robots-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


class RobotLock:
    """A lock on a robot's id, freed by the system when its process ends, however that ends."""

    def __init__(self, robot: str) -> None:
        """The lock is not taken yet; `robot`: an id of letters, digits, '.', '_' and '-'."""
        self.robot, self._path = robot, robots_folder() / f"{robot}.lock"
        self._fd: int | None = None

    def take(self) -> None:
        """Take it.

        Raises:
            BusyError: another process has it; names the process.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise BusyError(f"robot '{self.robot}' is in use by process {holder}; stop that one first") from None
        os.ftruncate(fd, 0)
        os.write(fd, str(os.getpid()).encode())
        self._fd = fd

    def free(self) -> None:
        """Free it; nothing to do when it is not taken."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RobotLock:
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.free()
