"""A stand-in for the Hugging Face hub on loopback: the parts of its HTTP interface that huggingface_hub uses.

Repositories are commits of whole trees, in memory; large files lie in a folder and are never held whole. Written after
huggingface_hub's own client code and the behaviour that its comments and documentation tell of the server. Large files
go by git LFS, in one part or several, and are fetched from a second address as from the hub's CDN.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

PAGE = 3
"""Entries of a tree on one page."""
LFS_SUFFIXES = (".safetensors", ".parquet", ".mp4", ".bin", ".model")
PART = 2**20
"""Bytes of a part of a large file that is sent in several."""
BLOCK = 2**16


@dataclass(frozen=True)
class Stored:
    """A file of a commit: its bytes, or the sum of a large file."""

    size: int
    git: str
    content: bytes | None = None
    lfs: str | None = None

    @classmethod
    def small(cls, content: bytes) -> Stored:
        return cls(len(content), git_sum(content), content=content)

    @classmethod
    def large(cls, oid: str, size: int) -> Stored:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()
        return cls(size, git_sum(pointer), lfs=oid)

    @property
    def etag(self) -> str:
        return self.lfs or self.git


@dataclass(frozen=True)
class Commit:
    oid: str
    files: dict[str, Stored]
    message: str
    parent: str | None


@dataclass
class Repository:
    private: bool
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, Stored], message: str) -> Commit:
        parent = self.branches.get(branch)
        said = f"{parent}{message}{len(self.commits)}{sorted((p, f.etag) for p, f in files.items())}"
        commit = Commit(hashlib.sha1(said.encode()).hexdigest(), files, message, parent)
        self.commits[commit.oid] = commit
        self.branches[branch] = commit.oid
        return commit

    def find(self, revision: str) -> Commit | None:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    def history(self, branch: str = "main") -> list[str]:
        """Messages, oldest first."""
        found, at = [], self.branches.get(branch)
        while at is not None:
            found.append(self.commits[at].message)
            at = self.commits[at].parent
        return found[::-1]


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class HubServer:
    """The server, in threads of this process.

    Attributes:
        tokens: account by token.
        may_write: owners that each account may write for.
        repos: by (kind, OWNER/NAME), kind "model" or "dataset".
        requests: (method, path, Authorization header or "") of all that came.
        fail: by a pattern of "METHOD path" the status that such a request gets instead.
        before: by such a pattern what is called before a request is answered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = {"hf_aliceSecretToken": "mylab", "hf_malloryToken": "mallory"}
        self.may_write = {"mylab": {"mylab", "lab"}, "mallory": {"mallory"}}
        self.repos: dict[tuple[str, str], Repository] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.fail: dict[str, int] = {}
        self.before: dict[str, object] = {}
        self.lock = threading.RLock()
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        # Another host by name, as the CDN is: a client must not send its token there.
        self.cdn = f"http://localhost:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> HubServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def put(self, kind: str, name: str, files: dict[str, bytes], *, branch: str = "main", **flags: bool) -> Repository:
        """A repository with one commit of these files, as somebody else might have made it."""
        repo = self.repos.setdefault((kind, name), Repository(flags.get("private", False), flags.get("gated", False)))
        stored = {path: self.store(path, content) for path, content in files.items()}
        repo.add(branch, stored, "by hand")
        return repo

    def store(self, path: str, content: bytes) -> Stored:
        if not path.endswith(LFS_SUFFIXES):
            return Stored.small(content)
        oid = hashlib.sha256(content).hexdigest()
        self.object(oid).write_bytes(content)
        return Stored.large(oid, len(content))

    def object(self, oid: str) -> Path:
        assert re.fullmatch(r"[0-9a-f]{64}", oid)
        return self.folder / oid

    def content(self, stored: Stored) -> bytes:
        return stored.content if stored.content is not None else self.object(str(stored.lfs)).read_bytes()

    def files(self, kind: str, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds, by path."""
        commit = self.repos[kind, name].find(revision)
        assert commit is not None
        return {path: self.content(stored) for path, stored in commit.files.items()}


def git_sum(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: tests look at `requests`."""

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()

    def answer(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(split.query).items()}
        self.unread = int(self.headers.get("Content-Length") or 0)
        self.hub.requests.append((self.command, self.path, self.headers.get("Authorization") or ""))
        line = f"{self.command} {split.path}"
        try:
            for pattern, act in list(self.hub.before.items()):
                if fnmatch(line, pattern):
                    act()  # type: ignore[operator]
            for pattern, status in self.hub.fail.items():
                if fnmatch(line, pattern):
                    raise Refusal(status, message="made to fail")
            for pattern, method in ROUTES:
                if match := re.fullmatch(pattern, line):
                    method(self, *(unquote(part or "") for part in match.groups()))
                    return
            raise Refusal(404, message=f"no such address: {line}")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code} if refusal.code else {}
            if refusal.message:
                headers["X-Error-Message"] = refusal.message
            self.send({"error": refusal.message}, refusal.status, headers)

    def send(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.drain()
        self.send_response(status)
        for name, each in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, each)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        data = self.rfile.read(self.unread)
        self.unread = 0
        return data

    def drain(self) -> None:
        while self.unread:
            self.unread -= len(self.rfile.read(min(BLOCK, self.unread)))

    def json(self) -> dict:
        return json.loads(self.body())

    def account(self) -> str | None:
        """Whose token it is; None without one."""
        sent = self.headers.get("Authorization")
        if sent is None:
            return None
        account = self.hub.tokens.get(sent.removeprefix("Bearer "))
        if account is None:
            raise Refusal(401, message="Invalid credentials in Authorization header")
        return account

    def repo(self, kind: str, name: str, *, write: bool = False) -> Repository:
        account = self.account()
        repo = self.hub.repos.get((kind, name))
        owner = name.partition("/")[0]
        own = account is not None and owner in self.hub.may_write[account]
        if repo is None or (repo.private and not own):
            raise Refusal(401 if account is None else 404, "RepoNotFound", "Repository not found")
        if write and not own:
            raise Refusal(403, message=f"You don't have the right to write to {name}")
        return repo

    def commit_of(self, kind: str, name: str, revision: str, *, content: bool = False) -> tuple[Repository, Commit]:
        repo = self.repo(kind, name)
        if content and repo.gated and name.partition("/")[0] not in self.hub.may_write.get(self.account() or "", ()):
            raise Refusal(403 if self.account() else 401, "GatedRepo", "Access to this repository is restricted")
        commit = repo.find(revision)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    # --- accounts and repositories ---

    def whoami(self) -> None:
        account = self.account()
        if account is None:
            raise Refusal(401, message="Invalid username or password.")
        orgs = [{"name": owner} for owner in sorted(self.hub.may_write[account] - {account})]
        self.send({"type": "user", "name": account, "orgs": orgs})

    def create(self) -> None:
        asked = self.json()
        account = self.account()
        if account is None:
            raise Refusal(401, message="Invalid username or password.")
        owner = asked.get("organization") or account
        if owner not in self.hub.may_write[account]:
            raise Refusal(403, message=f"You don't have the rights to create a {asked['type']} under {owner}")
        key = (asked["type"], f"{owner}/{asked['name']}")
        with self.hub.lock:
            if key in self.hub.repos:
                raise Refusal(409, message=f"You already created this {asked['type']} repo")
            repo = self.hub.repos[key] = Repository(asked.get("visibility") == "private")
            repo.add("main", {".gitattributes": Stored.small(b"*.safetensors filter=lfs\n")}, "initial commit")
        self.send({"url": f"{self.hub.url}/{key[1]}", "name": key[1], "id": key[1]})

    def validate_yaml(self) -> None:
        match = re.match(r"---\n(.*?)\n---\n", self.json()["content"], re.DOTALL)
        try:
            found = yaml.safe_load(match[1]) if match else None
        except yaml.YAMLError as error:
            raise Refusal(400, message=str(error)) from error
        warnings = [] if isinstance(found, dict) else [{"message": "empty or missing yaml metadata in repo card"}]
        wrong = [
            {"message": f'"{key}" must be {kind.__name__}'}
            for key, kind in {"tags": list, "license": str, "pipeline_tag": str, "datasets": list, "model-index": list,
                              "configs": list, "task_categories": list}.items()
            if isinstance(found, dict) and key in found and not isinstance(found[key], kind)
        ]  # fmt: skip
        self.send({"errors": wrong, "warnings": warnings}, 400 if wrong else 200)

    def info(self, kind: str, name: str, revision: str = "main") -> None:
        repo, commit = self.commit_of(kind, name, revision)
        self.send({
            "_id": name, "id": name, "sha": commit.oid, "private": repo.private,
            "gated": "manual" if repo.gated else False, "disabled": False, "tags": [], "downloads": 0, "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z", "siblings": [{"rfilename": path} for path in commit.files],
        })  # fmt: skip

    def tree(self, kind: str, name: str, revision: str) -> None:
        _, commit = self.commit_of(kind, name, revision, content=True)
        paths = sorted(commit.files)
        folders = sorted({str(parent) for path in paths for parent in Path(path).parents if str(parent) != "."})
        entries: list[dict] = [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        for path in paths:
            stored = commit.files[path]
            entry = {"type": "file", "path": path, "size": stored.size, "oid": stored.git}
            if stored.lfs is not None:
                entry["lfs"] = {"oid": stored.lfs, "size": stored.size, "pointerSize": 130}
            entries.append(entry)
        start = int(self.query.get("cursor", 0))
        headers = {}
        if start + PAGE < len(entries):
            address = f"{self.hub.url}{urlsplit(self.path).path}?recursive=true&cursor={start + PAGE}"
            headers["Link"] = f'<{address}>; rel="next"'
        self.send(entries[start : start + PAGE], headers=headers)

    def refs(self, kind: str, name: str) -> None:
        repo = self.repo(kind, name)

        def listed(refs: dict[str, str], where: str) -> list[dict]:
            return [{"name": ref, "ref": f"refs/{where}/{ref}", "targetCommit": oid} for ref, oid in refs.items()]

        self.send({"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags"), "converts": []})

    def branch(self, kind: str, name: str, branch: str) -> None:
        repo = self.repo(kind, name, write=True)
        start = json.loads(self.body() or b"{}").get("startingPoint") or "main"
        if branch in repo.branches:
            raise Refusal(409, message=f"Reference already exists: {branch}")
        commit = repo.find(start)
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {start}")
        repo.branches[branch] = commit.oid
        self.send({})

    def tag(self, kind: str, name: str, revision: str) -> None:
        repo = self.repo(kind, name, write=True)
        tag = self.json()["tag"]
        if tag in repo.tags:
            raise Refusal(409, message=f"Tag reference already exists: {tag}")
        repo.tags[tag] = self.commit_of(kind, name, revision)[1].oid
        self.send({})

    def untag(self, kind: str, name: str, tag: str) -> None:
        if self.repo(kind, name, write=True).tags.pop(tag, None) is None:
            raise Refusal(404, "RevisionNotFound", f"Tag not found: {tag}")
        self.send({})

    # --- pushing ---

    def preupload(self, kind: str, name: str, revision: str) -> None:
        asked = self.json()
        self.repo(kind, name, write=True)
        _, commit = self.commit_of(kind, name, revision)
        ignore = asked.get("gitIgnore")
        if ignore is None:
            stored = commit.files.get(".gitignore")
            ignore = self.hub.content(stored).decode() if stored else ""
        answers = []
        for file in asked["files"]:
            there = commit.files.get(file["path"])
            answers.append({
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": any(fnmatch(file["path"], line) for line in ignore.split()),
                "oid": None if there is None else there.etag,
            })  # fmt: skip
        self.send({"files": answers})

    def batch(self, kind: str, name: str) -> None:
        asked = self.json()
        self.repo(kind, name, write=True)
        assert asked["operation"] == "upload"
        objects = []
        for each in asked["objects"]:
            oid, size = each["oid"], each["size"]
            answer: dict = {"oid": oid, "size": size}
            file = self.hub.object(oid)
            if not (file.exists() and file.stat().st_size == size):
                upload: dict = {"href": f"{self.hub.cdn}/lfs/{oid}"}
                if size > PART:
                    count = -(-size // PART)
                    parts = {f"{n:05}": f"{self.hub.cdn}/lfs/{oid}/{n:05}" for n in range(1, count + 1)}
                    upload = {
                        "href": f"{self.hub.cdn}/lfs/{oid}/complete",
                        "header": {"chunk_size": str(PART), **parts},
                    }
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/lfs/{oid}/verify"}}
            objects.append(answer)
        self.send({"transfer": "basic", "objects": objects})

    def put_object(self, oid: str, part: str = "") -> None:
        target = self.hub.folder / f"{oid}.{part or 'whole'}"
        with target.open("wb") as stream:
            while self.unread:
                data = self.rfile.read(min(BLOCK, self.unread))
                if not data:
                    raise ConnectionAbortedError
                stream.write(data)
                self.unread -= len(data)
        if not part:
            target.rename(self.hub.object(oid))
        self.send({}, headers={"ETag": f'"{part or oid}"'})

    def complete(self, oid: str) -> None:
        parts = [self.hub.folder / f"{oid}.{each['partNumber']:05}" for each in self.json()["parts"]]
        with self.hub.object(oid).open("wb") as stream:
            for part in parts:
                stream.write(part.read_bytes())
                part.unlink()
        self.send({})

    def verify(self, oid: str) -> None:
        asked, file = self.json(), self.hub.object(oid)
        if not file.exists() or file.stat().st_size != asked["size"]:
            raise Refusal(404, message="Object not found")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != oid:
                raise Refusal(400, message="Sum mismatch")
        self.send({})

    def commit(self, kind: str, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines()]
        repo = self.repo(kind, name, write=True)
        with self.hub.lock:
            if revision not in repo.branches:
                raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            header = next(line["value"] for line in lines if line["key"] == "header")
            if header.get("parentCommit") not in (None, repo.branches[revision]):
                raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
            files = dict(repo.commits[repo.branches[revision]].files)
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = Stored.small(base64.b64decode(value["content"]))
                elif line["key"] == "lfsFile":
                    if not self.hub.object(value["oid"]).exists():
                        raise Refusal(400, message=f"LFS pointer pointed to a file that does not exist: {value['oid']}")
                    files[value["path"]] = Stored.large(value["oid"], self.hub.object(value["oid"]).stat().st_size)
                elif line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                    raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
            made = repo.add(revision, files, header["summary"])
        self.send({"success": True, "commitOid": made.oid, "commitUrl": f"{self.hub.url}/{name}/commit/{made.oid}"})

    # --- pulling ---

    def resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        _, commit = self.commit_of(kind, name, revision, content=True)
        stored = commit.files.get(path)
        if stored is None:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{stored.etag}"', "Accept-Ranges": "bytes"}
        if stored.lfs is None:
            self.send_stream(io.BytesIO(self.hub.content(stored)), stored.size, headers)
            return
        headers |= {"X-Linked-Etag": f'"{stored.lfs}"', "X-Linked-Size": str(stored.size)}
        self.send({}, 302, {**headers, "Location": f"{self.hub.cdn}/cdn/{stored.lfs}"})

    def from_cdn(self, oid: str) -> None:
        file = self.hub.object(oid)
        with file.open("rb") as stream:
            self.send_stream(stream, file.stat().st_size, {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def send_stream(self, stream: BinaryIO, total: int, headers: dict[str, str]) -> None:
        start, status = 0, 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start, status = int(match[1]), 206
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        self.drain()
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        if self.command != "HEAD":
            stream.seek(start)
            shutil.copyfileobj(stream, self.wfile, BLOCK)


def _of_api(method):
    def call(handler: Handler, kinds: str, *rest: str) -> None:
        method(handler, kinds.removesuffix("s"), *rest)

    return call


def _of_files(method):
    def call(handler: Handler, prefix: str, *rest: str) -> None:
        method(handler, "dataset" if prefix else "model", *rest)

    return call


_REPO = r"/api/(models|datasets)/([^/]+/[^/]+)"
ROUTES = [
    ("GET /api/whoami-v2", Handler.whoami),
    ("POST /api/repos/create", Handler.create),
    ("POST /api/validate-yaml", Handler.validate_yaml),
    (f"GET {_REPO}", _of_api(Handler.info)),
    (f"GET {_REPO}/revision/([^/]+)", _of_api(Handler.info)),
    (f"GET {_REPO}/tree/([^/]+)", _of_api(Handler.tree)),
    (f"GET {_REPO}/refs", _of_api(Handler.refs)),
    (f"POST {_REPO}/branch/([^/]+)", _of_api(Handler.branch)),
    (f"POST {_REPO}/tag/([^/]+)", _of_api(Handler.tag)),
    (f"DELETE {_REPO}/tag/([^/]+)", _of_api(Handler.untag)),
    (f"POST {_REPO}/preupload/([^/]+)", _of_api(Handler.preupload)),
    (f"POST {_REPO}/commit/([^/]+)", _of_api(Handler.commit)),
    (r"POST /(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", _of_files(Handler.batch)),
    (r"PUT /lfs/([0-9a-f]{64})", Handler.put_object),
    (r"PUT /lfs/([0-9a-f]{64})/(\d{5})", Handler.put_object),
    (r"POST /lfs/([0-9a-f]{64})/complete", Handler.complete),
    (r"POST /lfs/([0-9a-f]{64})/verify", Handler.verify),
    (r"(?:GET|HEAD) /(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _of_files(Handler.resolve)),
    (r"(?:GET|HEAD) /cdn/([0-9a-f]{64})", Handler.from_cdn),
]
