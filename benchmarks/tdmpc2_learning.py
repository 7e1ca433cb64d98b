"""Sample efficiency of TD-MPC2 on tasks of the DeepMind Control Suite, several seeds as one program.

    python benchmarks/tdmpc2_learning.py walker-walk
    python benchmarks/tdmpc2_learning.py walker-walk cheetah-run finger-spin cartpole-swingup

Protocol of the paper (arXiv:2310.16828): action repeat 2, so 100k environment steps are 50k decisions; 2,500 of them at
random, as many updates on those, then one update for every decision; a score is the mean return of 10 episodes without
exploration. The algorithm, the rollout worker, the environments and the replay are the product's; only the seeds are
put side by side: the train states are stacked and every update and plan is mapped over them, one environment and one
stream of the replay for each. An update runs on the GPU while the environments step on the CPU, so that it sees the
data up to the step before.

Several tasks run in a process each, spread over the GPUs there are. A run that is stopped by `--minutes` leaves a
checkpoint (the states, and a journal of every step) and goes on from it when it is started again; its environments
begin new episodes then. Two clocks are kept over all starts: seconds of training, compilation included, and seconds
with the evaluations.

Curves go to `--output`. Of a run of the full length on a GPU the score at 100k steps is stored, as the mean of the
seeds and the lowest and highest of them, and so is its curve; `make bench-report` draws it over the published ones
(benchmarks/published).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import write_result
from curves import CURVES, published

FULL = 50_000
"""Decisions at which a score is a figure: 100k environment steps."""
SOLVED = {"walker-walk": 950.0}
"""Score whose wall clock is a figure."""
PACKAGES = ("rlsvc", "jax", "flax", "optax", "mujoco", "dm_control")
EVALUATION_EPISODES = 10
EPISODE = 500
"""Decisions in an episode."""


def main() -> None:
    """One task in this process; several in a process each, spread over the GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--decisions", type=int, default=50_000, help="of each seed; two simulator steps each")
    parser.add_argument("--random", type=int, default=2500, help="decisions at random, before learning begins")
    parser.add_argument("--every", type=int, default=5000, help="decisions between evaluations")
    parser.add_argument("--until", type=float, default=None, help="stop when the median seed scores this")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many, with what there is by then")
    parser.add_argument("--output", type=Path, default=Path("runs/tdmpc2_learning"), help="folder for curves")
    parser.add_argument("--override", nargs="*", default=[], help="of the RunSpec, such as policy.samples=256")
    parser.add_argument("--state", type=Path, default=Path("runs/tdmpc2_learning"), help="folder for checkpoints")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if len(args.tasks) == 1:
        run(args.tasks[0], args)
        return
    words = [word for word in sys.argv[1:] if word not in args.tasks]
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines()
    started = []
    for i, task in enumerate(args.tasks):
        log = (args.output / f"{task}.log").open("a")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(i % len(gpus))}
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        command = [sys.executable, __file__, task, *words]
        started.append((task, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)))
    for task, process in started:
        code = process.wait()
        tail = (args.output / f"{task}.log").read_text().splitlines()[-12:]
        print(f"--- {task} (exit code {code})", *tail, sep="\n")


class SeedsRunner:
    """The runner of a worker whose environments belong to one seed each; `after` runs once the plan is under way."""

    version = "0"

    def __init__(self, act: Any, after: Any) -> None:
        self.act_on, self.after = act, after

    def act(self, observation: Any, seeds: Any, steps: Any, carry: Any = None) -> Any:
        """See `rlsvc.runner.Runner`."""
        import numpy as np

        from rlsvc.core.types import ActionChunk

        action, carry = self.act_on(observation, seeds, steps, carry)
        self.after()  # queued behind the plan, so that the GPU goes on while the environments step
        return ActionChunk(np.asarray(action), self.version, carry)


def run(task: str, args: argparse.Namespace) -> None:
    """Train and score; the curve goes to `<output>/<task>.json`."""
    begin = time.monotonic()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlsvc.algos.tdmpc2 import TDMPC2
    from rlsvc.data.journal import Journal
    from rlsvc.data.normalize import Normalizer
    from rlsvc.data.replay import Replay
    from rlsvc.envs.make import make_env
    from rlsvc.envs.vector import VectorEnv
    from rlsvc.nn.backend import setup_jax
    from rlsvc.policies import make_policy
    from rlsvc.policies.api import ActOptions
    from rlsvc.spec.compose import compose
    from rlsvc.store import checkpoint
    from rlsvc.train.rollout_worker import Acting, RolloutWorker

    setup_jax("auto")
    spec = compose(["experiment=tdmpc2_walker_walk", f"env.task={task}", f"precision={args.precision}", *args.override])
    assert spec.env is not None
    env_spec = spec.env.replace(isolation="process")
    probe = make_env(spec.env)
    contract = probe.contract(1, 1)
    probe.close()
    n, config = len(args.seeds), spec.policy.model_dump(mode="json")
    policy = make_policy(config, contract, spec.precision)
    normalizer = Normalizer.from_contract(contract)
    algorithm = TDMPC2(policy, normalizer, spec.algo, total_steps=args.decisions)
    keys = jnp.stack([jax.random.key(seed) for seed in args.seeds])
    states = jax.jit(jax.vmap(lambda key: algorithm.init(jax.random.fold_in(key, 0))))(keys)
    # On this device for good, as the replay is: else everything would be compiled again after the first update.
    states, keys = jax.device_put((states, keys), jax.local_devices()[0])
    capacity = n * (args.decisions + args.decisions // EPISODE + EPISODE)
    schema = {**contract.observation, "action": contract.action}
    replay = Replay(spec.replay.replace(capacity=capacity), schema, range(n), observation=tuple(contract.observation))

    def update(states: Any, view: Any, keys: Any) -> Any:
        def of_seed(state: Any, view: Any, key: Any) -> Any:
            own = jax.tree.map(lambda x: x[None], view)
            draw_key = jax.random.split(jax.random.fold_in(key, state.step))[0]
            batch = own.sample(draw_key, spec.algo.batch_size, spec.policy.horizon)
            return algorithm.update_once(state, batch, key)[0]

        return jax.vmap(of_seed)(states, view, keys)

    update_jit = jax.jit(update, donate_argnames="states")
    learn_keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)

    def acting(explore: bool) -> Any:
        def act(params: Any, observation: Any, noise: Any, steps: Any, carry: Any) -> Any:
            def of_seed(params: Any, observation: Any, noise: Any, steps: Any, carry: Any) -> Any:
                keys = jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed), step))(noise, steps)
                normal = {name: normalizer.normalize(name, x) for name, x in observation.items()}
                carry = jnp.where((steps == 0)[:, None, None], 0.0, carry)
                action, carry, _ = policy.act(params, normal, carry, keys, ActOptions(explore=explore))
                return normalizer.unnormalize("action", action), carry

            return jax.vmap(of_seed)(params, observation, noise, steps, carry)

        compiled = jax.jit(act)

        def call(observation: Any, noise: Any, steps: Any, carry: Any) -> Any:
            each = len(steps) // n
            split = lambda x: np.asarray(x).reshape(n, each, *np.shape(x)[1:])  # noqa: E731
            if carry is None:
                carry = jnp.zeros((n, each, spec.policy.horizon, contract.action.shape[0]))
            observation = {name: split(x) for name, x in observation.items()}
            action, carry = compiled(
                algorithm.acting_params(states), observation, split(noise), split(steps).astype(np.uint32), carry
            )
            return action.reshape(n * each, *action.shape[2:]), carry

        return call

    due = False

    def learn() -> None:
        nonlocal states
        if due:
            states = update_jit(states, replay.view(), learn_keys)

    folder = args.state / task
    journal = Journal(folder / "journal")
    curve: list[dict[str, Any]] = []
    training, evaluating, done, starts = 0.0, 0.0, 0, 0
    if saved := checkpoint.steps(folder):
        done = saved[-1]
        states, meta = checkpoint.load(folder, done, states)
        curve, training, evaluating = meta["curve"], meta["training_s"], meta["evaluating_s"]
        starts = meta["starts"] + 1
        if meta["seeds"] != args.seeds:
            raise SystemExit(
                f"{folder}: a run of the seeds {meta['seeds']}, got {args.seeds}; use its seeds or delete it"
            )
        for chunk in journal.read(0, meta["cursor"]):
            replay.add(chunk)
        print(f"{task}: goes on from {2 * done} env steps", flush=True)
    elif len(journal):
        raise SystemExit(f"{folder}: a journal without a checkpoint; delete the folder to begin anew")

    worker = RolloutWorker(
        env_spec,
        Acting(config, contract, normalizer, spec.precision),
        worker=0,
        num_envs=n,
        seed=args.seeds[0],
        incarnation=starts,
        runner=SeedsRunner(acting(True), learn),
    )
    worker.set_weights(None, 0)
    judge = VectorEnv(env_spec, n * EVALUATION_EPISODES)
    judge_act = acting(False)

    def evaluate(decisions: int) -> None:
        nonlocal training, evaluating, mark
        jax.block_until_ready(states)
        start = time.monotonic()
        training, mark = training + start - mark, start
        rows = n * EVALUATION_EPISODES
        seeds = np.arange(1_000_000, 1_000_000 + rows)
        observation, carry, total = judge.reset(seeds), None, np.zeros(rows)
        for step in range(EPISODE):
            window = {name: x[:, None] for name, x in observation.items()}
            action, carry = judge_act(window, seeds.astype(np.uint32), np.full(rows, step), carry)
            out = judge.step(np.asarray(action)[:, 0])
            observation, total = out.observation, total + out.reward
        returns = total.reshape(n, EVALUATION_EPISODES)
        mark = time.monotonic()
        evaluating += mark - start
        point = {
            "env_steps": 2 * decisions,
            "returns": returns.mean(1).tolist(),
            "training_s": training,
            "wall_s": training + evaluating,
        }
        curve.append(point)
        shown = ", ".join(f"{value:.1f}" for value in point["returns"])
        print(
            f"{task} {point['env_steps']} env steps: returns {shown} "
            f"({point['training_s']:.0f} s training, {point['wall_s']:.0f} s in all)",
            flush=True,
        )
        result = {
            "task": task,
            "seeds": args.seeds,
            "precision": args.precision,
            "device": jax.devices()[0].device_kind,
            "curve": curve,
        }
        (args.output / f"{task}.json").write_text(json.dumps(result, indent=1))

    def save() -> None:
        nonlocal training, mark
        training, mark = training + time.monotonic() - mark, time.monotonic()
        clocks = {"training_s": training, "evaluating_s": evaluating}
        counters = {"starts": starts, "cursor": len(journal), "seeds": args.seeds, "curve": curve}
        checkpoint.save(folder, done, states, {**counters, **clocks})
        checkpoint.prune(folder, 1, set())
        mark = time.monotonic()

    def collect(count: int, acting: str = "policy") -> None:
        chunk = worker.collect(count, acting)
        journal.append(chunk)
        replay.add(chunk)

    mark = begin
    print(f"{task}: ready after {time.monotonic() - begin:.0f} s", flush=True)
    if not done:
        while done < args.random:
            count = min(100, args.random - done)
            collect(count, "random")
            done += count
        evaluate(args.random)
        for _ in range(args.random):
            states = update_jit(states, replay.view(), learn_keys)
    due = True
    while done < args.decisions:
        collect(1)
        done += 1
        if done % args.every == 0 or done == args.decisions:
            evaluate(done)
            if args.until is not None and np.median(curve[-1]["returns"]) >= args.until:
                break
        if done < args.decisions and time.monotonic() - begin > 60 * args.minutes:
            save()
            print(f"{task}: stopped at {2 * done} env steps; run again to go on", flush=True)
            break
    else:
        store(task, curve, args)
    worker.close()
    judge.close()
    journal.close()
    if checkpoint.steps(folder)[-1:] != [done]:
        shutil.rmtree(folder)  # it has come to its end, and is not gone on with


def store(task: str, curve: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The figures of a run that went all the way, with the product's own settings."""
    if args.override or curve[-1]["env_steps"] != 2 * FULL:
        return
    import jax

    if jax.default_backend() != "gpu":
        return
    CURVES.mkdir(exist_ok=True)
    shutil.copy(args.output / f"{task}.json", CURVES / f"tdmpc2_{task}.json")
    kw: dict[str, Any] = {"gpu": True, "packages": PACKAGES, "seeds": args.seeds}
    name, returns = task.replace("-", "_"), curve[-1]["returns"]
    theirs = [reward for step, reward in published("tdmpc2", task) if step == 2 * FULL]
    peer = sum(theirs) / len(theirs)
    mean = sum(returns) / len(returns)
    write_result(
        f"tdmpc2_{name}_100k",
        mean,
        "return",
        low=min(returns),
        high=max(returns),
        peer=f"published curves, mean of {len(theirs)} seeds",
        peer_value=peer,
        ratio=mean / peer,
        **kw,
    )
    if task in SOLVED:
        solved = [point for point in curve if sorted(point["returns"])[len(returns) // 2] >= SOLVED[task]]
        if solved:
            wall, training = solved[0]["wall_s"] / 60, solved[0]["training_s"] / 60
            write_result(f"tdmpc2_{name}_{SOLVED[task]:.0f}_minutes", wall, "minutes", low=training, high=wall, **kw)


if __name__ == "__main__":
    main()
