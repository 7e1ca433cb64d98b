"""Episodes that robots' computers send to a learner, over HTTP.

    GET /v1/episodes/{dataset}             which of a dataset's episodes are held: {"held": [0, 1, ...]}
    PUT /v1/episodes/{dataset}/{number}    an episode (rlsvc/data/pack_episode.py); 200 once it is on this disk

An episode is held once it was unpacked, checked, and lies on the disk under a name of its own: a kill at any moment
loses none that was answered for, and sending one again changes nothing.
"""

from __future__ import annotations

import asyncio
import queue
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from rlsvc.core.errors import UserError
from rlsvc.data.commit import FULL, sync
from rlsvc.data.pack_episode import ID, unpack_episode
from rlsvc.serve import openapi
from rlsvc.serve.body import pieces_of
from rlsvc.serve.codec import RequestError
from rlsvc.serve.keys import body_limit
from rlsvc.serve.log import log_refused, request_id
from rlsvc.serve.service import internal_error

_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
ANYBODY = "anybody"
"""The client, where nobody is asked for a key."""


@dataclass(frozen=True)
class Received:
    """An episode that is held.

    Attributes:
        client: name of the key it came with.
        dataset: id.
        number: in that dataset.
        content: what `read` made of it.
    """

    client: str
    dataset: str
    number: int
    content: Any


class EpisodeInbox:
    """A folder of episodes, `<client>/<dataset>/<number>`, each a LeRobot dataset.

    Attributes:
        max_bytes: of one episode, packed and unpacked.
    """

    def __init__(
        self,
        folder: Path,
        read: Callable[[Path], Any],
        max_bytes: int,
        known: Callable[[str, str, int], bool] = lambda client, dataset, number: False,
    ) -> None:
        """Open it, and read what it holds.

        Args:
            folder: made when it is not there.
            read: what is to be made of an episode's folder; raises UserError for one that is of no use here.
            max_bytes: of one episode, packed and unpacked.
            known: whether an episode (client, dataset, number) that lies here need not be read again.

        Raises:
            UserError: what `read` raises of an episode that lies here.
        """
        self._folder, self._read, self.max_bytes = folder, read, max_bytes
        self._arrived: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._keeping = asyncio.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".receiving-*"):
            shutil.rmtree(leftover)
        held = [path for path in folder.glob("*/*/*") if _NUMBER.fullmatch(path.name)]
        for path in sorted(held, key=lambda path: (path.stat().st_mtime_ns, path.parent, int(path.name))):
            if not known(path.parent.parent.name, path.parent.name, int(path.name)):
                self._announce(path, read(path))

    def held(self, client: str, dataset: str) -> list[int]:
        """Numbers of the episodes of a client's dataset that are here, in order."""
        folder = self._folder / client / dataset
        return sorted(int(path.name) for path in folder.glob("*") if _NUMBER.fullmatch(path.name))

    def take(self, timeout_s: float) -> list[Received]:
        """Episodes since the last call, those that lay here at the start first; waits at most so long for one."""
        out: list[Received] = []
        try:
            out.append(self._arrived.get(timeout=timeout_s) if timeout_s > 0 else self._arrived.get_nowait())
            while True:
                out.append(self._arrived.get_nowait())
        except queue.Empty:
            return out

    async def receive(self, client: str, dataset: str, number: int, pieces: AsyncIterator[bytes]) -> None:
        """Hold an episode; one that is held already is read and dropped.

        Args:
            client: see `Received`.
            dataset: likewise.
            number: likewise.
            pieces: of its file, at most `max_bytes`.

        Raises:
            RequestError: no episode, one of no use here, or the disk is full; and whatever `pieces` raises.
        """
        target = self._folder / client / dataset / str(number)
        work = self._folder / f".receiving-{uuid.uuid4().hex}"
        try:
            work.mkdir()
            with (work / "episode.tar").open("wb") as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
            async with self._keeping:
                if not target.exists():
                    self._announce(target, await asyncio.to_thread(self._keep, work, target))
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise RequestError(503, "disk_full", f"the learner's disk is full ({error.strerror})") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    def _keep(self, work: Path, target: Path) -> Any:
        folder = work / "episode"
        try:
            unpack_episode(work / "episode.tar", folder, self.max_bytes)
            content = self._read(folder)
        except UserError as error:
            raise RequestError(422, "episode", str(error).replace(str(folder), "the episode")) from error
        for path in (folder, *folder.rglob("*")):
            sync(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        for path in (target.parent, target.parent.parent, self._folder):
            sync(path)
        return content

    def _announce(self, path: Path, content: Any) -> None:
        self._arrived.put(Received(path.parent.parent.name, path.parent.name, int(path.name), content))


def add_episode_routes(app: FastAPI, inbox: EpisodeInbox) -> None:
    """Let an application take episodes."""

    @app.get("/v1/episodes/{dataset}", responses=openapi.HELD_RESPONSES)
    async def held(dataset: str, request: Request) -> JSONResponse:
        """Which episodes of a dataset the learner has."""
        try:
            return JSONResponse({"held": inbox.held(_client(request), _dataset(dataset))})
        except RequestError as refusal:
            return _refused(refusal)

    @app.put("/v1/episodes/{dataset}/{number}", responses=openapi.SEND_RESPONSES, openapi_extra=openapi.SEND_BODY)
    async def send(dataset: str, number: str, request: Request) -> Response:
        """Give the learner an episode."""
        try:
            if not _NUMBER.fullmatch(number):
                raise RequestError(404, "route", f"episode '{number[:40]}': expected a number below a million")
            pieces = pieces_of(request, body_limit(request.scope, inbox.max_bytes))
            await inbox.receive(_client(request), _dataset(dataset), int(number), pieces)
        except RequestError as refusal:
            return _refused(refusal)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            return _refused(internal_error(error))
        return JSONResponse({"held": int(number)})


def _client(request: Request) -> str:
    key = request.scope.get("state", {}).get("key")
    return ANYBODY if key is None else key.name


def _dataset(text: str) -> str:
    if not ID.fullmatch(text):
        raise RequestError(404, "route", f"dataset '{text[:40]}': expected its id, 32 hexadecimal digits")
    return text


def _refused(refusal: RequestError) -> JSONResponse:
    log_refused(refusal.reason, refusal.status)
    body = {"error": str(refusal), "reason": refusal.reason, "status": refusal.status, "request_id": request_id()}
    return JSONResponse(body, status_code=refusal.status, headers=refusal.headers)
