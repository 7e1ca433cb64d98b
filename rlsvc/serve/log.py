"""A server's log: one JSON object a line, and ids by which a request is found in it.

    {"time": "2030-05-05T10:00:00.123Z", "level": "warning", "event": "refused", "policy": "pick", "version": "3f2a...",
     "replica": "...", "request_id": "7c0e...", "route": "/v1/policies/{name}/act", "caller": "left_arm",
     "reason": "observation", "status": 422, "milliseconds": 0.41}

Events: started, stopped (where a replica ends in order, not by a kill), refused (a warning below status 500, an error
from there), internal_error (with the traceback as `exception`), answered (debug, so not by default), and those of other
modules. Neither keys nor anything of an observation stands in a line: of a refusal its reason is told, not its message,
which may quote what was sent.

The id is the caller's `X-Request-Id` where that has at most 64 letters, digits, '.', '_' or '-', else one made here.
Messages of a WebSocket count on from the id of its connection: `ID/1`, `ID/2`, ...
"""

from __future__ import annotations

import datetime
import logging
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlsvc.serve.bucket import TokenBucket

HEADER = "X-Request-Id"
REFUSALS_PER_S, REFUSALS_AT_ONCE = 1.0, 100.0
"""Of lines about refusals: whoever is refused all day fills no disk. /metrics counts all of them."""
IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What is taken for a caller's own id."""

logger = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: what `write` was given, or the message of somebody else's record."""

    def format(self, record: logging.LogRecord) -> str:
        """See the module."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time.replace("+00:00", "Z"), "level": record.levelname.lower()}
        event = getattr(record, "event", None)
        line |= (
            {"event": event, **getattr(record, "fields", {})}
            if event
            else {"event": "message", "message": record.getMessage()}
        )
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def log_as_json(level: str) -> None:
    """Write what rlsvc logs in this process to standard error, as JSON, from a level (of ServeSettings) up."""
    # Ray Serve may have put a logger of its own in place of sys.stderr, which writes a prefix before each line.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter())
    ours = logging.getLogger("rlsvc")
    ours.handlers, ours.propagate = [handler], False
    ours.setLevel(level.upper())


def write(level: int, event: str, fields: Mapping[str, Any], error: Exception | None = None) -> None:
    """Log an event, with fields of JSON types."""
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.log(level, "%s %s", event, text, exc_info=error, extra={"event": event, "fields": dict(fields)})


@dataclass(frozen=True)
class Call:
    """A request under way.

    Attributes:
        id: see the module.
        scope: ASGI's.
        began: `perf_counter()`.
        traced: the application's, whose limits hold.
    """

    id: str
    scope: Scope
    began: float
    traced: Traced

    def fields(self) -> dict[str, Any]:
        """What every line about it says."""
        state = self.scope.get("state", {})
        # The pattern of the route, since a path is the caller's text; it is the path before a route was found.
        route = getattr(self.scope.get("route"), "path", None) or self.scope["path"][:200]
        fields = {**self.traced.about(), "request_id": self.id, "route": route}
        return {**fields, "caller": state["key"].name} if "key" in state else fields

    def milliseconds(self) -> float:
        """Since it began."""
        return round((perf_counter() - self.began) * 1e3, 3)


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


class Traced:
    """An application whose requests have ids, which their answers bring back as a header."""

    def __init__(self, app: ASGIApp, about: Callable[[], dict[str, Any]], *, echo: bool = True) -> None:
        """Stand before `app`.

        Args:
            app: the application.
            about: the first fields of each line: policy, version, replica.
            echo: whether answers get the header; Ray Serve gives one itself, with the same id, or with the caller's own
                where that is none that is taken here.
        """
        self._app, self.about, self._echo = app, about, echo
        self.refusals = TokenBucket(REFUSALS_PER_S, REFUSALS_AT_ONCE)
        self.left_out = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        identity = given if IDENTITY.fullmatch(given) else uuid.uuid4().hex
        # Never reset: an answer to an exception is made outside of this, and each request has a context of its own.
        _CALL.set(Call(identity, scope, perf_counter(), self))

        async def send_with_id(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.accept"):
                MutableHeaders(scope=message)[HEADER] = identity
            await send(message)

        await self._app(scope, receive, send_with_id if self._echo else send)


def begin_message(count: int) -> None:
    """The WebSocket message of this number begins: it has an id and a time of its own."""
    call = _CALL.get()
    if call is not None:
        connection = call.id.split("/")[0]
        _CALL.set(replace(call, id=f"{connection}/{count}", began=perf_counter()))


def request_id() -> str:
    """Of the request under way; one made now where there is none."""
    call = _CALL.get()
    return uuid.uuid4().hex if call is None else call.id


def log_refused(reason: str, status: int) -> None:
    """A line about a refusal of the request under way, unless there were too many; the next then says how many."""
    call = _CALL.get()
    # A bug has its own line, with the traceback.
    if call is None or reason == "internal":
        return
    traced = call.traced
    if traced.refusals.take() > 0:
        traced.left_out += 1
        return
    fields = {**call.fields(), "reason": reason, "status": status, "milliseconds": call.milliseconds()}
    if traced.left_out:
        fields["refusals_left_out"] = traced.left_out
        traced.left_out = 0
    write(logging.ERROR if status >= 500 else logging.WARNING, "refused", fields)


def log_internal_error(error: Exception) -> str:
    """A line about a bug, with its traceback; gives the id under which it is found."""
    call = _CALL.get()
    identity = request_id()
    fields = {"request_id": identity} if call is None else {**call.fields(), "milliseconds": call.milliseconds()}
    write(logging.ERROR, "internal_error", {**fields, "reason": "internal", "status": 500}, error)
    return identity


def log_answered() -> None:
    """A line about an answer, for those who asked for debug lines."""
    call = _CALL.get()
    if call is not None and logger.isEnabledFor(logging.DEBUG):
        write(logging.DEBUG, "answered", {**call.fields(), "milliseconds": call.milliseconds()})
