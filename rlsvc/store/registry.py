"""The model registry: a policy bundle as a version of a named model in MLflow.

On a SQLite store the bundle's files are hard links under the store's artifact folder: there is no second copy of the
weights, and a version stays usable when its run folder is deleted or its checkpoints are thinned out. A remote store
gets an upload.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from rlsvc.core.cache import cache_dir
from rlsvc.core.errors import BundleError, NotFoundError, SpecError, unknown_name
from rlsvc.store.bundle import read_bundle
from rlsvc.store.mlflow_store import RUN_DIR_TAG, artifact_root, on_storage, open_store, store_uri
from rlsvc.store.registry_names import Version, check_alias, check_name, parse_target
from rlsvc.store.run_store import fetch_bundle
from rlsvc.store.storage import is_url
from rlsvc.store.url_registry import UrlRegistry

if TYPE_CHECKING:
    from mlflow import MlflowClient

BUNDLE_TAG = "rlsvc.bundle"
BEFORE_TAG = "rlsvc.before."
"""And an alias: the versions that it pointed at before, oldest first, as JSON."""
BEFORE = 50
"""Of them, how many are kept."""


class Registry:
    """Registered policies in one MLflow store.

    Args:
        root: the folder of runs, whose `mlflow.db` is the default store.
        uri: another MLflow store; None means MLFLOW_TRACKING_URI, then the default.
    """

    def __init__(self, root: str | Path = "runs", uri: str | None = None) -> None:
        self.uri = store_uri(root, uri)
        self._client: MlflowClient = open_store(self.uri)

    def register(self, bundle: Path, name: str, run_id: str = "") -> int:
        """Makes a bundle the newest version of the policy `name`; a bundle that is a version already stays that one.

        Raises:
            BundleError: the bundle does not verify.
            SpecError: the name has characters that a registered name cannot have.
        """
        from mlflow.exceptions import MlflowException

        check_name(name)
        bundle_id = read_bundle(bundle).id
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        for version in self.versions(name):
            if version.bundle == bundle_id:
                return version.version
        source = self._store(bundle, name, bundle_id, run_id)
        made = self._client.create_model_version(name, source, run_id=run_id or None, tags={BUNDLE_TAG: bundle_id})
        return int(made.version)

    def names(self) -> list[str]:
        """The registered policies, in alphabetical order."""
        return sorted(model.name for model in _pages(self._client.search_registered_models))

    def versions(self, name: str) -> list[Version]:
        """The versions of a policy, oldest first.

        Raises:
            NotFoundError: no policy of that name.
        """
        model = self._model(name)
        aliases: dict[int, list[str]] = {}
        for alias, number in model.aliases.items():
            aliases.setdefault(int(number), []).append(alias)
        found = _pages(self._client.search_model_versions, filter_string=f"name = '{name}'")
        return sorted(
            (
                Version(
                    name=name,
                    version=int(version.version),
                    bundle=version.tags.get(BUNDLE_TAG, ""),
                    run_id=version.run_id or "",
                    source=version.source,
                    created=version.creation_timestamp / 1000,
                    aliases=tuple(sorted(aliases.get(int(version.version), ()))),
                )
                for version in found
            ),
            key=lambda version: version.version,
        )

    def promote(self, name: str, version: int, alias: str) -> None:
        """Points `alias` at a version, away from the one that it pointed at.

        Raises:
            NotFoundError: no such policy, or no such version of it.
            SpecError: the alias cannot be one (MLflow reserves `latest` and `v1`, `v2`, ...).
        """
        check_alias(alias)
        self._version(name, str(version))
        now, before = self._history(name, alias)
        if now is not None and now != version:
            self._remember(name, alias, [*before, now])
        self._client.set_registered_model_alias(name, alias, str(version))

    def rollback(self, name: str, alias: str) -> int:
        """Points `alias` at the version that it pointed at before, and returns that; again goes one further back.

        Raises:
            NotFoundError: no such policy or alias, nothing before it, or that version is no more.
        """
        now, before = self._history(name, alias)
        if now is None:
            raise unknown_name(f"alias of policy '{name}'", alias, self._model(name).aliases)
        if not before:
            raise NotFoundError(
                f"models:/{name}@{alias}: version {now} is the first that it points at; promote another"
            )
        version = self._version(name, str(before[-1]))
        self._client.set_registered_model_alias(name, alias, str(version.version))
        self._remember(name, alias, before[:-1])
        return version.version

    def find(self, target: str) -> Version:
        """The version that `models:/name@alias`, `models:/name/3` or `models:/name/latest` means; no bundle is read.

        Raises:
            NotFoundError: no such policy, version or alias.
        """
        name, alias, version = parse_target(target)
        if not alias:
            return self._version(name, version)
        by_alias = {each: version for version in self.versions(name) for each in version.aliases}
        if alias not in by_alias:
            raise unknown_name(f"alias of policy '{name}'", alias, by_alias)
        return by_alias[alias]

    def resolve(self, target: str) -> Path:
        """The verified folder of the bundle that `models:/name@alias`, `models:/name/3` or `models:/name/latest` means.

        Raises:
            NotFoundError: no such policy, version or alias.
            BundleError: its bundle is gone, damaged, or not the one that was registered.
        """
        version = self.find(target)
        path = self._folder(version)
        if not path.is_dir():
            raise BundleError(
                f"{target}: version {version.version} lies at {path}, which is gone. Promote another version"
            )
        if (got := read_bundle(path).id) != version.bundle:
            raise BundleError(
                f"{target}: {path} holds bundle {got[:12]}, but {version.bundle[:12]} was registered there"
            )
        return path

    def run_folder(self, version: Version) -> Path | None:
        """The folder of the run that made a version; None where it is not on this machine, or no run did."""
        from mlflow.exceptions import MlflowException

        if not version.run_id:
            return None
        try:
            folder = self._client.get_run(version.run_id).data.tags.get(RUN_DIR_TAG)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return Path(folder) if folder and Path(folder).is_dir() else None

    def _model(self, name: str) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
        raise unknown_name(f"policy in {self.uri}:", name, self.names())

    def _history(self, name: str, alias: str) -> tuple[int | None, list[int]]:
        """The version that an alias points at, and those before it, oldest first."""
        model = self._model(name)
        now = model.aliases.get(alias)
        return None if now is None else int(now), json.loads(model.tags.get(BEFORE_TAG + alias, "[]"))

    def _remember(self, name: str, alias: str, before: list[int]) -> None:
        self._client.set_registered_model_tag(name, BEFORE_TAG + alias, json.dumps(before[-BEFORE:]))

    def _version(self, name: str, number: str) -> Version:
        versions = {str(version.version): version for version in self.versions(name)}
        if number == "latest" and versions:
            return versions[max(versions, key=int)]
        if number not in versions:
            raise NotFoundError(f"policy '{name}' has no version {number}. There are: {', '.join(versions) or 'none'}.")
        return versions[number]

    def _store(self, bundle: Path, name: str, bundle_id: str, run_id: str) -> str:
        root = artifact_root(self.uri)
        if root is None:
            if not run_id:
                raise SpecError(
                    f"{self.uri} keeps artifacts by run: registering a bundle there needs the id of an MLflow run"
                )
            folder = f"bundles/{bundle_id[:16]}"
            self._client.log_artifacts(run_id, str(bundle), artifact_path=folder)
            return f"{self._client.get_run(run_id).info.artifact_uri}/{folder}"
        target = root / "models" / name / bundle_id[:16]
        if not target.exists():
            temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            link_tree(bundle, temporary)
            try:
                temporary.rename(target)
            except OSError:  # another process registered the same bundle in between
                shutil.rmtree(temporary)
                if not target.is_dir():
                    raise
        return target.as_uri()

    def _folder(self, version: Version) -> Path:
        parsed = urlparse(version.source)
        if parsed.scheme == "file":
            return Path(unquote(parsed.path))
        from mlflow.artifacts import download_artifacts

        cache = cache_dir() / "bundles" / version.bundle[:16]
        if not cache.is_dir():
            temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
            temporary.mkdir(parents=True)
            got = Path(download_artifacts(artifact_uri=version.source, dst_path=str(temporary), tracking_uri=self.uri))
            got.rename(cache)
            shutil.rmtree(temporary, ignore_errors=True)
        return cache


def register(bundle: Path, name: str, run_id: str = "", uri: str | None = None, *, root: str | Path = "runs") -> int:
    """Registers a bundle as a version of the policy `name`; see `Registry.register`."""
    return open_registry(root, uri).register(bundle, name, run_id)


def open_registry(root: str | Path = "runs", uri: str | None = None) -> Registry | UrlRegistry:
    """The registry of a store: MLflow's, or, for a root that is a URL and no MLflow store named, one below that URL."""
    store = store_uri(root, uri)
    return UrlRegistry(store) if on_storage(store) else Registry(uri=store)


def resolve(target: str, *, root: str | Path = "runs", uri: str | None = None) -> Path:
    """The bundle folder that `target` means: itself, `ROOT-URL/project/run/bundles/step`, or `models:/name@alias`.

    Raises:
        NotFoundError: no such folder, policy, version or alias.
        BundleError: a registered bundle is gone or damaged. (A plain folder is verified by whoever loads it.)
    """
    if target.startswith("models:"):
        return open_registry(root, uri).resolve(target)
    if is_url(target):
        return fetch_bundle(target)
    path = Path(target)
    if not path.is_dir():
        raise NotFoundError(f"'{target}': expected the folder of a policy bundle, or models:/name@alias")
    return path


def link_tree(source: Path, target: Path) -> None:
    """Copies a folder as hard links: no second copy on disk, and neither goes when the other is deleted."""
    shutil.copytree(source, target, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
    return target


def _pages(search: Any, **query: Any) -> list[Any]:
    found, token = [], None
    while True:
        page = search(page_token=token, **query)
        found += page
        token = page.token
        if not token:
            return found
