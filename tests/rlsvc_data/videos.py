"""Videos whose frames say their own number, for tests that must know which frame they got."""

from pathlib import Path

import av
import numpy as np

STEP = 4


def write_numbered_video(path: Path, frames: int, size: tuple[int, int] = (48, 64), fps: int = 10) -> None:
    """Frame i is grey of brightness STEP * i (at most 63 frames)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "1", "bf": "3"}
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((*size, 3), STEP * i, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def numbers_of(frames: np.ndarray) -> list[int]:
    """The numbers of frames [N, H, W, 3]."""
    return [round(float(frame.mean()) / STEP) for frame in frames]
