"""Ray jobs through the Jobs REST API, from an install without Ray.

`JobsClient` speaks to the dashboard of a cluster; it follows Ray 2.60: `GET | PUT /api/packages/gcs/<name>`,
`POST /api/jobs/`, `GET | DELETE /api/jobs/<id>`, `POST /api/jobs/<id>/stop`, the WebSocket `/api/jobs/<id>/logs/tail`,
and for what the cluster has `GET /api/v0/nodes` and `GET /api/cluster_status`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from rlsvc.core.errors import BusyError, unknown_name
from rlsvc.jobs.package import JobError, Package
from rlsvc.jobs.types import BEGINS, COMMIT, DIGEST, FIXED_NODE, QUEUE, Capacity, Job, Submission

STARTING_S = 60.0
"""How long a cluster's dashboard may answer before it can run jobs."""
WATCHED_S = 5.0
"""So long after its end Ray has seen that a job has ended."""
PEEK_CHARS = 100_000
"""How far a log is read for the line with which a job leaves its queue."""


class JobsClient:
    """The Jobs API of one cluster.

    Args:
        address: of the dashboard, `http://host:8265`.
        token: sent as a bearer token; None when the cluster asks for none.

    Raises:
        JobError: from every method, when the cluster cannot be reached or refuses; the message says what to do.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        if "://" not in address:
            address = f"http://{address}"
        if not address.startswith(("http://", "https://")):
            raise JobError(f"address '{address}': expected the dashboard's http://host:8265, not Ray's own port")
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.address, headers=self._headers, timeout=httpx.Timeout(60, connect=10, write=300)
        )

    def __enter__(self) -> JobsClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def version(self) -> str:
        """The cluster's version of Ray."""
        return self._request("GET", "/api/version").json()["ray_version"]

    def upload(self, package: Package) -> bool:
        """Puts a package into the cluster's store, unless it is there already (False)."""
        # Asked first also because Ray keeps a package for the next minutes once it was asked for.
        if self._has(package.name):
            return False
        self._request("PUT", f"/api/packages/gcs/{package.name}", content=package.data)
        return True

    def submit(self, submission: Submission, package: Package | None) -> bool:
        """Starts a job, unless a job of this name and content was submitted before (False): it does not run twice.

        Raises:
            BusyError: the name belongs to a job of another content.
        """
        if self._known(submission):
            return False
        if package is not None:
            self.upload(package)
        return self._start(submission)

    def resume(self, submission: Submission, package: Package | None) -> None:
        """Starts a job that has ended once more, under its name; its log goes on where it ended.

        Args:
            submission: what is to run.
            package: its working tree, for a cluster that has it no more; None when nobody here has it either.

        Raises:
            BusyError: it still runs.
            JobError: it has succeeded, or the cluster has its working tree no more.
        """
        found = self.find(submission.name)
        if found is not None and not found.over:
            raise BusyError(f"job '{found.id}' is {found.status}: stop it first (rlsvc jobs stop {found.id})")
        if found is not None and found.status == "SUCCEEDED":
            raise JobError(f"job '{found.id}' has succeeded; there is nothing to resume")
        if package is not None:
            self.upload(package)
        elif (uri := submission.runtime_env.get("working_dir")) and not self._has(uri.removeprefix("gcs://")):
            commit = submission.metadata.get(COMMIT, "")
            raise JobError(
                f"job '{submission.name}': the cluster keeps its working tree no longer (Ray drops one some minutes "
                f"after its job has ended), and this computer did not send it. Submit it again from commit "
                f"{commit[:12] or 'unknown'} under another --name, with train ... --continue"
            )
        if found is not None:
            # Who watches the job in the cluster looks once a second; it would take the old process's end for the new
            # one's.
            time.sleep(WATCHED_S)
            self._request("DELETE", f"/api/jobs/{quote(submission.name, safe='')}")
        self._start(submission)

    def _start(self, submission: Submission) -> bool:
        body = submission.to_json()
        response = self._request("POST", "/api/jobs/", allow=(400, 500), json=body)
        deadline = time.monotonic() + STARTING_S
        while "No available agent" in response.text and time.monotonic() < deadline:  # the cluster is still starting
            time.sleep(1.0)
            response = self._request("POST", "/api/jobs/", allow=(400, 500), json=body)
        if response.status_code == 200:
            return True
        if "already exists" in response.text and self._known(submission):  # submitted by another in between
            return False
        raise self._refused(response)

    def _has(self, package: str) -> bool:
        return self._request("GET", f"/api/packages/gcs/{package}", allow=(404,)).status_code == 200

    def find(self, name: str) -> Job | None:
        """One job, None when the cluster does not know it."""
        response = self._request("GET", f"/api/jobs/{quote(name, safe='')}", allow=(404,))
        return None if response.status_code == 404 else Job.from_json(response.json())

    def _known(self, submission: Submission) -> bool:
        job = self.find(submission.name)
        if job is None:
            return False
        if job.metadata.get(DIGEST) != submission.digest:
            raise BusyError(
                f"job '{job.id}' exists already ({job.status}) and is another one: {job.entrypoint}. "
                "Choose another --name"
            )
        return True

    def capacity(self) -> Capacity:
        """What the nodes of the cluster have, busy or not."""
        listed = self._request("GET", "/api/v0/nodes?detail=1&limit=10000").json()
        total: dict[str, float] = {}
        for node in listed["data"]["result"]["result"]:
            if node["state"] == "ALIVE":
                for name, amount in (node.get("resources_total") or {}).items():
                    total[name] = total.get(name, 0.0) + float(amount)
        status = self._request("GET", "/api/cluster_status").json()["data"].get("clusterStatus") or {}
        kinds = (status.get("autoscalerReport") or {}).get("activeNodes") or {}
        return Capacity(total, grows=not kinds or not all(FIXED_NODE.match(kind) for kind in kinds))

    def job(self, name: str) -> Job:
        """One job.

        Raises:
            NotFoundError: no job of that id; lists those there are.
        """
        found = self.find(name)
        if found is None:
            raise unknown_name("job", name, (job.id for job in self.jobs()))
        return found

    def submission(self, name: str) -> Submission:
        """What was sent of a job. Raises NotFoundError."""
        self.job(name)
        return Submission.from_json(self._request("GET", f"/api/jobs/{quote(name, safe='')}").json())

    def state(self, job: Job) -> str:
        """A job's status; QUEUED for one that Ray runs but that waits for its turn in a queue."""
        waits = job.status == "RUNNING" and QUEUE in job.metadata and BEGINS not in self._begin_of_log(job.id)
        return "QUEUED" if waits else job.status

    def jobs(self) -> list[Job]:
        """All submitted jobs, the newest first."""
        listed = self._request("GET", "/api/jobs/").json()
        found = [Job.from_json(each) for each in listed if each.get("type") == "SUBMISSION"]
        return sorted(found, key=lambda job: -(job.started or 0))

    def logs(self, name: str) -> str:
        """Everything that the job has printed so far."""
        self.job(name)
        return self._request("GET", f"/api/jobs/{quote(name, safe='')}/logs").json()["logs"]

    def stop(self, name: str) -> bool:
        """Asks the job to stop; False when it had ended already."""
        self.job(name)
        return bool(self._request("POST", f"/api/jobs/{quote(name, safe='')}/stop").json()["stopped"])

    def follow(self, name: str, *, patience: float = 60.0) -> Iterator[str]:
        """What the job prints, as it comes, until it is over.

        A connection that breaks is made again, and what was already given is left out.

        Args:
            name: of the job.
            patience: s without a connection before giving up; the job itself goes on.
        """
        self.job(name)
        given, broken_since = 0, None
        while True:
            seen = 0
            try:
                with self._tail(name) as tail:
                    for message in tail:
                        text = message if isinstance(message, str) else message.decode(errors="replace")
                        seen += len(text)
                        if seen > given:
                            yield text[len(text) - (seen - given) :]
                            given = seen
                        broken_since = None
                if self.wait(name, 10.0).over:
                    return
            except (OSError, WebSocketException) as error:
                now = time.monotonic()
                broken_since = broken_since or now
                if now - broken_since > patience:
                    raise JobError(
                        f"{self.address}: the log of job '{name}' broke off ({error}). The job itself goes on: "
                        f"rlsvc jobs logs {name}"
                    ) from error
                time.sleep(1.0)

    def _begin_of_log(self, name: str) -> str:
        """The first lines, without the rest of what may be a long log."""
        text = ""
        try:
            with self._http.stream("GET", f"/api/jobs/{quote(name, safe='')}/logs") as response:
                for part in response.iter_text():
                    text += part
                    if len(text) > PEEK_CHARS:
                        break
        except httpx.HTTPError as error:
            raise JobError(f"{self.address}: the log of job '{name}' cannot be read ({error})") from error
        return text

    def _tail(self, name: str) -> ClientConnection:
        # No pings: Ray answers none while a job says nothing. No compression: Ray's proxy hands the offer on to the
        # server behind it, and then drops every message.
        connection = connect(
            f"ws{self.address.removeprefix('http')}/api/jobs/{quote(name, safe='')}/logs/tail",
            additional_headers=self._headers, max_size=None, open_timeout=10, close_timeout=2, proxy=None,
            compression=None, ping_interval=None,
        )  # fmt: skip
        # The system's own end a connection to a peer that is gone, within a minute.
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # macOS has other names, and two hours
                connection.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return connection

    def wait(self, name: str, timeout: float) -> Job:
        """The job once it is over, or as it is after `timeout` s."""
        deadline = time.monotonic() + timeout
        while not (job := self.job(name)).over and time.monotonic() < deadline:
            time.sleep(0.5)
        return job

    def _request(self, method: str, path: str, *, allow: tuple[int, ...] = (), **body: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **body)
        except httpx.TimeoutException as error:
            raise JobError(
                f"{self.address}: no answer to {method} {path} in time. Is the cluster overloaded?"
            ) from error
        except httpx.HTTPError as error:
            raise JobError(
                f"{self.address}: cannot be reached ({error}). Expected the dashboard of a Ray cluster: start one with "
                "`ray start --head`, or forward its port (kubectl port-forward ..., ssh -L 8265:localhost:8265 HOST)"
            ) from error
        if response.status_code == 200 or response.status_code in allow:
            return response
        raise self._refused(response)

    def _refused(self, response: httpx.Response) -> JobError:
        if response.status_code == 401:
            return JobError(
                f"{self.address}: the cluster asks for a token and got none. Set RAY_AUTH_TOKEN, or name a file by "
                "--token-file; on the head, `ray get-auth-token` prints it"
            )
        if response.status_code == 403:
            return JobError(
                f"{self.address}: the cluster refuses this token. On the head, `ray get-auth-token` "
                "prints the right one"
            )
        if response.status_code == 413:
            return JobError(f"{self.address}: the cluster takes no package of this size. Send less: see .gitignore")
        lines = response.text.strip().splitlines() or [""]
        path = response.request.url.path
        return JobError(
            f"{self.address}: {response.request.method} {path} answered {response.status_code}: {lines[-1][:500]}"
        )


def find_token(file: Path | None = None) -> str | None:
    """The cluster's token, looked for as Ray does: `file`, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token.

    Raises:
        JobError: a file that is named cannot be read, or is empty.
    """
    if file is None and (token := os.environ.get("RAY_AUTH_TOKEN", "").strip()):
        return token
    named = file or (Path(path) if (path := os.environ.get("RAY_AUTH_TOKEN_PATH")) else None)
    path = named or Path.home() / ".ray" / "auth_token"
    if named is None and not path.exists():
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise JobError(f"token file {path}: cannot be read ({error.strerror})") from error
    if not token:
        raise JobError(f"token file {path}: is empty")
    return token
