"""Evaluation of one bundle, outside a training run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rlsvc.core.errors import UserError
from rlsvc.data.transforms import RobotTransforms
from rlsvc.envs.make import make_env
from rlsvc.runner import BASELINES, BaselineRunner, Runner
from rlsvc.spec.env import EnvSpec
from rlsvc.store.bundle import read_robot
from rlsvc.store.registry import resolve
from rlsvc.train.cluster import cluster_gpus, ensure_ray, takes_gpu
from rlsvc.train.evaluate import Evaluation, batch_sizes, evaluate
from rlsvc.train.inference import LocalInference, RayInference
from rlsvc.train.scores import Made, read_scores, write_scores
from rlsvc.train.workers import EpisodeResult, make_workers

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
    output: Path | None = None,
    resume: bool = False,
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
        output: a file that has every episode's scores as soon as it has ended; see `rlsvc.train.scores`.
        resume: take over the episodes that `output` has.

    Raises:
        ContractError: policy and environment differ; names the key.
        UserError: `resume`, and `output` is of another policy or environment.
    """
    if resume and output is None:
        raise UserError("--resume: goes on with the scores of --output, which is missing")
    if not local:
        ensure_ray(env_spec)
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
            path = resolve(bundle, root=root).absolute()
            contract = inference.load(path)
            seen = RobotTransforms(read_robot(path)).seen(env.contract())
            contract.check_same(seen, "policy", f"environment {env_spec.name}")
            runner = inference
        seeds = range(first_seed, first_seed + episodes)
        made = Made.by(runner.version, env_spec, sample_steps)
        before = [e for e in read_scores(output, made) if e.seed in seeds] if resume and output is not None else []
        rest = sorted(set(seeds) - {e.seed for e in before})

        def all_of(episodes: list[EpisodeResult]) -> Evaluation:
            return Evaluation(sorted([*before, *episodes], key=lambda e: e.seed))

        def save(episodes: list[EpisodeResult]) -> None:
            if output is not None:
                write_scores(all_of(episodes), made, output)

        pool = make_workers(env_spec, runner.contract.n_obs_steps, workers, local)
        stack.callback(pool.close)
        return all_of(evaluate(runner, pool, rest, parallel, finished=save).episodes)
