import json
import shutil
from dataclasses import replace

import av
import numpy as np
import pytest
from recorded import FRONT, STATE, load, open_recorder, picture, record, seeds_in
from typer.testing import CliRunner
from videos import write_numbered_video

from rlsvc.cli import app
from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.data.check import check_path
from rlsvc.data.edit import Written, all_cuts, open_lerobot, parts_of, write_cuts
from rlsvc.data.video import decode_frames
from rlsvc.data.video_cut import FrameReader, cut_video


def run(*arguments):
    result = CliRunner().invoke(app, ["dataset", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Episodes 0 .. 2 of 12, 5 and 8 steps with a camera."""
    path = tmp_path_factory.mktemp("edit") / "recorded"
    with open_recorder(path, camera=True) as recorder:
        for seed, steps in ((0, 12), (1, 5), (2, 8)):
            record(recorder, seed, steps, camera=True)
    return path


def frames_of(path):
    table = load(path)
    return [table.episode(i)[FRONT] for i in range(table.num_episodes)]


def clean(path):
    (report,) = check_path(path, deep=True)
    return [f for f in report.findings if f.severity != "note"] == []


def test_relabelling_changes_what_was_said_and_nothing_else(recorded, tmp_path):
    new = tmp_path / "new"
    text = run(
        *("relabel", recorded, new, "--episodes", "1", "--task", "open the door"),
        *("--outcome", "failure", "--reward", "-1", "--reward-source", "anna"),
    )
    assert "3 episodes, 25 steps; videos: 3 copied without loss, 0 encoded again" in text
    old, now = load(recorded), load(new)
    tasks = [now.tasks[i] for i in now.task]
    assert tasks == ["task 0"] * 12 + ["open the door"] * 5 + ["task 0"] * 8
    assert now.columns["next.success"].ravel().nonzero()[0].tolist() == [11, 24]
    assert now.columns["next.done"].ravel().nonzero()[0].tolist() == [11, 16, 24]
    changed = np.flatnonzero(now.columns["reward"].ravel() != old.columns["reward"].ravel())
    assert (changed.tolist(), now.columns["reward"][16]) == ([16], -1)
    assert now.columns["reward_source"].ravel()[15:17].tolist() == ["environment", "anna"]
    for key in set(old.columns) - {"next.success", "next.done", "reward", "reward_source"}:
        assert np.array_equal(old.columns[key], now.columns[key]), key
    assert (now.names, now.units, now.fps) == (old.names, old.units, old.fps)
    assert json.loads((new / "meta/info.json").read_text())["robot_type"] == "toy"
    assert clean(new)


def test_trimming_keeps_frames_with_their_steps_and_the_end_at_the_end(recorded, tmp_path):
    text = run("trim", recorded, tmp_path / "new", "--start", "2", "--end", "1", "--episodes", "0,2")
    assert "3 episodes, 19 steps; videos: 1 copied without loss, 2 encoded again" in text
    assert "rewards of 18 in all" in text  # the last steps' rewards, 11 and 7
    table = load(tmp_path / "new")
    kept = [(0, i) for i in range(2, 11)] + [(1, i) for i in range(5)] + [(2, i) for i in range(2, 7)]
    assert table.columns["observation.state"].tolist() == [list(map(float, pair)) for pair in kept]
    for (seed, step), frame in zip(kept, table.columns[FRONT], strict=True):
        assert np.abs(frame - picture(seed, step).astype(float)).mean() < 8
    assert table.columns["next.success"].ravel().nonzero()[0].tolist() == [8, 13, 18]
    assert np.array_equal(table.columns["capture_time"][:3, 0], [0, 0.125, 0.25])
    assert clean(tmp_path / "new")


def test_trimming_all_of_an_episode_is_refused(recorded, tmp_path):
    with pytest.raises(DatasetError, match=r"nothing is left of episode 1: it has 5 steps, and 3 \.\. 2 were to be"):
        run("trim", recorded, tmp_path / "new", "--start", "3", "--end", "3")
    with pytest.raises(DatasetError, match="trim: nothing to drop"):
        run("trim", recorded, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_splitting_and_merging_gives_the_same_episodes_without_loss(recorded, tmp_path):
    run("split", recorded, tmp_path, "--part", "a=2", "--part", "b=0-1")
    assert (seeds_in(tmp_path / "a"), seeds_in(tmp_path / "b")) == ([2], [0, 1])
    run("merge", tmp_path / "b", tmp_path / "a", "--into", tmp_path / "c")
    assert seeds_in(tmp_path / "c") == [0, 1, 2]
    old, new = load(recorded), load(tmp_path / "c")
    for key in old.columns:
        assert np.array_equal(old.columns[key], new.columns[key]), key
    assert clean(tmp_path / "c")


def test_merging_different_robots_or_rates_is_refused_by_name(recorded, tmp_path):
    changes = {
        "robot_type is 'toy' in the first and 'so101' in the other": {"robot_type": "so101"},
        r"\(fps\) is 20.0 in the first and 30.0 in the other": {"fps": 30},
        "unit of feature 'action' is 'rad' in the first and 'deg' in the other": {"action": replace(STATE, unit="deg")},
    }
    for i, (message, change) in enumerate(changes.items()):
        with open_recorder(tmp_path / str(i), camera=True, **change) as recorder:
            record(recorder, 9, camera=True)
        with pytest.raises(DatasetError, match=message):
            run("merge", recorded, tmp_path / str(i), "--into", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_dataset_is_replaced_in_place_only_when_asked(recorded, tmp_path):
    run("split", recorded, tmp_path, "--part", "d=0-1")
    with pytest.raises(DatasetError, match="a dataset is already there"):
        run("relabel", tmp_path / "d", tmp_path / "d", "--task", "new")
    run("relabel", tmp_path / "d", tmp_path / "d", "--task", "new", "--overwrite")
    assert load(tmp_path / "d").tasks == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_dataset_is_replaced_in_one_step(recorded, tmp_path, monkeypatch):
    run("split", recorded, tmp_path, "--part", "d=0-1")
    inode = (tmp_path / "d").stat().st_ino
    monkeypatch.delattr("pathlib.Path.rename")  # moving the old one away first would leave a moment without either
    with pytest.raises(AttributeError):
        (tmp_path / "d").rename(tmp_path / "e")
    monkeypatch.setattr("rlsvc.data.edit._write", lambda cuts, root, _: shutil.copytree(recorded, root) and Written())
    write_cuts(all_cuts(open_lerobot(tmp_path / "d")), tmp_path / "d", overwrite=True)
    assert (tmp_path / "d").stat().st_ino != inode
    assert seeds_in(tmp_path / "d") == [0, 1, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_dataset_that_is_being_recorded_is_not_replaced(recorded, tmp_path):
    run("split", recorded, tmp_path, "--part", "d=0-1")
    with (
        open_recorder(tmp_path / "d", camera=True),
        pytest.raises(BusyError, match="another process is recording into this dataset"),
    ):
        run("relabel", tmp_path / "d", tmp_path / "d", "--task", "new", "--overwrite")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_disk_that_is_full_leaves_what_was_there(recorded, tmp_path, monkeypatch):
    run("split", recorded, tmp_path, "--part", "d=0-1")
    before = frames_of(tmp_path / "d")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rlsvc.data.edit.cut_video", full)
    with pytest.raises(DatasetError, match=r"cannot be written \(No space left on device\); nothing was changed"):
        run("relabel", tmp_path / "d", tmp_path / "d", "--task", "new", "--overwrite")
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert all(np.array_equal(a, b) for a, b in zip(before, frames_of(tmp_path / "d"), strict=True))


def test_episodes_of_a_packed_file_keep_their_frames(tmp_path, monkeypatch):
    """LeRobot's writer packs all episodes of a camera into one mp4."""
    from rlsvc.data.lerobot_write import write_lerobot

    monkeypatch.setenv("SVT_LOG", "1")
    with open_recorder(tmp_path / "mine", camera=True) as recorder:
        for seed in range(3):
            record(recorder, seed, 5 + seed, camera=True)
    write_lerobot(load(tmp_path / "mine"), tmp_path / "packed", robot_type="toy")
    assert len(list((tmp_path / "packed/videos").rglob("*.mp4"))) == 1
    packed = frames_of(tmp_path / "packed")
    source = open_lerobot(tmp_path / "packed")
    written = write_cuts(all_cuts(source, [2, 0]), tmp_path / "new")
    assert written.copied == 2
    new = frames_of(tmp_path / "new")
    assert np.array_equal(new[0], packed[2])
    assert np.array_equal(new[1], packed[0])
    assert clean(tmp_path / "new")


@pytest.mark.parametrize(("first", "length"), [(0, 30), (0, 7), (12, 10), (29, 1)])
def test_a_part_of_a_video_with_b_frames_has_exactly_its_frames(first, length, tmp_path):
    write_numbered_video(tmp_path / "v.mp4", 30)
    copied, _ = cut_video(FrameReader(), tmp_path / "v.mp4", first, length, tmp_path / "part.mp4", 10)
    whole, part = (np.stack(list(decode_frames(tmp_path / name))).astype(int) for name in ("v.mp4", "part.mp4"))
    assert np.abs(part - whole[first : first + length]).max() <= 1  # neighbours differ by 3 and more
    assert copied == (length == 30)
    with av.open(str(tmp_path / "part.mp4")) as container:
        stream = container.streams.video[0]
        times = [float(frame.pts * stream.time_base) for frame in container.decode(stream)]
    assert np.allclose(times, np.arange(length) / 10, atol=1e-4)


def test_a_video_that_is_shorter_than_the_dataset_says_is_refused(tmp_path):
    write_numbered_video(tmp_path / "v.mp4", 10)
    with pytest.raises(DatasetError, match="ends at frame 10, the dataset says that it has 12"):
        cut_video(FrameReader(), tmp_path / "v.mp4", 5, 7, tmp_path / "part.mp4", 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["relabel", "--outcome", "won"], "outcome: got 'won', expected one of success, failure, cut"),
        (["relabel"], "relabel: nothing to say"),
        (["relabel", "--task", " "], "task: got an empty text"),
        (["relabel", "--reward", "nan"], "reward: got nan, expected a finite number"),
        (["relabel", "--task", "x", "--episodes", "3"], "no episode 3; it has 3, from 0 to 2"),
        (["split", "--part", "a=0", "--part", "b=0-1"], "episode 0 is in 'a' and in 'b'"),
        (["split", "--part", "0-1"], "got '0-1', expected NAME=EPISODES"),
        (["split"], "--part: got none"),
    ],
)
def test_options_that_mean_nothing_are_refused(arguments, message, recorded, tmp_path):
    command, *rest = arguments
    with pytest.raises(DatasetError, match=message):
        run(command, recorded, tmp_path / "new", *rest)
    assert not (tmp_path / "new").exists()


def test_a_dataset_without_the_column_cannot_be_relabelled_by_it(sample, tmp_path):
    with pytest.raises(DatasetError, match="no column 'reward' to relabel"):
        run("relabel", sample("cr5_v21"), tmp_path / "new", "--episodes", "2", "--reward", "1")


def test_parts_are_read_by_name():
    assert parts_of(["train=0-2", "val=5"], lambda text: [int(c) for c in text.split("-")]) == {
        "train": [0, 2],
        "val": [5],
    }
