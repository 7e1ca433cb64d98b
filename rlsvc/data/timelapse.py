"""Videos of a training run's evaluations, one after the other in one file, with the step written on each frame.

Needs PyAV, which comes with the `lerobot` and `sim` extras, and Pillow.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.video import decode_frames
from rlsvc.data.video_encode import VideoFile

NAME = re.compile(r"step_(\d+)\.mp4")
MARGIN, SHADE = 4, 0.35


def step_videos(folder: Path) -> dict[int, Path]:
    """The videos step_<number>.mp4 of a folder by step, in order.

    Raises:
        DatasetError: there are none.
    """
    names = [(NAME.fullmatch(path.name), path) for path in folder.glob("*.mp4")] if folder.is_dir() else []
    found = {int(name[1]): path for name, path in names if name}
    if not found:
        raise DatasetError(
            f"{folder}: no videos step_<number>.mp4; a run writes them when it has evaluation.step_videos=true"
        )
    return dict(sorted(found.items()))


def write_timelapse(videos: dict[int, Path], target: Path, *, speed: int = 1) -> int:
    """Join videos of one size; the file appears whole or not at all.

    Args:
        videos: by step, in the order in which they are shown.
        target: mp4 file at the rate of the first video.
        speed: only every so many frames are taken; the last of each video always is.

    Returns:
        How many frames it has.

    Raises:
        DatasetError: a video is damaged or of another size, or the file cannot be written.
    """
    import av

    first = next(iter(videos.values()))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    shape: tuple[int, ...] = ()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(first)) as container:
            rate = container.streams.video[0].average_rate
        out = VideoFile(temporary, float(rate) if rate else 30.0)
        for step, path in videos.items():
            frames = list(decode_frames(path))
            # H.264 with half the colours has even sides.
            frames = [frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2] for frame in frames]
            shape = shape or frames[0].shape
            if frames[0].shape != shape:
                raise DatasetError(f"{path}: frames are {frames[0].shape[:2]}, those of {first} are {shape[:2]}")
            for frame in [*frames[:-1:speed], frames[-1]]:
                out.add(write_on(frame, f"step {step:,}"))
        out.close()
        os.replace(temporary, target)
    except OSError as error:
        raise DatasetError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return out.frames


def write_on(frame: np.ndarray, text: str) -> np.ndarray:
    """A copy of a frame [H, W, 3] uint8 with a text on a dark ground in its upper left corner."""
    from PIL import Image, ImageDraw, ImageFont

    size = max(10, len(frame) // 16)
    font = ImageFont.load_default(size)
    width, height = int(font.getlength(text)) + 2 * MARGIN, size + 2 * MARGIN
    marked = frame.copy()
    marked[:height, :width] = (marked[:height, :width] * SHADE).astype(np.uint8)
    image = Image.fromarray(marked)
    ImageDraw.Draw(image).text((MARGIN, MARGIN - size // 8), text, fill="white", font=font)
    return np.asarray(image)
