"""A robot that can only be commanded through its guard, and that stops when commands stop.

Three things stop it, each without the others: the guard's own watchdog, a thread; the supervisor, a process, when this
one is dead or hangs; and every way out of the `with` block. A stop latches: nothing is sent until a person resumes.

This is not safety-rated (docs/safety.md): a robot that can hurt somebody needs a hardware emergency stop.

Letters: A action dimensions.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from rlsvc.core.errors import UserError
from rlsvc.robots.api import ConnectionLost, Driver, Reading
from rlsvc.robots.guard import Guard, Sites, Verdict
from rlsvc.robots.lease import Lease
from rlsvc.robots.lock import RobotLock
from rlsvc.robots.supervisor import Supervisor
from rlsvc.spec.guard import GuardSpec

log = logging.getLogger(__name__)
STATE = "observation.state"
BUS_WAIT_S = 0.01
"""A stop waits so long for a read or write that is under way, then connects by itself."""


@dataclass(frozen=True)
class Stop:
    """Why the robot stands still.

    Attributes:
        why: for a person.
        by: who stopped it: "watchdog", "supervisor", "program", or a person's name.
        at: time.monotonic(), s.
    """

    why: str
    by: str
    at: float


class GuardedRobot:
    """One robot, its guard, its watchdog and its supervisor.

    `connect`, then `start` before commands and `rest` after them, as often as episodes come, then `close`; as a context
    manager it connects and closes. Reads and commands come from one thread; `stop`, `resume` and the lease from any.

    Attributes:
        lease: who may command.
        guard: with its counts.
    """

    def __init__(
        self,
        robot: str,
        driver: Driver,
        spec: GuardSpec,
        rate_hz: float,
        *,
        sites: Sites | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is connected yet.

        Args:
            robot: its id; one process at a time drives it.
            driver: of its hardware.
            spec: its limits.
            rate_hz: at which commands are meant to come.
            sites: forward kinematics, needed where the limits have a workspace.
            clock: the robot's monotonic clock, s.

        Raises:
            UserError: as Guard.
        """
        self.robot, self.driver, self.spec, self.clock = robot, driver, spec, clock
        self.guard = Guard(spec, driver.action, rate_hz, sites)
        self.lease = Lease()
        self._lock = RobotLock(robot)
        self._bus = threading.RLock()
        self._supervisor: Supervisor | None = None
        self._watchdog: threading.Thread | None = None
        self._deadline = math.inf
        self._moved = threading.Condition()
        self._closing = False
        self._stop: Stop | None = None
        self._measured = np.zeros(0)
        self._joints: list[int] = []

    def connect(self) -> None:
        """Take the robot, connect to it, and start what stops it. Nothing moves.

        Raises:
            BusyError: another process drives it.
            UserError, ConnectionLost: as `Driver.connect`.
        """
        self._lock.take()
        try:
            self.driver.connect()
            self._joints = _joints_in_state(self.driver)
            self._supervisor = Supervisor(self.driver.stopper(), self.spec.torque)
        except BaseException:
            self.driver.close()
            self._lock.free()
            raise
        self._closing = False
        self._watchdog = threading.Thread(target=self._watch, name=f"watchdog of {self.robot}", daemon=True)
        self._watchdog.start()

    def reconnect(self) -> None:
        """Find a robot again that was lost; commands are let through after the next `start`.

        Raises:
            UserError, ConnectionLost: as `Driver.connect`.
        """
        with self._bus:
            self.guard.end()
            self._expect(math.inf)
            self.driver.close()
            self.driver.connect()

    def read(self) -> Reading:
        """The newest measurement. Raises ConnectionLost."""
        with self._bus:
            reading = self.driver.read()
        self._measured = self.positions(reading.values[STATE])
        return reading

    def positions(self, state: np.ndarray) -> np.ndarray:
        """[A] float64, the position of each action dimension in a measured `observation.state`."""
        return np.asarray(state)[self._joints].astype(np.float64)

    def start(self) -> Reading:
        """Let commands through: the robot's present position is where they begin.

        Raises:
            UserError: it is stopped, or stands outside its limits.
            ConnectionLost: it does not answer.
        """
        self._notice_supervisor()
        if self._stop is not None:
            raise UserError(
                f"robot '{self.robot}' was stopped by {self._stop.by} ({self._stop.why}); a person has to resume it"
            )
        reading = self.read()
        now = self.clock()
        self.guard.begin(self._measured, now)
        self._expect(now + self.spec.expiry_s)
        return reading

    def command(self, command: object, *, answers: float, token: int) -> Verdict:
        """Send a command, as far as the guard lets it.

        Args:
            command: [A] numbers, in the unit of the robot's action.
            answers: when the observation was captured that it answers, s, on this robot's clock.
            token: of the lease.

        Returns:
            What became of it. Only one that was sent keeps the watchdog from stopping the robot.

        Raises:
            ConnectionLost: it could not be sent; commands are let through again after the next `start`.
        """
        self._notice_supervisor()
        with self._bus:
            if self._stop is not None:
                self.guard.counts["refused: stopped"] += 1
                return Verdict(None, "stopped", why=self._stop.why)
            verdict = self.guard.check(
                command,
                now=self.clock(),
                answers=answers,
                measured=self._measured,
                holds_lease=self.lease.holds(token),
            )
            if verdict.sent is not None:
                try:
                    self.driver.send(verdict.sent)
                except ConnectionLost:
                    self.guard.end()
                    self._expect(math.inf)
                    raise
                self._expect(self.clock() + self.spec.expiry_s)
        return verdict

    def rest(self) -> None:
        """Expect no more commands until `start`: the robot holds where it is. Raises ConnectionLost."""
        with self._bus:
            self.guard.end()
            self._expect(math.inf)
            if self._stop is None:
                self.driver.stop("hold")

    def stop(self, why: str, by: str) -> None:
        """Stop it now, and until a person resumes; safe from any thread, and again."""
        self._stop = self._stop or Stop(why, by, self.clock())
        free = self._bus.acquire(timeout=BUS_WAIT_S)
        try:
            if not free:
                raise ConnectionLost("its connection is busy")
            self.driver.stop(self.spec.torque)
        except Exception as error:  # whatever a driver raises: the watchdog has to go on
            log.warning("robot '%s' is stopped over a connection of its own: %s", self.robot, error)
            self._stop_beside()
        finally:
            self.guard.end()
            self._expect(math.inf)
            if free:
                self._bus.release()

    @property
    def stopped(self) -> Stop | None:
        """Why it stands still; None while it does not."""
        self._notice_supervisor()
        return self._stop

    def resume(self, person: str) -> None:
        """End a stop; commands are let through after the next `start`.

        Raises:
            UserError: nobody is named: programs do not resume a robot.
        """
        if not person.strip():
            raise UserError("resume: a person has to say who resumes the robot")
        if self._stop is not None:
            log.info("robot '%s' is resumed by %s after: %s", self.robot, person, self._stop.why)
        if self._supervisor is not None:
            self._supervisor.reset()
        self._stop = None

    def close(self) -> None:
        """Stop by the rule of the specification, then disconnect. Never raises for a robot that is gone."""
        self._closing = True
        self._expect(math.inf)
        if self._watchdog is not None:
            self._watchdog.join()
            self._watchdog = None
        if self._supervisor is not None:
            with self._bus:
                self.guard.end()
                try:
                    self.driver.stop(self.spec.torque)
                except Exception as error:
                    log.warning("robot '%s' is stopped over a connection of its own: %s", self.robot, error)
                    self._stop_beside()
            self._supervisor.close()
            self._supervisor = None
        self.driver.close()
        self._lock.free()

    def __enter__(self) -> GuardedRobot:
        self.connect()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _expect(self, until: float) -> None:
        """Set the moment at which the watchdog stops the robot, and a little later the supervisor."""
        with self._moved:
            self._deadline = until
            self._moved.notify()
        if self._supervisor is not None:
            self._supervisor.expect(until)

    def _watch(self) -> None:
        """The watchdog.

        Consumes deadlines, produces stops; waits for nothing but time.
        """
        while not self._closing:
            with self._moved:
                left = self._deadline - self.clock()
                if left > 0:
                    self._moved.wait(min(left, 1.0))
                    continue
            self.stop(f"no command for {self.spec.expiry_s:g} s", "watchdog")

    def _notice_supervisor(self) -> None:
        supervisor = self._supervisor
        if supervisor is None or self._stop is not None:
            return
        if supervisor.stopped:
            self._stop = Stop("its process hung or was stopped", "supervisor", self.clock())
            # What this process may have sent in the moment in which it went on is taken back.
            self.stop(self._stop.why, self._stop.by)
        elif not supervisor.alive:
            self.stop("its supervisor is gone", "program")

    def _stop_beside(self) -> None:
        """Over a connection of its own, as the supervisor would."""
        try:
            stopper = self.driver.stopper()
            stopper.load()(**stopper.arguments, torque=self.spec.torque)
        except Exception as error:
            log.error("robot '%s' could not be stopped: %s; use its emergency stop", self.robot, error)


def _joints_in_state(driver: Driver) -> list[int]:
    """Where each action dimension is measured in the state.

    Raises:
        UserError: one is not.
    """
    state = driver.observation[STATE].names
    if not driver.action.names or (missing := [name for name in driver.action.names if name not in state]):
        raise UserError(
            f"driver: '{STATE}' has {', '.join(state) or 'no names'}; the guard needs the measured position of every "
            f"action: {', '.join(driver.action.names) or 'no names'}"
            + (f"; missing: {', '.join(missing)}" if driver.action.names else "")
        )
    return [state.index(name) for name in driver.action.names]
