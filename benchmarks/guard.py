"""Commands at a guarded robot, random and hostile ones, and how many reach it that should not have.

    python benchmarks/guard.py --commands 10000000

Every command goes the whole way: lease, guard, watchdog, supervisor, driver, on a clock that the script moves. The
driver is a judge that was written apart from the guard: for each command that arrives it works out anew, joint by
joint in plain numbers, whether it was allowed, and counts those that were not. The commands: walks within the limits,
jumps, the limits themselves and their neighbours, NaN, infinity, denormals, huge numbers, wrong shapes and types, too
old, from the future, too soon, after pauses, from who does not hold the lease, with an arm that is held up or pushed.
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import os
import time
from typing import Any

import numpy as np
from common import write_result

from rlsvc.core.contract import Feature
from rlsvc.robots.api import Reading, Stopper
from rlsvc.robots.guarded import GuardedRobot
from rlsvc.spec.guard import GuardSpec

JOINTS, RATE = 6, 30.0
NAMES = tuple(f"joint_{i}.pos" for i in range(JOINTS))
LINKS = (0.12, 0.14)
LIMITS: dict[str, Any] = {
    "low": (-1.9, -1.7, -1.7, -1.6, -2.7, 0.0), "high": (1.9, 1.7, 1.6, 1.6, 2.8, 1.7),
    "velocity": (2.0, 2.0, 2.5, 3.0, 4.0, 5.0), "acceleration": (20.0, 15.0, 25.0, 30.0, 60.0, 80.0),
    "step": (0.3, 0.3, 0.3, 0.4, 0.5, 0.6),
    "workspace": {
        "model": "-", "sites": ("tool",), "low": (-0.2, -0.25, -1.0), "high": (0.3, 0.25, 1.0), "unit": "rad",
    },
    "time_to_live_s": 0.5, "expiry_s": 2.0, "torque": "hold",
}  # fmt: skip
EDGE = 1e-9
"""Relative error of the judge's own arithmetic."""


def tool(joints: np.ndarray) -> np.ndarray:
    """[1, 3] m: a planar arm of the first two joints."""
    a, b = joints[0], joints[0] + joints[1]
    x, y = LINKS[0] * math.cos(a) + LINKS[1] * math.cos(b), LINKS[0] * math.sin(a) + LINKS[1] * math.sin(b)
    return np.array([[x, y, 0.0]])


class Judge:
    """A driver that says of each command whether it may have come."""

    def __init__(self) -> None:
        self.observation = {"observation.state": Feature((JOINTS,), "float32", "rad", NAMES)}
        self.action = Feature((JOINTS,), "float32", "rad", NAMES)
        self.measured = [0.0] * JOINTS
        self.now = self.answers = 0.0
        self.may_command = False
        self.last, self.speed, self.last_at = list(self.measured), [0.0] * JOINTS, -math.inf
        self.unsafe: collections.Counter[str] = collections.Counter()
        self.arrived = 0

    def connect(self) -> None:
        """Nothing to open."""

    def read(self) -> Reading:
        """Where the arm is."""
        state = np.array(self.measured, np.float64)
        return Reading({"observation.state": state}, {"observation.state": self.now})

    def begin(self) -> None:
        """Commands begin where the arm is."""
        self.last, self.speed, self.last_at = list(self.measured), [0.0] * JOINTS, -math.inf

    def send(self, command: np.ndarray) -> None:
        """Judge a command."""
        self.arrived += 1
        found = set(self._faults([float(x) for x in command]))
        self.unsafe.update(found)
        self.unsafe["commands"] += bool(found)

    def _faults(self, command: list[float]) -> list[str]:
        faults = []
        if len(command) != JOINTS:
            return ["shape"]
        if any(x != x or x in (math.inf, -math.inf) for x in command):
            return ["finite"]
        if not (self.answers <= self.now and self.now - self.answers <= LIMITS["time_to_live_s"]):
            faults.append("stale")
        if not self.may_command:
            faults.append("lease")
        passed = self.now - self.last_at
        if passed < 0.25 / RATE * (1 - EDGE):
            faults.append("soon")
        rests = passed > 2.0 / RATE
        dt = 2.0 / RATE if rests else passed
        for i, x in enumerate(command):
            if x < LIMITS["low"][i] or x > LIMITS["high"][i]:
                faults.append("position")
            if abs(x - self.measured[i]) > LIMITS["step"][i] * (1 + EDGE):
                faults.append("step")
            speed = (x - self.last[i]) / dt
            if abs(speed) > LIMITS["velocity"][i] * (1 + EDGE):
                faults.append("velocity")
            before = 0.0 if rests else self.speed[i]
            if abs(speed - before) > LIMITS["acceleration"][i] * dt * (1 + EDGE) + EDGE:
                faults.append("acceleration")
            self.speed[i] = speed
        end = LINKS[0] * complex(math.cos(command[0]), math.sin(command[0]))
        end += LINKS[1] * complex(math.cos(command[0] + command[1]), math.sin(command[0] + command[1]))
        box = LIMITS["workspace"]
        if not (box["low"][0] <= end.real + EDGE and end.real - EDGE <= box["high"][0]):
            faults.append("workspace")
        if not (box["low"][1] <= end.imag + EDGE and end.imag - EDGE <= box["high"][1]):
            faults.append("workspace")
        self.last, self.last_at = command, self.now
        return faults

    def stop(self, torque: str) -> None:
        """Stand still."""

    def close(self) -> None:
        """Nothing to close."""

    def stopper(self) -> Stopper:
        """From outside: nothing that moves is there."""
        return Stopper("builtins:dict")


class Clock:
    """Moved by the script; far ahead of the real one, so that only the guarded robot's own deadlines count."""

    def __init__(self) -> None:
        self.now = time.monotonic() + 1e6

    def __call__(self) -> float:
        """Now, s."""
        return self.now


def hostile(rng: np.random.Generator, judge: Judge) -> Any:
    """A command: most are numbers of the right shape, the rest anything."""
    kind, last = rng.integers(20), np.array(judge.last)
    low, high = np.array(LIMITS["low"]), np.array(LIMITS["high"])
    if kind < 7:
        return last + rng.normal(0, 0.02, JOINTS)
    if kind < 9:
        return rng.uniform(low - 0.5, high + 0.5)
    if kind < 11:
        edge = np.where(rng.random(JOINTS) < 0.5, low, high)
        return np.nextafter(edge, rng.choice([-np.inf, np.inf]))
    if kind < 13:  # as fast as allowed, and a little more
        return last + np.array(LIMITS["velocity"]) / RATE * rng.choice([-1.0, 1.0], JOINTS) * rng.choice([1.0, 1.0001])
    if kind == 13:
        return np.where(rng.random(JOINTS) < 0.2, rng.choice([np.nan, np.inf, -np.inf]), last)
    if kind == 14:
        return last * rng.choice([1e300, -1e300, 5e-324, 1e16])
    if kind == 15:
        return rng.normal(size=int(rng.integers(0, 12)))
    if kind == 16:
        return (last + 0.01).astype((np.float32, np.float16)[rng.integers(2)])
    if kind == 17:
        return [*last[:-1], float("nan")] if rng.random() < 0.5 else last.tolist()
    if kind == 18:
        odd: list[Any] = [
            "stop",
            None,
            {},
            [last.tolist()],
            [None] * JOINTS,
            b"\x00" * 24,
            [True] * JOINTS,
            7,
            last * 1j,
        ]
        return odd[int(rng.integers(len(odd)))]
    return rng.integers(-3, 4, JOINTS)


def run(seed: int, commands: int, on_limit: str) -> tuple[int, collections.Counter[str], collections.Counter[str]]:
    """Arrived, unsafe by kind, and what the guard counted."""
    rng, judge, clock = np.random.default_rng(seed), Judge(), Clock()
    spec = GuardSpec(**LIMITS, on_limit=on_limit)  # type: ignore[arg-type]
    judge.now = clock.now
    with GuardedRobot(f"judge-{os.getpid()}", judge, spec, RATE, sites=tool, clock=clock) as robot:
        robot.start()
        judge.begin()
        mine, theirs = robot.lease.take("a policy", is_person=False), -1
        for _ in range(commands):
            draw = rng.random(4)
            clock.now += (1 / RATE) * (1.0 if draw[0] < 0.5 else rng.choice([0.0, 0.1, 0.3, 0.9, 1.1, 1.9, 2.1, 20.0]))
            age = 0.02 if draw[1] < 0.8 else rng.choice([0.0, 0.4999, 0.5, 0.5001, 3.0, -0.001, np.nan, np.inf])
            # The arm follows, is held up, or is pushed.
            follow = 0.5 if draw[2] < 0.8 else rng.choice([0.0, 1.0])
            judge.measured = [m + follow * (x - m) for m, x in zip(judge.measured, judge.last, strict=True)]
            if draw[2] > 0.995:
                judge.measured[int(rng.integers(JOINTS))] += float(rng.normal(0, 0.3))
            judge.now, judge.answers, judge.may_command = clock.now, clock.now - float(age), bool(draw[3] < 0.9)
            robot.read()
            token = mine.token if judge.may_command else theirs
            robot.command(hostile(rng, judge), answers=judge.answers, token=token)
            if robot.stopped is not None:
                robot.resume("the benchmark")
                judge.measured = np.clip(judge.measured, LIMITS["low"], LIMITS["high"]).tolist()
                judge.measured[:2] = [0.0, 0.0]
                robot.start()
                judge.begin()
        return judge.arrived, judge.unsafe, robot.guard.counts


def main() -> None:
    """Run in as many processes as there are cores, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=10_000_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true")
    args = parser.parse_args()
    begin, each = time.monotonic(), math.ceil(args.commands / args.processes)
    jobs = [(args.seed + i, each, ("clip", "refuse")[i % 2]) for i in range(args.processes)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        results = pool.starmap(run, jobs)
    arrived = sum(result[0] for result in results)
    unsafe: collections.Counter[str] = sum((result[1] for result in results), collections.Counter())
    counts: collections.Counter[str] = sum((result[2] for result in results), collections.Counter())
    total = each * args.processes
    took = time.monotonic() - begin
    print(f"{total} commands in {took:.0f} s, {arrived} reached the robot, {unsafe['commands']} unsafe")
    for name, count in sorted(counts.items()):
        print(f"  {name}: {count}")
    for name, count in sorted(unsafe.items()):
        print(f"  UNSAFE {name}: {count}")
    if total >= 10_000_000 and not args.no_store:
        seeds = [seed for seed, _, _ in jobs]
        write_result(
            "guard_unsafe_commands", float(unsafe["commands"]), "count of 10M", seeds=seeds, packages=("rlsvc", "numpy")
        )
    raise SystemExit(int(unsafe["commands"] > 0))


if __name__ == "__main__":
    main()
