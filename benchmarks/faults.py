"""Seeded faults, and an independent ledger that says whether a transition was lost or doubled.

    python benchmarks/faults.py --faults 100 --group-faults 12

Everything collects from an environment that writes down every step it makes and fails when it is told to.

Part one, the rollout plane alone (`--faults`): two workers, journal and replay. Workers are killed (SIGKILL) and
stopped (SIGSTOP); simulators raise, give NaN, hang, leak, die; chunks are sent again; and the driver's end is played:
the journal is closed without warning, cut within a record that was never acknowledged, and opened anew, with new
workers.

Part two, a whole run of TD-MPC2 (`--group-faults`) in asynchronous mode with a central inference actor, on a local
cluster of two nodes: ranks of the learner group, Ray Train's controller, the inference actor and workers are killed or
stopped, the object store is filled, the second node is removed (and comes back).

Each fault must be followed by new chunks, and in part two by new updates, before the next one comes. At the end every
transition that was acknowledged (its chunk's `append` returned) must be in the journal and in a replay that is built
from it, once, and nothing may be there that no environment made. The longest time that the driver of part one was held
up by a fault is printed: the learner takes chunks from it and waits no longer than that.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result
from faulty_env import LEDGER, NEXT, SIMULATOR_FAULTS

HERE = Path(__file__).resolve().parent
KINDS = (
    "kill a worker",
    "stop a worker",
    *(f"simulator: {fault}" for fault in SIMULATOR_FAULTS),
    "chunk is sent again",
    "driver ends",
)
PROCESSES = {
    "kill a rank": ("RayTrainWorker", signal.SIGKILL),
    "stop a rank": ("RayTrainWorker", signal.SIGSTOP),
    "kill the controller": ("TrainController", signal.SIGKILL),
    "kill the inference actor": ("CentralInference", signal.SIGKILL),
    "stop the inference actor": ("CentralInference", signal.SIGSTOP),
    "kill a worker of the run": ("_RayWorker", signal.SIGKILL),
    "stop a worker of the run": ("_RayWorker", signal.SIGSTOP),
}
"""Fault, what the title of its victim's process holds, and the signal."""
GROUP_KINDS = (*PROCESSES, "fill the object store", "remove a node")
SURVIVAL_S = 180.0
"""A fault that is not followed by work within this time was not survived."""
RUN = """
name: faults
log_interval: 50
env: {name: gymnasium, id: rlsvc-faulty-v0, import_module: faulty_env}
policy: {name: tdmpc2, size: 1M, encoder_dim: 16, hidden_dim: 16, latent_dim: 16, num_q: 2, episode_length: 40,
         plan: false}
algo: {name: tdmpc2, batch_size: 16}
replay: {capacity: 4000000}
rollout: {workers: 2, envs_per_worker: 2, chunk_steps: 10, mode: async, inference: central, cpus_per_worker: 0.5,
          timeout_s: 5, start_timeout_s: 60, max_restarts: 100000, max_ahead: 400}
phases:
  - {name: seed, type: online, acting: random, hooks: {collect: 1}, duration_steps: 200}
  - {name: train, type: online, hooks: {collect: 4, update: 1}, duration_steps: 100000000}
learner: {updates_per_call: 25, cpus_per_rank: 0.5, max_failures: 100000, timeout_s: 45}
checkpoint: {interval: 400}
evaluation: {interval: null, episodes: 1, parallel: 1, metric: return, videos: false, cpus_per_worker: 0.5}
tracking: {trackers: []}
"""


def main() -> int:
    """Inject, check, print; exit code 1 when something was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="of part one")
    parser.add_argument("--group-faults", type=int, default=12, help="of part two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    begin, counts, bad = time.monotonic(), collections.Counter[str](), 0
    for part, faults in ((Plane, args.faults), (WholeRun, args.group_faults)):
        if not faults:
            continue
        with tempfile.TemporaryDirectory() as folder:
            subject = part(Path(folder))
            try:
                counts += subject.run(faults, args.seed)
                lost, doubled, invented = subject.audit()
            finally:
                subject.close()
        bad += lost + doubled + invented
        print(
            f"{len(subject.acknowledged)} transitions acknowledged, {lost} lost, {doubled} doubled, {invented} that no "
            f"environment made{subject.more()}",
            flush=True,
        )
    print(", ".join(f"{kind}: {count}" for kind, count in counts.items()))
    print(f"{counts.total()} faults survived in {time.monotonic() - begin:.0f} s")
    if bad:
        return 1
    if not args.no_store:
        write_result("faults_survived", float(counts.total()), "count", seeds=[args.seed], packages=("rlsvc", "ray"))
    return 0


def order_of(kinds: tuple[str, ...], faults: int, seed: int) -> list[str]:
    """Every kind in turn, in an order that is drawn anew each time."""
    rng, order = np.random.default_rng(seed), []
    while len(order) < faults:
        order += [kinds[i] for i in rng.permutation(len(kinds))]
    return order[:faults]


def worker_environment(ledger: Path) -> dict[str, Any]:
    """What Ray's processes need to find the environment and the ledger."""
    os.environ[LEDGER] = str(ledger)
    sys.path.insert(0, str(HERE))
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    # Small nets are compiled often and run seldom: most optimizations would cost more than they save.
    return {"env_vars": {LEDGER: str(ledger), "PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}}


class Plane:
    """Rollout workers, journal, and what was acknowledged."""

    def __init__(self, folder: Path) -> None:
        import ray

        from rlsvc.envs.make import make_env
        from rlsvc.spec.env import GymnasiumSpec
        from rlsvc.spec.rollout import RolloutSpec

        self.folder, self.ledger = folder, folder / "ledger"
        self.ledger.mkdir()
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            runtime_env=worker_environment(self.ledger),
        )  # fmt: skip
        self.env = GymnasiumSpec(
            id="rlsvc-faulty-v0", import_module="faulty_env", isolation="process", step_timeout_s=1.0, max_memory_mb=300
        )
        self.spec = RolloutSpec(
            workers=2, envs_per_worker=2, mode="async", chunk_steps=16, cpus_per_worker=0.5, timeout_s=5.0,
            start_timeout_s=60.0, max_restarts=100_000,
        )  # fmt: skip
        probe = make_env(self.env)
        self.contract = probe.contract(1, 1)
        probe.close()
        self.acknowledged: set[tuple[int, int]] = set()
        self.longest, self.simulator_failures, self.taken = 0.0, 0, collections.Counter[int]()
        self._last: Any = None
        self._open()

    def _open(self) -> None:
        from rlsvc.data.journal import Journal
        from rlsvc.data.normalize import Normalizer
        from rlsvc.train.rollout import RayRollouts, next_incarnations
        from rlsvc.train.rollout_worker import Acting

        self.journal = Journal(self.folder / "journal")
        acting = Acting({}, self.contract, Normalizer.from_contract(self.contract), "fp32")
        self.rollouts = RayRollouts(
            self.env, self.spec, acting, seed=0, incarnations=next_incarnations(self.journal, self.spec.workers)
        )

    def run(self, faults: int, seed: int) -> collections.Counter[str]:
        """Inject faults one after the other, each followed by work."""
        rng, counts = np.random.default_rng(seed), collections.Counter[str]()
        self._work(8)
        for kind in order_of(KINDS, faults, seed):
            worker = int(rng.integers(self.spec.workers))
            if kind in ("kill a worker", "stop a worker"):
                # Any moment of a chunk may be hit.
                time.sleep(float(rng.uniform(0, 0.05)))
                number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
                os.kill(self.pid(worker), number)
                self._work(6, worker)
            elif kind.startswith("simulator"):
                before = self.simulator_failures
                told = self.ledger / NEXT
                told.with_suffix(".tmp").write_text(kind.split()[-1])
                told.with_suffix(".tmp").rename(told)
                self._work_until(lambda before=before: self.simulator_failures > before)
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
            print(f"{counts.total()}: {kind}", flush=True)
        return counts

    def more(self) -> str:
        """What else was measured."""
        return f"; the driver was held up for {self.longest:.2f} s at most"

    def pid(self, worker: int) -> int:
        """Process of a worker."""
        import ray

        return ray.get(self.rollouts.actors[worker].pid.remote())

    def _work(self, chunks: int, worker: int | None = None) -> None:
        """Take in so many chunks, from one worker if it is named."""
        goal = self._taken(worker) + chunks
        self._work_until(lambda: self._taken(worker) >= goal)

    def _taken(self, worker: int | None) -> int:
        return self.taken.total() if worker is None else self.taken[worker]

    def _work_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SURVIVAL_S
        while not done():
            if time.monotonic() > deadline:
                raise SystemExit(f"not done within {SURVIVAL_S:.0f} s: a fault was not survived")
            start = time.monotonic()
            self.rollouts.pump(1024, "random")
            arrived = self.rollouts.poll(0.2)
            self.longest = max(self.longest, time.monotonic() - start - 0.2)
            for one in arrived:
                self.journal.append(one.chunk)
                self.acknowledged |= transitions(one.chunk)
                self.simulator_failures += one.chunk.lost
                self._last = one.chunk
                self.taken[one.chunk.worker] += 1

    def _driver_ends(self, rng: np.random.Generator) -> None:
        """What a killed driver leaves: no more workers, and perhaps part of a record at the end of the journal."""
        self.rollouts.close()
        sizes = {file: file.stat().st_size for file in (self.folder / "journal").glob("*.journal")}
        self.journal.append(dataclasses.replace(self._last, number=self._last.number + 1000))
        self.journal.close()
        newest = max((self.folder / "journal").glob("*.journal"))
        os.truncate(newest, int(rng.integers(sizes.get(newest, 0), newest.stat().st_size)))
        self._open()

    def audit(self) -> tuple[int, int, int]:
        """See `audit`."""
        self.journal.close()
        streams = self.spec.workers * self.spec.envs_per_worker
        return audit(self.folder / "journal", self.ledger, self.contract, streams, self.acknowledged)

    def close(self) -> None:
        """End workers, and Ray."""
        import ray

        self.rollouts.close()
        self.journal.close()
        ray.shutdown()


class WholeRun:
    """A run of its own on a cluster of two nodes; the journal's `append` is watched from outside."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        from rlsvc.data.journal import Journal
        from rlsvc.spec.compose import compose

        self.folder, self.ledger = folder, folder / "ledger"
        self.ledger.mkdir()
        environment = worker_environment(self.ledger)
        node = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        self.cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self.node_args, self._wants_node = node, threading.Event()
        self.node: Any = self.cluster.add_node(**node)
        ray.init(address=self.cluster.address, log_to_driver=False, runtime_env=environment)
        file = folder / "faults.yaml"
        file.write_text(RUN)
        self.spec = compose([str(file), f"root={folder}"])
        self.acknowledged: set[tuple[int, int]] = set()
        self._env_steps, self._updates = 0.0, 0.0
        self._survived = collections.Counter[str]()
        self._problem: BaseException | None = None
        append = Journal.append

        def watched(journal: Any, chunk: Any) -> int:
            cursor = append(journal, chunk)
            self.acknowledged |= transitions(chunk)
            return cursor

        Journal.append, self._restore = watched, lambda: setattr(Journal, "append", append)

    def run(self, faults: int, seed: int) -> collections.Counter[str]:
        """Train until all faults were survived."""
        from rlsvc.train.run import train

        stop = threading.Event()
        chaos = threading.Thread(target=self._inject, args=(order_of(GROUP_KINDS, faults, seed), seed, stop))
        chaos.start()
        try:
            train(self.spec, on_metrics=self._saw, stop=stop)
        finally:
            stop.set()
            chaos.join()
        if self._problem is not None:
            raise self._problem
        return self._survived

    def _saw(self, step: int, metrics: dict[str, float]) -> None:
        self._env_steps = metrics.get("progress/env_steps", self._env_steps)
        self._updates = metrics.get("progress/updates", self._updates)
        if self._wants_node.is_set():  # here, since only a main thread can start one
            self._wants_node.clear()
            self.node = self.cluster.add_node(**self.node_args)

    def _inject(self, kinds: list[str], seed: int, stop: threading.Event) -> None:
        rng = np.random.default_rng(seed)
        try:
            self._await_work(stop, "start")
            for kind in kinds:
                begin = time.monotonic()
                if kind in PROCESSES:
                    self._await_end(self._signal(*PROCESSES[kind], rng), stop, kind)
                    self._await_work(stop, kind)
                elif kind == "fill the object store":
                    self._fill(lambda kind=kind: self._await_work(stop, kind))
                else:
                    self.cluster.remove_node(self.node, allow_graceful=False)
                    self.node = None
                    self._await_work(stop, kind)
                    self._wants_node.set()
                    while self.node is None:
                        if stop.wait(0.2):
                            raise RuntimeError(f"{kind}: the run ended before the node came back")
                self._survived[kind] += 1
                print(f"{self._survived.total()}: {kind}, {time.monotonic() - begin:.1f} s", flush=True)
        except BaseException as problem:
            self._problem = problem
        finally:
            stop.set()

    @staticmethod
    def _await_end(victim: Any, stop: threading.Event, what: str) -> None:
        """Wait until the process is gone: one that was stopped has then been found out and killed."""
        deadline = time.monotonic() + SURVIVAL_S
        while _alive(victim):
            if stop.wait(0.2):
                raise RuntimeError(f"{what}: the run ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: process {victim.pid} was not replaced within {SURVIVAL_S:.0f} s")

    def _await_work(self, stop: threading.Event, what: str) -> None:
        """Wait for new steps and updates, twice, since what was on its way before may still arrive."""
        for _ in range(2):
            steps, updates = self._env_steps, self._updates
            deadline = time.monotonic() + SURVIVAL_S
            while self._env_steps <= steps or self._updates == updates:
                if stop.wait(0.2):
                    raise RuntimeError(f"{what}: the run ended")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{what}: no work for {SURVIVAL_S:.0f} s, the fault was not survived")

    @staticmethod
    def _signal(title: str, number: signal.Signals, rng: np.random.Generator) -> Any:
        """Send a signal to one of the processes whose title holds this; that process."""
        import psutil

        deadline = time.monotonic() + SURVIVAL_S
        while time.monotonic() < deadline:
            own = psutil.Process().children(recursive=True)
            if victims := [p for p in own if title in _title(p)]:
                victim = victims[int(rng.integers(len(victims)))]
                victim.send_signal(number)
                return victim
            time.sleep(0.2)
        raise RuntimeError(f"there is no process '{title}' to signal")

    @staticmethod
    def _fill(while_full: Callable[[], None]) -> None:
        """More than the store of this node holds, referred to as long as that takes."""
        import ray

        held = [ray.put(np.zeros(16 * 2**20, np.uint8)) for _ in range(6)]
        while_full()
        del held

    def audit(self) -> tuple[int, int, int]:
        """See `audit`."""
        from rlsvc.envs.make import make_env
        from rlsvc.train.run import run_dir

        assert self.spec.env is not None
        env = make_env(self.spec.env)
        contract = env.contract(1, 1)
        env.close()
        streams = self.spec.rollout.workers * self.spec.rollout.envs_per_worker
        return audit(run_dir(self.spec) / "journal", self.ledger, contract, streams, self.acknowledged)

    def more(self) -> str:
        """What else was measured."""
        return ""

    def close(self) -> None:
        """End the cluster."""
        import ray

        self._restore()
        ray.shutdown()
        self.cluster.shutdown()


def _alive(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def audit(
    folder: Path, ledger: Path, contract: Any, streams: int, acknowledged: set[tuple[int, int]]
) -> tuple[int, int, int]:
    """Transitions that were acknowledged and are not there, that are there twice, and that nobody made."""
    from rlsvc.data.journal import Journal
    from rlsvc.data.replay import Replay
    from rlsvc.spec.replay import ReplaySpec

    made = {
        tuple(int(number) for number in line.split())
        for file in ledger.glob("*.txt")
        for line in file.read_text().splitlines()
        if len(line.split()) == 2
    }
    name = next(iter(contract.observation))
    schema = {**contract.observation, "action": contract.action}
    with Journal(folder, read_only=True) as journal:
        there, rows = collections.Counter[tuple[int, int]](), set[tuple[int, int]]()
        capacity = streams * (1000 + sum(chunk.num_rows for chunk in journal.read()))
        replay = Replay(
            ReplaySpec(capacity=capacity, placement="host"),
            schema,
            range(streams),
            observation=tuple(contract.observation),
        )
        for chunk in journal.read():
            there.update(steps(chunk))
            rows |= {key(x) for x in chunk.columns[name]}
            replay.add(chunk)
            replay.add(chunk)  # harmless
    view = replay.view()
    stored = collections.Counter(key(x) for x in view.columns[name][view.real].reshape(-1, 4))
    # The last step before a worker was lost has no observation after it: it is kept, and no transition.
    whole = {(episode, step) for episode, step in there if (episode, step + 1) in rows}
    lost = len(acknowledged - set(there)) + len(whole ^ set(stored))
    doubled = sum(count > 1 for count in there.values()) + sum(count > 1 for count in stored.values())
    return lost, doubled, len(set(there) - made)


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
