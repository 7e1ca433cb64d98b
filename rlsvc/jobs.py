"""Ray jobs through the Jobs REST API, from an install without Ray.

`pack` makes a zip of the working tree, `JobsClient` speaks to the dashboard of a cluster. The client follows Ray 2.60:
`GET | PUT /api/packages/gcs/<name>`, `POST /api/jobs/`, `GET /api/jobs/<id>`, `POST /api/jobs/<id>/stop`, and the
WebSocket `/api/jobs/<id>/logs/tail`.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from rlsvc.core.errors import BusyError, UserError, unknown_name

MAX_PACKAGE_BYTES = 100 * 2**20
"""Ray's dashboard takes no larger request (DASHBOARD_CLIENT_MAX_SIZE)."""
STARTING_S = 60.0
"""How long a cluster's dashboard may answer before it can run jobs."""
TERMINAL = ("SUCCEEDED", "FAILED", "STOPPED")
DIGEST = "rlsvc.digest"


class JobError(UserError):
    """A cluster cannot be reached, refuses a request, or a working tree cannot be sent."""


@dataclass(frozen=True)
class Package:
    """A working tree as a zip. The same files give the same bytes, so that a tree is uploaded once."""

    data: bytes
    files: int

    @property
    def name(self) -> str:
        """Its name in the cluster's store."""
        return f"_rlsvc_{hashlib.sha256(self.data).hexdigest()[:32]}.zip"

    @property
    def uri(self) -> str:
        """What a runtime environment's `working_dir` names."""
        return f"gcs://{self.name}"


def pack(tree: Path, extra: Mapping[str, bytes] | None = None, limit: int = MAX_PACKAGE_BYTES) -> Package:
    """Zips what git knows of a working tree (tracked, changed, and new files that are not ignored).

    Args:
        tree: a folder inside a git working tree.
        extra: further files by their path in the package.
        limit: of the zip, in bytes.

    Raises:
        JobError: no git tree, or too large; the message names the largest files.
    """
    sizes: dict[str, int] = {}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes, mode: int) -> None:
            # A fixed time: the same tree must give the same bytes. The mode keeps scripts executable.
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            before = buffer.tell()
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            sizes[name] = buffer.tell() - before
            if buffer.tell() > limit:
                raise _too_large(tree, sizes, limit)

        for name in _git_files(tree):
            path = tree / name
            if path.is_file():  # a deleted file is still listed; a submodule is a folder
                if path.stat().st_size > 20 * limit:
                    raise _too_large(tree, {**sizes, name: path.stat().st_size}, limit)
                add(name, path.read_bytes(), path.stat().st_mode & 0o777)
        for name, data in sorted((extra or {}).items()):
            add(name, data, 0o644)
    return Package(buffer.getvalue(), len(sizes))


def _git_files(tree: Path) -> list[str]:
    command = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise JobError(f"{tree}: git is not installed, and says which files belong to the working tree") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise JobError(
            f"{tree}: expected a git working tree, to know which files to send ({''.join(reason)}). Run in one, or "
            "name one by --working-dir"
        ) from error
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _too_large(tree: Path, sizes: Mapping[str, int], limit: int) -> JobError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} ({sizes[name] / 2**20:.1f} MiB)" for name in largest)
    return JobError(
        f"{tree}: the working tree is over {limit / 2**20:.0f} MiB as a zip, the most that a Ray dashboard takes. The "
        f"largest so far: {named}. Put data on storage that the cluster reaches and name it in "
        "data.datasets, or add it to .gitignore"
    )


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
        path = f"/api/packages/gcs/{package.name}"
        # Asked first also because Ray keeps a package for the next minutes once it was asked for.
        if self._request("GET", path, allow=(404,)).status_code == 200:
            return False
        self._request("PUT", path, content=package.data)
        return True

    def submit(self, entrypoint: str, package: Package, name: str, env: Mapping[str, str]) -> bool:
        """Starts a job, unless a job of this name and content was submitted before (False): it does not run twice.

        Raises:
            BusyError: the name belongs to a job of another content.
        """
        digest = hashlib.sha256(
            "\0".join([entrypoint, package.name, *map(str, sorted(env.items()))]).encode()
        ).hexdigest()
        if self._known(name, digest):
            return False
        self.upload(package)
        body = {
            "entrypoint": entrypoint,
            "submission_id": name,
            "runtime_env": {"working_dir": package.uri, "env_vars": dict(env)},
            "metadata": {DIGEST: digest},
        }
        response = self._request("POST", "/api/jobs/", allow=(400, 500), json=body)
        deadline = time.monotonic() + STARTING_S
        while "No available agent" in response.text and time.monotonic() < deadline:  # the cluster is still starting
            time.sleep(1.0)
            response = self._request("POST", "/api/jobs/", allow=(400, 500), json=body)
        if response.status_code == 200:
            return True
        if "already exists" in response.text and self._known(name, digest):  # submitted by another in between
            return False
        raise self._refused(response)

    def _known(self, name: str, digest: str) -> bool:
        response = self._request("GET", f"/api/jobs/{quote(name, safe='')}", allow=(404,))
        if response.status_code == 404:
            return False
        job = Job.from_json(response.json())
        if job.metadata.get(DIGEST) != digest:
            raise BusyError(
                f"job '{name}' exists already ({job.status}) and is another one: {job.entrypoint}. "
                "Choose another --name"
            )
        return True

    def job(self, name: str) -> Job:
        """One job.

        Raises:
            NotFoundError: no job of that id; lists those there are.
        """
        response = self._request("GET", f"/api/jobs/{quote(name, safe='')}", allow=(404,))
        if response.status_code == 404:
            raise unknown_name("job", name, (job.id for job in self.jobs()))
        return Job.from_json(response.json())

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
        uri = f"ws{self.address.removeprefix('http')}/api/jobs/{quote(name, safe='')}/logs/tail"
        while True:
            seen = 0
            try:
                # Pings every 20 s end a connection to a peer that is gone. No compression: Ray's proxy hands the offer
                # on to the server behind it, and then drops every message.
                with connect(
                    uri, additional_headers=self._headers, max_size=None, open_timeout=10, close_timeout=2, proxy=None,
                    compression=None,
                ) as socket:  # fmt: skip
                    for message in socket:
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
