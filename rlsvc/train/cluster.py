"""The Ray cluster of this process: the one that RAY_ADDRESS names, or one that is started here."""

from __future__ import annotations

import logging
import os

from rlsvc.core.errors import UserError
from rlsvc.spec.run import RunSpec


def ensure_ray() -> None:
    """Connect to RAY_ADDRESS when it is set (a submitted job has it), else start Ray on this machine.

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
        )
    except ConnectionError as error:
        raise UserError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from error


def check_resources(spec: RunSpec) -> None:
    """Refuse a run that the cluster can never hold, before anything starts.

    Raises:
        UserError: names the resource, what the run asks for and what there is.
    """
    import ray

    total = ray.cluster_resources()
    ranks, evaluation = spec.learner.ranks, spec.evaluation
    workers = evaluation.workers if spec.env else 0
    wanted = {
        "CPU": (
            ranks * spec.learner.cpus_per_rank + workers,
            f"{ranks} ranks x {spec.learner.cpus_per_rank:g} + {workers} rollout workers",
        ),
        "GPU": (
            ranks * spec.learner.gpus_per_rank + evaluation.gpus,
            f"{ranks} ranks x {spec.learner.gpus_per_rank:g} + evaluation {evaluation.gpus:g}",
        ),
    }
    for name, (amount, why) in wanted.items():
        if amount > total.get(name, 0):
            raise UserError(
                f"the run asks for {amount:g} {name} ({why}), the cluster has {total.get(name, 0):g}; "
                "lower learner.ranks, learner.cpus_per_rank, learner.gpus_per_rank or evaluation.workers, "
                "or run with --local"
            )
