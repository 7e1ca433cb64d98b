"""API keys: who may ask what of a server. A file holds their hashes, never the keys.

A key is sent as `Authorization: Bearer KEY`, or `Authorization: Api-Key KEY` as openpi's client does. It is 32 random
bytes behind its id, so that one round of SHA-256 is enough to keep it; it is compared in constant time.

A key may have limits: requests a second and the size of one. They hold in each replica by itself, so that several
replicas together let as many times more through.

Every route asks for a role (`ROUTES`); one that is not in the table takes `administer`, so that a new route is closed
until somebody opens it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import math
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rlsvc.core.errors import NotFoundError, UserError, unknown_name
from rlsvc.serve.bucket import TokenBucket
from rlsvc.serve.codec import RequestError
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
        requests_per_s: more are refused, by each replica; as many as in a second may come at once. None for no limit.
        max_body_mb: of a request, MiB, where that is less than the server's own limit; None for that one.
    """

    id: str
    name: str
    roles: tuple[str, ...]
    sha256: str
    expires: str | None = None
    requests_per_s: float | None = None
    max_body_mb: float | None = None

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


def new_key(
    name: str,
    roles: tuple[str, ...],
    expires: datetime.date | None = None,
    *,
    requests_per_s: float | None = None,
    max_body_mb: float | None = None,
) -> tuple[str, ApiKey]:
    """A key, and what is kept of it; arguments as of `ApiKey`.

    Raises:
        UserError: a name or a role that there is not, no role, or a limit that is no number above 0.
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
    last = None if expires is None else expires.isoformat()
    kept = ApiKey(identity, name, tuple(roles), _digest(key), last, requests_per_s, max_body_mb)
    if wrong := _wrong_limit(kept):
        raise UserError(wrong)
    return key, kept


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

    Without a good key the answer is 401, with one that lacks the role 403, and 429 where it asks too often; a WebSocket
    is refused before it opens, and each of its messages is a request.
    """

    def __init__(self, app: ASGIApp, keys: Keys, refused: Callable[[str, int], None]) -> None:
        """Stand before `app`; `refused` is told the reason and the status of each refusal."""
        self._app, self._keys, self._refused = app, keys, refused
        self._buckets = {
            key.id: TokenBucket(key.requests_per_s, max(1.0, key.requests_per_s))
            for key in keys.keys
            if key.requests_per_s is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = "WEBSOCKET" if scope["type"] == "websocket" else scope["method"]
        # Without the application's route prefix, and cut off by the router's own function: the two must not differ.
        role = role_of(method, get_route_path(scope))
        if role is not None:
            key = self._keys.find(Headers(scope=scope).get("authorization"))
            if key is None or role not in key.roles:
                self._refused("key", 401 if key is None else 403)
                await _refuse(key, role, scope, receive, send)
                return
            scope.setdefault("state", {}).update(key=key, bucket=self._buckets.get(key.id))
            refusal = too_often(scope) if scope["type"] == "http" else None
            if refusal is not None:
                self._refused(refusal.reason, refusal.status)
                body = {"error": str(refusal), "reason": refusal.reason, "status": refusal.status}
                answer = JSONResponse({**body, "request_id": request_id()}, refusal.status, refusal.headers)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def too_often(scope: Scope) -> RequestError | None:
    """Count a request with the key that was let in; what to refuse it with where that has asked too often."""
    state = scope.get("state", {})
    bucket: TokenBucket | None = state.get("bucket")
    wait_s = 0.0 if bucket is None else bucket.take()
    if wait_s == 0.0:
        return None
    key = state["key"]
    return RequestError(
        429,
        "rate",
        f"key '{key.name}' may send {key.requests_per_s:g} requests a second; try again in {wait_s:.3g} s",
        retry_after_s=math.ceil(wait_s),
    )


def body_limit(scope: Scope, most: int) -> int:
    """Bytes that a request may have: `most`, or what the key that was let in may send where that is less."""
    key = scope.get("state", {}).get("key")
    return most if key is None or key.max_body_mb is None else min(most, int(key.max_body_mb * 2**20))


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


def _wrong_limit(key: ApiKey) -> str | None:
    for name in ("requests_per_s", "max_body_mb"):
        value = getattr(key, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            return f"{name} of key '{key.name}': got {str(value)[:40]}, expected a number above 0, or none for no limit"
    return None


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
            if wrong := _wrong_limit(key):
                raise ValueError(wrong)
            key.expired(datetime.date.min)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: expected a file of keys, made by rlsvc keys add ({error})") from error
    return keys
