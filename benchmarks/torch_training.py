"""Training of a LeRobot policy here and by lerobot-train's own loop: samples a second, same policy, data and machine.

    python benchmarks/torch_training.py                      one GPU: torch_samples_vs_lerobot_train
    python benchmarks/torch_training.py --ranks 2            two GPUs besides: torch_scaling_2
    python benchmarks/torch_training.py --tiny --updates 4   on a CPU, to see that it runs; nothing is stored

Both sides train the policy that LeRobot's preset makes, in float32 with TF32 products, as lerobot-train sets it, on the
206 human PushT demonstrations (states), batch 64. Theirs is `lerobot.scripts.lerobot_train.train` as it is: dataset,
DataLoader with `--workers` processes, its processors, accelerate; timed between the calls of its own update.
Ours is what a rank of the learner group does for an update order: windows drawn and cut on the device, LeRobot's
processors, loss, preset optimizer and schedule. `--compile` compiles ours besides, which is printed and not stored.
With several ranks every one has its GPU and a batch of 64 of its own.
Sides are timed in turn, `--rounds` times; the figure is the median, the interval the range of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import ROOT, write_result
from torch.multiprocessing.spawn import spawn

from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec

DATA = ROOT / "datasets" / "pusht_human"
TINY = {
    "act": {"dim_model": 16, "n_heads": 2, "dim_feedforward": 16, "n_encoder_layers": 1, "n_vae_encoder_layers": 1},
    "diffusion": {"down_dims": [8, 16], "n_groups": 4, "diffusion_step_embed_dim": 8},
}
EXPERIMENTS = {"act": "act_pusht", "diffusion": "lerobot_diffusion_pusht"}
PACKAGES = ("rlsvc", "torch", "lerobot", "accelerate", "diffusers")


def run_spec(kind: str, *, tiny: bool = False, words: tuple[str, ...] = ()) -> RunSpec:
    """The shipped experiment, without an environment and with all episodes to train on."""
    fields = [f"+policy.config.{name}={value}" for name, value in (TINY[kind] if tiny else {}).items()]
    always = ("env=null", "data.validation_fraction=0", f"data.datasets=[{{path: {DATA}}}]", "tracking.trackers=[]")
    return compose([f"experiment={EXPERIMENTS[kind]}", *always, *fields, *words])


def lerobot_config(spec: RunSpec, folder: Path, *, steps: int, workers: int, save: bool = False) -> Any:
    """lerobot-train's configuration of the same run."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    from rlsvc.backends.torch_lerobot import make_config
    from rlsvc.backends.torch_runner import choose_device
    from rlsvc.data.mixture import load_demonstrations

    found = load_demonstrations(
        spec.data, n_obs_steps=spec.policy.n_obs_steps, horizon=1, action_horizon=spec.policy.n_action_steps
    )
    policy = make_config(spec.policy, found.contract, device=choose_device("auto"))
    return TrainPipelineConfig(
        dataset=DatasetConfig(repo_id="local/pusht_human", root=str(DATA)),
        policy=policy,
        output_dir=folder,
        seed=spec.seed,
        batch_size=spec.algo.batch_size,
        num_workers=workers,
        steps=steps,
        log_freq=max(steps // 10, 1),
        save_checkpoint=save,
        env_eval_freq=0,
    )


def lerobot_train(config: Any) -> list[float]:
    """Run lerobot-train's loop; the clock at the end of each of its updates, s."""
    from lerobot.scripts import lerobot_train as script

    update, ended = script.update_policy, []

    def timed(*args: Any, **kwargs: Any) -> Any:
        made = update(*args, **kwargs)
        ended.append(time.perf_counter())
        return made

    with patch.object(script, "update_policy", timed):
        script.train(config)
    return ended


def theirs(spec: RunSpec, updates: int, workers: int) -> float:
    """Samples a second of lerobot-train, without its first tenth."""
    with tempfile.TemporaryDirectory() as folder:
        ended = lerobot_train(lerobot_config(spec, Path(folder) / "run", steps=updates, workers=workers))
    ended = ended[len(ended) // 10 :]
    return (len(ended) - 1) * spec.algo.batch_size / (ended[-1] - ended[0])


class Ours:
    """A learner's rank, alone."""

    def __init__(self, spec: RunSpec, updates: int) -> None:
        from rlsvc.train.torch_learner import TorchLearner

        self.spec, self.updates, self._folder = spec, updates, tempfile.TemporaryDirectory()
        self._learner = TorchLearner(spec, Path(self._folder.name))
        self.samples_per_s()

    def samples_per_s(self) -> float:
        """Of one update order; the metrics that end it wait for the device."""
        start = time.perf_counter()
        self._learner.algorithm.update(self._learner._train, self.updates)
        return self.updates * self.spec.algo.batch_size / (time.perf_counter() - start)


def _rank(rank: int, ranks: int, store: str, spec: RunSpec, updates: int, rounds: int, results: Any) -> None:
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    side = Ours(spec, updates)
    found = [side.samples_per_s() for _ in range(rounds)]
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def ours_on(ranks: int, spec: RunSpec, updates: int, rounds: int) -> list[float]:
    """Samples a second of several ranks, by round."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, f"{folder}/store", spec, updates, rounds, results)
        spawn(_rank, arguments, nprocs=ranks)
    return results.get()


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=sorted(EXPERIMENTS), default="diffusion")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--updates", type=int, default=400, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="of LeRobot's DataLoader; 4 is its default")
    parser.add_argument("--ranks", type=int, default=1, help="besides one")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a small policy, for a CPU")
    args = parser.parse_args()
    words = (f"algo.batch_size={args.batch}",)
    spec = run_spec(args.policy, tiny=args.tiny, words=words)
    stored = torch.cuda.is_available() and not args.tiny

    def show(name: str, values: list[float]) -> float:
        middle = statistics.median(values)
        ends = f"[{min(values):,.0f}, {max(values):,.0f}]"
        print(f"{args.policy}, batch {args.batch}, {name}: {middle:,.0f} samples/s {ends}")
        return middle

    side, mine, other = Ours(spec, args.updates), [], []
    for _ in range(args.rounds):
        mine.append(side.samples_per_s())
        other.append(theirs(spec, args.updates, args.workers))
    one, peer = show("ours", mine), show("lerobot-train", other)
    ratio = one / peer
    print(f"torch_samples_vs_lerobot_train: {ratio:.2f}")
    if stored:
        low, high = min(mine) / max(other), max(mine) / min(other)
        write_result(
            "torch_samples_vs_lerobot_train", ratio, "ratio", low=low, high=high, peer="lerobot-train 0.6.1, samples/s",
            peer_value=peer, ratio=ratio, gpu=True, gpus=1, packages=PACKAGES, seeds=[0],
        )  # fmt: skip
    if args.compile:
        compiled = Ours(run_spec(args.policy, tiny=args.tiny, words=(*words, "algo.compile=true")), args.updates)
        show("ours, compiled", [compiled.samples_per_s() for _ in range(args.rounds)])
    if args.ranks > 1:
        whole = run_spec(
            args.policy,
            tiny=args.tiny,
            words=(f"algo.batch_size={args.batch * args.ranks}", f"learner.ranks={args.ranks}"),
        )
        values = ours_on(args.ranks, whole, args.updates, args.rounds)
        scaling = show(f"ours on {args.ranks} ranks", values) / one
        name = f"torch_scaling_{args.ranks}"
        print(f"{name}: {scaling:.2f}, {scaling / args.ranks:.2f} a rank")
        if stored:
            low, high = min(values) / max(mine), max(values) / min(mine)
            write_result(
                name, scaling, "ratio", low=low, high=high, peer="one rank, samples/s", peer_value=one, ratio=scaling,
                gpu=True, gpus=args.ranks, packages=PACKAGES, seeds=[0],
            )  # fmt: skip


if __name__ == "__main__":
    main()
