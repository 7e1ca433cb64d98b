"""Does a pi0.5 do what its prompt says: success with the right prompt minus success with the wrong one.

    python benchmarks/pi0_prompt.py

Trains `experiment=pi05_debug` at 40 million parameters on demonstrations that are made here (rlsvc/envs/two_goals.py: a
point that is told which of two discs to go to), and evaluates the last weights on `--episodes` seeds that training
never saw: once told the truth, once the prompt names the other disc. A policy that cannot read has a difference of 0.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from common import write_result

from rlsvc.envs.two_goals import demonstrations
from rlsvc.spec.compose import compose
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.train.evaluate import share_interval
from rlsvc.train.run import run_dir, train
from rlsvc.train.standalone import evaluate_bundle

PACKAGES = ("rlsvc", "jax", "flax", "optax", "gymnasium")
SIZES = [
    "policy.vision={width: 256, depth: 6, mlp_dim: 1024, heads: 4, patch: 4}",
    "policy.backbone={width: 512, depth: 8, mlp_dim: 2048, heads: 8, head_dim: 64}",
    "policy.expert={width: 256, depth: 8, mlp_dim: 1024, heads: 8, head_dim: 64}",
    "policy.horizon=8", "algo.batch_size=256", "algo.learning_rate=3e-4", "+precision=bf16",
    "+learner.updates_per_call=50",
]  # fmt: skip


def main() -> None:
    """Train, score, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the RunSpec")
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="the experiment's own size; nothing is stored")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "two_goals.npz"
        np.savez(path, **demonstrations(args.demonstrations))
        words = ["experiment=pi05_debug", "tracking.trackers=[]", "env=null", "data.validation_fraction=0"]
        words += [f"data.datasets.0.path={path}", f"root={folder}", *([] if args.small else SIZES), *args.overrides]
        spec = compose(words)
        started = time.monotonic()

        def report(step: int, metrics: dict[str, float]) -> None:
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if "loss" in k)
            print(f"{time.monotonic() - started:6.1f} s  step {step}  {shown}", flush=True)

        result = train(spec, local=True, on_metrics=report)
        bundle = run_dir(spec) / "bundles" / str(result.step)
        shares = {}
        for mislead in (False, True):
            env = GymnasiumSpec(
                id="rlsvc/TwoGoals-v0", import_module="rlsvc.envs.two_goals", kwargs={"mislead": mislead}
            )
            found = evaluate_bundle(str(bundle), env, episodes=args.episodes, workers=args.workers, local=True)
            wins = found.scores("success")
            shares[mislead] = share_interval(int(wins.sum()), len(wins))
            print(f"prompt {'wrong' if mislead else 'right'}: success {shares[mislead]}", flush=True)
    right, wrong = shares[False], shares[True]
    difference = right.mean - wrong.mean
    print(f"difference: {difference:.3f}")
    if not args.small:
        ends = {"low": right.low - wrong.high, "high": right.high - wrong.low}
        write_result(
            "pi0_prompt_follow", difference, "difference", **ends, gpu=True, packages=PACKAGES, seeds=[spec.seed]
        )


if __name__ == "__main__":
    main()
