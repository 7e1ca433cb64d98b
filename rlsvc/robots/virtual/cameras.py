"""Cameras that look into a MuJoCo model, as MJPEG over HTTP.

Any browser shows a stream, and OpenCV and LeRobot read it (rlsvc/robots/lerobot_camera). Each part carries the header
`X-Captured`, `time.monotonic()` of this host when the state was taken that it shows; the response's `X-Boot` says which
host and boot that clock is of.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

import cv2
import mujoco as _mujoco
import numpy as np

from rlsvc.core.errors import UserError, unknown_name
from rlsvc.robots.camera_watch import boot_id

mujoco: Any = _mujoco  # its names are made at run time

BOUNDARY = "frame"
QUALITY = 90
INSTALL = "they need EGL: apt install libegl1 libgl1-mesa-dri; or do without: --cameras none"


Fault = Literal["black", "frozen", "silent"] | None
"""What a camera does wrong: black frames, one frame again and again, none at all."""


@dataclass
class View:
    """A camera.

    Attributes:
        name: of the model's camera.
        width: px.
        height: px.
        fps: frames a second.
        fault: at first.
    """

    name: str
    width: int = 640
    height: int = 480
    fps: float = 10.0
    fault: Fault = None


class Stream:
    """The newest frame of a camera; readers wait for the next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frame: tuple[int, float, bytes] = (0, 0.0, b"")

    def put(self, stamp: float, jpeg: bytes) -> None:
        """A frame captured at `stamp`, `time.monotonic()`."""
        with self._changed:
            self._frame = (self._frame[0] + 1, stamp, jpeg)
            self._changed.notify_all()

    def after(self, number: int, timeout: float) -> tuple[int, float, bytes]:
        """The newest frame once its number is beyond `number`, or the one that there is after `timeout` s."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame[0] > number, timeout)
            return self._frame


class CameraProcess:
    """Draws views of a model and serves them, in a process of its own: physics and the bus don't wait for pictures.

    A context manager; the process ends with it, and with the process that started it, however that ends.

    Attributes:
        urls: of the streams, by the name of the view.
    """

    def __init__(self, model: Path, views: Mapping[str, View], size: int, port: int = 0) -> None:
        """`model`: an MJCF file; `size`: of its qpos; `port`: of HTTP, 0 takes a free one."""
        context = multiprocessing.get_context("spawn")
        self.urls: dict[str, str] = {}
        self._views = views
        self._shared = np.frombuffer(context.RawArray("d", size + 2))
        self._pipe, theirs = context.Pipe()
        arguments = (str(model), dict(views), self._shared.base, theirs, port)
        self._process = context.Process(target=_draw, args=arguments, name="cameras", daemon=True)

    def __enter__(self) -> Self:
        if not os.environ.get("DISPLAY"):
            # MuJoCo reads it when the process imports it, and its own choice needs a display.
            os.environ.setdefault("MUJOCO_GL", "egl")
        self._process.start()
        while not self._pipe.poll(0.1):
            if not self._process.is_alive():
                raise UserError(f"the cameras' process has ended (exit code {self._process.exitcode}); {INSTALL}")
        told = self._pipe.recv()
        if isinstance(told, str):
            self._process.join()
            raise UserError(f"the cameras can't draw: {told}; {INSTALL}")
        self.urls = told
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def show(self, qpos: np.ndarray) -> None:
        """The state that the next frames show."""
        # A sequence lock: odd while it is being written.
        self._shared[0] += 1
        self._shared[1] = time.monotonic()
        self._shared[2:] = qpos
        self._shared[0] += 1

    def fault(self, name: str, fault: Fault) -> None:
        """Let a camera do something wrong, or right again.

        Raises:
            NotFoundError: no such camera.
        """
        if name not in self._views:
            raise unknown_name("camera", name, self._views)
        self._pipe.send((name, fault))


def _draw(path: str, views: dict[str, View], shared: Any, pipe: Connection, port: int) -> None:
    """The process of the cameras."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner ends it
    os.nice(10)  # servos answer first
    try:
        model = mujoco.MjModel.from_xml_path(path)
        data = mujoco.MjData(model)
        renderers: dict[tuple[int, int], Any] = {}
        for view in views.values():
            if (size := (view.height, view.width)) not in renderers:
                renderers[size] = mujoco.Renderer(model, *size)
    except Exception as error:
        pipe.send(str(error) or type(error).__name__)
        return
    streams = {name: Stream() for name in views}
    with Web(streams, {}, {}, port) as web:
        pipe.send({name: f"{web.url}/{name}.mjpg" for name in views})
        with contextlib.suppress(EOFError, OSError):  # the owner has closed the pipe, or is dead
            _render(model, data, np.frombuffer(shared), views, streams, renderers, pipe)
    for renderer in renderers.values():
        renderer.close()


def _render(
    model: Any,
    data: Any,
    shared: np.ndarray,
    views: dict[str, View],
    streams: dict[str, Stream],
    renderers: dict[tuple[int, int], Any],
    pipe: Connection,
) -> None:
    noise = np.random.default_rng(0).normal(0, 2, 1 << 22).round().astype(np.int16)
    due = dict.fromkeys(views, time.monotonic())
    last: dict[str, bytes] = {}
    while True:
        name = min(due, key=due.__getitem__)
        while pipe.poll(max(0.0, due[name] - time.monotonic())):
            changed, fault = pipe.recv()
            views[changed].fault = fault
        view = views[name]
        due[name] = max(due[name] + 1 / view.fps, time.monotonic())
        stamp, data.qpos[:] = _read(shared)
        mujoco.mj_forward(model, data)
        renderer = renderers[view.height, view.width]
        renderer.update_scene(data, camera=view.name)
        image = renderer.render().astype(np.int16)
        # No two frames of a real sensor are alike.
        start = int(stamp * 1e6) % max(1, noise.size - image.size)
        image = np.clip(image + np.resize(noise[start : start + image.size], image.shape), 0, 255).astype(np.uint8)
        if view.fault == "black":
            image[:] = 0
        if view.fault == "silent":
            continue
        if view.fault != "frozen" or name not in last:
            last[name] = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
        streams[name].put(stamp, last[name])


def _read(shared: np.ndarray) -> tuple[float, np.ndarray]:
    """When the state was taken, and qpos."""
    while True:
        before = shared[0]
        stamp, qpos = float(shared[1]), shared[2:].copy()
        if before % 2 == 0 and before == shared[0] and before > 0:
            return stamp, qpos
        time.sleep(0.0002)


class Web:
    """Serves streams, and functions of JSON, on loopback. A context manager.

    `GET /<name>.mjpg` is a stream, `GET /<name>` calls `get[name]()`, `POST /<name>` calls `post[name](body)`.

    Attributes:
        url: "http://127.0.0.1:PORT".
    """

    def __init__(
        self,
        streams: Mapping[str, Stream],
        get: Mapping[str, Callable[[], Any]],
        post: Mapping[str, Callable[[Any], Any]],
        port: int = 0,
    ) -> None:
        """Port 0 takes a free one."""
        handler = type("Handler", (_Handler,), {"streams": streams, "get": get, "post": post})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="web", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    streams: Mapping[str, Stream]
    get: Mapping[str, Callable[[], Any]]
    post: Mapping[str, Callable[[Any], Any]]

    def do_GET(self) -> None:
        name = self.path.strip("/")
        if (stream := self.streams.get(name.removesuffix(".mjpg"))) and name.endswith(".mjpg"):
            self._stream(stream)
        elif name in self.get:
            self._json(200, self.get[name]())
        else:
            self._json(404, {"streams": [f"/{each}.mjpg" for each in self.streams], "values": list(self.get)})

    def do_POST(self) -> None:
        name = self.path.strip("/")
        if name not in self.post:
            return self._json(404, {"functions": list(self.post)})
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            return self._json(200, self.post[name](body))
        except (ValueError, TypeError, AttributeError) as error:  # what the caller gave does not fit
            return self._json(400, {"error": str(error)})

    def _stream(self, stream: Stream) -> None:
        self.send_response(200)
        self.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={BOUNDARY}")
        self.send_header("X-Boot", boot_id())
        self.end_headers()
        number = 0
        try:
            while True:
                before, (number, stamp, jpeg) = number, stream.after(number, timeout=1.0)
                if number > before:
                    head = f"--{BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n"
                    self.wfile.write(f"{head}X-Captured: {stamp:.6f}\r\n\r\n".encode() + jpeg + b"\r\n")
        except OSError:
            return  # the reader has gone

    def _json(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
