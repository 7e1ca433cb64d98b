"""Eight robots that ask one served pi0 at once, beside one robot alone: chunks a second, and how long they wait.

    python benchmarks/pi0_robots.py [--robots 8] [--rounds 3] [--seconds 10] [--tiny]

The policy of pi0_latency.py (3.3 billion parameters drawn at random, bf16, two cameras, 50 actions in ten Euler steps)
behind Ray Serve on one GPU, in batches of up to so many requests. Each robot asks over WebSocket, with images of its
own, as fast as it is answered; one robot and all of them take turns in each round. The figures are the median round's
chunks a second, with those of one robot as the peer's, and the 95th percentile of a robot's wait. `--tiny` tries the
program on a CPU; nothing is stored then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from common import hardware, write_result
from serving_overhead import observation_of

from rlsvc.client import PolicyClient
from rlsvc.core.contract import Contract
from rlsvc.serve.deploy import Deployment, ray_for_serving, start
from rlsvc.serve.haproxy import free_ports
from rlsvc.serve.settings import ServeSettings

PACKAGES = ("rlsvc", "ray", "jax", "flax", "websockets", "numpy")
ONE = "one robot alone"


class RandomPi0:
    """Makes the policy in a replica, warm."""

    def __init__(self, batch: int, tiny: bool) -> None:
        self.folder, self.batch, self.tiny = str(Path(__file__).parent), batch, tiny

    def __call__(self) -> Any:
        """The runner."""
        sys.path.insert(0, self.folder)
        from pi0_latency import random_runner, spec_of

        runner = random_runner(spec_of(self.tiny), 2, (1, self.batch))
        runner.warm_up()
        return runner


class Robot:
    """A connection, and images of its own."""

    def __init__(self, url: str, number: int, contract: Contract) -> None:
        self.client, self.number, self.asked = PolicyClient(url), number, 0
        self.observation = observation_of(contract, number)

    def ask(self, end: float) -> list[float]:
        """Until a moment of `time.monotonic()`; the seconds of each answer that came before it."""
        took = []
        while True:
            begun = time.monotonic()
            self.client.act(self.observation, seed=self.number, step=self.asked)
            self.asked += 1
            now = time.monotonic()
            if now > end:
                return took
            took.append(now - begun)


def ask_all(robots: Sequence[Robot], seconds: float) -> list[float]:
    """The seconds of every answer."""
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(robots)) as pool:
        return [took for one in pool.map(lambda robot: robot.ask(end), robots) for took in one]


def main() -> None:
    """Serve, ask, print, store."""
    from pi0_latency import contract_of, spec_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--robots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each side in a round")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU; nothing is stored")
    args = parser.parse_args()
    print(hardware(not args.tiny), flush=True)
    (port,) = free_ports(1)
    deployment = Deployment(
        "pi0",
        RandomPi0(args.robots, args.tiny),
        port=port,
        gpus=0.0 if args.tiny else 1.0,
        settings=ServeSettings(max_batch=args.robots),
    )
    answers: dict[int, list[list[float]]] = {1: [], args.robots: []}
    with ExitStack() as stack:
        stack.enter_context(ray_for_serving(deployment))
        start(deployment)
        contract = contract_of(spec_of(args.tiny), 2)
        robots = [Robot(f"127.0.0.1:{port}", number, contract) for number in range(args.robots)]
        ask_all(robots, min(args.seconds, 3.0))
        for turn in range(args.rounds):
            for count, rounds in answers.items():
                rounds.append(ask_all(robots[:count], args.seconds))
                rate, wait = len(rounds[-1]) / args.seconds, 1e3 * np.percentile(rounds[-1], 95)
                print(f"round {turn + 1}, {count} at once: {rate:.1f} chunks/s, p95 {wait:.1f} ms", flush=True)
    rates = {count: [len(took) / args.seconds for took in rounds] for count, rounds in answers.items()}
    waits = {count: [1e3 * float(np.percentile(took, 95)) for took in rounds] for count, rounds in answers.items()}
    for name, unit, values in (
        (f"pi0_{args.robots}_robots_chunks_per_s", "chunks/s", rates),
        (f"pi0_{args.robots}_robots_p95_ms", "ms", waits),
    ):
        value, alone = statistics.median(values[args.robots]), statistics.median(values[1])
        print(f"{name}: {value:.1f}, {ONE}: {alone:.1f}")
        if not args.tiny:
            write_result(
                name, value, unit, low=min(values[args.robots]), high=max(values[args.robots]), peer=ONE,
                peer_value=alone, ratio=value / alone, gpu=True, packages=PACKAGES,
            )  # fmt: skip


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    main()
