"""LeRobot's cameras for drivers of this project: made from a map of configurations, read with the time of capture."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.errors import UserError, unknown_name
from rlsvc.robots.api import ConnectionLost

PREFIX = "observation.images."


class Cameras:
    """Cameras by name; each keeps its newest frame in a thread of its own.

    Attributes:
        features: by name, `observation.images.<camera>`.
    """

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], stale_after_s: float) -> None:
        """Nothing is opened yet.

        Args:
            configs: by camera's name LeRobot's configuration with its `type`; `width` and `height`, px, are needed.
            stale_after_s: age of the newest frame at which a camera counts as lost.

        Raises:
            UserError: a configuration that LeRobot does not take, by camera.
        """
        self._stale_after_s = stale_after_s
        self._cameras: dict[str, Any] = {}
        self.features: dict[str, Feature] = {}
        for name, config in configs.items():
            camera = _make(name, config)
            if not camera.width or not camera.height:
                raise UserError(f"camera '{name}': no width and height; give both, px, as the camera delivers them")
            self._cameras[name] = camera
            self.features[PREFIX + name] = Feature((camera.height, camera.width, 3), "uint8")

    def connect(self) -> None:
        """Open all.

        Raises:
            UserError: one that is not there, by name.
        """
        for name, camera in self._cameras.items():
            try:
                camera.connect()
            except Exception as error:  # each LeRobot camera raises errors of its own
                self.close()
                raise UserError(f"camera '{name}' ({type(camera).__name__}) does not open: {error}") from error

    def read(self) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Newest frames and when they were captured, time.monotonic(), by feature name.

        Raises:
            ConnectionLost: a camera whose newest frame is too old, by name.
        """
        frames: dict[str, np.ndarray] = {}
        stamps: dict[str, float] = {}
        for name, camera in self._cameras.items():
            # Taken before the frame, so that it is never newer than the frame is.
            captured = getattr(camera, "latest_timestamp", None)
            try:
                frame = np.asarray(camera.read_latest(max_age_ms=round(self._stale_after_s * 1e3)))
            except Exception as error:  # as above
                raise ConnectionLost(f"camera '{name}': {error}") from error
            expected = self.features[PREFIX + name].shape
            if frame.shape != expected or frame.dtype != np.uint8:
                raise ConnectionLost(
                    f"camera '{name}': got a frame {frame.shape} {frame.dtype}, expected {expected} uint8"
                )
            age = 0.0 if captured is None else time.perf_counter() - captured
            frames[PREFIX + name], stamps[PREFIX + name] = frame, time.monotonic() - age
        return frames, stamps

    def close(self) -> None:
        """Close those that are open. Never raises."""
        for camera in self._cameras.values():
            with contextlib.suppress(Exception):
                camera.disconnect()


def _make(name: str, config: Mapping[str, Any]) -> Any:
    from lerobot.cameras import CameraConfig, make_cameras_from_configs
    from lerobot.cameras.opencv import OpenCVCameraConfig
    from lerobot.cameras.realsense import RealSenseCameraConfig
    from lerobot.cameras.zmq import ZMQCameraConfig
    from lerobot.utils.import_utils import register_third_party_plugins

    from rlsvc.robots.lerobot_camera import StreamCameraConfig

    # Importing them makes their types known.
    del OpenCVCameraConfig, RealSenseCameraConfig, ZMQCameraConfig, StreamCameraConfig
    register_third_party_plugins()
    kinds = CameraConfig.get_known_choices()
    kind = config.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise unknown_name(f"type of camera '{name}'", str(kind), kinds)
    try:
        made = kinds[kind](**{key: value for key, value in config.items() if key != "type"})
        return make_cameras_from_configs({name: made})[name]
    except Exception as error:  # whatever LeRobot finds wrong with it
        raise UserError(f"camera '{name}' ({kind}): {error}") from error
