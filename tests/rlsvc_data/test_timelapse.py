import av
import numpy as np
import pytest
from typer.testing import CliRunner
from videos import STEP, write_numbered_video

from rlsvc.cli import app
from rlsvc.core.errors import DatasetError
from rlsvc.data.timelapse import step_videos, write_on, write_timelapse
from rlsvc.data.video import decode_frames

CLEAR = np.s_[40:, :]
"""Below the text."""


def test_a_run_becomes_one_video_in_the_order_of_its_steps(tmp_path):
    for step, frames in ((2000, 4), (1000, 5), (10_000, 3)):
        write_numbered_video(tmp_path / f"videos/step_{step:09d}.mp4", frames)
    write_numbered_video(tmp_path / "videos/best_seed3.mp4", 9)
    result = CliRunner().invoke(app, ["timelapse", str(tmp_path), "--speed", "2"])
    assert result.exit_code == 0, result.output
    assert "3 evaluations, step 1,000 to 10,000, 8 frames" in " ".join(result.output.split())
    frames = list(decode_frames(tmp_path / "videos/timelapse.mp4"))
    grey = [float(frame[CLEAR].mean()) for frame in frames]
    expected = [STEP * i for i in (0, 2, 4, 0, 2, 3, 0, 2)]
    assert np.allclose(grey, expected, atol=3)
    with av.open(str(tmp_path / "videos/timelapse.mp4")) as container:
        assert container.streams.video[0].average_rate == 10


def test_the_step_is_written_in_the_corner_and_nowhere_else():
    frame = np.full((96, 128, 3), 120, np.uint8)
    one, other = write_on(frame, "step 1,000"), write_on(frame, "step 2,000")
    assert one.max() > 240
    assert (one != other).any()
    assert np.array_equal(one[24:], frame[24:])
    assert (frame == 120).all()


def test_a_run_without_step_videos_and_videos_of_two_sizes_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"no videos step_<number>.mp4; .* evaluation.step_videos=true"):
        step_videos(tmp_path / "videos")
    write_numbered_video(tmp_path / "step_1.mp4", 3)
    write_numbered_video(tmp_path / "step_2.mp4", 3, size=(32, 64))
    with pytest.raises(DatasetError, match=r"step_2.mp4: frames are \(32, 64\), those of .*step_1.mp4 are \(48, 64\)"):
        write_timelapse(step_videos(tmp_path), tmp_path / "all.mp4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_1.mp4", "step_2.mp4"]
