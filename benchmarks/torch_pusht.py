"""PushT by LeRobot's policies, trained here and by lerobot-train for the same number of steps: do they reach the same?

    python benchmarks/torch_pusht.py --policy diffusion --steps 20000       on a GPU
    python benchmarks/torch_pusht.py --policy act --tiny --steps 4 --episodes 2 --seeds 0      on a CPU, to see it run

Each side trains the shipped experiment's policy on the 206 human demonstrations (states) from fresh weights, with
LeRobot's preset optimizer, schedule and batch, once for every seed. LeRobot's pretrained folder is imported as
`rlsvc policies import` does it, and all policies drive the same unseen starts. Printed, with 95 % intervals of the
episodes: mean max overlap and success of each side, and their difference start by start.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import ROOT
from torch_training import EXPERIMENTS, lerobot_config, lerobot_train, run_spec

from rlsvc.backends.torch_lerobot import from_folder
from rlsvc.spec.env import PushTSpec
from rlsvc.store.bundle import LEROBOT_WEIGHTS, write_bundle
from rlsvc.train.evaluate import Evaluation
from rlsvc.train.run import train
from rlsvc.train.standalone import evaluate_bundle

METRICS = ("max_reward", "success")


def trained_here(kind: str, words: tuple[str, ...], tiny: bool, folder: Path) -> Path:
    """The last bundle of a run of ours."""
    spec = run_spec(kind, tiny=tiny, words=(*words, f"root={folder}", "name=ours"))
    result = train(spec, local=True)
    assert result.bundle is not None
    return result.bundle


def trained_there(kind: str, words: tuple[str, ...], tiny: bool, folder: Path, workers: int) -> Path:
    """A bundle of what lerobot-train saved last."""
    spec = run_spec(kind, tiny=tiny, words=words)
    config = lerobot_config(spec, folder / "lerobot", steps=spec.length, workers=workers, save=True)
    lerobot_train(config)
    (saved,) = sorted((folder / "lerobot" / "checkpoints").glob("[0-9]*"))[-1:]
    return write_bundle(folder / "theirs", **from_folder(saved / "pretrained_model", 10.0), weights=LEROBOT_WEIGHTS)


def main() -> None:
    """Train both, evaluate both, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=sorted(EXPERIMENTS), default="diffusion")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--parallel", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4, help="of LeRobot's DataLoader, and of the evaluation")
    parser.add_argument("--tiny", action="store_true", help="a small policy, for a CPU")
    args = parser.parse_args()
    env = PushTSpec(observation="keypoints")
    episodes: dict[str, list] = {"ours": [], "lerobot-train": []}
    for seed in args.seeds:
        words = (f"seed={seed}", f"total_steps={args.steps}", f"checkpoint.interval={args.steps}")
        with tempfile.TemporaryDirectory(dir=ROOT / "runs" if (ROOT / "runs").is_dir() else None) as name:
            folder = Path(name)
            for side in episodes:
                start = time.perf_counter()
                if side == "ours":
                    bundle = trained_here(args.policy, words, args.tiny, folder)
                else:
                    bundle = trained_there(args.policy, words, args.tiny, folder, args.workers)
                minutes = (time.perf_counter() - start) / 60
                found = evaluate_bundle(
                    str(bundle), env, episodes=args.episodes, parallel=min(args.parallel, args.episodes),
                    workers=max(1, args.workers), local=True,
                )  # fmt: skip
                episodes[side] += found.episodes
                overlap = found.interval("max_reward")
                print(
                    f"seed {seed}, {side}: {overlap.mean:.3f} [{overlap.low:.3f}, {overlap.high:.3f}] after "
                    f"{minutes:.1f} minutes of training"
                )
    ours, theirs = (Evaluation(found) for found in episodes.values())
    print(f"{args.policy}, {args.steps} updates, {len(args.seeds)} seeds x {args.episodes} starts")
    for metric in METRICS:
        for side, found in (("ours", ours), ("lerobot-train", theirs)):
            interval = found.interval(metric)
            print(f"{metric}, {side}: {interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]")
        difference = ours.minus(theirs, metric)
        print(f"{metric}, difference: {difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]")


if __name__ == "__main__":
    main()
