"""The sweep's own MLflow run, whose children its trials are, and the registered policy of the best trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlsvc.core.errors import NotFoundError
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec
from rlsvc.store.mlflow_store import experiment_id, open_store, store_uri

if TYPE_CHECKING:
    from rlsvc.tune.report import Report

IDS = "tracking.json"


def start_sweep_run(folder: Path, spec: SweepSpec, base: RunSpec) -> str | None:
    """The id of the sweep's MLflow run, begun now or when the sweep began; None without the mlflow tracker."""
    if "mlflow" not in base.tracking.trackers:
        return None
    uri = store_uri(base.root, base.tracking.mlflow_uri)
    client = open_store(uri)
    path = folder / IDS
    if path.exists():
        run_id = json.loads(path.read_text())["run_id"]
        client.update_run(run_id, status="RUNNING")
        return run_id
    tags = {"rlsvc.sweep": str(folder), "rlsvc.group": spec.name}
    run = client.create_run(experiment_id(client, uri, base.project), run_name=spec.name, tags=tags)
    path.write_text(json.dumps({"uri": uri, "run_id": run.info.run_id}) + "\n")
    client.log_dict(run.info.run_id, spec.model_dump(mode="json"), "sweep.json")
    return run.info.run_id


def finish_sweep_run(report: Report, spec: SweepSpec, base: RunSpec, run_id: str | None) -> Report:
    """Logs the report, registers the best bundle, ends the run; the report, with the name that it was registered by."""
    if run_id is None:
        return report
    client = open_store(store_uri(base.root, base.tracking.mlflow_uri))
    for path in (report.table, report.page, *report.plots, report.best_yaml):
        if path is not None:
            client.log_artifact(run_id, str(path))
    if report.best is not None:
        step, value = report.best.best(spec) or (0, 0.0)
        client.log_metric(run_id, spec.metric, value, step=step)
        client.set_tag(run_id, "rlsvc.best", report.best.name)
    if report.best_bundle is not None and base.tracking.register_bundle:
        report = replace(report, registered=register_best(report.folder, spec, base))
    client.set_terminated(run_id, status="FINISHED" if report.complete else "KILLED")
    return report


def register_best(folder: Path, spec: SweepSpec, base: RunSpec) -> str:
    """Registers the bundle of the best trial, once, as a version of the sweep's policy: `models:/name/version`.

    Raises:
        NotFoundError: no trial of the sweep has a bundle yet.
    """
    from rlsvc.store.registry import register

    bundle = folder / "best_bundle"
    if not bundle.is_dir():
        raise NotFoundError(f"sweep '{spec.name}' has no bundle in {bundle} yet: no trial of it has finished")
    name = base.tracking.register_as or f"{base.project}-{spec.name}"
    ids = folder / base.project / json.loads((folder / "best.json").read_text())["trial"] / IDS
    run_id = json.loads(ids.read_text()).get("mlflow", {}).get("run_id", "") if ids.exists() else ""
    version = register(bundle, name, run_id, base.tracking.mlflow_uri, root=base.root)
    return f"models:/{name}/{version}"
