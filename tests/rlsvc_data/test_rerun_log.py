"""Recordings for the Rerun viewer, read back by Rerun itself."""

import numpy as np
import pytest
from recorded import open_recorder, record
from rerun.chunk import RrdReader
from typer.testing import CliRunner

from rlsvc.cli import app
from rlsvc.core.errors import DatasetError
from rlsvc.data.load import load_table
from rlsvc.data.rerun_log import write_rerun
from rlsvc.spec.data import DatasetSpec


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("rerun") / "recorded"
    with open_recorder(path, camera=True) as recorder:
        record(recorder, 0, 6, camera=True)
        record(recorder, 1, 4, camera=True)
    return path


def columns_of(file):
    """By entity, what stands there over time; and what stands there for all of it."""
    timed, static = {}, {}
    for chunk in RrdReader(file).stream().to_chunks():
        (static if chunk.is_static else timed)[str(chunk.entity_path)] = chunk.to_record_batch()
    return timed, static


def test_an_episodes_numbers_words_and_frames_are_in_its_recording(recorded, tmp_path):
    result = CliRunner().invoke(app, ["dataset", "view", str(recorded), str(tmp_path / "out"), "--rerun"])
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["episode_000000.rrd", "episode_000001.rrd"]
    timed, static = columns_of(files[1])
    table = load_table(DatasetSpec(path=str(recorded), episodes=[1]))
    state = timed["/observation/state"]
    np.testing.assert_allclose(
        np.stack([np.asarray(row) for row in state["Scalars:scalars"].to_pylist()]), table.columns["observation.state"]
    )
    assert state["step"].to_pylist() == list(range(table.num_steps))
    seconds = [t.total_seconds() for t in state["time"].to_pylist()]
    assert seconds == pytest.approx(np.arange(table.num_steps) / table.fps)
    assert timed["/actor"]["TextLog:text"].to_pylist() == [[str(a)] for a in table.columns["actor"].ravel()]
    frames = timed["/observation/images/front"]["VideoFrameReference:timestamp"].to_pylist()
    assert len({str(frame) for frame in frames}) == table.num_steps
    assert static["/observation/images/front"]["AssetVideo:media_type"].to_pylist() == [["video/mp4"]]
    assert static["/task"]["TextDocument:text"].to_pylist() == [[table.tasks[0]]]


def test_nothing_that_is_there_is_replaced(recorded, tmp_path):
    with pytest.raises(DatasetError, match="exists; choose another folder"):
        write_rerun(recorded, tmp_path)
    with pytest.raises(DatasetError, match="no episode 7"):
        write_rerun(recorded, tmp_path / "out", [7])
    assert list(tmp_path.iterdir()) == []
