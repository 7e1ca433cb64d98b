"""Replicas, Serve's controller and its proxies killed under load: what clients see of it, and how long it lasts.

    python benchmarks/serve_kills.py [--minutes 5] [--every 5] [--replicas 2] [--spares 2] [--seed 0] [--no-store]

Four clients of rlsvc (two over WebSocket, two over HTTP) each ask 20 times a second, and two raw ones beside them (of
httpx and websockets) that connect anew after a failure and ask nothing twice. A replica, drawn at random, is killed
(SIGKILL) every 5 s; Serve's controller, HAProxy's manager, HAProxy itself and Serve's own proxy are killed once each. A
request fails when it raises, or when its actions are not those that its seed and step give. The figure is the failures
of rlsvc's clients.

`--replicas` are needed, `--spares` run warm beside them: Serve has no other kind of spare. It is back in full when as
many replicas as are needed are alive and in HAProxy's table; when the spares are too is printed beside that. The time
is that of the first half, in which replicas alone die.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import numpy as np
import psutil
import websockets.sync.client
from common import QUIET, load_of_others, percentile_interval, write_result

from rlsvc.client import ClientOptions, PolicyClient
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.wire import pack, unpack
from rlsvc.runner import BaselineRunner

CONTRACT = Contract({"observation.state": Feature((24,), "float32")}, Feature((7,), "float32"), 10.0, 1, 16)
OBSERVATION = {"observation.state": np.random.default_rng(0).normal(size=24).astype(np.float32)}
POLICY = "random"
RATE_HZ = 20.0
OPTIONS = ClientOptions(timeout_s=60.0, retries=1000)
"""A proxy that was killed takes ten seconds to come back on two cores; within this time no request may fail."""
HAPROXY = "haproxy"
PARTS = {
    "controller": "ServeController",
    "HAProxy's manager": "HAProxyManager",
    "HAProxy": HAPROXY,
    "Serve's own proxy": "ProxyActor",
}
"""What is killed once, and what the command line of its process holds."""
REPLICA = f"ServeReplica:rlsvc:{POLICY}"

Ask = Callable[[int], np.ndarray]


@dataclass
class Seen:
    """What the clients of one kind saw.

    Attributes:
        seconds: of each request that was answered.
        failures: by what was raised.
    """

    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def requests(self) -> int:
        """Answered or not."""
        return len(self.seconds) + self.failures.total()


def rlsvc_client(url: str, transport: str, seed: int) -> tuple[Ask, Callable[[], None]]:
    """Our client, with its retry."""
    client = PolicyClient(url, transport=transport, options=OPTIONS)
    return lambda step: client.act(OBSERVATION, seed=seed, step=step).action, client.close


def raw_http(url: str, seed: int) -> tuple[Ask, Callable[[], None]]:
    """A POST, once."""
    client = httpx.Client(trust_env=False, timeout=OPTIONS.timeout_s)

    def ask(step: int) -> np.ndarray:
        body = {"observation": {key: value.tolist() for key, value in OBSERVATION.items()}, "seed": seed, "step": step}
        answer = client.post(f"http://{url}/v1/policies/{POLICY}/act", json=body)
        answer.raise_for_status()
        return np.asarray(answer.json()["action"], np.float32)

    return ask, client.close


def raw_websocket(url: str, seed: int) -> tuple[Ask, Callable[[], None]]:
    """A message over a connection that is not made anew."""
    socket = websockets.sync.client.connect(f"ws://{url}/", compression=None, proxy=None, legacy=True)
    socket.recv(OPTIONS.timeout_s)

    def ask(step: int) -> np.ndarray:
        socket.send(pack({"observation": OBSERVATION, "seed": seed, "step": step}))
        answer = socket.recv(OPTIONS.timeout_s)
        assert isinstance(answer, bytes)
        return unpack(answer)["action"]

    return ask, socket.close


class Robot(threading.Thread):
    """Asks at a rate until it is told to stop."""

    def __init__(self, make: Callable[[int], tuple[Ask, Callable[[], None]]], seed: int, seen: Seen) -> None:
        super().__init__(daemon=True)
        self._make, self._seed, self.seen = make, seed, seen
        self._expected = BaselineRunner(POLICY, CONTRACT)
        self.stop = threading.Event()

    def run(self) -> None:
        """Ask, check, count."""
        ask, close = None, lambda: None
        step, next_at = 0, time.monotonic()
        while not self.stop.wait(max(0.0, next_at - time.monotonic())):
            next_at = max(next_at + 1 / RATE_HZ, time.monotonic())
            begun = time.monotonic()
            try:
                if ask is None:
                    ask, close = self._make(self._seed)
                action = ask(step)
                if not np.array_equal(action, self._answer(step)):
                    raise ValueError("other actions than its seed and step give")
            except Exception as error:
                self.seen.failures[f"{type(error).__name__}: {str(error)[:80]}"] += 1
                close()
                ask, close = None, lambda: None
            else:
                self.seen.seconds.append(time.monotonic() - begun)
            step += 1
        close()

    def _answer(self, step: int) -> np.ndarray:
        batch = {key: value[None, None] for key, value in OBSERVATION.items()}
        return self._expected.act(batch, np.array([self._seed]), np.array([step])).action[0]


def processes(title: str) -> list[psutil.Process]:
    """Those of this Ray whose command line holds a text."""
    found = []
    # HAProxy outlives its manager, and is nobody's child then; its files' folder is this server's own.
    own = title == HAPROXY
    title = os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] if own else title
    for process in psutil.process_iter() if own else psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Watch(threading.Thread):
    """How many replicas are alive and in HAProxy's table, ten times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, int]] = []
        self.stop = threading.Event()

    def run(self) -> None:
        """Look."""
        url = f"http://127.0.0.1:{os.environ['RAY_SERVE_HAPROXY_STATS_PORT']}/stats;csv"
        with httpx.Client(trust_env=False, timeout=5) as client:
            while not self.stop.wait(0.1):
                try:
                    table = csv.DictReader(io.StringIO(client.get(url).text.removeprefix("# ")))
                    up = sum(row["svname"].startswith("SERVE_REPLICA_") and row["status"] == "UP" for row in table)
                except httpx.HTTPError:
                    up = 0  # it is down, or being started anew
                self.samples.append((time.monotonic(), min(up, len(processes(REPLICA)))))

    def back(self, killed: list[float], count: int) -> list[float]:
        """Seconds from each of these moments until so many replicas are there."""
        waits = []
        for moment in killed:
            later = [at for at, there in self.samples if at >= moment and there >= count]
            waits.append(later[0] - moment if later else float("inf"))
        return waits


def kill(minutes: float, every: float, seed: int, say: Callable[[str], None]) -> tuple[list[float], int]:
    """Kill for so long; the moments at which a replica died, and how many of them came before another part's end."""
    rng, killed = np.random.default_rng(seed), []
    begun = time.monotonic()
    end = begun + minutes * 60
    # In the second half, so that the first one tells what the loss of replicas alone costs.
    parts = {begun + minutes * 60 * (0.5 + 0.12 * i): name for i, name in enumerate(PARTS)}
    next_at, alone = begun + every, 0
    while next_at < end:
        time.sleep(max(0.0, next_at - time.monotonic()))
        next_at += every
        for moment in [moment for moment in parts if moment <= time.monotonic()]:
            name = parts.pop(moment)
            victims = processes(PARTS[name])
            for victim in victims:
                victim.kill()
            say(f"{time.monotonic() - begun:.0f} s: {name} killed ({len(victims)} processes)")
        if replicas := processes(REPLICA):
            replicas[int(rng.integers(len(replicas)))].kill()
            killed.append(time.monotonic())
            alone += len(parts) == len(PARTS)
    if parts:
        raise RuntimeError(f"too short: {', '.join(parts.values())} was not killed")
    return killed, alone


def main() -> int:
    """Serve, kill, count, store; exit code 1 when a client of rlsvc saw a failure."""
    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.haproxy import free_ports

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills of replicas")
    parser.add_argument("--replicas", type=int, default=2, help="needed")
    parser.add_argument("--spares", type=int, default=2, help="warm, beside those needed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only, as with fewer than 5 minutes")
    args = parser.parse_args()
    say = partial(print, flush=True)
    load = load_of_others()
    (port,) = free_ports(1)
    url, total = f"127.0.0.1:{port}", args.replicas + args.spares
    policy = partial(BaselineRunner, POLICY, CONTRACT)
    ours, raw, watch = Seen(), Seen(), Watch()
    makers: list[tuple[Any, Seen]] = [(partial(rlsvc_client, url, kind), ours) for kind in ("ws", "http", "ws", "http")]
    makers += [(partial(raw_http, url), raw), (partial(raw_websocket, url), raw)]
    deployment = Deployment(POLICY, policy, port=port, replicas=total, cpus=0.1)
    with ExitStack() as stack:
        stack.enter_context(ray_for_serving(deployment))
        start(deployment)
        robots = [Robot(make, seed, seen) for seed, (make, seen) in enumerate(makers)]
        for thread in (watch, *robots):
            thread.start()
        killed, alone = kill(args.minutes, args.every, args.seed, say)
        time.sleep(30)  # the last ones are to come back too
        for thread in (*robots, watch):
            thread.stop.set()
        for thread in (*robots, watch):
            thread.join(OPTIONS.timeout_s + 10)
            if thread.is_alive():
                raise RuntimeError("a client never came back: its deadline does not hold")
    for name, seen in (("rlsvc.client", ours), ("raw clients", raw)):
        p50, p99 = np.percentile(np.asarray(seen.seconds) * 1e3, [50, 99])
        say(
            f"{name}: {seen.requests} requests, {seen.failures.total()} failed; p50 {p50:.1f} ms, p99 {p99:.0f} ms, "
            f"longest {max(seen.seconds):.1f} s"
        )
        for what, count in seen.failures.most_common():
            say(f"  {count}: {what}")
    say(f"{len(killed)} replicas killed")
    needed = watch.back(killed[:alone], args.replicas)
    for when, moments in (
        ("replicas alone die", killed[:alone]),
        ("proxies and the controller die too", killed[alone:]),
    ):
        for what, count in ((f"{args.replicas} replicas", args.replicas), (f"all {total}", total)):
            p50, p99 = np.percentile(watch.back(moments, count), [50, 99])
            say(f"where {when}: {what} are there again after p50 {p50:.2f} s, p99 {p99:.2f} s")
    if not args.no_store and args.minutes >= 5:
        write_result(
            "kills_failed_requests",
            ours.failures.total() / ours.requests * 10_000,
            "count of 10k",
            peer="raw clients without retry",
            peer_value=raw.failures.total() / raw.requests * 10_000,
            seeds=[args.seed],
            packages=("rlsvc", "ray", "websockets", "httpx"),
        )
        if load <= QUIET:
            value, low, high = percentile_interval(needed, 99)
            write_result("kills_back_p99_s", value, "s", low=low, high=high, seeds=[args.seed], packages=("ray",))
        else:
            say(f"others load this machine ({load:.1f}): the times are not stored")
    return 1 if ours.failures else 0


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    sys.exit(main())
