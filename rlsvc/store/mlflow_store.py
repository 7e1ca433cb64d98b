"""Where MLflow keeps runs and models, and how it is opened: the one place that constructs an MLflow client."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from rlsvc.core.errors import UserError
from rlsvc.store.storage import is_url, local_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

# A store that does not answer must cost a training step seconds, not MLflow's own 7 retries of 120 s each.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
RUN_DIR_TAG = "rlsvc.run_dir"
"""Of a run: its folder."""
MLFLOW_SCHEMES = ("http", "sqlite", "mysql", "postgresql", "mssql", "databricks")


class TrackingError(UserError):
    """A tracker cannot start: the store does not answer, or does not know the run."""


def store_uri(root: str | Path = "runs", uri: str | None = None) -> str:
    """The MLflow store: `uri` if given, else MLFLOW_TRACKING_URI, else SQLite at `<root>/mlflow.db`.

    A root that is a URL has no place for SQLite: then it is the root itself, which holds policies and no tracking.
    """
    named = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if named or is_url(root):
        return named or str(root)
    return f"sqlite:///{Path(local_folder(root)).absolute() / 'mlflow.db'}"


def on_storage(uri: str) -> bool:
    """Whether a store is no MLflow store but a storage, such as `s3://bucket/runs`."""
    return is_url(uri) and not urlparse(uri).scheme.startswith(MLFLOW_SCHEMES)


def sqlite_path(uri: str) -> Path | None:
    """The database file of a `sqlite:///` URI; None for a store that is not a local file."""
    parsed = urlparse(uri)
    if not parsed.scheme.startswith("sqlite"):
        return None
    return Path(parsed.path[1:]).absolute()  # sqlite:///relative, sqlite:////absolute


def artifact_root(uri: str) -> Path | None:
    """The folder beside a SQLite store that holds artifacts and registered bundles; None for a remote store."""
    path = sqlite_path(uri)
    return path.parent / "mlflow-artifacts" if path else None


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock among the processes of this machine. The kernel frees it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def open_store(uri: str) -> MlflowClient:
    """A client of the store at `uri`, whose schema exists and is current.

    The first use of a SQLite store creates its tables. Processes that do so at once would migrate against each other
    (mlflow#5222, #6388), so one does it under a lock beside the database and the others wait.

    Raises:
        TrackingError: the store cannot be reached, is damaged, or has the schema of another MLflow.
    """
    if on_storage(uri):
        raise TrackingError(
            f"tracking.trackers: mlflow keeps a database, which cannot lie at {uri}. Name a store "
            "(tracking.mlflow_uri, MLFLOW_TRACKING_URI), or take tracking.trackers=[]; metrics.jsonl is written, and "
            "the bundle is registered, in any case"
        )
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise TrackingError(
            "MLflow is not installed. Install rlsvc[cluster], or leave mlflow out of tracking.trackers"
        ) from error
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    path = sqlite_path(uri)
    try:
        if path is None:
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
            return client
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock")):
            client = MlflowClient(tracking_uri=uri, registry_uri=uri)
            client.search_experiments(max_results=1)
            return client
    except Exception as error:  # MLflow, SQLAlchemy, requests and the file system each raise their own kind here
        raise TrackingError(
            f"MLflow store {uri} cannot be used: {_first_line(error)}. Set tracking.mlflow_uri or "
            "MLFLOW_TRACKING_URI to a store that works (sqlite:///file.db, http://host:port), or leave "
            "mlflow out of tracking.trackers"
        ) from error


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment `name`, made when it does not exist, also when several processes ask at once."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        root = artifact_root(uri)
        try:
            return client.create_experiment(name, artifact_location=(root / name).as_uri() if root else None)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
            assert found is not None
    if found.lifecycle_stage == "deleted":
        raise TrackingError(f"MLflow experiment '{name}' in {uri} is deleted. Restore it, or choose another project")
    return found.experiment_id


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
