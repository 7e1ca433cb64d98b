"""Fixtures of the store's tests."""

import shutil
from pathlib import Path

import pytest
from moto_s3 import s3, s3_server  # noqa: F401 - fixtures

from rlsvc.store.mlflow_store import open_store


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with MLflow's schema in it; making one takes several seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def root(tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs with an empty MLflow store of its own."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(migrated_database, tmp_path / "mlflow.db")
    return tmp_path
