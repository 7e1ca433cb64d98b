"""Evaluation of one bundle, outside a training run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from rlsvc.envs.make import make_env
from rlsvc.runner import BASELINES, BaselineRunner, Runner
from rlsvc.spec.env import EnvSpec
from rlsvc.store.registry import resolve
from rlsvc.train.cluster import cluster_gpus, ensure_ray, takes_gpu
from rlsvc.train.evaluate import Evaluation, batch_sizes, evaluate
from rlsvc.train.inference import LocalInference, RayInference
from rlsvc.train.workers import make_workers

BASELINE_HORIZON = 8


def evaluate_bundle(
    bundle: str,
    env_spec: EnvSpec,
    *,
    episodes: int = 50,
    first_seed: int = 100_000,
    workers: int = 1,
    parallel: int = 50,
    sample_steps: int | None = None,
    local: bool = False,
    device: str = "auto",
    group: str | None = None,
    root: str = "runs",
) -> Evaluation:
    """Run episodes with a bundle's policy, or a baseline's.

    Args:
        bundle: folder, `models:/name@alias`, "random" or "zero".
        env_spec: the environment.
        episodes: how many, with the seeds first_seed, first_seed + 1, ...
        first_seed: see `episodes`.
        workers: rollout workers; Ray actors, or processes with `local`.
        parallel: episodes side by side.
        sample_steps: denoising steps, None for the policy's own.
        local: without Ray.
        device: of the policy; auto takes a GPU where there is one.
        group: the environment's normaliser group, for a bundle that has several.
        root: of runs and registry.

    Raises:
        ContractError: policy and environment differ; names the key.
    """
    if not local:
        ensure_ray()
    env = make_env(env_spec)
    runner: Runner
    with contextlib.ExitStack() as stack:
        stack.callback(env.close)
        if bundle in BASELINES:
            runner = BaselineRunner(bundle, env.contract(action_horizon=BASELINE_HORIZON))
        else:
            sizes = batch_sizes(parallel)
            inference = (
                LocalInference(sizes, device, sample_steps, group)
                if local
                else RayInference(sizes, float(takes_gpu(device, cluster_gpus())), sample_steps, group)
            )
            stack.callback(inference.close)
            contract = inference.load(resolve(bundle, root=root).absolute())
            contract.check_same(env.contract(), "policy", f"environment {env_spec.name}")
            runner = inference
        pool = make_workers(env_spec, runner.contract.n_obs_steps, workers, local)
        stack.callback(pool.close)
        return evaluate(runner, pool, list(range(first_seed, first_seed + episodes)), parallel)


def write_scores(evaluation: Evaluation, path: Path) -> Path:
    """Every episode's seed and scores as JSON."""
    rows = [
        {
            "seed": e.seed,
            "max_reward": max(e.rewards, default=0.0),
            "return": sum(e.rewards),
            "length": e.length,
            "success": e.success,
            **({} if e.malformed is None else {"malformed_chunks": e.malformed}),
        }
        for e in evaluation.episodes
    ]
    path.write_text(json.dumps({"metrics": evaluation.metrics(), "episodes": rows}, indent=1))
    return path
