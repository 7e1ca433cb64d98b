"""Jobs written down where they outlive their cluster: `<folder>/<job>.json`, and its working tree, `<job>.zip`.

The job itself writes the record when it begins (also when it only waits in a queue), and erases it when it ends by
itself or is stopped. What is still there after the cluster was lost is to be done: `rlsvc jobs restore FOLDER`.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from rlsvc.jobs.types import ENTRYPOINT, PRIORITY
from rlsvc.store.storage import Storage


class Record:
    """The record of one job, from within it.

    Args:
        folder: a path or a URL that all clusters reach.
        job: as `rlsvc.jobs.run.job_of` gives it.
        since: when it was first submitted, unix time in s.
    """

    def __init__(self, folder: str, job: dict[str, Any], since: float) -> None:
        self._storage, self._job, self._since = Storage(folder), job, since
        self._name: str = job["submission_id"]

    def write(self) -> None:
        """Write it, the working tree first. Raises StorageError."""
        uri = self._job["runtime_env"].get("working_dir", "")
        if uri.startswith("gcs://"):
            self._storage.write(f"{self._name}.zip", _package(uri))
        body = {**self._job, "entrypoint": self._job["metadata"][ENTRYPOINT], "since": self._since}
        self._storage.write(f"{self._name}.json", json.dumps(body).encode())

    def erase(self) -> None:
        """The job is done with."""
        for end in ("json", "zip"):
            self._storage.delete(f"{self._name}.{end}")


def read_records(storage: Storage) -> list[dict[str, Any]]:
    """The records of a folder: the body of a submission each, in the order in which they are to begin."""
    found = (storage.read(name) for name in storage.names("") if name.endswith(".json"))
    bodies = [json.loads(data) for data in found if data is not None]
    return sorted(bodies, key=lambda body: (-int(body["metadata"].get(PRIORITY, "0")), body["since"]))


def _package(uri: str) -> bytes:
    """A package out of the cluster's own store."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_get  # pyright: ignore[reportPrivateUsage]

    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    data = _internal_kv_get(uri)
    assert data is not None, uri
    return data
