"""API keys: who may ask what of a server. A file holds their hashes, never the keys.

A key is sent as `Authorization: Bearer KEY`, or `Authorization: Api-Key KEY` as openpi's client does. It is 32 random
bytes behind its id, so that one round of SHA-256 is enough to keep it; it is compared in constant time.

Every route asks for a role (`ROUTES`); one that is not in the table takes `administer`, so that a new route is closed
until somebody opens it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rlsvc.core.errors import NotFoundError, UserError, unknown_name
from rlsvc.serve.log import request_id

ROLES = {
    "read": "sees which policies there are, their contracts and their metrics",
    "act": "asks policies for actions",
    "record": "sends episodes to a learner",
    "command": "commands a robot",
    "administer": "changes what is served",
}
"""What a key may do; none includes another."""
PREFIX = "rlsvc_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(PREFIX + r"([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
ROUTES: tuple[tuple[str, str, str | None], ...] = (
    ("GET", r"/healthz", None),
    ("GET", r"/readyz", None),
    ("GET", r"/v1/policies(/[^/]*)?", "read"),
    ("GET", r"/(docs|redoc|openapi\.json)", "read"),
    ("GET", r"/metrics", "read"),
    ("POST", r"/v1/policies/[^/]*/act", "act"),
    ("WEBSOCKET", r"/", "act"),
    ("GET", r"/v2/health/(live|ready)", None),
    ("GET", r"/v2(/models/[^/]*(/versions/[^/]*)?(/ready)?)?", "read"),
    ("POST", r"/v2/models/[^/]*(/versions/[^/]*)?/infer", "act"),
    ("GET", r"/v1/episodes/[^/]*", "record"),
    ("PUT", r"/v1/episodes/[^/]*/[^/]*", "record"),
)
"""Method, path and role; None is open to everybody, since whoever watches a server has no key."""
_PATTERNS = tuple((method, re.compile(pattern), role) for method, pattern, role in ROUTES)


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key.

    Attributes:
        id: 16 hexadecimal digits that the key begins with.
        name: whose it is; stands in logs, and names the client whose episodes come with it.
        roles: of `ROLES`.
        sha256: of the whole key, hexadecimal.
        expires: the first day on which it is refused, ISO; None never.
    """

    id: str
    name: str
    roles: tuple[str, ...]
    sha256: str
    expires: str | None = None

    def expired(self, today: datetime.date) -> bool:
        """Whether it is refused on this day (UTC)."""
        return self.expires is not None and today >= datetime.date.fromisoformat(self.expires)


class Keys:
    """The keys of a server, read once; a changed file takes effect when the server starts anew."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        """Take these."""
        self.keys = keys
        self._by_id = {key.id: key for key in keys}

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The keys of a file.

        Raises:
            NotFoundError: there is none.
            UserError: it is not one, others may read it, or it has no keys; says what.
        """
        keys = _load(path)
        if not keys:
            raise UserError(f"{path}: it has no keys, so nobody could get in; rlsvc keys add NAME --file {path}")
        return cls(keys)

    def find(self, authorization: str | None, today: datetime.date | None = None) -> ApiKey | None:
        """The key in an Authorization header; None where there is none that holds."""
        scheme, _, given = (authorization or "").partition(" ")
        match = _KEY.fullmatch(given.strip())
        if scheme.lower() not in ("bearer", "api-key") or match is None:
            return None
        key = self._by_id.get(match[1])
        if key is None or not hmac.compare_digest(_digest(given.strip()), key.sha256):
            return None
        return None if key.expired(today or datetime.datetime.now(datetime.UTC).date()) else key


def new_key(name: str, roles: tuple[str, ...], expires: datetime.date | None = None) -> tuple[str, ApiKey]:
    """A key, and what is kept of it.

    Raises:
        UserError: a name or a role that there is not, or no role.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"name '{name[:80]}': expected 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    if not roles:
        raise UserError(f"a key without a role opens nothing; give it one of: {', '.join(ROLES)}")
    for role in roles:
        if role not in ROLES:
            raise unknown_name("role", role, ROLES)
    identity = secrets.token_hex(8)
    key = f"{PREFIX}{identity}_{secrets.token_urlsafe(32)}"
    return key, ApiKey(identity, name, tuple(roles), _digest(key), None if expires is None else expires.isoformat())


def read_file(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file, none where it is not there yet. Raises UserError."""
    return _load(path) if path.exists() else ()


def write_file(path: Path, keys: tuple[ApiKey, ...]) -> None:
    """Replace a file of keys, readable for this user alone."""
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=1) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)


def role_of(method: str, path: str) -> str | None:
    """What a route asks for, None when it is open."""
    for there, pattern, role in _PATTERNS:
        if there == method and pattern.fullmatch(path):
            return role
    return "administer"


class Authenticated:
    """An application behind keys. The key that was let in is `scope["state"]["key"]`.

    Without a good key the answer is 401, with one that lacks the role 403; a WebSocket is refused before it opens.
    """

    def __init__(self, app: ASGIApp, keys: Keys, refused: Callable[[str, int], None]) -> None:
        """Stand before `app`; `refused` is told the reason and the status of each refusal."""
        self._app, self._keys, self._refused = app, keys, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
        role = role_of(method, scope["path"])
        if role is not None:
            key = self._keys.find(Headers(scope=scope).get("authorization"))
            if key is None or role not in key.roles:
                self._refused("key", 401 if key is None else 403)
                await _refuse(key, role, scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)


async def _refuse(key: ApiKey | None, role: str, scope: Scope, receive: Receive, send: Send) -> None:
    if key is None:
        status, what = 401, "this needs a key that holds: Authorization: Bearer KEY (rlsvc keys add makes one)"
    else:
        status, what = 403, f"key '{key.name}' has the roles {', '.join(key.roles)}; this needs '{role}'"
    if scope["type"] == "websocket":
        await receive()  # websocket.connect
        await send({"type": "websocket.close", "code": 1008, "reason": what[:120]})
        return
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    body = {"error": what, "reason": "key", "status": status, "request_id": request_id()}
    await JSONResponse(body, status_code=status, headers={**headers, "Connection": "close"})(scope, receive, send)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _load(path: Path) -> tuple[ApiKey, ...]:
    try:
        with path.open() as file:
            # Whoever reads the hashes learns no key, but whoever writes them opens the server.
            if os.fstat(file.fileno()).st_mode & 0o022:
                raise UserError(f"{path}: others may write it, and so let themselves in; chmod 600 {path}")
            return _parse(path, json.load(file))
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file; make a key with: rlsvc keys add NAME --file {path}") from error
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: expected a file of keys, made by rlsvc keys add ({error})") from error


def _parse(path: Path, stored: Any) -> tuple[ApiKey, ...]:
    try:
        keys = tuple(ApiKey(**{**one, "roles": tuple(one["roles"])}) for one in stored["keys"])
        for key in keys:
            if not NAME.fullmatch(key.name):  # it becomes a folder
                raise ValueError(f"'{key.name[:80]}' is no name of a key")
            if unknown := sorted(set(key.roles) - set(ROLES)):
                raise ValueError(f"key '{key.name}' has a role that there is not: {unknown[0]}")
            if not key.roles:
                raise ValueError(f"key '{key.name}' has no role")
            if not re.fullmatch("[0-9a-f]{64}", key.sha256):
                raise ValueError(f"key '{key.name}' has no SHA-256 hash")
            key.expired(datetime.date.min)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: expected a file of keys, made by rlsvc keys add ({error})") from error
    return keys
