"""Sample efficiency of TD-MPC2 on one task of the DeepMind Control Suite, several seeds as one program on one GPU.

    python benchmarks/tdmpc2_learning.py walker-walk
    python benchmarks/tdmpc2_learning.py walker-walk cartpole-swingup cheetah-run finger-spin      # one GPU each

Protocol of the paper (arXiv:2310.16828): action repeat 2, so 100k environment steps are 50k decisions; 2,500 of them at
random, as many updates on those, then one update for every decision; a score is the mean return of 10 episodes without
exploration. The algorithm, the rollout worker, the environments and the replay are the product's; only the seeds are
put side by side: the train states are stacked and every update and plan is mapped over them, one environment and one
stream of the replay for each. While an environment steps on the CPU, the update of that step runs on the GPU, so that
an update sees the data up to the step before.

Two clocks are kept: seconds of training, compilation included, and seconds with the evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EVALUATION_EPISODES = 10
EPISODE = 500
"""Decisions in an episode."""


def main() -> None:
    """One task in this process; several in one process each, on a GPU of its own."""
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
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    if len(args.tasks) == 1:
        run(args.tasks[0], args)
        return
    words = [word for word in sys.argv[1:] if word not in args.tasks]
    started = []
    for gpu, task in enumerate(args.tasks):
        log = (args.output / f"{task}.log").open("w")
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [sys.executable, __file__, task, *words]
        started.append((task, subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)))
    for task, process in started:
        code = process.wait()
        tail = (args.output / f"{task}.log").read_text().splitlines()[-12:]
        print(f"--- {task} (exit code {code})", *tail, sep="\n")


class SeedsRunner:
    """The runner of a worker whose environments belong to one seed each; `after` runs once actions are known."""

    version = "0"

    def __init__(self, act: Any, after: Any) -> None:
        self.act_on, self.after = act, after

    def act(self, observation: Any, seeds: Any, steps: Any, carry: Any = None) -> Any:
        """See `rlsvc.runner.Runner`."""
        import numpy as np

        from rlsvc.core.types import ActionChunk

        action, carry = self.act_on(observation, seeds, steps, carry)
        action = np.asarray(action)
        self.after()
        return ActionChunk(action, self.version, carry)


def run(task: str, args: argparse.Namespace) -> None:
    """Train and score; the curve goes to `<output>/<task>.json`."""
    begin = time.monotonic()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rlsvc.algos.tdmpc2 import TDMPC2
    from rlsvc.data.normalize import Normalizer
    from rlsvc.data.replay import Replay
    from rlsvc.envs.make import make_env
    from rlsvc.envs.vector import VectorEnv
    from rlsvc.nn.backend import setup_jax
    from rlsvc.policies import make_policy
    from rlsvc.policies.api import ActOptions
    from rlsvc.spec.compose import compose
    from rlsvc.train.rollout import Acting, RolloutWorker

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
    capacity = n * (args.decisions + args.decisions // EPISODE + EPISODE)
    schema = {**contract.observation, "action": contract.action}
    replay = Replay(spec.replay.replace(capacity=capacity), schema, range(n), observation=tuple(contract.observation))

    def update(states: Any, view: Any, keys: Any, count: int) -> Any:
        def one(states: Any, _: None) -> Any:
            def of_seed(state: Any, view: Any, key: Any) -> Any:
                own = jax.tree.map(lambda x: x[None], view)
                draw_key = jax.random.split(jax.random.fold_in(key, state.step))[0]
                batch = own.sample(draw_key, spec.algo.batch_size, spec.policy.horizon)
                return algorithm.update_once(state, batch, key)

            return jax.vmap(of_seed)(states, view, keys)

        states, metrics = jax.lax.scan(one, states, None, length=count)
        return states, {name: value.mean(0) for name, value in metrics.items()}

    update_jit = jax.jit(update, static_argnames="count", donate_argnames="states")
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

    due = 0

    def learn() -> None:
        nonlocal states, due
        if due:
            states, _ = update_jit(states, replay.view(), learn_keys, due)
            due = 0

    worker = RolloutWorker(
        env_spec,
        Acting(config, contract, normalizer, spec.precision),
        worker=0,
        num_envs=n,
        seed=args.seeds[0],
        runner=SeedsRunner(acting(True), learn),
    )
    worker.set_weights(None, 0)
    judge = VectorEnv(env_spec, n * EVALUATION_EPISODES)
    judge_act = acting(False)
    curve: list[dict[str, Any]] = []
    evaluating = 0.0

    def evaluate(decisions: int) -> None:
        nonlocal evaluating
        jax.block_until_ready(states)
        start = time.monotonic()
        rows = n * EVALUATION_EPISODES
        seeds = np.arange(1_000_000, 1_000_000 + rows)
        observation, carry, total = judge.reset(seeds), None, np.zeros(rows)
        for step in range(EPISODE):
            window = {name: x[:, None] for name, x in observation.items()}
            action, carry = judge_act(window, seeds.astype(np.uint32), np.full(rows, step), carry)
            out = judge.step(np.asarray(action)[:, 0])
            observation, total = out.observation, total + out.reward
        returns = total.reshape(n, EVALUATION_EPISODES)
        evaluating += time.monotonic() - start
        point = {
            "env_steps": 2 * decisions,
            "returns": returns.mean(1).tolist(),
            "training_s": time.monotonic() - begin - evaluating,
            "wall_s": time.monotonic() - begin,
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

    print(f"{task}: ready after {time.monotonic() - begin:.0f} s", flush=True)
    for start in range(0, args.random, 100):
        replay.add(worker.collect(min(100, args.random - start), "random"))
    evaluate(args.random)
    for _ in range(args.random // 100):
        states, _ = update_jit(states, replay.view(), learn_keys, 100)
    done = args.random
    while done < args.decisions:
        due = 1
        replay.add(worker.collect(1))
        done += 1
        if done % args.every == 0 or done == args.decisions:
            evaluate(done)
            late = time.monotonic() - begin > 60 * args.minutes
            if late or (args.until is not None and np.median(curve[-1]["returns"]) >= args.until):
                break
    worker.close()
    judge.close()


if __name__ == "__main__":
    main()
