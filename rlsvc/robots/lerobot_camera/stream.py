"""Reads MJPEG over HTTP in a thread, behind LeRobot's interface of a camera."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import Any

import cv2
import numpy as np
from lerobot.cameras.camera import Camera
from lerobot.utils.errors import DeviceAlreadyConnectedError, DeviceNotConnectedError
from numpy.typing import NDArray

from rlsvc.robots.camera_watch import boot_id
from rlsvc.robots.lerobot_camera.config_stream import StreamCameraConfig


class StreamCamera(Camera):
    """Frames [H, W, 3] uint8 RGB.

    Attributes:
        latest_frame: the newest, None before the first.
        latest_timestamp: when it was captured, `time.perf_counter()` as in LeRobot's cameras: as the stream's
            `X-Captured` says where it comes from this host, else when its last byte came.
        frame_lock: held while the two change.
    """

    def __init__(self, config: StreamCameraConfig) -> None:
        super().__init__(config)
        self.config = config
        self.frame_lock = threading.Lock()
        self.latest_frame: NDArray[Any] | None = None
        self.latest_timestamp: float | None = None
        self._new = threading.Event()
        self._stop = threading.Event()
        self._response: HTTPResponse | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __str__(self) -> str:
        return f"StreamCamera({self.config.url})"

    @property
    def is_connected(self) -> bool:
        """Whether the stream is open, though it may be silent."""
        return self._response is not None

    @staticmethod
    def find_cameras() -> list[dict[str, Any]]:
        """None: a stream is known by its address only."""
        return []

    def connect(self, warmup: bool = True) -> None:
        """Open the stream and wait for its first frame.

        Raises:
            ConnectionError: nothing answers, it is no MJPEG stream, no frame comes, or it has another size.
        """
        if self.is_connected:
            raise DeviceAlreadyConnectedError(f"{self} is already connected.")
        try:
            response = urllib.request.urlopen(self.config.url, timeout=self.config.timeout_s)
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConnectionError(f"{self} does not answer: {reason}") from error
        kind = response.headers.get_content_type()
        if kind != "multipart/x-mixed-replace":
            response.close()
            raise ConnectionError(f"{self} is no MJPEG stream: it sends {kind}, expected multipart/x-mixed-replace")
        self._response, self._error = response, None
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, args=(response,), name=str(self), daemon=True)
        self._thread.start()
        try:
            frame = self.async_read(1000 * self.config.timeout_s)
        except (TimeoutError, RuntimeError) as error:
            self.disconnect()
            raise ConnectionError(f"{self} sends no frame: {error}") from error
        height, width = frame.shape[:2]
        expected = (self.width or width, self.height or height)
        if (width, height) != expected:
            self.disconnect()
            raise ConnectionError(f"{self} sends {width}x{height}, expected {expected[0]}x{expected[1]}")
        self.width, self.height = width, height

    def _run(self, response: HTTPResponse) -> None:
        same_host = bool(boot_id()) and response.headers.get("X-Boot") == boot_id()
        try:
            while not self._stop.is_set():
                headers = _headers(response)
                jpeg = response.read(int(headers["content-length"]))
                arrived = time.perf_counter()
                image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
                if image is None:
                    continue  # a damaged part; the next may be whole
                captured = arrived
                if same_host and "x-captured" in headers:
                    captured = float(headers["x-captured"]) + time.perf_counter() - time.monotonic()
                frame = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
                with self.frame_lock:
                    self.latest_frame, self.latest_timestamp = frame, captured
                self._new.set()
        except (OSError, HTTPException, KeyError, ValueError, AttributeError) as error:
            # AttributeError: http.client's answer to a response that another thread closes.
            self._error = error
            self._new.set()

    def read(self) -> NDArray[Any]:
        """The next frame; waits for it."""
        self._new.clear()
        return self.async_read(1000 * self.config.timeout_s)

    def async_read(self, timeout_ms: float = 200) -> NDArray[Any]:
        """The newest frame that was not read yet.

        Raises:
            TimeoutError: none came in `timeout_ms`.
            RuntimeError: the stream has ended.
        """
        self._check()
        if not self._new.wait(timeout_ms / 1000):
            raise TimeoutError(f"{self}: no frame for {timeout_ms:.0f} ms")
        self._new.clear()
        return self.read_latest(max_age_ms=round(1000 * self.config.timeout_s))

    def read_latest(self, max_age_ms: int = 1000) -> NDArray[Any]:
        """The newest frame.

        Raises:
            TimeoutError: it is older than `max_age_ms`.
            RuntimeError: there is none yet, or the stream has ended.
        """
        self._check()
        with self.frame_lock:
            frame, stamp = self.latest_frame, self.latest_timestamp
        if frame is None or stamp is None:
            raise RuntimeError(f"{self} has sent no frame yet")
        age_ms = 1000 * (time.perf_counter() - stamp)
        if age_ms > max_age_ms:
            raise TimeoutError(f"{self}: the newest frame is {age_ms:.0f} ms old, at most {max_age_ms} ms are allowed")
        return frame

    def _check(self) -> None:
        if self._response is None:
            raise DeviceNotConnectedError(f"{self} is not connected.")
        if self._error is not None:
            raise RuntimeError(f"{self} has ended: {self._error or type(self._error).__name__}")

    def disconnect(self) -> None:
        """Close the stream."""
        self._stop.set()
        response, self._response = self._response, None
        if response is not None:
            with contextlib.suppress(OSError):
                response.close()
        if self._thread is not None:
            self._thread.join(timeout=2 * self.config.timeout_s)
            self._thread = None
        self._new.clear()
        with self.frame_lock:
            self.latest_frame = self.latest_timestamp = None


def _headers(response: HTTPResponse) -> dict[str, str]:
    """Of the next part, names in lower case; skips to its boundary."""
    while not (line := response.readline(1024)).startswith(b"--"):
        if not line:
            raise ConnectionError("the server closed it")
    headers: dict[str, str] = {}
    while (line := response.readline(1024).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return headers
