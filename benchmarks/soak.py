"""A served policy at half its peak rate for half an hour: memory and latency stay what they were.

    python benchmarks/soak.py [--minutes 30] [--peak-seconds 20] [--clients 8] [--no-store]

First clients ask as fast as they are answered: that is the peak. Then they ask at half of it, each at an even pace,
some over WebSocket and some over HTTP. Every five seconds the resident memory of the replica, HAProxy, its manager and
Serve's controller is read. The slope is that of a straight line through what was read after the first tenth of the
time; the drift is a percentile of the last third's latencies over that of the first third's.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial

import numpy as np
from common import QUIET, load_of_others, write_result
from serve_kills import CONTRACT, HAPROXY, OBSERVATION, POLICY, REPLICA, processes

from rlsvc.client import PolicyClient
from rlsvc.runner import BaselineRunner

PARTS = {
    "replica": REPLICA,
    "HAProxy": HAPROXY,
    "HAProxy's manager": "HAProxyManager",
    "Serve's own proxy": "ProxyActor",
    "controller": "ServeController",
}
"""What is watched, and what the command line of its process holds."""
EVERY_S = 5.0
PACKAGES = ("rlsvc", "ray", "uvicorn", "websockets", "httpx")


class Robot(threading.Thread):
    """Asks until a moment, at a rate or as fast as it is answered."""

    def __init__(self, url: str, number: int, rate_hz: float | None, seconds: float) -> None:
        super().__init__(daemon=True)
        self._client = PolicyClient(url, transport=("ws", "http")[number % 2])
        self._seed, self._rate_hz, self._seconds = number, rate_hz, seconds
        self.asked: list[tuple[float, float]] = []
        """Seconds since the start, and seconds until the answer."""
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Ask; a failure ends it."""
        begun, step = time.monotonic(), 0
        try:
            with self._client as client:
                while (at := time.monotonic() - begun) < self._seconds:
                    if self._rate_hz is not None and (early := step / self._rate_hz - at) > 0:
                        time.sleep(early)
                        at += early
                    client.act(OBSERVATION, seed=self._seed, step=step)
                    self.asked.append((at, time.monotonic() - begun - at))
                    step += 1
        except BaseException as problem:
            self.problem = problem


def drive(url: str, clients: int, rate_hz: float | None, seconds: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Ask with so many clients.

    Returns:
        [N, 2] seconds since the start and latency of each request, and by part of the server [M, 2] seconds and MiB.
    """
    robots = [Robot(url, i, None if rate_hz is None else rate_hz / clients, seconds) for i in range(clients)]
    memory: dict[str, list[tuple[float, float]]] = {name: [] for name in PARTS}
    watched = {name: processes(title) for name, title in PARTS.items()}
    begun = time.monotonic()
    for robot in robots:
        robot.start()
    while (at := time.monotonic() - begun) < seconds:
        for name, found in watched.items():
            memory[name].append((at, sum(process.memory_info().rss for process in found) / 2**20))
        time.sleep(min(EVERY_S, seconds - at))
    for robot in robots:
        robot.join(60)
        if robot.problem is not None:
            raise robot.problem
    asked = np.concatenate([np.asarray(robot.asked) for robot in robots])
    return asked[asked[:, 0].argsort()], {name: np.asarray(rows) for name, rows in memory.items()}


def slope(rows: np.ndarray) -> float:
    """MiB an hour, of [M, 2] seconds and MiB after the first tenth of the time."""
    later = rows[rows[:, 0] > rows[-1, 0] / 10]
    return float(np.polyfit(later[:, 0] / 3600, later[:, 1], 1)[0])


def drift(asked: np.ndarray, q: float) -> tuple[float, float, float]:
    """A percentile of the latencies of the last third over that of the first; and both, in ms."""
    third = asked[-1, 0] / 3
    first, last = (
        float(np.percentile(asked[rows, 1], q)) * 1e3 for rows in (asked[:, 0] < third, asked[:, 0] >= 2 * third)
    )
    return last / first, first, last


def main() -> None:
    """Find the peak, hold half of it, print, store."""
    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.haproxy import free_ports

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--peak-seconds", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--no-store", action="store_true", help="print only, as with less than 30 minutes")
    args = parser.parse_args()
    load = load_of_others()
    (port,) = free_ports(1)
    deployment = Deployment(POLICY, partial(BaselineRunner, POLICY, CONTRACT), port=port)
    with ExitStack() as stack:
        stack.enter_context(ray_for_serving(deployment))
        start(deployment)
        url = f"127.0.0.1:{port}"
        peak = len(drive(url, args.clients, None, args.peak_seconds)[0]) / args.peak_seconds
        print(f"peak: {peak:.0f} requests/s of {args.clients} clients", flush=True)
        asked, memory = drive(url, args.clients, peak / 2, args.minutes * 60)
    rate = len(asked) / (args.minutes * 60)
    print(f"{len(asked)} requests, {rate:.0f} a second (asked for {peak / 2:.0f}), none failed")
    slopes = {name: slope(rows) for name, rows in memory.items()}
    for name, rows in memory.items():
        print(f"{name}: {rows[0, 1]:.1f} MiB, at the end {rows[-1, 1]:.1f}; {slopes[name]:+.1f} MiB an hour")
    drifts = {q: drift(asked, q) for q in (50, 99)}
    for q, (ratio, first, last) in drifts.items():
        print(f"p{q}: first third {first:.2f} ms, last third {last:.2f} ms, {ratio:.3f} of it")
    if args.no_store or args.minutes < 30:
        return
    write_result("soak_memory_mib_per_hour", max(slopes.values()), "MiB/h, the steepest process", packages=PACKAGES)
    if load <= QUIET:
        for q, (ratio, _, _) in drifts.items():
            write_result(f"soak_latency_drift_p{q}", ratio, "last third over first third", packages=PACKAGES)
    else:
        print(f"others load this machine ({load:.1f}): the drift is not stored")


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    sys.exit(main())
