"""How long an arm goes on after the link to its policy is lost, beyond the expiry of its last command.

    python benchmarks/deadman.py --trials 1000

A policy is served in a process of its own; the robot's process asks it ahead over a real connection, through a proxy,
and commands a guarded arm at 30 Hz. Then, in turn: the server is stopped (SIGSTOP); the connection goes half open (the
proxy takes all and passes nothing on); the server is killed. Once the arm has stopped, the link is mended, and commands
come again: none may reach the arm until a person resumes it. The arm is a driver that writes down when it is sent and
stopped; what is counted begins at its last command and ends at its stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
from common import percentile_interval, write_result

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.core.contract import Contract, Feature
from rlsvc.robots.api import Reading, Stopper
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.robots.handover import Handover
from rlsvc.robots.operator import Operator
from rlsvc.robots.station import Station
from rlsvc.spec.guard import GuardSpec

NAMES = ("shoulder.pos", "elbow.pos")
STATE, ACTION = Feature((2,), "float32", "rad", NAMES), Feature((2,), "float32", "rad", NAMES)
CONTRACT = Contract({"observation.state": STATE}, ACTION, 30.0, 1, 4)
SPEC = GuardSpec(
    low=(-1, -1), high=(1, 1), velocity=(2, 2), acceleration=(50, 50), step=(1, 1), workspace=None, time_to_live_s=0.25,
    expiry_s=0.1, torque="hold", on_limit="clip",
)  # fmt: skip
FAULTS = ("server stopped", "half open", "server stopped", "half open", "server killed")
PACKAGES = ("rlsvc", "websockets", "uvicorn", "numpy")


class Arm:
    """Writes down when it was last sent and when it was stopped."""

    def __init__(self) -> None:
        self.observation, self.action = {"observation.state": STATE}, ACTION
        self.sent: list[float] = []
        self.stopped: list[float] = []

    def connect(self) -> None:
        """Nothing to open."""

    def read(self) -> Reading:
        """It stands at zero."""
        return Reading({"observation.state": np.zeros(2, np.float32)}, {"observation.state": time.monotonic()})

    def send(self, command: np.ndarray) -> None:
        """Write it down."""
        self.sent.append(time.monotonic())

    def stop(self, torque: str) -> None:
        """Write it down."""
        self.stopped.append(time.monotonic())

    def close(self) -> None:
        """Nothing to close."""

    def stopper(self) -> Stopper:
        """From outside nothing is there; the supervisor is not what is measured."""
        return Stopper("builtins:dict")


def serve(port: int) -> None:
    """A policy that holds still."""
    import uvicorn

    from rlsvc.runner import BaselineRunner
    from rlsvc.serve.app import build_app
    from rlsvc.serve.service import PolicyService
    from rlsvc.serve.settings import ServeSettings

    service = PolicyService("still", BaselineRunner("zero", CONTRACT), ServeSettings())
    uvicorn.run(build_app(service), host="127.0.0.1", port=port, log_level="error")


def proxy(port: int, target: int) -> None:
    """Pass everything on; SIGUSR1 passes nothing on, SIGUSR2 does again and drops the connections of before."""

    async def run() -> None:
        silent, open_ones = False, set[asyncio.StreamWriter]()

        def go_silent() -> None:
            nonlocal silent
            silent = True

        def speak() -> None:
            nonlocal silent
            silent = False
            for writer in list(open_ones):
                writer.close()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    if not silent:
                        writer.write(data)
                        await writer.drain()
            writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                up, down = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            both = {writer, down}
            open_ones.update(both)
            await asyncio.gather(pass_on(reader, down), pass_on(up, writer))
            open_ones.difference_update(both)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, go_silent)
        loop.add_signal_handler(signal.SIGUSR2, speak)
        server = await asyncio.start_server(accept, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(run())


class Link:
    """The server and the proxy, and what goes wrong with them."""

    def __init__(self) -> None:
        self.server_port, self.port = free_port(), free_port()
        self._proxy = self._start("--proxy", self.port, self.server_port)
        self._server = self._start("--serve", self.server_port)

    @staticmethod
    def _start(*arguments: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, *map(str, arguments)])

    def lose(self, fault: str) -> None:
        """Inject."""
        if fault == "half open":
            self._proxy.send_signal(signal.SIGUSR1)
        else:
            self._server.send_signal(signal.SIGSTOP if fault == "server stopped" else signal.SIGKILL)

    def mend(self, fault: str) -> None:
        """As before."""
        if fault == "half open":
            self._proxy.send_signal(signal.SIGUSR2)
        elif fault == "server stopped":
            self._server.send_signal(signal.SIGCONT)
        else:
            self._server.wait()
            self._server = self._start("--serve", self.server_port)

    def close(self) -> None:
        """End both."""
        for process in (self._server, self._proxy):
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Loop:
    """The robot's process: a thread that observes, asks and commands, whatever happens to the link."""

    def __init__(self, robot: GuardedRobot, port: int) -> None:
        self.robot, self._port = robot, port
        self._client: PolicyClient | None = None
        self._operator = Operator(robot)
        self._station = Station(robot, self._operator, rate_hz=30.0, max_skew_s=1.0)
        self._handover = Handover(self._ask, execute=3)
        self._over = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _ask(self, observation: Any, tick: int) -> np.ndarray:
        if self._client is None:
            options = ClientOptions(timeout_s=1.0, connect_timeout_s=1.0, retries=0)
            self._client = PolicyClient(f"127.0.0.1:{self._port}", options=options)
        try:
            return self._client.act(observation, step=tick % 2**31).action
        except Exception:
            self._client.close()
            self._client = None
            raise

    def _run(self) -> None:
        self._station.begin()
        while not self._over.is_set():
            reading = self._station.observe()
            try:
                planned = self._handover.command(
                    reading.values, reading.stamps["observation.state"], self._station.pacer.tick
                )
            except Exception:
                self._handover.reset()
                continue
            step = self._station.act(planned, reading, "policy")
            if step.verdict is not None and step.verdict.refused == "stopped":
                self.refused += 1

    def resume(self) -> None:
        """As a person would."""
        self._operator.resume("the benchmark, in a person's place")
        self.robot.start()

    def close(self) -> None:
        """End."""
        self._over.set()
        self._thread.join(10)


def wait_until(done: Any, seconds: float, what: str) -> None:
    """Wait, or fail."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {seconds:g} s")
        time.sleep(0.001)


def run(trials: int, seed: int) -> tuple[dict[str, list[float]], int]:
    """By fault, s from the expiry of the last command to the stop; commands that reached a stopped arm."""
    rng, arm, link = np.random.default_rng(seed), Arm(), Link()
    beyond: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    moved_again = 0
    try:
        with GuardedRobot(f"deadman-{os.getpid()}", arm, SPEC, 30.0) as robot:
            loop = Loop(robot, link.port)
            trial = 0
            while trial < trials:
                fault = FAULTS[trial % len(FAULTS)]
                # Commands flow again, whether or not the wait for the server stopped the arm meanwhile.
                deadline = time.monotonic() + 60
                count = len(arm.sent)
                while len(arm.sent) < count + 5:
                    if robot.stopped is not None:
                        loop.resume()
                        time.sleep(0.05)
                    if time.monotonic() > deadline:
                        raise SystemExit("no commands for a minute")
                    time.sleep(0.005)
                time.sleep(rng.uniform(0, 0.15))
                if robot.stopped is not None:
                    continue
                link.lose(fault)
                wait_until(lambda: robot.stopped is not None, 10, fault)
                wait_until(lambda: arm.stopped and arm.stopped[-1] > arm.sent[-1], 10, fault)
                sent = len(arm.sent)
                beyond[fault].append(arm.stopped[-1] - arm.sent[-1] - SPEC.expiry_s)
                link.mend(fault)
                refused = loop.refused
                wait_until(lambda refused=refused: loop.refused > refused, 60, f"commands after: {fault}")
                moved_again += len(arm.sent) - sent
                trial += 1
                if trial % 50 == 0:
                    print(f"{trial} trials", flush=True)
            loop.close()
    finally:
        link.close()
    return beyond, moved_again


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--proxy", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)
    if args.proxy:
        return proxy(*args.proxy)
    beyond, moved_again = run(args.trials, args.seed)
    everything = [x * 1e3 for values in beyond.values() for x in values]
    for fault, values in beyond.items():
        p50, p99 = np.percentile(np.array(values) * 1e3, [50, 99])
        most = max(values) * 1e3
        print(f"{fault}: {len(values)} trials, beyond the expiry p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {most:.2f} ms")
    p99, low, high = percentile_interval(everything, 99)
    print(f"all {len(everything)}: p99 {p99:.2f} ms [{low:.2f}, {high:.2f}], at most {max(everything):.2f} ms")
    print(f"commands that reached a stopped arm: {moved_again}")
    if moved_again:
        raise SystemExit(1)
    if len(everything) >= 1000 and not args.no_store:
        write_result("deadman_p99_over_expiry_ms", p99, "ms", low=low, high=high, seeds=[args.seed], packages=PACKAGES)
        write_result("deadman_max_over_expiry_ms", max(everything), "ms", seeds=[args.seed], packages=PACKAGES)
    return None


if __name__ == "__main__":
    main()
