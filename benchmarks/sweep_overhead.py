"""What a sweep costs beyond its trials: 1,000 one-second trials on two cores, beside a bare Ray Tune in the same run.

A trial sleeps and reports once. The sweep is `rlsvc.tune.run.run_sweep`, everything counted from the call to its
written report, records of each trial included. The peer is `ray.tune.Tuner` over the same function of Tune's own API
with `reuse_actors=True` (without it each trial starts a process, which takes it several times as long) and Tune's own
defaults otherwise. With trials this short Tune may run all of them in one process: it gives a trial whose process is
starting to one that became free, and ends the starting one. The sweep waits for its processes first. Each of both runs
in a process of its own, on a Ray of two CPUs that was started before its clock starts.

    python benchmarks/sweep_overhead.py                # 1,000 trials each: about 20 minutes
    python benchmarks/sweep_overhead.py --trials 40    # a try; nothing is stored

Figures: tune_overhead_percent, tune_vs_bare_tuner.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

from common import QUIET, hardware, load_of_others, write_result
from rich.console import Console

CPUS = 2
TRIALS, SECONDS = 1000, 1.0
PACKAGES = ("ray", "optuna", "rlsvc")
WHICH = ("--ours", "--bare")


def ours(trials: int, seconds: float) -> float:
    """Wall time of a sweep, s."""
    import ray

    from rlsvc.spec.compose import compose, validate
    from rlsvc.spec.sweep import SweepSpec
    from rlsvc.tune.run import TUNE_ENVIRONMENT, run_sweep

    os.environ.update(TUNE_ENVIRONMENT)
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)

    def train(run, on_metrics):
        time.sleep(seconds)
        on_metrics(1, {"eval/max_reward": run.algo.learning_rate})

    with tempfile.TemporaryDirectory() as root:
        base = compose(["experiment=pusht_demo", f"root={root}", "tracking.trackers=[]"])
        space = {"algo.learning_rate": {"loguniform": [1e-5, 1e-3]}}
        spec = validate(SweepSpec, {"run": "experiment=pusht_demo", "space": space, "samples": trials})
        start = time.monotonic()
        report = run_sweep(spec, base, train=train)
        wall = time.monotonic() - start
    done = sum(trial.status == "finished" for trial in report.trials)
    assert done == trials, f"{done} of {trials} trials finished"
    return wall


def bare(trials: int, seconds: float) -> float:
    """Wall time of a bare Tuner, s."""
    import ray
    from ray import tune

    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False)

    def train(config):
        time.sleep(seconds)
        tune.report({"eval/max_reward": config["learning_rate"]})

    with tempfile.TemporaryDirectory() as root:
        tuner = tune.Tuner(
            tune.with_resources(train, {"CPU": 1}),
            param_space={"learning_rate": tune.loguniform(1e-5, 1e-3)},
            tune_config=tune.TuneConfig(metric="eval/max_reward", mode="max", num_samples=trials, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=root, verbose=0),
        )
        start = time.monotonic()
        results = tuner.fit()
        wall = time.monotonic() - start
    assert len(results) == trials
    assert not results.errors
    return wall


def measured(which: str, trials: int, seconds: float) -> float:
    """Wall time of one of them in a process of its own, s."""
    command = [sys.executable, __file__, which, "--trials", str(trials), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{which} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return float(done.stdout.splitlines()[-1].removeprefix("wall "))


def main() -> None:
    """Measures, prints, and stores the figures of a full run on a quiet machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a trial sleeps")
    parser.add_argument("--ours", action="store_true", help="the sweep alone, in this process")
    parser.add_argument("--bare", action="store_true", help="the bare Tuner alone, in this process")
    options = parser.parse_args()
    if options.ours or options.bare:
        wall = (ours if options.ours else bare)(options.trials, options.seconds)
        print(f"wall {wall}")
        return
    console = Console(soft_wrap=True)
    load = load_of_others()
    console.print(f"{hardware()}; load of others {load:.1f}")
    walls = {}
    for which in WHICH:
        walls[which] = measured(which, options.trials, options.seconds)
        console.print(f"{which.removeprefix('--')}: {options.trials} trials in {walls[which]:.1f} s")
    ideal = options.trials * options.seconds / CPUS
    overhead = {which: 100 * (wall / ideal - 1) for which, wall in walls.items()}
    ratio = walls["--ours"] / walls["--bare"]
    console.print(f"ideal {ideal:.0f} s; over it: {overhead['--ours']:.1f} %, bare {overhead['--bare']:.1f} %")
    console.print(f"the sweep takes {ratio:.3f} of the bare Tuner's time")
    if (options.trials, options.seconds) != (TRIALS, SECONDS):
        console.print("not the full run: nothing is stored")
        return
    if load > QUIET:
        console.print(f"the load of others was {load:.1f}: nothing is stored")
        return
    peer = "ray.tune.Tuner with reuse_actors=True"
    write_result(
        "tune_overhead_percent", overhead["--ours"], "percent", peer=peer, peer_value=overhead["--bare"],
        packages=PACKAGES,
    )  # fmt: skip
    write_result(
        "tune_vs_bare_tuner", ratio, "ratio of wall time", peer=peer, peer_value=1.0, ratio=ratio, packages=PACKAGES
    )


if __name__ == "__main__":
    main()
