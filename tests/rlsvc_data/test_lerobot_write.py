"""What rlsvc reads and writes is what lerobot itself reads: proven on the same folders."""

import json
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.lerobot import LeRobotSource
from rlsvc.data.lerobot_write import write_lerobot
from rlsvc.data.load import load_table, open_source
from rlsvc.spec.data import DatasetSpec

PUSHT = Path(__file__).parents[2] / "datasets" / "pusht_human"
BOOKKEEPING = {"timestamp", "frame_index", "episode_index", "index", "task_index"}


def load(path, keys=None, **fields):
    return load_table(DatasetSpec.model_validate({"path": str(path), **fields}), keys)


@pytest.fixture
def lerobot_dataset(monkeypatch, tmp_path):
    """The reader of lerobot itself, offline and with its cache in the test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return lambda root, **options: LeRobotDataset("local/test", root=root, video_backend="pyav", **options)


def make_table() -> EpisodeTable:
    """Two episodes of 5 and 3 steps with a column of every kind."""
    rng = np.random.default_rng(0)
    n = 8
    return EpisodeTable(
        columns={
            "observation.state": rng.normal(size=(n, 3)).astype(np.float32),
            "observation.grid": rng.normal(size=(n, 2, 2)).astype(np.float32),
            "observation.gripper": rng.normal(size=(n, 1)).astype(np.float32),
            "observation.image": rng.integers(0, 256, (n, 32, 48, 3), dtype=np.uint8),
            "observation.phase": np.arange(n).reshape(n, 1),
            "next.done": np.arange(n).reshape(n, 1) == n - 1,
            "note": np.array([f"step {i}" for i in range(n)], object),
            "action": rng.normal(size=(n, 2)).astype(np.float32),
        },
        episode_ends=np.array([5, 8]),
        fps=10.0,
        task=np.array([0, 0, 0, 0, 0, 1, 1, 1], np.int32),
        tasks=["lift", "drop"],
        names={"action": ("x", "y")},
        units={"action": "px"},
    )


def test_what_is_written_is_read_back_exactly(tmp_path):
    table = make_table()
    write_lerobot(table, tmp_path / "d", images="image", robot_type="test arm")
    back = load(tmp_path / "d")
    assert set(back.columns) == set(table.columns)
    for key, column in table.columns.items():
        assert np.array_equal(back.columns[key], column), key
        assert back.columns[key].dtype == column.dtype, key
    assert back.episode_ends.tolist() == [5, 8]
    assert [back.tasks[i] for i in back.task] == ["lift"] * 5 + ["drop"] * 3
    assert (back.fps, back.names, back.units) == (10.0, table.names, table.units)
    assert json.loads((tmp_path / "d/meta/info.json").read_text())["robot_type"] == "test arm"
    assert load(tmp_path / "d", ["action"], tasks=["drop"]).num_steps == 3


def test_our_reader_and_lerobots_agree_on_what_was_written_with_video(tmp_path, lerobot_dataset):
    write_lerobot(make_table(), tmp_path / "d", images="video")
    mine, theirs = load(tmp_path / "d"), lerobot_dataset(tmp_path / "d", return_uint8=True)
    assert len(theirs) == mine.num_steps
    for step in range(len(theirs)):
        item = theirs[step]
        assert item["task"] == mine.tasks[mine.task[step]]
        for key, column in mine.columns.items():
            if key == "note":
                assert item[key] == column[step]
                continue
            value = item[key].numpy()
            value = value.transpose(1, 2, 0) if key == "observation.image" else value
            assert np.array_equal(value.reshape(column.shape[1:]), column[step]), (key, step)


def test_our_reader_and_lerobots_agree_on_the_shipped_demonstrations(lerobot_dataset):
    mine, theirs = load(PUSHT), lerobot_dataset(PUSHT)
    meta = theirs.meta
    assert (mine.fps, mine.num_episodes, mine.num_steps) == (meta.fps, meta.total_episodes, meta.total_frames)
    assert mine.episode_ends.tolist() == list(meta.episodes["dataset_to_index"])
    assert set(mine.columns) == set(meta.features) - BOOKKEEPING
    rows = theirs.hf_dataset.with_format("arrow")[:]
    for key, column in mine.columns.items():
        assert np.array_equal(np.stack(rows[key].to_numpy()), column), key
    assert [mine.tasks[i] for i in mine.task] == [meta.tasks.index[i] for i in rows["task_index"].to_numpy()]
    # lerobot's statistics of it are those of the data.
    for key in ("action", "observation.state"):
        assert np.allclose(meta.stats[key]["mean"], mine.columns[key].mean(0, dtype=np.float64), rtol=1e-5)
        assert np.array_equal(meta.stats[key]["max"], mine.columns[key].max(0))


def test_our_metadata_is_lerobots_on_a_v30_dataset_of_another_maker(sample):
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    path = sample("g1_v30")
    mine, theirs = LeRobotSource(path).meta, LeRobotDatasetMetadata("local/test", root=path)
    assert (mine.fps, mine.cameras) == (theirs.fps, theirs.video_keys)
    assert list(mine.tasks.values()) == list(theirs.tasks.index)
    for index, episode in mine.episodes.items():
        row = theirs.episodes[index]
        assert episode.length == row["length"]
        assert episode.data == path / theirs.get_data_file_path(index)
        span = episode.videos["observation.images.cam_high"]
        assert span.path == path / theirs.get_video_file_path(index, "observation.images.cam_high")
        assert span.first == row["dataset_from_index"]
        assert span.total == theirs.total_frames


def test_v20_is_written_as_v30_that_lerobot_takes(sample, tmp_path, lerobot_dataset):
    old = load(sample("gr1_v20"), ["observation.state", "action", "next.done"])
    write_lerobot(old, tmp_path / "new")
    assert open_source(tmp_path / "new").format == "LeRobot v3.0"
    theirs = lerobot_dataset(tmp_path / "new").hf_dataset.with_format("numpy")
    assert np.array_equal(theirs["action"], old.columns["action"])
    assert np.allclose(theirs["timestamp"][:3], [0, 0.05, 0.1])


@pytest.mark.parametrize("there", ["dataset", "other files", "file"])
def test_what_is_there_is_not_overwritten_unasked(there, tmp_path):
    path, table = tmp_path / "d", make_table().select([0])
    del table.columns["observation.image"]
    if there == "dataset":
        write_lerobot(table, path)
        before = (path / "meta/info.json").read_bytes()
        with pytest.raises(DatasetError, match=r"a dataset is already there; .* --overwrite"):
            write_lerobot(table.select([0]), path)
        assert (path / "meta/info.json").read_bytes() == before
        write_lerobot(make_table(), path, images="image", overwrite=True)
        assert load(path, ["action"]).num_episodes == 2
    else:
        if there == "file":
            path.write_text("mine")
        else:
            path.mkdir()
            (path / "thesis.tex").write_text("mine")
        with pytest.raises(DatasetError, match="is not a LeRobot dataset, so it is not overwritten"):
            write_lerobot(table, path, overwrite=True)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_leaves_the_old_dataset_and_no_rubbish(error, tmp_path, monkeypatch):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    path, table = tmp_path / "d", make_table()
    del table.columns["observation.image"]
    write_lerobot(table.select([0]), path)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(LeRobotDataset, "save_episode", fail)
    with pytest.raises(DatasetError if isinstance(error, OSError) else KeyboardInterrupt):
        write_lerobot(table, path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert load(path, ["action"]).num_steps == 5


def test_an_empty_table_and_a_name_with_a_slash_are_refused(tmp_path):
    table = make_table()
    with pytest.raises(DatasetError, match="no steps to write"):
        write_lerobot(table.select([]), tmp_path / "d")
    table.columns["observation/state"] = table.columns.pop("observation.state")
    with pytest.raises(DatasetError, match="'observation/state': LeRobot feature names have no '/'"):
        write_lerobot(table, tmp_path / "d")
    assert not (tmp_path / "d").exists()
