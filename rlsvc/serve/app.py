"""The HTTP and WebSocket face of a served policy, as a FastAPI application that knows nothing of Ray.

The WebSocket at `/` speaks openpi's protocol (`/?policy=NAME` where several are served): a metadata frame first, then
an observation in and actions out, msgpack both. A message `{"observation": {...}, "seed": int, "step": int}` is taken
there too and answered like HTTP's, errors included; with `"session": true` the server keeps the episode.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

import rlsvc
from rlsvc.core.wire import pack
from rlsvc.serve import openapi
from rlsvc.serve.batcher import Answer
from rlsvc.serve.body import read_body
from rlsvc.serve.codec import (
    JSON,
    MSGPACK,
    ActRequest,
    RequestError,
    as_request,
    decode_message,
    decode_request,
    encode,
    media_type,
)
from rlsvc.serve.keys import Authenticated, Keys, body_limit, too_often
from rlsvc.serve.log import HEADER, Traced, begin_message, request_id, write
from rlsvc.serve.metrics import CONTENT_TYPE
from rlsvc.serve.oip import add_oip_routes
from rlsvc.serve.policies import Policies
from rlsvc.serve.service import PolicyService, internal_error, timing
from rlsvc.serve.session import Session, session_key


def build_app(served: PolicyService | Policies, keys: Keys | None = None, *, echo_request_id: bool = True) -> FastAPI:
    """The application for one policy, or for several.

    Args:
        served: the policy; loaded and warm, so that the application is ready as soon as it is reachable. Of several the
            first is.
        keys: who may use it; None lets everybody who reaches it.
        echo_request_id: whether answers have the header X-Request-Id; without it when the server around gives one.
    """
    policies = served if isinstance(served, Policies) else Policies(served)
    service = policies.first

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        write(logging.INFO, "started", service.about())
        yield
        await policies.close()
        write(logging.INFO, "stopped", service.about())

    app = FastAPI(
        title="rlsvc",
        version=rlsvc.__version__,
        description="Robot policies: an observation in, a chunk of actions out. The WebSocket at `/` speaks openpi's "
        "protocol and is not on this page.",
        # Links between the answers of this page name a route by its function.
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    app.openapi = lambda: openapi.page(app, policies.names, service.version, keys=keys is not None)

    if keys is not None:
        app.add_middleware(Authenticated, keys=keys, refused=service.refused)
    # The outermost, so that refused keys have ids too.
    app.add_middleware(Traced, about=service.about, echo=echo_request_id)

    @app.post(
        "/v1/policies/{name}/act",
        responses=openapi.ACT_RESPONSES,
        openapi_extra=openapi.act_request(service.contract, of_one=len(policies.names) == 1),
    )
    async def act(name: str, request: Request) -> Response:
        """The actions for one observation, in the encoding of the request (JSON or msgpack)."""
        received = perf_counter()
        kind = JSON
        policy = service
        try:
            policy = await policies.get(name)
            kind = media_type(request.headers.get("content-type"))
            limit = body_limit(request.scope, policy.settings.max_body_bytes)
            data = await read_body(request, limit)
            read = perf_counter()
            answer = await policy.act(decode_request(data, kind, limit), read=read, key=session_key(request))
        except RequestError as refusal:
            return _refused(policy, refusal, kind)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return _refused(policy, internal_error(error), kind)
        body = _answer(policy, answer, timing(answer, received))
        response = Response(encode(body, kind), media_type=kind)
        policy.answered(answer, "http", received)
        return response

    add_oip_routes(app, policies)

    @app.get("/v1/policies", responses=openapi.LIST_RESPONSES)
    async def list_policies() -> dict[str, Any]:
        """The policies served here."""
        return {"policies": [policies.status(name) for name in policies.names]}

    @app.get("/v1/policies/{name}", responses=openapi.DESCRIBE_RESPONSES)
    async def policy(name: str) -> Response:
        """A policy's contract and version."""
        try:
            return JSONResponse(policies.status(name))
        except RequestError as refusal:
            return _refused(service, refusal, JSON)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether this server answers at all."""
        return {"status": "ok"}

    @app.get("/readyz", responses=openapi.READY_RESPONSES)
    async def readyz() -> Response:
        """Whether the policy is loaded, compiled and free to act."""
        ready = service.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    @app.get("/metrics", response_class=Response, responses=openapi.METRICS_RESPONSES)
    async def metrics() -> Response:
        """Counters and latencies of the replica that answers, as Prometheus text."""
        return Response(policies.render(), media_type=CONTENT_TYPE)

    @app.websocket("/")
    async def websocket(socket: WebSocket) -> None:
        # A web page may open a WebSocket to any host without asking: only pages of this server itself are let in.
        origin = socket.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != socket.headers.get("host"):
            service.refused("origin", 403)
            await socket.close(1008)
            return
        await socket.accept()
        try:
            policy = await policies.get(socket.query_params.get("policy"))
        except RequestError as refusal:
            service.refused(refusal.reason, refusal.status)
            # 1013 is "try again later"; a reason has room for 123 bytes.
            await socket.close(1013 if refusal.status == 503 else 1008, str(refusal)[:120])
            return
        policy.metrics.websockets.inc()
        session = policy.open(session_key(socket))
        try:
            await _converse(socket, policy, session)
        except WebSocketDisconnect:
            pass
        finally:
            policy.close_session(session)
            policy.metrics.websockets.dec()

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        service.refused("route", error.status_code)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}; see /docs for what is served"
        body = {"error": message, "reason": "route", "status": error.status_code, "request_id": request_id()}
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        answer = _refused(service, internal_error(error), JSON)
        answer.headers[HEADER] = request_id()  # it is made outside of what puts the header on all others
        return answer

    return app


def _refused(service: PolicyService, refusal: RequestError, kind: str) -> Response:
    service.refused(refusal.reason, refusal.status)
    body = encode(_error(refusal), kind)
    return Response(body, status_code=refusal.status, media_type=kind, headers=refusal.headers)


def _answer(service: PolicyService, answer: Answer, spent: dict[str, float]) -> dict[str, Any]:
    expires_in_ms = service.expires_in_ms if answer.expires_in_ms is None else answer.expires_in_ms
    body = {"action": answer.action, "version": answer.version, "expires_in_ms": expires_in_ms, "timing": spent}
    return body if answer.carry is None else {**body, "carry": answer.carry}


def _error(refusal: RequestError) -> dict[str, Any]:
    return {"error": str(refusal), "reason": refusal.reason, "status": refusal.status, "request_id": request_id()}


async def _converse(socket: WebSocket, service: PolicyService, session: Session) -> None:
    # A robot's runtime looks for what it needs beside the policy's name (ALOHA: `reset_pose`).
    robot = session.version.runner.robot
    metadata = {} if robot is None else robot.metadata
    await socket.send_bytes(pack({**metadata, **service.describe(session.version), "server": "rlsvc"}))
    step = count = 0
    previous_ms: float | None = None
    while True:
        frame = await socket.receive()
        if frame["type"] == "websocket.disconnect":
            return
        received = perf_counter()
        count += 1
        begin_message(count)
        enveloped = False
        try:
            excess = too_often(socket.scope)
            message = _decode_frame(frame, body_limit(socket.scope, service.settings.max_body_bytes))
            # A feature is an array, so a map under this name can only be the envelope of the HTTP request.
            enveloped = isinstance(message.get("observation"), dict)
            if excess is not None:  # only now, since it is told in the form of the message
                raise excess
            asked = as_request(message) if enveloped else ActRequest(message)
            if asked.step is None and not asked.session:
                asked = ActRequest(asked.observation, asked.seed, step)
            answer = await service.act(asked, read=received, session=session)
        except RequestError as refusal:
            await _send_refusal(socket, service, refusal, enveloped)
            continue
        except Exception as error:
            await _send_refusal(socket, service, internal_error(error), enveloped)
            continue
        spent = timing(answer, received)
        if enveloped:
            reply = _answer(service, answer, spent)
        else:
            server_timing = {"infer_ms": spent["queue_ms"] + spent["model_ms"], "queue_ms": spent["queue_ms"]}
            if previous_ms is not None:
                server_timing["prev_total_ms"] = previous_ms
            reply = {
                "actions": answer.action,
                "server_timing": server_timing,
                "policy_timing": {"infer_ms": spent["model_ms"]},
                "version": answer.version,
            }
        await socket.send_bytes(pack(reply))
        service.answered(answer, "websocket", received)
        previous_ms = (perf_counter() - received) * 1e3
        step += 1


def _decode_frame(frame: Any, limit: int) -> dict[str, Any]:
    data = frame.get("bytes")
    if data is None:
        raise RequestError(400, "malformed", "got a text frame, expected a binary frame with a msgpack map")
    if len(data) > limit:
        raise RequestError(413, "too_large", f"the message has {len(data)} bytes, {limit} are the limit here")
    message = decode_message(data, MSGPACK, limit)
    if not isinstance(message, dict):
        raise RequestError(
            400, "malformed", f"the message is a {type(message).__name__}, expected a map of arrays by name"
        )
    return message


async def _send_refusal(socket: WebSocket, service: PolicyService, refusal: RequestError, enveloped: bool) -> None:
    """As openpi's clients expect an error, a text frame; in the request's own form where the client speaks it."""
    service.refused(refusal.reason, refusal.status)
    if enveloped:
        await socket.send_bytes(pack(_error(refusal)))
    else:
        await socket.send_text(str(refusal))
