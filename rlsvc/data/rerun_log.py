"""Episodes for the Rerun viewer: one `.rrd` file each, with video, vectors, reward and who acted on one time line.

    rerun page/episode_000000.rrd

Letters: N steps of an episode, D dimensions.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlsvc.core.contract import TEXT
from rlsvc.core.errors import DatasetError
from rlsvc.data.edit import all_cuts, open_lerobot
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_write import replace_folder
from rlsvc.data.video_cut import FrameReader, cut_video

TIME, STEP = "time", "step"


def write_rerun(
    path: Path,
    target: Path,
    episodes: Sequence[int] | None = None,
    *,
    on_episode: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write a recording of each episode; the folder appears whole or not at all.

    Args:
        path: of the dataset.
        target: new folder of the recordings.
        episodes: their numbers; None takes all.
        on_episode: called with the number of episodes done so far.

    Returns:
        The recordings, in order.

    Raises:
        DatasetError: the folder is there, an episode that there is not, damage, or a full disk.
    """
    source = open_lerobot(path)
    chosen = [cut.episode for cut in all_cuts(source, episodes)]
    if target.exists():
        raise DatasetError(f"{target}: exists; choose another folder")
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    names = [f"episode_{episode:06d}.rrd" for episode in chosen]
    try:
        temporary.mkdir(parents=True)
        reader = FrameReader()
        for done, (episode, name) in enumerate(zip(chosen, names, strict=True), 1):
            _record(source, episode, reader, temporary / name)
            if on_episode is not None:
                on_episode(done)
        replace_folder(temporary, target)
    except OSError as error:
        raise DatasetError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [target / name for name in names]


def _record(source: LeRobotSource, episode: int, reader: FrameReader, file: Path) -> None:
    import rerun as rr

    cameras = [camera for camera in source.meta.cameras if camera in source.features]
    table = source.read([key for key in source.features if key not in cameras], [episode])
    steps = np.arange(table.num_steps)
    seconds = steps / source.fps
    with rr.RecordingStream(source.path.name, recording_id=f"{source.path.name}/{episode}") as stream:
        stream.save(file)
        stream.log("task", rr.TextDocument("\n".join(dict.fromkeys(table.tasks[i] for i in table.task))), static=True)
        indexes = [rr.TimeColumn(STEP, sequence=steps), rr.TimeColumn(TIME, duration=seconds)]
        for key, column in table.columns.items():
            if source.features[key].dtype == TEXT or column.dtype == object:
                texts = [str(text) for text in column.ravel()]
                stream.send_columns(key.replace(".", "/"), indexes, rr.TextLog.columns(text=texts))
                continue
            rows = column.reshape(len(steps), -1).astype(np.float64)
            numbered = [key.rpartition(".")[2]] if rows.shape[1] == 1 else [str(d) for d in range(rows.shape[1])]
            labels = table.names.get(key) or numbered
            entity = key.replace(".", "/")
            stream.log(entity, rr.SeriesLines(names=list(labels)), static=True)
            stream.send_columns(entity, indexes, rr.Scalars.columns(scalars=rows))
        for camera in cameras:
            span = source.meta.episodes[episode].videos[camera]
            with tempfile.TemporaryDirectory() as folder:
                video = Path(folder) / "video.mp4"
                cut_video(reader, span.path, span.first, span.length, video, source.fps)
                asset = rr.AssetVideo(path=video)
            entity = camera.replace(".", "/")
            stream.log(entity, asset, static=True)
            frames = asset.read_frame_timestamps_nanos()[: len(steps)]
            stream.send_columns(entity, indexes, rr.VideoFrameReference.columns_nanos(frames))
