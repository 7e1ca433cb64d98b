"""Environment steps per second that reach replay through Ray actors, beside the raw simulator and what others offer.

    python benchmarks/rollout_speed.py [--rounds 5] [--seconds 2] [--envs 16]

Two rollout workers (Ray actors) act at random in CartPole-v1 and HalfCheetah-v5 while the driver writes every chunk to
the journal on disk and to replay in host memory: what an online run does, but for learning. Beside it, in turns within
each round, in an order that changes:

- the raw simulator: two processes that only step one environment each; the sum of their rates
- gymnasium's AsyncVectorEnv and SyncVectorEnv with 8 environments, and Stable-Baselines3's SubprocVecEnv with 8: the
  driver steps them with actions that were drawn before, and keeps nothing
- RLlib's env runners: two Ray actors, as many environments each as one of our workers, two requests under way each; the
  driver fetches the episodes and keeps nothing. Once with RLlib's random RLModule, which acts as every RLlib policy
  does, through its connectors, and once with `random_actions` and no module at all, its shortest way

Every rate counts true environment steps: a reset step (gymnasium's vector environments make them) is none. A ratio is
the median over the rounds of one rate over the other of the same round, its low and high are the least and the most.
Peers that are not installed are left out; Stable-Baselines3 is no part of this project's environment: install it into a
folder of its own (`uv pip install --no-deps --target FOLDER stable-baselines3`) and put that on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import numpy as np
from common import QUIET, hardware, load_of_others, write_result
from rich.console import Console
from rich.table import Table

IDS = ("CartPole-v1", "HalfCheetah-v5")
WORKERS, PEER_ENVS = 2, 8
CAPACITY = 500_000
PACKAGES = ("rlsvc", "ray", "gymnasium", "mujoco", "numpy", "stable-baselines3")
OURS, RAW, ASYNC, SYNC = "rlsvc", "raw simulator", "AsyncVectorEnv", "SyncVectorEnv"
SB3, RLLIB, RLLIB_BARE = "SubprocVecEnv", "RLlib's env runners, random RLModule", "RLlib's env runners, no module"
PEERS = (RAW, ASYNC, SYNC, SB3, RLLIB, RLLIB_BARE)
FIGURES = (
    ("rollout_cartpole_vs_async_vector_env", "CartPole-v1", ASYNC),
    ("rollout_cartpole_vs_rllib", "CartPole-v1", RLLIB),
    ("rollout_cartpole_vs_rllib_no_module", "CartPole-v1", RLLIB_BARE),
    ("rollout_halfcheetah_vs_raw", "HalfCheetah-v5", RAW),
)
"""Figure, environment, and whose rate ours is divided by."""


class Contender(Protocol):
    """Something that steps environments when it is its turn, and is idle otherwise."""

    def measure(self, seconds: float) -> float:
        """Step for so long; true environment steps per second."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def make(env_id: str) -> gymnasium.Env:
    """The environment as our workers make it: without gymnasium's checks of each step."""
    return gymnasium.make(env_id, disable_env_checker=True)


class Raw:
    """Processes that only step, at the same time."""

    def __init__(self, env_id: str) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes = []
        for seed in range(WORKERS):
            here, there = context.Pipe()
            context.Process(target=self._step, args=(env_id, seed, there), daemon=True).start()
            self._pipes.append(here)

    @staticmethod
    def _step(env_id: str, seed: int, pipe: Any) -> None:
        env = make(env_id)
        env.action_space.seed(seed)
        env.reset(seed=seed)
        actions = [env.action_space.sample() for _ in range(1000)]
        while (seconds := pipe.recv()) is not None:
            steps, begin = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begin) < seconds:
                for action in actions[:100]:
                    _, _, terminated, truncated, _ = env.step(action)
                    if terminated or truncated:
                        env.reset()
                steps += 100
                actions = actions[100:] + actions[:100]
            pipe.send(steps / elapsed)

    def measure(self, seconds: float) -> float:
        """See Contender."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return sum(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        """See Contender."""
        for pipe in self._pipes:
            pipe.send(None)


class GymnasiumVector:
    """A vector environment of gymnasium's; the step after an episode's end is a reset, and no step."""

    def __init__(self, env: Any) -> None:
        self._env = env
        env.action_space.seed(0)
        self._actions = [env.action_space.sample() for _ in range(1000)]
        env.reset(seed=0)
        self._over = np.zeros(env.num_envs, bool)

    def measure(self, seconds: float) -> float:
        """See Contender."""
        steps, count, begin = 0, 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            _, _, terminated, truncated, _ = self._env.step(self._actions[count % 1000])
            steps += len(self._over) - np.count_nonzero(self._over)
            self._over = terminated | truncated
            count += 1
        return steps / elapsed

    def close(self) -> None:
        """See Contender."""
        self._env.close()


class Subproc:
    """Stable-Baselines3's SubprocVecEnv, which resets within the step that ends an episode."""

    def __init__(self, env_id: str) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv  # pyright: ignore[reportMissingImports]

        self._env = SubprocVecEnv([partial(make, env_id)] * PEER_ENVS, start_method="fork")
        space = self._env.action_space
        space.seed(0)
        self._actions = [np.stack([space.sample() for _ in range(PEER_ENVS)]) for _ in range(1000)]
        self._env.reset()

    def measure(self, seconds: float) -> float:
        """See Contender."""
        steps, begin = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            self._env.step(self._actions[steps // PEER_ENVS % 1000])
            steps += PEER_ENVS
        return steps / elapsed

    def close(self) -> None:
        """See Contender."""
        self._env.close()


class RLlib:
    """RLlib's env runners as Ray actors."""

    def __init__(self, env_id: str, envs: int, chunk_steps: int, *, module: bool) -> None:
        import ray
        from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec
        from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
        from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule

        class Random(RandomRLModule):
            """With what env runners of this version ask of a module."""

            framework = "torch"

            def to(self, device: Any) -> Any:
                return self

        config = (PPOConfig if module else AlgorithmConfig)()
        config = config.environment(env_id, disable_env_checking=True)
        config = config.env_runners(num_env_runners=WORKERS, num_envs_per_env_runner=envs)
        if module:
            config = config.rl_module(rl_module_spec=RLModuleSpec(module_class=Random))
        actor = ray.remote(num_cpus=1)(SingleAgentEnvRunner)
        self._runners: list[Any] = [actor.remote(config=config, worker_index=i + 1) for i in range(WORKERS)]
        self._request = {"num_timesteps": envs * chunk_steps, "random_actions": not module}

    def measure(self, seconds: float) -> float:
        """See Contender. What is under way when the time is over is waited for, and counts."""
        import ray

        def ask(runner: Any) -> Any:
            return runner.sample.remote(**self._request)

        begin, steps = time.perf_counter(), 0
        pending = {index: deque([ask(runner), ask(runner)]) for index, runner in enumerate(self._runners)}
        while any(pending.values()):
            owner = {refs[0]: index for index, refs in pending.items() if refs}
            for ref in ray.wait(list(owner), num_returns=1)[0]:
                steps += sum(len(episode) for episode in ray.get(ref))
                pending[owner[ref]].popleft()
                if time.perf_counter() - begin < seconds:
                    pending[owner[ref]].append(ask(self._runners[owner[ref]]))
        return steps / (time.perf_counter() - begin)

    def close(self) -> None:
        """See Contender."""
        import ray

        for runner in self._runners:
            ray.kill(runner)


class Ours:
    """The rollout workers of an online run; each chunk goes to the journal and to replay."""

    def __init__(self, env_id: str, envs: int, chunk_steps: int, folder: Path) -> None:
        from rlsvc.data.journal import Journal
        from rlsvc.data.normalize import Normalizer
        from rlsvc.data.replay import Replay
        from rlsvc.envs.make import make_env
        from rlsvc.spec.env import GymnasiumSpec
        from rlsvc.spec.replay import ReplaySpec
        from rlsvc.spec.rollout import RolloutSpec
        from rlsvc.train.rollout import RayRollouts
        from rlsvc.train.rollout_worker import Acting

        env = GymnasiumSpec(id=env_id)
        probe = make_env(env)
        contract = probe.contract()
        probe.close()
        spec = RolloutSpec(workers=WORKERS, envs_per_worker=envs, mode="async", chunk_steps=chunk_steps)
        acting = Acting({}, contract, Normalizer.from_contract(contract), "fp32")
        self._rollouts = RayRollouts(env, spec, acting, seed=0, incarnations=[0] * WORKERS)
        self._journal = Journal(folder / env_id)
        schema = {**contract.observation, "action": contract.action}
        self._replay = Replay(ReplaySpec(capacity=CAPACITY, placement="host"), schema, range(WORKERS * envs))
        self._budget = 2 * spec.max_inflight * WORKERS * envs * chunk_steps

    def measure(self, seconds: float) -> float:
        """See Contender. What is under way when the time is over is waited for, and counts."""
        begin, steps, asks = time.perf_counter(), 0, True
        while asks or self._rollouts.metrics()["inflight"]:
            if asks:
                self._rollouts.pump(self._budget, "random")
            for one in self._rollouts.poll(1.0):
                self._journal.append(one.chunk)
                assert self._replay.add(one.chunk)
                steps += one.chunk.num_steps
            asks = time.perf_counter() - begin < seconds
        return steps / (time.perf_counter() - begin)

    def close(self) -> None:
        """See Contender."""
        self._rollouts.close()
        self._journal.close()


def contenders(stack: ExitStack, env_id: str, options: argparse.Namespace, console: Console) -> dict[str, Contender]:
    """By name. Those that fork come first, before Ray has threads in this process."""
    made: dict[str, Contender] = {}

    def add(name: str, create: Callable[[], Contender]) -> None:
        if options.peers is not None and name not in (OURS, *options.peers):
            return
        made[name] = create()
        stack.callback(made[name].close)

    vectors = [partial(make, env_id)] * PEER_ENVS
    add(RAW, lambda: Raw(env_id))
    add(ASYNC, lambda: GymnasiumVector(gymnasium.vector.AsyncVectorEnv(vectors, context="fork")))
    if importlib.util.find_spec("stable_baselines3") is None:
        console.print("stable-baselines3 is not installed: its SubprocVecEnv is not measured")
    else:
        add(SB3, lambda: Subproc(env_id))
    add(SYNC, lambda: GymnasiumVector(gymnasium.vector.SyncVectorEnv(vectors)))

    import ray

    # More CPUs than there are: actors that are not at their turn are idle.
    ray.init(address="local", num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    stack.callback(ray.shutdown)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    add(OURS, lambda: Ours(env_id, options.envs, options.chunk_steps, folder))
    try:
        add(RLLIB, lambda: RLlib(env_id, options.envs, options.chunk_steps, module=True))
        add(RLLIB_BARE, lambda: RLlib(env_id, options.envs, options.chunk_steps, module=False))
    except ImportError as error:
        console.print(f"RLlib cannot be imported ({error}): its env runners are not measured")
    return made


def measure(env_id: str, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Rates by contender, one a round; in a process of its own, so that no other environment's contenders exist."""
    console, rng = Console(soft_wrap=True), np.random.default_rng(0)
    with ExitStack() as stack:
        group = contenders(stack, env_id, options, console)
        samples: dict[str, list[float]] = {name: [] for name in group}
        for contender in group.values():
            contender.measure(options.seconds / 4)  # actors start, caches fill
        for _ in range(options.rounds):
            for name in rng.permutation(list(group)).tolist():
                samples[name].append(group[name].measure(options.seconds))
    rates = {name: np.asarray(values) for name, values in samples.items()}
    report(env_id, rates, console)
    return rates


def ratio(rates: dict[str, np.ndarray], peer: str) -> tuple[float, float, float]:
    """Our rate over a peer's: median, least and most over the rounds."""
    each = rates[OURS] / rates[peer]
    return float(np.median(each)), float(each.min()), float(each.max())


def main() -> None:
    """Measure, print, and store the figures if the machine has nothing else to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender in a round")
    parser.add_argument("--envs", type=int, default=16, help="environments of one of our workers, and of RLlib's")
    parser.add_argument("--chunk-steps", type=int, default=64, help="steps of each environment in a chunk")
    parser.add_argument("--ids", nargs="+", default=list(IDS), help="environments")
    parser.add_argument(
        "--peers", nargs="+", help=f"those that are measured, of: {', '.join(PEERS)}; all when left out"
    )
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    load = load_of_others()
    console.print(f"{hardware()}; load of others {load:.1f}")
    measured: dict[str, dict[str, np.ndarray]] = {}
    for env_id in options.ids:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            measured[env_id] = pool.submit(measure, env_id, options).result()
    if load > QUIET:
        console.print(f"the load of others was {load:.1f}: nothing is stored")
        return
    for figure, env_id, peer in FIGURES:
        rates = measured.get(env_id, {})
        if peer in rates:
            value, low, high = ratio(rates, peer)
            write_result(
                figure,
                value,
                "ratio",
                low=low,
                high=high,
                peer=f"{peer}, env steps/s",
                peer_value=float(np.median(rates[peer])),
                ratio=value,
                packages=PACKAGES,
                seeds=[0],
            )


def report(env_id: str, rates: dict[str, np.ndarray], console: Console) -> None:
    """Print the table of one environment."""
    table = Table("who", "env steps/s", "least", "most", "ours / theirs", "least", "most", title=env_id)
    for name, values in sorted(rates.items(), key=lambda item: -np.median(item[1])):
        row = [f"{np.median(values):,.0f}", f"{values.min():,.0f}", f"{values.max():,.0f}"]
        table.add_row(name, *row, *(f"{part:.2f}" for part in ratio(rates, name)))
    console.print(table)


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    # One thread for each process that computes, for all contenders alike.
    os.environ.update(OMP_NUM_THREADS="1", JAX_PLATFORMS="cpu")
    main()
