"""The console's server: one page, one WebSocket a person, one stream a camera.

Everything but the page itself needs the key, which is made anew for each session and stands in the address that
`rlsvc collect` prints and `rlsvc console ROBOT` says. A person who goes away while in control stops the robot: a policy
does not move it again before somebody looks.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.resources
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse, StreamingResponse

from rlsvc.core.errors import BusyError, UserError
from rlsvc.core.http_server import ThreadServer
from rlsvc.robots.console.hub import ConsoleHub
from rlsvc.robots.lock import robots_folder

log = logging.getLogger(__name__)
STATE_S = 0.1
FRAME_S = 1 / 15
MAX_MESSAGE_BYTES = 4096
NO_KEY, TAKEN, BAD_HELLO = 4401, 4409, 4400
"""Codes with which a WebSocket is closed: a wrong key, a name that is there already, no name."""


def make_app(hub: ConsoleHub, key: str) -> FastAPI:
    """The console of one robot; `key`: what a request must have."""
    app = FastAPI(title="rlsvc console", docs_url=None, redoc_url=None, openapi_url=None)
    here: set[str] = set()

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (importlib.resources.files("rlsvc.robots.console") / "page.html").read_text()

    @app.get("/camera/{name}")
    async def camera(name: str, key: str = "") -> StreamingResponse:
        if not _same(key, expected):
            raise HTTPException(401, "the key is missing or wrong; take the address that rlsvc collect printed")
        if name not in hub.cameras:
            raise HTTPException(404, f"no camera '{name}'; there are: {', '.join(hub.cameras) or 'none'}")
        return StreamingResponse(_frames(hub, name), media_type="multipart/x-mixed-replace; boundary=frame")

    @app.websocket("/ws")
    async def people(socket: WebSocket) -> None:
        await socket.accept()
        if not _same(socket.query_params.get("key", ""), expected):
            await socket.close(NO_KEY, "the key is missing or wrong")
            return
        person = await _hello(socket, here)
        if person is None:
            return
        here.add(person)
        show = asyncio.create_task(_show(hub, socket))
        try:
            while True:
                await _hear(hub, socket, person, await socket.receive_text())
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            show.cancel()
            here.discard(person)
            _went_away(hub, person)

    expected = key
    return app


async def _hello(socket: WebSocket, here: set[str]) -> str | None:
    """The name with which a person comes, None (and a closed socket) for one that cannot."""
    try:
        message = _message(await asyncio.wait_for(socket.receive_text(), 10))
    except (TimeoutError, WebSocketDisconnect, UserError):
        message = {}
    person = str(message.get("person", "")).strip()[:64] if message.get("type") == "hello" else ""
    if not person:
        await socket.close(BAD_HELLO, "expected a first message with type hello and a person's name")
        return None
    if person in here:
        await socket.close(TAKEN, f"{person} is here already; choose another name")
        return None
    return person


async def _show(hub: ConsoleHub, socket: WebSocket) -> None:
    while True:
        await socket.send_text(json.dumps(hub.snapshot()))
        await asyncio.sleep(STATE_S)


async def _hear(hub: ConsoleHub, socket: WebSocket, person: str, text: str) -> None:
    try:
        message = _message(text)
        # The guard's stop talks to the robot, so it must not hold up the other pages.
        await asyncio.to_thread(_do, hub, person, message)
    except UserError as error:
        await socket.send_text(json.dumps({"type": "error", "message": str(error)}))


def _message(text: str) -> dict[str, Any]:
    if len(text) > MAX_MESSAGE_BYTES:
        raise UserError(f"message: got {len(text)} characters, at most {MAX_MESSAGE_BYTES}")
    try:
        message = json.loads(text)
    except ValueError:
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise UserError("message: expected a JSON object with a type")
    return message


def _do(hub: ConsoleHub, person: str, message: dict[str, Any]) -> None:
    """Carry out what a person said. Raises UserError."""
    operator, kind = hub.operator, message["type"]
    simple: dict[str, Callable[[str], Any]] = {
        "start": operator.start,
        "take_over": operator.take_over,
        "hand_back": operator.hand_back,
        "stop": operator.stop,
        "resume": operator.resume,
    }
    if kind in simple:
        simple[kind](person)
    elif kind == "mark":
        ending = message.get("ending")
        if ending not in ("success", "failure", "discard"):
            raise UserError(f"ending: got {ending!r}, expected success, failure or discard")
        operator.mark(person, ending)
    elif kind == "axes":
        grant = operator.in_control
        if hub.jog is None:
            raise UserError("axes: this robot is not moved from the page; its teleoperator is another one")
        if grant is None or grant.holder != person:
            raise BusyError("axes: take over first")
        hub.jog.set(message.get("axes"))  # type: ignore[arg-type] - it refuses what it cannot take
    else:
        raise UserError(f"type: got '{kind}', expected {', '.join(simple)}, mark or axes")


def _went_away(hub: ConsoleHub, person: str) -> None:
    grant = hub.operator.in_control
    if grant is not None and grant.holder == person:
        hub.robot.stop(f"{person}, who commanded the robot, left the console", "program")
        hub.robot.lease.give_back(grant)


async def _frames(hub: ConsoleHub, camera: str) -> AsyncIterator[bytes]:
    number = 0
    while True:
        frame = await asyncio.to_thread(hub.frame, camera, number)
        if frame is not None:
            number, data = frame
            yield b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(data), data)
        await asyncio.sleep(FRAME_S)


def _same(got: str, expected: str) -> bool:
    return hmac.compare_digest(got.encode(), expected.encode())


def address_file(robot: str) -> Path:
    """Where the address of a robot's console lies while there is one, readable for this user alone."""
    return robots_folder() / f"{robot}.console"


class ConsoleServer:
    """The console, served from a thread of this process.

    Attributes:
        url: with the key; whoever has it may command the robot.
    """

    def __init__(self, hub: ConsoleHub, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start it; `rlsvc console ROBOT` on this machine says its address.

        Args:
            hub: what it shows.
            host: that it listens on; anything but loopback opens the robot to the network.
            port: 0 takes a free one.

        Raises:
            BusyError: the port is in use, or the host is not one of this machine.
        """
        self.key = secrets.token_urlsafe(16)
        self._server = ThreadServer(
            make_app(hub, self.key), host, port, "console", log_level="warning", ws_max_size=MAX_MESSAGE_BYTES * 4
        )
        self.url = f"http://{self._server.address}/?key={self.key}"
        self._address = address_file(hub.robot.robot)
        self._address.unlink(missing_ok=True)
        with os.fdopen(os.open(self._address, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.url)

    def close(self) -> None:
        """Say goodbye to all pages and end."""
        self._address.unlink(missing_ok=True)
        self._server.close()
