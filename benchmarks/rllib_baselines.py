"""PPO and SAC of RLlib beside TD-MPC2: the same environment, the same environment steps, the same evaluation.

    python benchmarks/rllib_baselines.py --env pendulum --steps 4000            two CPU cores, minutes
    python benchmarks/rllib_baselines.py --env cartpole-swingup --steps 50000   on a GPU
    python benchmarks/rllib_baselines.py --tiny --steps 600 --episodes 2 --seeds 0     to see it run; nothing is stored

Each side trains once for every seed, through `rlsvc train` as anybody would, for so many decisions of the policy (an
action that is repeated counts once). Its last bundle drives the same unseen starts. Printed: mean return with its 95 %
interval over all episodes of all seeds, and minutes. Stored: `rllib_<side>_<env>_<steps>`, with TD-MPC2 as the peer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import ROOT, write_result

from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.train.evaluate import Evaluation
from rlsvc.train.run import train
from rlsvc.train.standalone import evaluate_bundle

SIDES = ("tdmpc2", "sac", "ppo")
PENDULUM = "+env={name: gymnasium, id: Pendulum-v1, action_repeat: 2, max_steps: 100}"
PPO = (
    "experiment=rllib_ppo_cartpole", "algo.observation_filter=mean_std", "algo.config.lr=3e-4",
    "algo.config.num_epochs=10", "algo.config.minibatch_size=64", "+algo.config.gamma=0.97",
    "rollout.envs_per_worker=4",
)  # fmt: skip
"""Settings of a small PPO for continuous actions: rate, passes and minibatch of arXiv:1707.06347, table 3."""
EVERY = (
    "evaluation.interval=null", "evaluation.episodes=1", "evaluation.videos=false", "tracking.trackers=[]",
    "checkpoint.interval=1000000000",
)  # fmt: skip


def words_of(side: str, env: str, steps: int) -> tuple[str, ...]:
    """The run of one side; `env`: pendulum, or a task of the DeepMind Control Suite with actions held for two steps."""
    pendulum = env == "pendulum"
    where = ("~env", PENDULUM if pendulum else f"+env={{name: dm_control, task: {env}, action_repeat: 2}}")
    if side == "tdmpc2":
        experiment = "experiment=tdmpc2_pendulum" if pendulum else "experiment=tdmpc2_walker_walk"
        seed = steps // 5 if pendulum else min(2500, steps // 5)
        phases = (
            f"{{name: seed, type: online, acting: random, hooks: {{collect: 1}}, duration_steps: {seed}}}",
            f"{{name: pretrain, type: offline, hooks: {{update: 1}}, duration_updates: {seed}}}",
            f"{{name: train, type: online, hooks: {{collect: 1, update: 1}}, duration_steps: {steps - seed}}}",
        )
        return (experiment, *where, f"phases=[{', '.join(phases)}]")
    if side == "sac":
        seed = "algo.config.num_steps_sampled_before_learning_starts"
        return ("experiment=rllib_sac_pendulum", *where, f"total_steps={steps}", f"{seed}={steps // 10}")
    batch = 500 if pendulum else 2048
    return (*PPO, *where, f"total_steps={steps}", f"algo.config.train_batch_size_per_learner={batch}")


def run_of(side: str, env: str, steps: int, seed: int, folder: Path) -> RunSpec:
    """The specification of one side's run."""
    named = (f"root={folder}", f"name={side}_{seed}", f"seed={seed}")
    return compose([*words_of(side, env, steps), *EVERY, *named])


def main() -> None:
    """Train all, evaluate all, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="pendulum", help="pendulum, or a task such as cartpole-swingup")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--tiny", action="store_true", help="store nothing")
    args = parser.parse_args()
    found: dict[str, Evaluation] = {}
    for side in args.sides:
        episodes, minutes = [], 0.0
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as name:
                spec = run_of(side, args.env, args.steps, seed, Path(name))
                start = time.perf_counter()
                result = train(spec, local=side == "tdmpc2")
                minutes += (time.perf_counter() - start) / 60
                assert result.bundle is not None
                assert spec.env is not None
                scored = evaluate_bundle(
                    str(result.bundle), spec.env, episodes=args.episodes, parallel=args.episodes, local=True
                )
            episodes += scored.episodes
            print(
                f"{side}, seed {seed}: return {scored.interval('return').mean:.1f} after {result.step} steps",
                flush=True,
            )
        found[side] = Evaluation(episodes)
        interval = found[side].interval("return")
        print(
            f"{side} on {args.env}: return {interval.mean:.1f} [{interval.low:.1f}, {interval.high:.1f}], "
            f"{len(args.seeds)} seeds x {args.episodes} episodes, {minutes:.1f} minutes of training",
            flush=True,
        )
    if args.tiny or "tdmpc2" not in found:
        return
    peer = found["tdmpc2"].interval("return").mean
    for side in (name for name in args.sides if name != "tdmpc2"):
        interval = found[side].interval("return")
        path = write_result(
            f"rllib_{side}_{args.env.replace('-', '_')}_{args.steps}", interval.mean, "return",
            low=interval.low, high=interval.high, peer="TD-MPC2, the same steps", peer_value=peer,
            packages=("ray", "torch", "jax", "gymnasium", "mujoco", "dm_control"), seeds=args.seeds,
        )  # fmt: skip
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
