"""Hi-ORS against behaviour cloning, on the same few demonstrations and under the same budget of robot time.

    python benchmarks/hiors.py [--experiment hiors_planar_push] [--demonstrations 20] [--seeds 0 1 2] [--small]

For each seed the environment's own script writes demonstrations. Hi-ORS (`rlsvc train experiment=...`) learns from them
and then from its own rollouts, in which a scripted stand-in for a person takes over where nothing moves on; it is no
person. BC learns from the same demonstrations with the same policy and as many updates, and uses none of the robot's
time for learning, since demonstrations are all that it can use; so a second BC spends Hi-ORS's budget of robot time on
more demonstrations of the script, to say what that time would be worth to it. The HIL-SERL-style baseline
(`experiment=hil_serl_...` of the same name) learns from the same demonstrations, with the same stand-in, in the same
number of environment steps. All are judged alone, without the stand-in, on the same starts, which training never had.

The figure is the mean over seeds of Hi-ORS's success minus BC's, in points, with a t interval over the seeds. Printed
and stored in results/curves besides: success by environment step, the stand-in's share of control by quarter of the
online phase, and the mean time to success.

The environment is an argument: any experiment whose `env.import_module` has `demonstrations(episodes, seed)`, which
gives the columns of a replay buffer, and whose simulator has `expert` and `progress`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, write_result
from rich.console import Console
from rich.table import Table

PACKAGES = ("rlsvc", "jax", "flax", "optax", "gymnasium", "numpy")
FIRST_SEED = 500_000
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By the number of seeds, for 95 %."""
SMALL = [
    "phases.0.duration_updates=40", "phases.1.duration_steps=480", "phases.1.hooks={collect: 12, update: 1}",
    "evaluation.interval=null", "evaluation.episodes=8", "evaluation.parallel=8", "log_interval=120",
]  # fmt: skip
"""Tries the program; what it gives is no result."""


@dataclass
class Judged:
    """One policy's final episodes.

    Attributes:
        success: share of them.
        seconds: mean time of those that succeeded, s of the environment's clock; None where none did.
    """

    success: float
    seconds: float | None


@dataclass
class Run:
    """What one seed came to.

    Attributes:
        hiors, hil_serl, bc, bc_more: the policies; bc_more had as much robot time's worth of demonstrations besides.
        demonstrations: episodes of bc_more.
        curve: (environment steps, success) of Hi-ORS in evaluations on the way.
        control: the stand-in's share of steps by quarter of the online phase.
        accepted: share of Hi-ORS's episodes that it learned from.
    """

    seed: int
    hiors: Judged
    hil_serl: Judged
    bc: Judged
    bc_more: Judged
    demonstrations: int
    curve: list[tuple[int, float]]
    control: list[float]
    accepted: float


def write_demonstrations(make: Any, episodes: int, seed: int, path: Path) -> int:
    """Steps of so many episodes of the script, written to `path`."""
    columns = make(episodes, seed)
    np.savez(path, **columns)
    return int(columns["episode_ends"][-1])


def quarters(journal_dir: Path) -> list[float]:
    """The share of steps in which the stand-in acted, by quarter of all that was collected."""
    from rlsvc.data.journal import Journal

    with Journal(journal_dir, read_only=True) as journal:
        acted = [chunk.columns["intervention"][~chunk.columns["is_last"]] for chunk in journal.read()]
    return [float(part.mean()) for part in np.array_split(np.concatenate(acted), 4)]


def judge(bundle: Path, spec: Any, episodes: int) -> Judged:
    """A bundle alone in the environment."""
    from rlsvc.train.standalone import evaluate_bundle

    scores = evaluate_bundle(
        str(bundle), spec.env, episodes=episodes, first_seed=FIRST_SEED, parallel=min(episodes, 50), local=True,
        device=spec.device,
    )  # fmt: skip
    rate = read_rate(bundle)
    times = [episode.length / rate for episode in scores.episodes if episode.success]
    return Judged(float(scores.interval("success").mean), float(np.mean(times)) if times else None)


def read_rate(bundle: Path) -> float:
    """Control rate of a bundle's contract, Hz."""
    from rlsvc.store.bundle import read_contract

    return read_contract(bundle).rate_hz


def one_seed(seed: int, args: argparse.Namespace, root: Path) -> Run:
    """Train and judge all three on the same demonstrations."""
    from rlsvc.spec.compose import compose
    from rlsvc.store.tracking import read_metrics
    from rlsvc.train.run import run_dir, train

    common = [f"root={root}", f"seed={seed}", "tracking.trackers=[]", "evaluation.videos=false", "rollout.workers=1"]
    words = [f"experiment={args.experiment}", *common, *(SMALL if args.small else []), *args.words]
    few, more = root / f"few_{seed}.npz", root / f"more_{seed}.npz"
    where = "data.datasets.0.path="
    spec = compose([*words, "name=hiors", f"{where}{few}"])
    assert spec.env is not None
    assert spec.env.import_module is not None, "the experiment names no module with the script's demonstrations"
    make = importlib.import_module(spec.env.import_module).demonstrations
    steps = write_demonstrations(make, args.demonstrations, 1000 + seed, few)
    budget = sum(phase.length for phase in spec.curriculum if phase.type == "online")
    count = args.demonstrations + round(budget / (steps / args.demonstrations))
    write_demonstrations(make, count, 1000 + seed, more)

    def trained(name: str, data: Path, *overrides: str, words: list[str] = words) -> tuple[Any, Path]:
        begun = time.monotonic()
        this = compose([*words, f"name={name}_{seed}", f"{where}{data}", *overrides])
        result = train(this, local=True)
        print(f"seed {seed}: {name} trained in {(time.monotonic() - begun) / 60:.1f} min", flush=True)
        # The last bundle, for all alike: the best one would be chosen by evaluations that BC has fewer of.
        return this, run_dir(this) / "bundles" / str(result.step)

    hiors_spec, hiors_bundle = trained("hiors", few)
    offline_steps = sum(phase.length for phase in hiors_spec.curriculum if phase.type == "offline")
    updates = sum(phase.num_updates for phase in hiors_spec.curriculum)
    offline = f"{{name: bc, type: offline, buffer: demonstrations, hooks: {{update: 1}}, duration_updates: {updates}}}"
    bc_words = [f"phases=[{offline}]", "algo.name=imitation", "rollout.stand_in=null", "evaluation.interval=null"]
    seeding = compose([f"experiment={baseline_of(args.experiment)}"]).curriculum[0].length
    hil_words = [f"experiment={baseline_of(args.experiment)}", *common, "evaluation.interval=null"]
    hil_words += [f"phases.1.duration_steps={max(8, budget - seeding)}"]
    logged = read_metrics(run_dir(hiors_spec) / "metrics.jsonl")
    return Run(
        seed,
        hiors=judge(hiors_bundle, spec, args.episodes),
        hil_serl=judge(trained("hil_serl", few, words=hil_words)[1], spec, args.episodes),
        bc=judge(trained("bc", few, *bc_words)[1], spec, args.episodes),
        bc_more=judge(trained("bc_more", more, *bc_words)[1], spec, args.episodes),
        demonstrations=count,
        curve=[
            (int(row["step"]) - offline_steps, row["eval/success"])
            for row in logged
            if "eval/success" in row and row["step"] >= offline_steps
        ],
        control=quarters(run_dir(hiors_spec) / "journal"),
        accepted=next(row["train/accepted_share"] for row in reversed(logged) if "train/accepted_share" in row),
    )


def baseline_of(experiment: str) -> str:
    """The HIL-SERL-style experiment in the same environment."""
    return experiment.replace("hiors_", "hil_serl_")


def report(runs: list[Run], args: argparse.Namespace) -> None:
    """A table of all seeds."""
    table = Table(title=f"{args.experiment}, {args.demonstrations} demonstrations, {args.episodes} starts each")
    more = "BC, robot time as demonstrations"
    for name in ("seed", "Hi-ORS", "HIL-SERL", "BC", more, "stand-in acts, by quarter", "accepted"):
        table.add_column(name)
    for run in runs:
        cells = [
            f"{100 * one.success:.0f} %" + ("" if one.seconds is None else f" in {one.seconds:.1f} s")
            for one in (run.hiors, run.hil_serl, run.bc, run.bc_more)
        ]
        control = " ".join(f"{100 * share:.0f} %" for share in run.control)
        table.add_row(str(run.seed), *cells, control, f"{100 * run.accepted:.0f} %")
    Console(width=140).print(table)


def main() -> None:
    """Run all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="hiors_planar_push")
    parser.add_argument("--demonstrations", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1, help="seeds at a time")
    parser.add_argument("--small", action="store_true", help="try the program: a minute, one seed, nothing stored")
    parser.add_argument("words", nargs="*", help="overrides of the experiment")
    args = parser.parse_args()
    if args.small:
        args.seeds, args.episodes, args.demonstrations = args.seeds[:1], 8, 4
    with tempfile.TemporaryDirectory() as folder:
        if args.processes == 1:
            runs = [one_seed(seed, args, Path(folder)) for seed in args.seeds]
        else:  # small nets leave a card idle; each seed has a process of its own
            with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
                runs = list(pool.map(one_seed, args.seeds, repeat(args), repeat(Path(folder))))
    report(runs, args)
    points = np.array([100 * (run.hiors.success - run.bc.success) for run in runs])
    half = STUDENT_T[len(runs)] * points.std(ddof=1) / np.sqrt(len(runs)) if len(runs) in STUDENT_T else None
    print(f"Hi-ORS minus BC: {points.mean():.1f} points" + ("" if half is None else f" +- {half:.1f}"))
    if args.small:
        return
    import jax

    curves = RESULTS / "curves" / f"hiors_{args.experiment.removeprefix('hiors_')}.json"
    curves.parent.mkdir(parents=True, exist_ok=True)
    curves.write_text(json.dumps({"demonstrations": args.demonstrations, "runs": [asdict(r) for r in runs]}, indent=1))
    write_result(
        "hiors_minus_bc_points", float(points.mean()), "points", gpu=jax.default_backend() == "gpu", seeds=args.seeds,
        low=None if half is None else float(points.mean() - half),
        high=None if half is None else float(points.mean() + half),
        peer="BC on the same demonstrations, success in percent",
        peer_value=100 * float(np.mean([run.bc.success for run in runs])), packages=PACKAGES,
    )  # fmt: skip


if __name__ == "__main__":
    main()
