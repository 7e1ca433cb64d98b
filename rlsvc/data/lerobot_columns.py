"""Features and columns in LeRobot's terms: how info.json declares them, and how parquet holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsvc.core.contract import TEXT, Feature
from rlsvc.core.errors import DatasetError
from rlsvc.data.lerobot_meta import BOOKKEEPING, flat_names
from rlsvc.data.video_encode import PIXELS

IMAGE_NAMES = ["height", "width", "channels"]
INTEGERS = ("frame_index", "episode_index", "index", "task_index")


def declare(features: Mapping[str, Feature], fps: float) -> dict[str, Any]:
    """`features` of meta/info.json. `unit` is ours; lerobot carries it along.

    Args:
        features: of a step, without bookkeeping; images become videos.
        fps: steps a second.

    Raises:
        DatasetError: a name or a shape that LeRobot does not store, by name.
    """
    declared: dict[str, Any] = {}
    for key, feature in features.items():
        if "/" in key or key in BOOKKEEPING or key == "task":
            raise DatasetError(
                f"feature '{key}': LeRobot names have no '/', and {', '.join(BOOKKEEPING)} and task are its own"
            )
        if feature.is_image:
            declared[key] = _declare_video(key, feature, fps)
        elif feature.dtype == TEXT:
            declared[key] = {"dtype": "string", "shape": [1], "names": None}
        else:
            names = list(feature.names) or None
            declared[key] = {"dtype": feature.dtype, "shape": list(feature.shape) or [1], "names": names}
            if feature.unit:
                declared[key]["unit"] = feature.unit
    declared["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    return declared | {key: {"dtype": "int64", "shape": [1], "names": None} for key in INTEGERS}


def _declare_video(key: str, feature: Feature, fps: float) -> dict[str, Any]:
    height, width, channels = feature.shape
    if channels != 3 or height % 2 or width % 2:
        raise DatasetError(
            f"camera '{key}': images are {height} x {width} x {channels}, expected an even height and width and 3 "
            "channels; crop or resize them"
        )
    info = {
        "video.height": height,
        "video.width": width,
        "video.codec": "h264",
        "video.pix_fmt": PIXELS,
        "video.fps": int(fps) if float(fps).is_integer() else fps,
        "video.channels": 3,
        "has_audio": False,
        "is_depth_map": False,
    }
    return {"dtype": "video", "shape": [height, width, 3], "names": IMAGE_NAMES, "info": info}


def differences(there: Mapping[str, Any], mine: Mapping[str, Any], where: tuple[str, str] = ("there", "here")) -> str:
    """In what two meta/info.json differ that makes them of different robots, as a text; "" when in nothing.

    Args:
        there: the one.
        mine: the other.
        where: how the text calls them.
    """
    for key, label in (("fps", "steps a second (fps)"), ("robot_type", "robot_type")):
        if there.get(key) != mine.get(key):
            return f"{label} is {there.get(key)!r} {where[0]} and {mine.get(key)!r} {where[1]}"
    theirs, ours = there.get("features", {}), mine["features"]
    for key in [*ours, *theirs]:
        if key not in theirs or key not in ours:
            return f"feature '{key}' is only {where[key not in theirs]}"
        for field in ("dtype", "shape", "names", "unit"):
            a, b = theirs[key].get(field), ours[key].get(field)
            a, b = (flat_names(a), flat_names(b)) if field == "names" else (a, b)
            if field == "shape":
                a, b = list(a), list(b)
            if (a or None) != (b or None):
                return f"{field} of feature '{key}' is {a!r} {where[0]} and {b!r} {where[1]}"
    return ""


def arrow_column(column: np.ndarray) -> Any:
    """A pyarrow array of N rows from a column [N, ...]; [N, 1] is stored as N numbers, as LeRobot does."""
    import pyarrow as pa

    if column.dtype.kind in "OU":
        return pa.array([str(text) for text in column], pa.string())
    shape = column.shape[1:]
    array = pa.array(np.ascontiguousarray(column).reshape(-1))
    if shape in ((), (1,)):
        return array
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
