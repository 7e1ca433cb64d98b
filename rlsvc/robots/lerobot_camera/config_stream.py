"""The configuration of StreamCamera."""

from __future__ import annotations

from dataclasses import dataclass

from lerobot.cameras.configs import CameraConfig


@CameraConfig.register_subclass("mjpeg")
@dataclass
class StreamCameraConfig(CameraConfig):
    """An MJPEG stream.

    Attributes:
        url: "http://HOST:PORT/PATH", answered with multipart/x-mixed-replace parts of image/jpeg.
        timeout_s: without a frame, after which the stream counts as lost, s.
    """

    url: str
    timeout_s: float = 2.0
