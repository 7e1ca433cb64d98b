"""Evaluation of one bundle, outside a training run."""

from __future__ import annotations

import json
from pathlib import Path

from rlsvc.envs.make import make_env
from rlsvc.runner import BASELINES, BaselineRunner, Runner
from rlsvc.spec.env import PushTSpec
from rlsvc.store.registry import resolve
from rlsvc.train.cluster import ensure_ray
from rlsvc.train.evaluate import Evaluation, batch_sizes, evaluate
from rlsvc.train.inference import LocalInference, RayInference
from rlsvc.train.workers import make_workers

BASELINE_HORIZON = 8


def evaluate_bundle(
    bundle: str,
    env_spec: PushTSpec,
    *,
    episodes: int = 50,
    first_seed: int = 100_000,
    workers: int = 1,
    parallel: int = 50,
    sample_steps: int | None = None,
    local: bool = False,
    device: str = "auto",
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
        device: of the policy.
        root: of runs and registry.

    Raises:
        ContractError: policy and environment differ; names the key.
    """
    if not local:
        ensure_ray()
    env = make_env(env_spec)
    runner: Runner
    inference: RayInference | None = None
    if bundle in BASELINES:
        runner = BaselineRunner(bundle, env.contract(action_horizon=BASELINE_HORIZON))
    else:
        sizes = batch_sizes(parallel)
        if local:
            runner = LocalInference(sizes, device, sample_steps)
        else:
            runner = inference = RayInference(sizes, device, 1.0 if device == "gpu" else 0.0, sample_steps)
        contract = runner.load(resolve(bundle, root=root).absolute())
        contract.check_same(env.contract(), "policy", f"environment {env_spec.name}")
    env.close()
    pool = make_workers(env_spec, runner.contract.n_obs_steps, workers, local)
    try:
        return evaluate(runner, pool, list(range(first_seed, first_seed + episodes)), parallel)
    finally:
        pool.close()
        if inference is not None:
            inference.close()


def write_scores(evaluation: Evaluation, path: Path) -> Path:
    """Every episode's seed and scores as JSON."""
    rows = [
        {
            "seed": e.seed,
            "max_reward": max(e.rewards),
            "return": sum(e.rewards),
            "length": e.length,
            "success": e.success,
        }
        for e in evaluation.episodes
    ]
    path.write_text(json.dumps({"metrics": evaluation.metrics(), "episodes": rows}, indent=1))
    return path
