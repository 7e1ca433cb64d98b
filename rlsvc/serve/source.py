"""Where a replica's policy comes from: a bundle's folder, or a name in a registry, read where the device is."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsvc.core.errors import BundleError
from rlsvc.serve.log import write

if TYPE_CHECKING:
    from rlsvc.runner import ServedRunner
    from rlsvc.store.registry import Registry
    from rlsvc.store.url_registry import UrlRegistry


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """The shapes that are compiled for batches of up to `max_batch` rows: powers of two, and `max_batch` itself."""
    sizes = {2**k for k in range(max_batch.bit_length()) if 2**k < max_batch}
    return tuple(sorted(sizes | {max_batch}))


@dataclass(frozen=True)
class PolicySource:
    """A bundle's folder or a name in a registry, read in the replica's process, where the device is.

    Attributes:
        target: an absolute folder, or models:/name@alias.
        store: URI of the MLflow store that is asked for names.
        batch_size: largest batch.
        device: "cpu" or "gpu".
        group: of the normaliser; may be left out where there is one.
        known: the folder that the target meant when the application was built, for a replica that starts while the
            registry is away; None where that is not watched.
    """

    target: str
    store: str = ""
    batch_size: int = 1
    device: str = "cpu"
    group: str | None = None
    known: Path | None = None

    def find(self) -> str:
        """See `Source.find`."""
        if not self.target.startswith("models:"):
            from rlsvc.store.bundle import read_id

            return read_id(self.target)
        return _registry(self.store).find(self.target).bundle

    def load(self, like: ServedRunner | None = None) -> ServedRunner:
        """See `Source.load`."""
        return self._load(self._path(), like)

    def __call__(self) -> ServedRunner:
        """The first version: what is meant now, or, where the registry does not say it, what was meant before."""
        try:
            path = self._path()
        except Exception as error:
            if self.known is None:
                raise
            path = self.known
            write(logging.WARNING, "registry_away", {"target": self.target, "taken": str(path)}, error)
        return self._load(path, None)

    def _path(self) -> Path:
        return _registry(self.store).resolve(self.target) if self.target.startswith("models:") else Path(self.target)

    def _load(self, path: Path, like: ServedRunner | None) -> ServedRunner:
        # Only now: the replica's environment decides about devices.
        from rlsvc.runner import PolicyRunner
        from rlsvc.store.bundle import read_bundle

        if isinstance(like, PolicyRunner):
            try:
                return like.sibling(read_bundle(path))
            except BundleError as error:
                write(logging.INFO, "compiled_anew", {"bundle": str(path), "because": str(error)})
        runner = PolicyRunner.load(path, batch_sizes=batch_sizes(self.batch_size), device=self.device, group=self.group)
        runner.warm_up()
        return runner


@functools.cache
def _registry(store: str) -> Registry | UrlRegistry:
    from rlsvc.store.registry import open_registry

    return open_registry(uri=store)
