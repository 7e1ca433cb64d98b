"""Serial ports: there, and nobody else's."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from rlsvc.core.errors import BusyError, UserError


class PortClaim:
    """A port that this process uses, until `free`.

    The claim is an advisory lock (flock) on the device, so a stopper of this project still opens it. Programs that lock
    nothing, such as LeRobot's own commands, are found where the system has /proc.
    """

    def __init__(self, path: str) -> None:
        """Claim the port at `path`.

        Raises:
            UserError: it is not there, or may not be opened.
            BusyError: another program has it; names the process.
        """
        self.path = path
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise UserError(
                f"port {path} is not there: is the arm plugged in? `lerobot-find-port` says which port is its; there "
                f"are: {', '.join(_ports()) or 'none'}"
            ) from None
        except PermissionError:
            raise UserError(f"port {path} may not be opened by this user: `sudo chmod 666 {path}`") from None
        except OSError as error:
            raise UserError(f"port {path} does not open: {error.strerror}. Is it a serial port?") from None
        try:
            if user := _user(path):
                raise BusyError(f"port {path} is in use by {user}; stop that program first")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.free()
            raise BusyError(f"port {path} is in use by another robot of this or another process") from None
        except BusyError:
            self.free()
            raise

    def free(self) -> None:
        """Let go of it; nothing to do the second time."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _ports() -> list[str]:
    folder = Path("/dev")
    return sorted(str(path) for pattern in ("ttyACM*", "ttyUSB*", "tty.usb*") for path in folder.glob(pattern))


def _user(path: str) -> str | None:
    """Another process that has the device open, None where none is seen."""
    real, device = os.path.realpath(path), os.stat(path).st_rdev
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError), os.scandir(process / "fd") as fds:  # it has ended, or is another user's
            for fd in fds:
                with contextlib.suppress(OSError):
                    if os.readlink(fd.path) == real and os.stat(fd.path).st_rdev == device:
                        command = (process / "cmdline").read_bytes().split(b"\0")
                        return f"process {process.name} ({b' '.join(command[:3]).decode(errors='replace').strip()})"
    return None
