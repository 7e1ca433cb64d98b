"""The Ray cluster of this process: the one that RAY_ADDRESS names, or one that is started here."""

from __future__ import annotations

import logging
import os

from rlsvc.core.errors import UserError
from rlsvc.spec.env import EnvBase, RobotEnvSpec
from rlsvc.spec.run import RunSpec


def robot_resources(env: EnvBase | None) -> dict[str, float]:
    """What Ray holds for a worker that steps this environment: all of its robot, so that no other run gets the arm."""
    return {f"robot:{env.station.id}": 1.0} if isinstance(env, RobotEnvSpec) else {}


def ensure_ray(env: EnvBase | None = None) -> None:
    """Connect to RAY_ADDRESS when it is set (a submitted job has it), else start Ray on this machine.

    Args:
        env: that the run steps; a Ray that is started here has its robot.

    Raises:
        UserError: Ray is not installed, or nobody answers at RAY_ADDRESS.
    """
    # An actor that asks for no GPU sees none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    # Relative paths of a specification (datasets/...) mean the same in the ranks as in the driver.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError("this needs Ray: install rlsvc[cluster], or run without it (--local)") from error
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    try:
        # A Ray of one's own has no dashboard, whose state API Ray Train's cleaner asks for and complains about in the
        # log.
        own = address is None
        ray.init(
            address=address or "local",
            include_dashboard=False if own else None,
            log_to_driver=not own,
            logging_level=logging.ERROR,
            resources=robot_resources(env) or None if own else None,
        )
    except ConnectionError as error:
        raise UserError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error


def cluster_gpus() -> float:
    """GPUs of the Ray cluster that this process is connected to, busy or not."""
    import ray

    return ray.cluster_resources().get("GPU", 0.0)


def takes_gpu(device: str, cluster_gpus: float) -> bool:
    """Whether what is to run on `device` (auto, cpu, gpu) takes a GPU of a cluster that has so many.

    Raises:
        UserError: `device` is gpu and the cluster has none.
    """
    if device == "gpu" and not cluster_gpus:
        raise UserError("device: got gpu, but the Ray cluster has no GPU; take device=auto or device=cpu")
    return cluster_gpus > 0 and device != "cpu"


def place_on_gpus(spec: RunSpec, cluster_gpus: float) -> RunSpec:
    """The specification with `learner.gpus_per_rank` and `evaluation.gpus` as numbers.

    Raises:
        UserError: `device` is gpu and the cluster has none.
    """
    learner, evaluation = spec.learner, spec.evaluation
    per_rank = learner.gpus_per_rank
    if per_rank is None:
        others = 0.25 * ((spec.env is not None) + (spec.online and spec.rollout.inference == "central"))
        apart = cluster_gpus >= learner.ranks + others
        per_rank = (1.0 if apart else 1.0 - others) if takes_gpu(spec.device, cluster_gpus) else 0.0
    acting = evaluation.gpus
    if acting is None:
        acting = 0.25 if per_rank and spec.env is not None else 0.0
    central = spec.rollout.inference_gpus
    if central is None:
        central = 0.25 if per_rank and spec.online and spec.rollout.inference == "central" else 0.0
    spec = spec.replace(rollout=spec.rollout.replace(inference_gpus=central))
    return spec.replace(learner=learner.replace(gpus_per_rank=per_rank), evaluation=evaluation.replace(gpus=acting))


def check_resources(spec: RunSpec) -> None:
    """Refuse a run that the cluster can never hold, before anything starts. `spec`: as `place_on_gpus` gives it.

    Raises:
        UserError: names the resource, what the run asks for and what there is.
    """
    import ray

    total = ray.cluster_resources()
    ranks, evaluation, rollout = spec.learner.ranks, spec.evaluation, spec.rollout
    per_rank = spec.learner.gpus_per_rank or 0.0
    asked = {"CPU": [(ranks * spec.learner.cpus_per_rank, f"{ranks} ranks x {spec.learner.cpus_per_rank:g}")]}
    asked["GPU"] = [(ranks * per_rank, f"{ranks} ranks x {per_rank:g}")]
    if spec.online and rollout.clients is None:
        share = rollout.cpus_per_worker
        asked["CPU"].append((rollout.workers * share, f"{rollout.workers} rollout workers x {share:g}"))
        if rollout.inference == "central":
            asked["GPU"].append((rollout.inference_gpus or 0.0, f"central inference {rollout.inference_gpus or 0:g}"))
    if spec.env:
        share = evaluation.cpus_per_worker
        asked["CPU"].append((evaluation.workers * share, f"{evaluation.workers} evaluation workers x {share:g}"))
        asked["GPU"].append((evaluation.gpus or 0.0, f"evaluation {evaluation.gpus or 0:g}"))
    for name in robot_resources(spec.env):
        if name not in total:
            raise UserError(
                f"no node of the Ray cluster has the robot '{name.removeprefix('robot:')}': start Ray on its computer "
                f"with ray start --address=HEAD:6379 --resources='{{\"{name}\": 1}}'"
            )
    for name, parts in asked.items():
        amount = sum(part for part, _ in parts)
        if amount > total.get(name, 0) + 1e-9:
            raise UserError(
                f"the run asks for {amount:g} {name} ({' + '.join(why for _, why in parts)}), the cluster has "
                f"{total.get(name, 0):g}; lower learner.ranks, learner.cpus_per_rank, learner.gpus_per_rank, "
                "rollout.workers, rollout.cpus_per_worker or evaluation.workers, or run with --local"
            )
