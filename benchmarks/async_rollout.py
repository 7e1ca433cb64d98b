"""Asynchronous against synchronous online runs of the same code, in an environment with a lognormal latency.

    python benchmarks/async_rollout.py [--latency-ms 10] [--steps 1200] [--seeds 0 1]

Both are `rlsvc train` on Ray: a small TD-MPC2 that plans, two rollout workers, one update for every step, the same seed
and the same schedule. Each of the two simulator steps of a decision sleeps for a lognormal time; in synchronous mode
the learner waits for the slower worker, and workers wait for the learner; in the asynchronous mode they overlap, and
collecting may be `max_ahead` steps ahead of the updates that are owed. Rates are those of the last phase, from its
first log on, so that neither start-up nor compilation counts. Asynchrony gains most, a factor of two, where collecting
takes as long as learning; the shares in which the learner was idle say how near that was.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import QUIET, hardware, load_of_others, write_result
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
PACKAGES = ("rlsvc", "ray", "jax", "gymnasium", "numpy")
RANDOM_STEPS, WORKERS, ENVS, CHUNK_STEPS = 500, 2, 2, 5
LOG_INTERVAL = 250


@dataclass
class Outcome:
    """Of one run.

    Attributes:
        rate: environment steps a second in the last phase.
        idle: share of that time in which the learner had nothing to do.
        score: mean return of the final evaluation's episodes.
        staleness: updates by which acting weights were behind, mean.
    """

    rate: float
    idle: float
    score: float
    staleness: float


def specification(mode: str, seed: int, options: argparse.Namespace, root: Path) -> Any:
    """The run, a variant of the pendulum experiment."""
    from rlsvc.spec.compose import compose

    chunk = ENVS * CHUNK_STEPS
    phases = [
        f"{{name: seed, type: online, acting: random, hooks: {{collect: 1}}, duration_steps: {RANDOM_STEPS}}}",
        f"{{name: pretrain, type: offline, hooks: {{update: 1}}, duration_updates: {RANDOM_STEPS}}}",
        f"{{name: train, type: online, hooks: {{collect: 1, update: 1}}, duration_steps: {options.steps}}}",
    ]
    kwargs = f"{{latency_ms: {options.latency_ms}, sigma: {options.sigma}}}"
    return compose(
        [
            "experiment=tdmpc2_pendulum", f"name={mode}_{seed}", f"root={root}", f"seed={seed}", "device=cpu",
            f"log_interval={LOG_INTERVAL}", f"phases=[{', '.join(phases)}]",
            "env.id=rlsvc-slow-pendulum-v0", "+env.import_module=slow_env", f"+env.kwargs={kwargs}",
            f"rollout.mode={mode}", f"rollout.workers={WORKERS}", f"rollout.envs_per_worker={ENVS}",
            f"rollout.chunk_steps={CHUNK_STEPS}", f"rollout.max_ahead={4 * chunk}", "rollout.cpus_per_worker=0.4",
            # As many updates as a chunk has steps: one compiled length.
            f"learner.updates_per_call={chunk}", "learner.cpus_per_rank=0.4", "checkpoint.interval=1000000",
            "evaluation.interval=null", "evaluation.episodes=10", "evaluation.parallel=10",
            "evaluation.videos=false", "evaluation.cpus_per_worker=0.4", "tracking.trackers=[]",
        ]
    )  # fmt: skip


def run(mode: str, seed: int, options: argparse.Namespace, root: Path) -> Outcome:
    """Train once."""
    from rlsvc.train.run import train

    logs: list[tuple[float, dict[str, float]]] = []
    score = float("nan")
    begins = 2 * RANDOM_STEPS

    def on_metrics(step: int, metrics: dict[str, float]) -> None:
        nonlocal score
        score = metrics.get("eval/return", score)
        if step > begins and "collect/steps_per_s" in metrics:
            logs.append((time.monotonic(), metrics))

    train(specification(mode, seed, options, root), on_metrics=on_metrics)
    (begin, first), rest = logs[0], logs[1:]
    seconds = np.diff([begin, *(at for at, _ in rest)])

    def mean(name: str) -> float:
        return float(np.average([metrics.get(name, 0.0) for _, metrics in rest], weights=seconds))

    steps = rest[-1][1]["progress/env_steps"] - first["progress/env_steps"]
    return Outcome(float(steps / seconds.sum()), mean("rollout/learner_idle"), score, mean("rollout/staleness"))


def main() -> None:
    """Both modes for each seed, in turns; print, and store the figure if the machine has nothing else to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--latency-ms", type=float, default=10.0, help="mean of a simulator step's latency; two to a decision"
    )
    parser.add_argument("--sigma", type=float, default=1.0, help="of the latency's logarithm")
    parser.add_argument("--steps", type=int, default=1200, help="of the last phase")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    load = load_of_others()
    console.print(f"{hardware()}; load of others {load:.1f}")
    outcomes: dict[str, list[Outcome]] = {"sync": [], "async": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for mode, found in outcomes.items():
                found.append(run(mode, seed, options, Path(folder)))
                console.print(f"{mode}, seed {seed}: {found[-1]}")
    table = Table("mode", "env steps/s", "return", "learner idle", "staleness, updates")
    for mode, found in outcomes.items():
        columns = np.array([[o.rate, o.score, o.idle, o.staleness] for o in found]).mean(0)
        rate, score, idle, staleness = columns.tolist()
        table.add_row(mode, f"{rate:.1f}", f"{score:.0f}", f"{100 * idle:.0f} %", f"{staleness:.1f}")
    console.print(table)
    ratios = [a.rate / s.rate for a, s in zip(outcomes["async"], outcomes["sync"], strict=True)]
    value = float(np.median(ratios))
    console.print(f"asynchronous / synchronous: {value:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    if load > QUIET:
        console.print(f"the load of others was {load:.1f}: nothing is stored")
        return
    write_result(
        "async_vs_sync_steps", value, "ratio", low=min(ratios), high=max(ratios),
        peer="the synchronous mode, env steps/s", peer_value=float(np.median([o.rate for o in outcomes["sync"]])),
        ratio=value, packages=PACKAGES, seeds=options.seeds,
    )  # fmt: skip


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    # Ray's workers import the environment's module too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    main()
