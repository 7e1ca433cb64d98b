"""Where metrics go, and whether the bundle is registered (rlsvc/store/tracking.py, registry.py)."""

from __future__ import annotations

from typing import Literal

from rlsvc.spec.base import Spec

Tracker = Literal["mlflow", "tensorboard", "wandb"]


class TrackingSpec(Spec):
    """Trackers of a run; several may be named."""

    trackers: tuple[Tracker, ...] = ("mlflow",)
    """`metrics.jsonl` in the run folder is written in any case."""
    mlflow_uri: str | None = None
    """MLflow store; null means MLFLOW_TRACKING_URI, or a SQLite file under the run folder's parent."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline writes files that `wandb sync` uploads."""
    register_as: str | None = None
    """Name of the registered model; null means `<project>-<name>`. Needs the mlflow tracker."""
    register_bundle: bool = True
    """Register the best bundle at the end as a new version of the model."""
    parent_run: str | None = None
    """MLflow run that this one is a child of, as a trial is of its sweep."""
