"""Cameras that look into a MuJoCo model, as MJPEG over HTTP.

Any browser shows a stream, and OpenCV and LeRobot read it (rlsvc/robots/lerobot_camera). Each part carries the header
`X-Captured`, `time.monotonic()` of this host when the state was taken that it shows; the response's `X-Boot` says which
host and boot that clock is of.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self

import cv2
import mujoco
import numpy as np

BOUNDARY = "frame"
QUALITY = 90


def boot_id() -> str:
    """What tells this host's monotonic clock from any other."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


@dataclass
class View:
    """A camera.

    Attributes:
        name: of the model's camera.
        width: px.
        height: px.
        fps: frames a second.
        fault: what it does wrong: black frames, one frame again and again, or none at all.
    """

    name: str
    width: int = 640
    height: int = 480
    fps: float = 10.0
    fault: Literal["black", "frozen", "silent"] | None = None


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


class Renderer:
    """Draws all views of a model in a thread of its own, which owns the OpenGL context. A context manager.

    Attributes:
        streams: by the name of the view.
    """

    def __init__(self, model: mujoco.MjModel, state: Callable[[], np.ndarray], views: Mapping[str, View]) -> None:
        """`state` returns qpos; it is called in the thread, once a frame."""
        self.streams = {name: Stream() for name in views}
        self._model, self._state, self._views = model, state, views
        self._done = threading.Event()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cameras", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        try:
            data = mujoco.MjData(self._model)
            for view in self._views.values():
                size = (view.height, view.width)
                if size not in renderers:
                    renderers[size] = mujoco.Renderer(self._model, *size)
        except Exception as error:
            self._error = error
            return
        finally:
            self._ready.set()
        noise = np.random.default_rng(0).normal(0, 2, 1 << 22).round().astype(np.int16)
        due = dict.fromkeys(self._views, time.monotonic())
        last: dict[str, bytes] = {}
        while not self._done.is_set():
            name = min(due, key=due.__getitem__)
            if self._done.wait(max(0.0, due[name] - time.monotonic())):
                break
            view = self._views[name]
            due[name] = max(due[name] + 1 / view.fps, time.monotonic())
            stamp = time.monotonic()
            data.qpos[:] = self._state()
            mujoco.mj_forward(self._model, data)
            renderer = renderers[view.height, view.width]
            renderer.update_scene(data, camera=view.name)
            image = renderer.render()
            # No two frames of a real sensor are alike.
            start = int(stamp * 1e6) % (noise.size - image.size) if image.size < noise.size else 0
            image = np.clip(image + np.resize(noise[start : start + image.size], image.shape), 0, 255).astype(np.uint8)
            if view.fault == "black":
                image[:] = 0
            if view.fault != "silent":
                if view.fault != "frozen" or name not in last:
                    last[name] = cv2.imencode(".jpg", image[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[
                        1
                    ].tobytes()
                self.streams[name].put(stamp, last[name])
        for renderer in renderers.values():
            renderer.close()


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
