"""Serial ports that are not there, or somebody else's."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlsvc.core.errors import BusyError, UserError
from rlsvc.robots.port import PortClaim


@pytest.fixture
def port() -> Iterator[str]:
    master, slave = pty.openpty()
    path = os.ttyname(slave)
    os.close(slave)
    yield path
    os.close(master)


def test_a_port_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"port /dev/ttyACM97 is not there.*lerobot-find-port"):
        PortClaim("/dev/ttyACM97")


def test_a_port_is_claimed_once_and_again_when_it_is_free(port: str) -> None:
    claim = PortClaim(port)
    with pytest.raises(BusyError, match=re.escape(f"port {port} is in use")):
        PortClaim(port)
    claim.free()
    claim.free()
    PortClaim(port).free()


def test_a_program_that_locks_nothing_is_found_by_its_process(port: str) -> None:
    code = f"import os, sys; os.open({port!r}, os.O_RDWR | os.O_NOCTTY); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BusyError, match=f"in use by process {other.pid} "):
            PortClaim(port)
        other.communicate()
    PortClaim(port).free()
