"""Jobs in words: what is sent of one, what a cluster says of one, and what a cluster has."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlsvc.jobs.package import JobError

TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
DIGEST, COMMIT, UNCOMMITTED = "rlsvc.digest", "rlsvc.commit", "rlsvc.uncommitted"
QUEUE, PRIORITY, RESUMED = "rlsvc.queue", "rlsvc.priority", "rlsvc.resumed"
ENTRYPOINT, RESOURCES = "rlsvc.entrypoint", "rlsvc.resources"
STOP_WAIT_S = 60
"""A job that is stopped has so long to write its checkpoint; Ray's own 3 s are too few."""
BEGINS = "rlsvc: its turn in the queue"
"""A queued job prints it when it stops waiting (rlsvc/jobs/run.py)."""
FIXED_NODE = re.compile(r"node_?[0-9a-f]{56}$", re.IGNORECASE)
"""How Ray's status names the type of a node that no autoscaler started; its dashboard writes keys in camel case."""


@dataclass(frozen=True)
class Job:
    """What the cluster says of a job.

    Attributes:
        id: its submission id.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: the cluster's words on that.
        entrypoint: the command.
        started, ended: unix time in s, None when not yet.
        exit_code: of the command, None until it ended.
        metadata: as submitted.
    """

    id: str
    status: str
    message: str
    entrypoint: str
    started: float | None
    ended: float | None
    exit_code: int | None
    metadata: Mapping[str, str]

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.status in TERMINAL

    @property
    def code(self) -> int:
        """The exit code to hand on: the command's own, 130 for a stopped job, 1 when the cluster knows none."""
        if self.status == "SUCCEEDED":
            return 0
        return 130 if self.status == "STOPPED" else self.exit_code or 1

    @property
    def command(self) -> str:
        """The rlsvc command, without what runs it."""
        for mark in (" -m rlsvc.jobs.run ", " -m rlsvc.cli "):
            _, found, after = self.entrypoint.partition(mark)
            if found:
                return after.partition("-- ")[2] if "jobs.run" in mark else after
        return self.entrypoint

    @property
    def tree(self) -> str:
        """The commit of its working tree, with a `+` where something was not committed."""
        commit = self.metadata.get(COMMIT, "")[:8]
        return commit + ("+" if self.metadata.get(UNCOMMITTED) else "")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Job:
        """From the API's JobDetails."""

        def seconds(key: str) -> float | None:
            return value[key] / 1000 if value.get(key) else None

        return cls(
            id=value.get("submission_id") or value.get("job_id") or "",
            status=value["status"],
            message=value.get("message") or "",
            entrypoint=value.get("entrypoint") or "",
            started=seconds("start_time"),
            ended=seconds("end_time"),
            exit_code=value.get("driver_exit_code"),
            metadata=value.get("metadata") or {},
        )


@dataclass(frozen=True)
class Capacity:
    """What a cluster has in all.

    Attributes:
        total: by resource; memory in bytes.
        grows: whether an autoscaler may add to it: how far, only the cluster itself knows.
    """

    total: Mapping[str, float]
    grows: bool

    def check(self, asked: Mapping[str, float]) -> None:
        """Refuses what the cluster will never have.

        Raises:
            JobError: names the resource, what is asked for and what there is.
        """
        for name, amount in asked.items():
            there = self.total.get(name, 0.0)
            if amount <= there + 1e-9 or self.grows:
                continue
            if name.startswith("robot:"):
                raise JobError(
                    f"no node of the cluster has the robot '{name.removeprefix('robot:')}'. Start Ray on its computer: "
                    f"ray start --address=HEAD:6379 --resources='{{\"{name}\": 1}}'"
                )
            shown = (f"{amount / 2**30:.1f} GiB", f"{there / 2**30:.1f}") if name == "memory" else None
            got, have = shown or (f"{amount:g}", f"{there:g}")
            raise JobError(
                f"the job asks for {got} {name} in all, the cluster has {have} and does not grow: it would wait for "
                "ever. Ask for less, or take another cluster (--address)"
            )


@dataclass(frozen=True)
class Submission:
    """A job as it is sent.

    Attributes:
        name: its id.
        entrypoint: a shell command.
        runtime_env: Ray's.
        metadata: strings by name; ours begin with `rlsvc.`.
        resources: that the command itself holds, apart from what it starts: CPU, GPU, memory (bytes), others.
    """

    name: str
    entrypoint: str
    runtime_env: Mapping[str, Any]
    metadata: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of what was first asked for: two submissions with one digest are the same job."""
        if DIGEST in self.metadata:
            return self.metadata[DIGEST]
        content = [self.entrypoint, dict(self.runtime_env), dict(self.resources)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def again(self, entrypoint: str) -> Submission:
        """The same job, to be resumed by this command; it keeps its digest."""
        count = int(self.metadata.get(RESUMED, "0")) + 1
        metadata = {DIGEST: self.digest, **self.metadata, RESUMED: str(count)}
        metadata |= {ENTRYPOINT: entrypoint} if ENTRYPOINT in metadata else {}
        return replace(self, entrypoint=entrypoint, metadata=metadata)

    def to_json(self) -> dict[str, Any]:
        """The body of `POST /api/jobs/`."""
        custom = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU", "memory")}
        # Ray does not tell what a job holds.
        held = {RESOURCES: json.dumps(dict(self.resources), sort_keys=True)} if self.resources else {}
        body = {
            "entrypoint": self.entrypoint,
            "submission_id": self.name,
            "runtime_env": dict(self.runtime_env),
            "metadata": {DIGEST: self.digest, **held, **self.metadata},
            "entrypoint_num_cpus": self.resources.get("CPU"),
            "entrypoint_num_gpus": self.resources.get("GPU"),
            "entrypoint_memory": int(self.resources["memory"]) if "memory" in self.resources else None,
            "entrypoint_resources": custom or None,
        }
        return {name: value for name, value in body.items() if value is not None}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Submission:
        """From what `to_json` gave, or from the API's JobDetails."""
        metadata = dict(body.get("metadata") or {})
        return cls(
            name=body["submission_id"],
            entrypoint=body["entrypoint"],
            runtime_env=body.get("runtime_env") or {},
            metadata=metadata,
            resources=json.loads(metadata.get(RESOURCES, "{}")),
        )


def continued(entrypoint: str, since: float | None = None) -> str:
    """The command by which a job of this one goes on.

    Args:
        entrypoint: of the job.
        since: when it was first submitted, unix time in s, for its place in a queue; None takes now.

    Raises:
        JobError: it is none of rlsvc's.
    """
    if since is not None:
        entrypoint = re.sub(r" --since [0-9.]+", "", entrypoint)
        return continued(entrypoint).replace(" --again ", f" --again --since {since:.3f} ", 1)
    for before, after in (
        (" -m rlsvc.jobs.run --again ", " -m rlsvc.jobs.run --again "),
        (" -m rlsvc.jobs.run ", " -m rlsvc.jobs.run --again "),
        (" -m rlsvc.cli ", " -m rlsvc.jobs.run --again -- "),
    ):
        if before in entrypoint:
            return entrypoint.replace(before, after, 1)
    raise JobError(f"'{entrypoint}' was not submitted by rlsvc, which does not know how it goes on")
