"""Seeded faults in the rollout plane, and an independent ledger that says whether a transition was lost or doubled.

    python benchmarks/faults.py --faults 100

Two rollout workers on Ray collect from an environment that writes down every step it makes. Meanwhile workers are
killed (SIGKILL) and stopped (SIGSTOP), simulators raise or give NaN, chunks are sent again, and the driver's end is
played: the journal is closed without warning, cut within a record that was never acknowledged, and opened anew, with
new workers. Each fault must be followed by new chunks before the next one comes.

At the end every transition that was acknowledged (its chunk's `append` returned) must be in the journal and in a replay
that is built from it, once, and nothing may be there that no environment made. The longest time that the driver was
held up by a fault is printed: the learner takes chunks from it and waits no longer than that.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result
from faulty_env import LEDGER

HERE = Path(__file__).resolve().parent
KINDS = ("kill a worker", "stop a worker", "simulator fails", "chunk is sent again", "driver ends")


def main() -> int:
    """Inject, check, print; exit code 1 when something was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plane = Plane(Path(folder))
        try:
            counts = plane.run(args.faults, args.seed)
            lost, doubled, invented = plane.audit()
        finally:
            plane.close()
    survived = sum(counts.values())
    print(", ".join(f"{kind}: {counts[kind]}" for kind in KINDS))
    print(
        f"{survived} faults survived; {len(plane.acknowledged)} transitions acknowledged, {lost} lost, "
        f"{doubled} doubled, {invented} that no environment made; "
        f"the driver was held up for {plane.longest:.2f} s at most"
    )
    if lost or doubled or invented:
        return 1
    if not args.no_store:
        write_result("faults_survived", float(survived), "count", seeds=[args.seed], packages=("rlsvc", "ray"))
    return 0


class Plane:
    """Rollout workers, journal, and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        import ray

        from rlsvc.envs.make import make_env
        from rlsvc.spec.env import GymnasiumSpec
        from rlsvc.spec.rollout import RolloutSpec

        self.folder, self.ledger = folder, folder / "ledger"
        self.ledger.mkdir()
        os.environ[LEDGER] = str(self.ledger)
        sys.path.insert(0, str(HERE))
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            environment = {"env_vars": {LEDGER: str(self.ledger), "PYTHONPATH": path}}
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
        # Simulators fail on their own about once in 2,000 steps.
        self.env = GymnasiumSpec(id="rlsvc-faulty-v0", import_module="faulty_env", kwargs={"faults_per_step": 5e-4})
        self.spec = RolloutSpec(
            workers=2, envs_per_worker=2, mode="async", chunk_steps=16, cpus_per_worker=0.5, timeout_s=2.0,
            max_restarts=100_000,
        )  # fmt: skip
        probe = make_env(self.env)
        self.contract = probe.contract(1, 1)
        probe.close()
        self.acknowledged: set[tuple[int, int]] = set()
        self.longest, self.simulator_failures = 0.0, 0
        self._last: Any = None
        self._open()

    def _open(self) -> None:
        from rlsvc.data.journal import Journal
        from rlsvc.data.normalize import Normalizer
        from rlsvc.train.rollout import Acting, RayRollouts, next_incarnations

        self.journal = Journal(self.folder / "journal")
        acting = Acting({}, self.contract, Normalizer.from_contract(self.contract), "fp32")
        self.rollouts = RayRollouts(
            self.env, self.spec, acting, seed=0, incarnations=next_incarnations(self.journal, self.spec.workers)
        )

    def run(self, faults: int, seed: int) -> collections.Counter[str]:
        """Inject faults one after the other, each followed by work."""
        rng, counts = np.random.default_rng(seed), collections.Counter[str]()
        self._work(8)
        while sum(counts.values()) < faults:
            kind = KINDS[int(rng.integers(len(KINDS)))]
            worker = int(rng.integers(self.spec.workers))
            if kind in ("kill a worker", "stop a worker"):
                # Any moment of a chunk may be hit.
                time.sleep(float(rng.uniform(0, 0.05)))
                number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
                os.kill(self.pid(worker), number)
                self._work(6, worker)
            elif kind == "simulator fails":
                before = self.simulator_failures
                while self.simulator_failures == before:
                    self._work(4)
            elif kind == "chunk is sent again":
                length = len(self.journal)
                assert self.journal.append(self._last) <= length
                assert len(self.journal) == length
                self._work(2)
            else:
                self._driver_ends(rng)
                self._work(4)
            counts[kind] += 1
            print(f"{sum(counts.values())}: {kind}", flush=True)
        return counts

    def pid(self, worker: int) -> int:
        """Process of a worker."""
        import ray

        return ray.get(self.rollouts.actors[worker].pid.remote())

    def _work(self, chunks: int, worker: int | None = None) -> None:
        """Take in so many chunks, from one worker if it is named."""
        deadline = time.monotonic() + 120
        taken = 0
        while taken < chunks:
            if time.monotonic() > deadline:
                raise SystemExit("no chunk for 120 s: a fault was not survived")
            start = time.monotonic()
            self.rollouts.pump(1024, "random")
            arrived = self.rollouts.poll(0.2)
            self.longest = max(self.longest, time.monotonic() - start - 0.2)
            for one in arrived:
                self.journal.append(one.chunk)
                self.acknowledged |= transitions(one.chunk)
                self.simulator_failures += one.chunk.lost
                self._last = one.chunk
                taken += worker is None or one.chunk.worker == worker

    def _driver_ends(self, rng: np.random.Generator) -> None:
        """What a killed driver leaves: no more workers, and perhaps half a record at the end of the journal."""
        self.rollouts.close()
        self.journal.close()
        newest = max((self.folder / "journal").glob("*.journal"))
        whole = newest.read_bytes()
        with newest.open("ab") as file:
            file.write(whole[: int(rng.integers(0, 60))])
        self._open()

    def audit(self) -> tuple[int, int, int]:
        """Transitions that were acknowledged and are not there, that are there twice, and that nobody made."""
        from rlsvc.data.journal import Journal
        from rlsvc.data.replay import Replay
        from rlsvc.spec.replay import ReplaySpec

        self.journal.close()
        streams = self.spec.workers * self.spec.envs_per_worker
        schema = {**self.contract.observation, "action": self.contract.action}
        made = {
            tuple(int(number) for number in line.split())
            for file in self.ledger.glob("*.txt")
            for line in file.read_text().splitlines()
            if len(line.split()) == 2
        }
        with Journal(self.folder / "journal", read_only=True) as journal:
            there = collections.Counter[tuple[int, int]]()
            rows = 1000
            replay = Replay(
                ReplaySpec(capacity=streams * max(rows, sum(c.num_rows for c in journal.read())), placement="host"),
                schema, range(streams), observation=tuple(self.contract.observation),
            )  # fmt: skip
            for chunk in journal.read():
                there.update(steps(chunk))
                replay.add(chunk)
                replay.add(chunk)  # harmless
        view = replay.view()
        name = next(iter(self.contract.observation))
        stored = collections.Counter(key(x) for x in view.columns[name][view.real].reshape(-1, 4))
        lost = len(self.acknowledged - set(there)) + len(set(stored) - set(there))
        doubled = sum(count > 1 for count in there.values()) + sum(count > 1 for count in stored.values())
        return lost, doubled, len(set(there) - made)

    def close(self) -> None:
        """End workers, and the Ray that was started here."""
        import ray

        self.rollouts.close()
        self.journal.close()
        if self._own_ray:
            ray.shutdown()


def steps(chunk: Any) -> list[tuple[int, int]]:
    """(episode, step) by the environment's own numbers, of all rows that are steps."""
    name = next(key for key in chunk.columns if key.startswith("observation"))
    rows = chunk.columns[name][~chunk.columns["is_last"]]
    return [key(x) for x in rows]


def key(x: np.ndarray) -> tuple[int, int]:
    """Episode and step of an observation."""
    return (int(x[0]) << 24) | int(x[1]), int(x[2])


def transitions(chunk: Any) -> set[tuple[int, int]]:
    """As `steps`."""
    return set(steps(chunk))


if __name__ == "__main__":
    sys.exit(main())
