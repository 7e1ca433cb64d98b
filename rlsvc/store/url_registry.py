"""The model registry on a storage without a database: policies of a root that is a URL, with no MLflow server named.

    <root>/models/<name>/versions/<number>-<bundle id>.json   {"bundle", "run_id", "created", "files"}
    <root>/models/<name>/objects/<sha256>                     the bundles' files
    <root>/models/<name>/aliases.json                         {alias: [versions, oldest first]}; the last is meant

`files` is {path: [sha256, bytes]}. A version's file is written last, so that a version is whole. Of two that take one
number at once the later one moves on; of two that point aliases of one policy at once one is lost: point them from one
place.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rlsvc.core.cache import cache_dir
from rlsvc.core.errors import BundleError, NotFoundError, unknown_name
from rlsvc.store.bundle import read_bundle
from rlsvc.store.registry_names import Version, check_alias, check_name, parse_target
from rlsvc.store.run_store import bring_folder, sha256_of
from rlsvc.store.storage import Storage

KEPT = 50
"""Versions that an alias pointed at, how many are kept."""


class UrlRegistry:
    """Registered policies below a URL; the methods are those of `rlsvc.store.registry.Registry`."""

    def __init__(self, url: str) -> None:
        self.uri = url
        self._storage = Storage(url)

    def register(self, bundle: Path, name: str, run_id: str = "") -> int:
        """See Registry.register."""
        check_name(name)
        bundle_id = read_bundle(bundle).id
        known = self._versions(name)
        if found := next((version for version, body in known if body["bundle"] == bundle_id), None):
            return found
        files: dict[str, Any] = {}
        for file in sorted(path for path in bundle.rglob("*") if path.is_file()):
            digest = sha256_of(file)
            if self._storage.size(f"models/{name}/objects/{digest}") is None:
                self._storage.upload(file, f"models/{name}/objects/{digest}")
            files[str(file.relative_to(bundle))] = [digest, file.stat().st_size]
        body = {"bundle": bundle_id, "run_id": run_id, "created": time.time(), "files": files}
        number = max((version for version, _ in known), default=0)
        while True:
            number += 1
            key = f"models/{name}/versions/{number:06d}-{bundle_id[:16]}.json"
            self._storage.write(key, json.dumps(body).encode())
            same = [one for one in self._storage.names(f"models/{name}/versions") if one.startswith(f"{number:06d}-")]
            if same[0] == key.rpartition("/")[2]:
                return number
            self._storage.delete(key)

    def names(self) -> list[str]:
        """See Registry.names."""
        return self._storage.names("models")

    def versions(self, name: str) -> list[Version]:
        """See Registry.versions."""
        self._check(name)
        aliases: dict[int, list[str]] = {}
        for alias, history in self._aliases(name).items():
            aliases.setdefault(history[-1], []).append(alias)
        return [
            Version(
                name=name,
                version=number,
                bundle=body["bundle"],
                run_id=body["run_id"],
                source=f"{self.uri.partition('?')[0].rstrip('/')}/models/{name}",
                created=body["created"],
                aliases=tuple(sorted(aliases.get(number, ()))),
            )
            for number, body in self._versions(name)
        ]

    def promote(self, name: str, version: int, alias: str) -> None:
        """See Registry.promote."""
        check_alias(alias)
        self._body(name, str(version))
        aliases = self._aliases(name)
        history = aliases.get(alias, [])
        if history[-1:] != [version]:
            aliases[alias] = [*history, version][-KEPT:]
            self._write_aliases(name, aliases)

    def rollback(self, name: str, alias: str) -> int:
        """See Registry.rollback."""
        self._check(name)
        aliases = self._aliases(name)
        if alias not in aliases:
            raise unknown_name(f"alias of policy '{name}'", alias, aliases)
        *before, now = aliases[alias]
        if not before:
            raise NotFoundError(
                f"models:/{name}@{alias}: version {now} is the first that it points at; promote another"
            )
        self._body(name, str(before[-1]))
        self._write_aliases(name, {**aliases, alias: before})
        return before[-1]

    def find(self, target: str) -> Version:
        """See Registry.find."""
        name, alias, number = parse_target(target)
        versions = self.versions(name)
        if alias:
            by_alias = {each: version for version in versions for each in version.aliases}
            if alias not in by_alias:
                raise unknown_name(f"alias of policy '{name}'", alias, by_alias)
            return by_alias[alias]
        wanted, _ = self._body(name, number)
        return next(version for version in versions if version.version == wanted)

    def resolve(self, target: str) -> Path:
        """See Registry.resolve; the bundle comes into the cache."""
        version = self.find(target)
        _, body = self._body(version.name, str(version.version))
        folder = cache_dir() / "bundles" / version.bundle[:16]

        def fill(into: Path) -> None:
            for name, (digest, _) in body["files"].items():
                self._storage.download(f"models/{version.name}/objects/{digest}", into / name, digest)

        if not folder.is_dir():
            bring_folder(fill, folder)
        if (got := read_bundle(folder).id) != version.bundle:
            raise BundleError(f"{target}: {folder} holds bundle {got[:12]}, but {version.bundle[:12]} was registered")
        return folder

    def run_folder(self, version: Version) -> None:
        """See Registry.run_folder; nothing below a URL says it."""
        del version

    def _check(self, name: str) -> None:
        if name not in self.names():
            raise unknown_name(f"policy in {self.uri}:", name, self.names())

    def _versions(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        folder = f"models/{name}/versions"
        keys = [key for key in self._storage.names(folder) if key.endswith(".json")]
        found = ((key, self._storage.read(f"{folder}/{key}")) for key in keys)
        return [(int(key.partition("-")[0]), json.loads(data)) for key, data in found if data is not None]

    def _body(self, name: str, number: str) -> tuple[int, dict[str, Any]]:
        self._check(name)
        versions = dict(self._versions(name))
        if number == "latest" and versions:
            number = str(max(versions))
        if not number.isdigit() or int(number) not in versions:
            there = ", ".join(map(str, versions)) or "none"
            raise NotFoundError(f"policy '{name}' has no version {number}. There are: {there}.")
        return int(number), versions[int(number)]

    def _aliases(self, name: str) -> dict[str, list[int]]:
        return json.loads(self._storage.read(f"models/{name}/aliases.json") or b"{}")

    def _write_aliases(self, name: str, aliases: dict[str, list[int]]) -> None:
        self._storage.write(f"models/{name}/aliases.json", json.dumps(aliases).encode())
