"""The process that stops a robot when the one that drives it cannot: it was killed, stopped, or hangs.

It shares a page of memory with the driving process, which writes there until when it must have written again, by the
monotonic clock that all processes of a host share. When that moment has passed by a grace, which leaves the driving
process's own watchdog the first chance, or when the pipe between the two ends, the supervisor connects to the robot by
itself and stops it. From then on the page says so, and the driving process, if it comes back, sends nothing more.

`python -m rlsvc.robots.supervisor` is started by `Supervisor`; nobody starts it by hand.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from rlsvc.core.errors import UserError
from rlsvc.robots.api import Stopper, Torque

GRACE_S = 0.012
POLL_S = 0.01
TORN_S = 1e-4
START_TIMEOUT_S = 30.0
QUIT = b"q"


class Page:
    """The memory that both processes share: a deadline twice, and whether the robot was stopped.

    Each number is stored by one instruction, and both are compared, since a deadline that is read while it is half
    written would stop a robot that is well (struct.pack_into clears its bytes first).
    """

    def __init__(self, file: int) -> None:
        """Map the file, of one page."""
        self._memory = mmap.mmap(file, mmap.PAGESIZE)
        self._deadlines = memoryview(self._memory)[:16].cast("d")

    @property
    def deadline(self) -> float:
        """By time.monotonic(), s; infinity for none. Where the writer died between the two, the earlier one."""
        for _ in range(4):
            first, second = self._deadlines[0], self._deadlines[1]
            if first == second:
                return first
            time.sleep(TORN_S)
        return min(first, second)

    @deadline.setter
    def deadline(self, until: float) -> None:
        self._deadlines[0] = until
        self._deadlines[1] = until

    @property
    def stopped(self) -> bool:
        """Whether the supervisor has stopped the robot."""
        return self._memory[16] != 0

    @stopped.setter
    def stopped(self, value: bool) -> None:
        self._memory[16] = int(value)


class Supervisor:
    """The driving process's side.

    Consumes deadlines, produces at most one stop; waits for nobody. When it dies, `alive` says so.
    """

    def __init__(self, stopper: Stopper, torque: Torque) -> None:
        """Start the process; nothing is watched until `expect`.

        Raises:
            UserError: it cannot load what stops the robot.
        """
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            self._page = Page(file.fileno())
            self._page.deadline = math.inf
            what = {"path": stopper.path, "arguments": stopper.arguments, "torque": torque, "page": file.fileno()}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlsvc.robots.supervisor", json.dumps(what)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[file.fileno()],
                start_new_session=True,
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        if not ready or self._process.stdout.readline() != b"ready\n":
            self._process.kill()
            raise UserError(f"the supervisor of the robot does not start: it cannot load {stopper.path}")

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether it has stopped the robot since the last `reset`."""
        return self._page.stopped

    def expect(self, until: float) -> None:
        """Expect another call before this moment (s, time.monotonic()); infinity: expect none."""
        self._page.deadline = until

    def reset(self) -> None:
        """Watch anew after a stop."""
        self.expect(math.inf)
        self._page.stopped = False

    def close(self) -> None:
        """End the process without a stop."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(QUIT)
            self._process.stdin.close()
            self._process.wait(5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Watch until told to quit, or until the driving process is gone."""
    what = json.loads(sys.argv[1])
    # A person's Ctrl-C or a closed terminal ends the driving process; this one outlives it by a stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    stop = Stopper(what["path"], what["arguments"]).load()
    page = Page(what["page"])
    os.close(what["page"])
    print("ready", flush=True)  # noqa: T201 - the driving process waits for it

    def stop_it() -> None:
        page.stopped = True
        stop(**what["arguments"], torque=what["torque"])

    while True:
        until = page.deadline + GRACE_S
        left = min(max(until - time.monotonic(), 0.0), POLL_S)
        if select.select([0], [], [], left)[0]:
            if os.read(0, 1) != QUIT:
                _insist(stop_it)
            return
        if not page.stopped and time.monotonic() > page.deadline + GRACE_S:
            _insist(stop_it)


def _insist(stop: Callable[[], None], attempts: int = 50) -> None:
    """Try until it works: the bus may be in the middle of a word."""
    for attempt in range(attempts):
        try:
            stop()
            return
        except Exception as error:
            if attempt in (0, attempts - 1):
                what = "again" if attempt == 0 else f"given up after {attempts} attempts"
                print(f"the robot could not be stopped, {what}: {error}", file=sys.stderr, flush=True)  # noqa: T201
            time.sleep(0.02)


if __name__ == "__main__":
    main()
