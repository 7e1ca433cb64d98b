"""The Ray cluster of this process: the one that RAY_ADDRESS names, or one that is started here."""

from __future__ import annotations

import logging
import os

from rlsvc.core.errors import UserError
from rlsvc.spec.env import EnvBase
from rlsvc.spec.needs import parts_of, robot_resources
from rlsvc.spec.run import RunSpec


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
        others = 0.25 * (spec.evaluates + (spec.online and spec.rollout.inference == "central"))
        apart = cluster_gpus >= learner.ranks + others
        per_rank = (1.0 if apart else 1.0 - others) if takes_gpu(spec.device, cluster_gpus) else 0.0
    acting = evaluation.gpus
    if acting is None:
        acting = 0.25 if per_rank and spec.evaluates else 0.0
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
    total = cluster_capacity()
    for name, parts in parts_of(spec).items():
        amount = sum(part for part, _ in parts)
        if amount <= total.get(name, 0) + 1e-9:
            continue
        if name.startswith("robot:"):
            raise UserError(
                f"no node of the Ray cluster has the robot '{name.removeprefix('robot:')}': start Ray on its computer "
                f"with ray start --address=HEAD:6379 --resources='{{\"{name}\": 1}}'"
            )
        raise UserError(
            f"the run asks for {amount:g} {name} ({' + '.join(why for _, why in parts)}), the cluster has "
            f"{total.get(name, 0):g}; lower learner.ranks, learner.cpus_per_rank, learner.gpus_per_rank, "
            "rollout.workers, rollout.cpus_per_worker or evaluation.workers, or run with --local"
        )


def own_node() -> dict[str, float]:
    """The resource that only this process's node has: a sliver of it keeps an actor here."""
    import ray.util

    return {f"node:{ray.util.get_node_ip_address()}": 0.001}


def check_own_node(spec: RunSpec) -> None:
    """Refuse ranks that this process's node does not hold: the files of a run with a URL for a root lie on it.

    Raises:
        UserError: names the resource.
    """
    import ray

    (name,) = own_node()
    node = next((one["Resources"] for one in ray.nodes() if one["Alive"] and name in one["Resources"]), {})
    ranks, evaluation = spec.learner.ranks, spec.evaluation.gpus or 0.0
    asked = {
        "CPU": ranks * spec.learner.cpus_per_rank,
        "GPU": ranks * (spec.learner.gpus_per_rank or 0.0) + (evaluation if spec.evaluates else 0.0),
    }
    for kind, amount in asked.items():
        if amount > node.get(kind, 0.0) + 1e-9:
            raise UserError(
                f"root {spec.root}: the learner's ranks work on the driver's own node, where the run's files are "
                f"before they are uploaded; they ask for {amount:g} {kind}, it has {node.get(kind, 0.0):g}. Put the "
                "driver on another node (rlsvc submit --cpus, --gpus or --resource), or take a folder that all nodes "
                "reach as root"
            )


def cluster_capacity() -> dict[str, float]:
    """What the cluster has in all, or what its autoscaler may bring it to where it says so: the larger, by resource."""
    import ray
    from ray._private.state import state  # pyright: ignore[reportPrivateUsage] - Ray Train looks there too

    total = ray.cluster_resources()
    most = state.get_max_resources_from_cluster_config() or {}
    return {name: max(total.get(name, 0.0), float(most.get(name, 0))) for name in total.keys() | most.keys()}
