"""PushT from the 206 human demonstrations: train on one GPU, then 500 episodes on seeds that training never saw.

    python benchmarks/pusht.py state
    python benchmarks/pusht.py image --dataset data/pusht/pusht_cchi_v7_replay.zarr
    python benchmarks/pusht.py pi0 --dataset data/pusht/pusht_cchi_v7_replay.zarr

Scored as Diffusion Policy does: per episode the maximum of clip(coverage / 0.95, 0, 1) over at most 300 steps; success
is coverage >= 0.95. The weights that are scored are those at the end of training, not the best of several evaluations.
`--budget-minutes` ends a call early with a checkpoint; the same command with `--resume` goes on, and the minutes
add up.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

from common import RESULTS, write_result

from rlsvc.spec.compose import compose
from rlsvc.spec.env import PushTSpec
from rlsvc.train.run import run_dir, train
from rlsvc.train.standalone import evaluate_bundle

FIRST_SEED = 1_000_000
PACKAGES = ("rlsvc", "jax", "flax", "gym-pusht", "pymunk")
EXPERIMENTS = {"state": "pusht_diffusion", "image": "pusht_image_diffusion", "pi0": "pi0_pusht"}
PAPER = {"state": 0.91, "image": 0.84}
"""Diffusion Policy, CNN: mean over the last ten checkpoints (arXiv:2303.04137, table 1 and 2)."""


def peer_of(kind: str) -> tuple[str, float]:
    """What a mean max overlap stands beside: the paper's, or for pi0 that of our diffusion policy from images."""
    if kind == "pi0":
        stored = json.loads((RESULTS / "pusht_image_overlap.json").read_text())
        return f"our diffusion policy from images, stored on {stored['date'][:10]}", stored["value"]
    return "Diffusion Policy, CNN, last ten checkpoints (published)", PAPER[kind]


def main() -> None:
    """Train, score, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(EXPERIMENTS))
    parser.add_argument("overrides", nargs="*", help="of the RunSpec")
    parser.add_argument("--dataset", help="path of the demonstrations; the experiment's own when left out")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--few-steps", type=int, default=4, help="denoising steps of the second evaluation")
    parser.add_argument("--budget-minutes", type=float, default=60.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--output", type=Path, default=None, help="folder for the scores of every episode")
    args = parser.parse_intermixed_args()
    # All demonstrations are trained on; only the weights at the end are scored, so the run itself evaluates nothing.
    words = [f"experiment={EXPERIMENTS[args.kind]}", "tracking.trackers=[]", "env=null", "data.validation_fraction=0"]
    if args.dataset:
        words.append(f"data.datasets=[{{path: {args.dataset}}}]")
    spec = compose([*words, *args.overrides]).replace(resume=args.resume)
    folder = run_dir(spec)
    clock = folder / "minutes.json"
    before = json.loads(clock.read_text()) if args.resume else 0.0

    stop = threading.Event()
    timer = threading.Timer(args.budget_minutes * 60, stop.set)
    timer.daemon = True
    timer.start()
    started = time.monotonic()

    def report(step: int, metrics: dict[str, float]) -> None:
        print(
            f"{time.monotonic() - started:6.1f} s  step {step}  "
            + "  ".join(f"{k} {v:.5g}" for k, v in metrics.items()),
            flush=True,
        )

    result = train(spec, local=True, on_metrics=report, stop=stop)
    timer.cancel()
    minutes = before + (time.monotonic() - started) / 60
    clock.write_text(json.dumps(minutes))
    if result.interrupted:
        print(f"stopped at step {result.step} after {minutes:.1f} min; go on with --resume")
        return
    bundle = folder / "bundles" / str(result.step)
    env = PushTSpec(observation="keypoints" if args.kind == "state" else "pixels")
    store = {"gpu": True, "packages": PACKAGES, "seeds": [spec.seed]}
    peer, peer_value = peer_of(args.kind)
    write_result(f"pusht_{args.kind}_train_minutes", minutes, "minutes", **store)
    for steps, suffix in ((spec.policy.sample_steps, ""), (args.few_steps, "_few_steps")):
        begin = time.monotonic()
        scores = evaluate_bundle(
            str(bundle),
            env,
            episodes=args.episodes,
            first_seed=FIRST_SEED,
            workers=args.workers,
            parallel=args.episodes,
            sample_steps=steps,
            local=True,
            output=args.output and args.output / f"pusht_{args.kind}_{steps}_steps.json",
        )
        overlap, success = scores.interval("max_reward"), scores.interval("success")
        print(
            f"{args.kind}, {steps} denoising steps, {args.episodes} seeds from {FIRST_SEED}: "
            f"mean max overlap {overlap.mean:.4f} [{overlap.low:.4f}, {overlap.high:.4f}], "
            f"success {100 * success.mean:.1f} % [{100 * success.low:.1f}, {100 * success.high:.1f}]; "
            f"training {minutes:.1f} min, {result.step} updates; evaluation {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        write_result(
            f"pusht_{args.kind}_overlap{suffix}",
            overlap.mean,
            "mean max overlap",
            low=overlap.low,
            high=overlap.high,
            peer=peer,
            peer_value=peer_value,
            ratio=overlap.mean / peer_value,
            **store,
        )
        write_result(
            f"pusht_{args.kind}_success{suffix}",
            100 * success.mean,
            "percent",
            low=100 * success.low,
            high=100 * success.high,
            **store,
        )


if __name__ == "__main__":
    main()
