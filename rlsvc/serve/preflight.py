"""What is checked before Ray starts, so that a mistake costs no minute: address, port, resources."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlsvc.core.errors import BusyError, UserError

# Stands in a URL path and in metric labels as it is.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(name: str) -> str:
    """A policy's name, as clients say it.

    Raises:
        UserError: empty, too long, or with a letter that has no place in a URL path.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"policy name '{name}': expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return name


def check_address(host: str, port: int, *, keys: bool = False) -> None:
    """Refuse an address that would be open to others, or that is taken.

    Args:
        host: to listen on.
        port: likewise.
        keys: whether callers are asked for one.

    Raises:
        UserError: not a loopback address, and no keys, or a bad port.
        BusyError: something listens there.
    """
    if not (keys or is_loopback(host)):
        raise UserError(
            f"--host {host}: without keys it listens on loopback only (127.0.0.1). Make keys (rlsvc keys add NAME "
            "--role act) and give them (--keys keys.json), "
            f"or forward the port: ssh -N -L {port}:127.0.0.1:{port} <this machine>"
        )
    if not 1 <= port <= 65535:
        raise UserError(f"--port {port}: expected 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BusyError(
                    f"port {port} on {host} is in use; stop what listens there or choose another with --port"
                ) from error
            raise UserError(f"cannot listen on {host} port {port}: {error.strerror}") from error


@contextlib.contextmanager
def hold_port(port: int) -> Iterator[None]:
    """Keep other `rlsvc serve` off this port while this one lives: Ray takes half a minute until it listens there.

    Raises:
        BusyError: another one of this user has it.
    """
    path = Path(tempfile.gettempdir()) / f"rlsvc-serve-{os.getuid()}-{port}.lock"
    # The file stays behind, the lock does not: it ends with the process, however that ends.
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"port {port} is taken by another `rlsvc serve` that is starting; choose another with --port"
            ) from error
        yield
    finally:
        os.close(descriptor)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Of names only "localhost" counts: others resolve elsewhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_resources(replicas: int, cpus: float, gpus: float, *, have_cpus: float, have_gpus: float) -> None:
    """Refuse what Ray would wait for without end.

    Args:
        replicas: how many.
        cpus: of each replica.
        gpus: of each replica; a fraction shares a card.
        have_cpus: cores that there are.
        have_gpus: cards that there are.

    Raises:
        UserError: not enough.
    """
    if replicas < 1 or cpus < 0 or gpus < 0:
        raise UserError(
            f"replicas = {replicas}, cpus = {cpus:g}, gpus = {gpus:g}: expected 1 replica or more and no negative share"
        )
    if gpus > 0 and have_gpus == 0:
        raise UserError(f"gpus = {gpus:g}: there is no GPU here; leave it out to serve on the CPU")
    if gpus > 1 and gpus != int(gpus):
        raise UserError(f"gpus = {gpus:g}: expected a fraction below 1, or whole cards")
    # A fraction does not stretch over two cards.
    fit = int(have_gpus) * int(1 / gpus + 1e-9) if 0 < gpus <= 1 else int(have_gpus / gpus) if gpus else replicas
    if replicas > fit:
        raise UserError(f"{replicas} replicas with gpus = {gpus:g} each: {have_gpus:g} GPUs hold {fit} such replicas")
    if replicas * cpus > have_cpus:
        raise UserError(
            f"{replicas} replicas with cpus = {cpus:g} each need {replicas * cpus:g} CPUs, there are {have_cpus:g}"
        )


def local_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def local_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """NVIDIA cards that this process may use, found without loading CUDA.

    Args:
        driver: where the kernel driver lists them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [item.strip() for item in visible.split(",")]
        # As CUDA reads it: what follows a bad entry does not count.
        return (
            next((i for i, item in enumerate(wanted) if item in ("", "-1", "NoDevFiles")), len(wanted))
            if _devices(driver)
            else 0
        )
    return _devices(driver)


def _devices(driver: Path) -> int:
    listed = len(list(driver.iterdir())) if driver.is_dir() else 0
    # In a container the driver lists every card of the host, the device files only those that were handed in.
    files = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    return min(listed, files)
