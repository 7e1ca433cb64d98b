"""A camera for LeRobot that reads MJPEG over HTTP: the virtual SO-101's, or any network camera's.

LeRobot's own OpenCVCamera opens such a stream too, but not as a robot's camera: a robot's camera has to name its width,
height and rate, OpenCVCamera then insists on setting them, and a stream can't be set. Importing this package registers
the type, as LeRobot's third-party cameras do; LeRobot's commands load it with
`--robot.discover_packages_path=rlsvc.robots.lerobot_camera`.
"""

from rlsvc.robots.lerobot_camera.config_stream import StreamCameraConfig
from rlsvc.robots.lerobot_camera.stream import StreamCamera

__all__ = ["StreamCamera", "StreamCameraConfig"]
