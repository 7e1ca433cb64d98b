"""What a run holds of a cluster, from its specification alone."""

from __future__ import annotations

from rlsvc.spec.env import EnvBase, RobotEnvSpec
from rlsvc.spec.rllib import RLlibSpec, remote_learners
from rlsvc.spec.run import RunSpec

Parts = dict[str, list[tuple[float, str]]]


def robot_resources(env: EnvBase | None) -> dict[str, float]:
    """What Ray holds for a worker that steps this environment: all of its robot, so that no other run gets the arm."""
    return {f"robot:{env.station.id}": 1.0} if isinstance(env, RobotEnvSpec) else {}


def parts_of(spec: RunSpec) -> Parts:
    """By resource, the amounts that a run holds and what for. A share of GPUs that is null counts as none.

    Workers of the evaluation and of the rollout count both: they live side by side.
    """
    ranks, evaluation, rollout = spec.learner.ranks, spec.evaluation, spec.rollout
    per_rank = spec.learner.gpus_per_rank or 0.0
    if isinstance(spec.algo, RLlibSpec):
        ranks = remote_learners(spec.learner)
    parts: Parts = {"CPU": [(ranks * spec.learner.cpus_per_rank, f"{ranks} ranks x {spec.learner.cpus_per_rank:g}")]}
    parts["GPU"] = [(ranks * per_rank, f"{ranks} ranks x {per_rank:g}")]
    if spec.collects and rollout.clients is None:
        share = rollout.cpus_per_worker
        parts["CPU"].append((rollout.workers * share, f"{rollout.workers} rollout workers x {share:g}"))
        if rollout.inference == "central":
            parts["GPU"].append((rollout.inference_gpus or 0.0, f"central inference {rollout.inference_gpus or 0:g}"))
    if spec.evaluates:
        share = evaluation.cpus_per_worker
        parts["CPU"].append((evaluation.workers * share, f"{evaluation.workers} evaluation workers x {share:g}"))
        parts["GPU"].append((evaluation.gpus or 0.0, f"evaluation {evaluation.gpus or 0:g}"))
    for name, amount in robot_resources(spec.env).items():
        parts[name] = [(amount, "the robot of env")]
    return parts


def needs_of_run(spec: RunSpec) -> dict[str, float]:
    """`parts_of`, added up; without what comes to nothing."""
    sums = {name: sum(amount for amount, _ in parts) for name, parts in parts_of(spec).items()}
    return {name: amount for name, amount in sums.items() if amount}
