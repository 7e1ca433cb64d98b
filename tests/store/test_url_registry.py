"""Policies registered below a URL: what the registry on MLflow holds to, held here too."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.contract import Contract, Feature
from rlsvc.core.errors import BundleError, NotFoundError, SpecError, UserError
from rlsvc.data.normalize import Normalizer
from rlsvc.store.bundle import read_bundle, write_bundle
from rlsvc.store.mlflow_store import TrackingError, on_storage, open_store, store_uri
from rlsvc.store.registry import Registry, open_registry, register, resolve
from rlsvc.store.storage import Storage
from rlsvc.store.url_registry import UrlRegistry


@pytest.fixture
def url(s3, tmp_path) -> str:
    return s3.bucket(f"g{hashlib.md5(str(tmp_path).encode()).hexdigest()}") + "/runs"


def bundle(path: Path, weight: float = 1.0) -> Path:
    contract = Contract({"observation.state": Feature((2,), "float32")}, Feature((2,), "float32"), 10.0, 1, 4)
    rows = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    features = {**contract.observation, "action": contract.action}
    normalizer = Normalizer.fit({"default": {"observation.state": rows, "action": rows}}, features, {})
    params = {"layer.kernel": np.full((3, 2), weight, np.float32)}
    return write_bundle(path, policy={"name": "zero"}, contract=contract, normalizer=normalizer, params=params)


def test_a_registered_bundle_is_found_elsewhere_by_alias_version_and_latest_and_verifies(url, tmp_path, monkeypatch):
    first, second = bundle(tmp_path / "a", 1.0), bundle(tmp_path / "b", 2.0)
    assert [register(one, "pusht", root=url) for one in (first, second, first)] == [1, 2, 1]
    open_registry(url).promote("pusht", 1, "production")
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "elsewhere"))
    for target, source in (("@production", first), ("/1", first), ("/2", second), ("/latest", second)):
        assert read_bundle(resolve(f"models:/pusht{target}", root=url)).id == read_bundle(source).id
    assert open_registry(url).names() == ["pusht"]


def test_what_is_registered_below_a_url_can_be_pushed_to_a_hub(url, tmp_path):
    from rlsvc.store.hub_policy import find_source

    made = bundle(tmp_path / "a")
    register(made, "pusht", root=url)
    found = find_source("models:/pusht/1", root=url)
    assert (found.bundle.id, found.run) == (read_bundle(made).id, None)


def test_an_alias_moves_and_is_rolled_back(url, tmp_path):
    registry = UrlRegistry(url)
    for number in (1, 2, 3):
        registry.register(bundle(tmp_path / str(number), float(number)), "pusht")
        registry.promote("pusht", number, "best")
    assert [version.aliases for version in registry.versions("pusht")] == [(), (), ("best",)]
    assert [registry.rollback("pusht", "best") for _ in range(2)] == [2, 1]
    with pytest.raises(NotFoundError, match="version 1 is the first that it points at"):
        registry.rollback("pusht", "best")
    with pytest.raises(NotFoundError, match="Did you mean 'best'"):
        registry.rollback("pusht", "bast")


def test_what_there_is_not_is_named_with_what_there_is(url, tmp_path):
    registry = UrlRegistry(url)
    registry.register(bundle(tmp_path / "a"), "pusht")
    with pytest.raises(NotFoundError, match=r"unknown policy .* 'pusth'\. Did you mean 'pusht'"):
        registry.versions("pusth")
    with pytest.raises(NotFoundError, match=r"no version 7\. There are: 1"):
        registry.resolve("models:/pusht/7")
    with pytest.raises(NotFoundError, match="unknown alias"):
        registry.resolve("models:/pusht@none")
    with pytest.raises(SpecError, match="policy name"):
        registry.register(tmp_path / "a", "no/slash")
    with pytest.raises(SpecError, match="alias 'v3'"):
        registry.promote("pusht", 1, "v3")


def test_a_number_that_another_took_at_once_is_left_to_it(url, tmp_path, monkeypatch):
    registry = UrlRegistry(url)
    made = bundle(tmp_path / "a")
    write = Storage.write

    def another_is_first(self, key, data):
        monkeypatch.setattr(Storage, "write", write)
        if "/versions/" in key:
            write(
                self,
                "models/pusht/versions/000001-0000000000000000.json",
                data.replace(b'"bundle": "', b'"bundle": "x'),
            )
        write(self, key, data)

    monkeypatch.setattr(Storage, "write", another_is_first)
    assert registry.register(made, "pusht") == 2
    assert [version.version for version in registry.versions("pusht")] == [1, 2]


def test_weights_that_were_changed_there_are_refused(url, tmp_path):
    registry = UrlRegistry(url)
    registry.register(bundle(tmp_path / "a"), "pusht")
    storage = Storage(url)
    for name in storage.names("models/pusht/objects"):
        storage.write(f"models/pusht/objects/{name}", b"other")
    with pytest.raises(UserError, match="is damaged"):
        registry.resolve("models:/pusht/1")


def test_a_cached_bundle_that_was_changed_is_refused(url, tmp_path):
    registry = UrlRegistry(url)
    registry.register(bundle(tmp_path / "a"), "pusht")
    folder = registry.resolve("models:/pusht/1")
    (folder / "params.safetensors").write_bytes(b"other")
    with pytest.raises(BundleError):
        registry.resolve("models:/pusht/1")


def test_a_store_that_is_named_wins_over_a_root_that_is_a_url(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert (store_uri("s3://b/r"), on_storage("s3://b/r")) == ("s3://b/r", True)
    assert store_uri("s3://b/r", "http://m:5000") == "http://m:5000"
    assert not any(
        on_storage(uri) for uri in ("http://m:5000", "sqlite:////a/mlflow.db", "postgresql://m/d", "databricks")
    )
    with pytest.raises(TrackingError, match=r"mlflow keeps a database, which cannot lie at s3://b/r.*trackers=\[\]"):
        open_store("s3://b/r")


def test_a_root_that_is_a_folder_has_its_database_there(root):
    assert isinstance(open_registry(root), Registry)
    assert isinstance(open_registry(f"file://{root}"), Registry)
    assert store_uri(f"file://{root}") == store_uri(root)
