import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from recorded import CAMERA, FPS, FRONT, STATE, load, open_recorder, picture, record, seeds_in, stamps_of, step_of

from rlsvc.core.contract import Feature
from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.data import commit
from rlsvc.data.check import check_path
from rlsvc.data.encoder import Encoder, EncoderBehindError
from rlsvc.data.recorder import CameraLostError, EpisodeLostError


@pytest.fixture
def lerobot_dataset(monkeypatch, tmp_path):
    """The reader of lerobot itself, offline and with its cache in the test's folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return lambda root, **options: LeRobotDataset("local/test", root=root, video_backend="pyav", **options)


class KilledError(BaseException):
    """Stands for SIGKILL: no handler of the recorder catches it, and the test throws the recorder away."""


def test_what_was_recorded_is_what_lerobot_and_rlsvc_read(tmp_path, lerobot_dataset):
    path = tmp_path / "d"
    with open_recorder(path, camera=True) as recorder:
        assert [record(recorder, 3, 5, camera=True), record(recorder, 4, 12, camera=True, outcome="failure")] == [0, 1]
    with open_recorder(path, camera=True) as recorder:
        assert recorder.num_episodes == 2
        assert record(recorder, 5, 3, camera=True, outcome="cut") == 2
    assert seeds_in(path) == [3, 4, 5]
    table, theirs = load(path), lerobot_dataset(path, return_uint8=True)
    assert len(theirs) == table.num_steps == 20
    seeds = [3] * 5 + [4] * 12 + [5] * 3
    for i in range(20):
        item = theirs[i]
        assert np.array_equal(item[FRONT].numpy().transpose(1, 2, 0), table.columns[FRONT][i])
        assert item["actor"] == table.columns["actor"][i]
        assert np.array_equal(item["commanded"], table.columns["commanded"][i])
        assert item["task"] == f"task {seeds[i] % 2}"
        assert float(item["timestamp"]) == np.float32(int(item["frame_index"]) / FPS)
    assert table.columns["next.done"].ravel().nonzero()[0].tolist() == [4, 16]
    assert table.columns["next.success"].ravel().nonzero()[0].tolist() == [4]
    assert np.array_equal(table.columns["capture_time"][:5, 0], [0, 0.125, 0.25, 0.375, 0.5])
    assert table.names["capture_time"] == ("observation.state", FRONT)
    assert (table.names["action"], table.units["action"]) == (("pan", "lift"), "rad")
    (report,) = check_path(path, deep=True)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert not (path / commit.STAGING).exists()


def test_statistics_are_those_of_the_frames_and_numbers(tmp_path):
    with open_recorder(tmp_path / "d", camera=True) as recorder:
        for seed in (0, 1):
            record(recorder, seed, 6, camera=True)
    stats = json.loads((tmp_path / "d/meta/stats.json").read_text())
    state = load(tmp_path / "d").columns["observation.state"]
    assert np.allclose(stats["observation.state"]["mean"], [0.5, 2.5])
    assert np.allclose(stats["observation.state"]["std"], state.std(0))
    assert stats["index"]["max"] == [11]
    frames = np.stack([picture(seed, i) for seed in (0, 1) for i in range(6)]) / 255
    assert np.allclose(np.ravel(stats[FRONT]["mean"]), frames.mean((0, 1, 2)))
    assert np.allclose(np.ravel(stats[FRONT]["std"]), frames.std((0, 1, 2)))
    assert np.array(stats[FRONT]["max"]).shape == (3, 1, 1)


CHANGES = ("rename", "replace", "rmdir")
"""Calls that change what another process sees."""


def deadly(monkeypatch, at):
    """From now on the at-th of CHANGES is never made, nor any later one."""
    count = 0

    def mortal(call):
        def wrapped(*arguments, **options):
            nonlocal count
            count += 1
            if count > at:
                raise KilledError
            return call(*arguments, **options)

        return wrapped

    for name in CHANGES:
        monkeypatch.setattr(os, name, mortal(getattr(os, name)))


def test_a_kill_before_any_change_leaves_every_acknowledged_episode(tmp_path, monkeypatch):
    """Each change that ending an episode makes, in turn. The dataset is read as it lies, then recording goes on."""
    there_whole = []
    for at in range(1000):
        path = tmp_path / str(at)
        first = open_recorder(path)
        record(first, 0)
        for i in range(4):
            step = step_of(1, i)
            first.add(step, stamps_of(step, 1.0))
        with monkeypatch.context() as patch:
            deadly(patch, at)
            try:
                first.end_episode("success", "another task")
            except KilledError:
                killed = True
            else:
                killed = False
        os.close(first._dataset._lock)  # as the end of the process would
        there_whole.append(len(seeds_in(path)))
        with open_recorder(path) as second:
            assert second.num_episodes >= there_whole[-1]
            record(second, 7)
        assert seeds_in(path) in ([0, 7], [0, 1, 7])
        if not killed:
            break
    (report,) = check_path(path)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert len(there_whole) > 10
    assert there_whole == sorted(there_whole)
    assert set(there_whole) == {1, 2}


@pytest.mark.parametrize("at", range(1, 9))
def test_lerobot_reads_what_a_kill_left(at, tmp_path, monkeypatch, lerobot_dataset):
    """Change 0 renames the video, 1 decides, 2 to 7 put files into place, 8 begins to clear up."""
    recorder = open_recorder(tmp_path / "d", camera=True)
    record(recorder, 0, camera=True)
    for i in range(3):
        step = step_of(1, i, camera=True)
        recorder.add(step, stamps_of(step, 1.0))
    with monkeypatch.context() as patch:
        deadly(patch, at)
        with pytest.raises(KilledError):
            recorder.end_episode("success", "another task")
    dataset = lerobot_dataset(tmp_path / "d", return_uint8=True)
    assert len(dataset) == (7 if at == 8 else 4)
    for i in range(4):
        assert np.abs(dataset[i][FRONT].numpy().transpose(1, 2, 0) - picture(0, i).astype(float)).mean() < 6
        assert dataset[i]["task"] == "task 0"


def test_a_recorder_that_is_killed_leaves_no_encoder_behind(tmp_path, root):
    script = (
        "import sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; from recorded import *\n"
        "r = open_recorder(Path(sys.argv[3]), camera=True); record(r, 0, camera=True)\n"
        "step = step_of(1, 0, camera=True); r.add(step, stamps_of(step, 0.0))\n"
        "print(*(e._process.pid for e in r._encoders.values()), flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(root), str(root / "tests/rlsvc_data"), str(tmp_path / "d")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    encoder = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 20
    while alive(encoder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(encoder)
    assert seeds_in(tmp_path / "d") == [0]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_ends_the_episode_and_leaves_the_others(tmp_path):
    with open_recorder(tmp_path / "d") as recorder:
        record(recorder, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            with pytest.raises(EpisodeLostError, match=r"disk full .* given up, the 1 episodes before it are whole"):
                record(recorder, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert seeds_in(tmp_path / "d") == [0]
        assert record(recorder, 2) == 1
    assert seeds_in(tmp_path / "d") == [0, 2]


def test_a_disk_that_fills_with_video_ends_the_episode_and_leaves_the_others(tmp_path):
    with open_recorder(tmp_path / "d", camera=True) as recorder:
        record(recorder, 0, camera=True)
        encoder = recorder._encoders[FRONT]._process
        assert encoder is not None
        resource.prlimit(encoder.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(EpisodeLostError, match="disk full"):
            record(recorder, 1, 100, camera=True)
        assert not (tmp_path / "d" / commit.STAGING).exists()
        assert recorder.num_steps == 0
        assert record(recorder, 2, camera=True) == 1
    assert seeds_in(tmp_path / "d") == [0, 2]


def test_an_encoder_that_dies_costs_the_episode_under_way_alone(tmp_path):
    with open_recorder(tmp_path / "d", camera=True) as recorder:
        step = step_of(0, 0, camera=True)
        recorder.add(step, stamps_of(step, 0.0))
        process = recorder._encoders[FRONT]._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(EpisodeLostError, match=r"encoder process of 0.mp4 ended \(-9\)"):
            recorder.end_episode("success", "go")
        assert record(recorder, 1, camera=True) == 0
    assert seeds_in(tmp_path / "d") == [1]


def test_frames_that_the_encoder_cannot_take_end_the_episode_instead_of_being_dropped(tmp_path):
    with open_recorder(tmp_path / "d", camera=True, queue_mb=0) as recorder:  # room for two frames
        process = recorder._encoders[FRONT]._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EpisodeLostError, match=r"video encoding of .* is 2 frames behind, .* rather than drop"):
            record(recorder, 0, camera=True)
        assert record(recorder, 1, 2, camera=True) == 0
    assert seeds_in(tmp_path / "d") == [1]


def test_an_encoder_that_is_behind_refuses_a_frame():
    encoder = Encoder((48, 64, 3), FPS, 1)
    try:
        assert encoder._process is not None
        encoder._process.send_signal(signal.SIGSTOP)
        with pytest.raises(EncoderBehindError):
            encoder.put(picture(0, 0))  # no episode has begun: nothing may be taken
    finally:
        encoder.close()


@pytest.mark.parametrize("kept", [True, False])
def test_a_camera_whose_frames_stop_ends_the_episode(kept, tmp_path):
    with open_recorder(tmp_path / "d", camera=True, camera_timeout_s=0.5) as recorder:
        for i in range(3):
            step = step_of(0, i, camera=True)
            recorder.add(step, stamps_of(step, i / 8))
        step = step_of(0, 3, camera=True)
        late = {"observation.state": 1.0, FRONT: 0.25}
        with pytest.raises(CameraLostError, match=rf"camera '{FRONT}' gave no new frame for 0.75 s at step 3"):
            recorder.add(step, late)
        with pytest.raises(CameraLostError):
            recorder.add(step, stamps_of(step, 1.1))
        if kept:
            assert recorder.end_episode("cut", "task 0") == 0
        else:
            recorder.discard()
        assert record(recorder, 1, camera=True) == int(kept)
    assert seeds_in(tmp_path / "d") == [0, 1][not kept :]


def test_a_camera_without_a_frame_is_named(tmp_path):
    step = step_of(0, 0, camera=True)
    with open_recorder(tmp_path / "d", camera=True) as recorder:
        stamps = stamps_of(step, 0.0)
        del step[FRONT]
        with pytest.raises(CameraLostError, match=f"camera '{FRONT}' gave no frame at step 0"):
            recorder.add(step, stamps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": np.zeros(3, np.float32)}, r"'action' has shape \(3,\), expected \(2,\)"),
        ({"action": np.array([1, np.nan], np.float32)}, "'action' has values that are not finite"),
        ({"action": np.array([1, 1e300])}, "'action' has values that are not finite"),
        ({"actor": 3}, "'actor' is int, expected a text"),
        ({"action": np.array(["a", "b"])}, "'action' is <U1, expected float32"),
        ({"rewards": 1.0}, r"'rewards' is no column of this dataset \(did you mean 'reward'\?\)"),
        ({"reward": None}, "'reward' is object"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    with open_recorder(tmp_path / "d") as recorder:
        step = step_of(0, 0)
        with pytest.raises(DatasetError, match=message):
            recorder.add(step | change, stamps_of(step, 0.0))
        del step["commanded"]
        with pytest.raises(DatasetError, match="'commanded' is missing"):
            recorder.add(step, stamps_of(step, 0.0))
        with pytest.raises(DatasetError, match=r"lacks the time stamp of 'observation.state'"):
            recorder.add(step_of(0, 0), {})
        assert recorder.num_steps == 0
        assert record(recorder, 0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"robot_type": "so101"}, "robot_type is 'toy' there and 'so101' here"),
        ({"fps": 30}, r"steps a second \(fps\) is 20 there and 30 here"),
        ({"action": Feature((3,), "float32", "rad")}, r"shape of feature 'action' is \[2\] there and \[3\] here"),
        (
            {"action": Feature((2,), "float32", "rad", ("pan", "roll"))},
            r"names of feature 'action' is \('pan', 'lift'\) there and \('pan', 'roll'\) here",
        ),
        ({"action": Feature((2,), "float32", "deg", STATE.names)}, "unit of feature 'action' is 'rad' there and 'deg'"),
        ({"observation": {"observation.state": STATE, **CAMERA}}, f"feature '{FRONT}' is only here"),
    ],
)
def test_a_dataset_of_another_robot_is_refused_by_name(change, message, tmp_path):
    with open_recorder(tmp_path / "d") as recorder:
        record(recorder, 0)
    with pytest.raises(DatasetError, match=f"of another robot: {message}"):
        open_recorder(tmp_path / "d", **change)
    assert seeds_in(tmp_path / "d") == [0]


def test_what_is_no_dataset_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DatasetError, match=r"is no dataset: it holds thesis.tex and no meta/info.json"):
        open_recorder(tmp_path)
    with pytest.raises(DatasetError, match="is a file"):
        open_recorder(tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_old_dataset_and_an_odd_camera_are_refused(sample, tmp_path):
    with pytest.raises(DatasetError, match=r"is a LeRobot dataset of v2.1, expected v3.0; .* rlsvc dataset import"):
        open_recorder(sample("cr5_v21"))
    odd = {"observation.state": STATE, FRONT: Feature((47, 64, 3), "uint8")}
    with pytest.raises(DatasetError, match=f"camera '{FRONT}': images are 47 x 64 x 3, expected an even height"):
        open_recorder(tmp_path / "d", observation=odd)


def test_two_recorders_cannot_write_one_dataset(tmp_path):
    with open_recorder(tmp_path / "d") as recorder:
        step = step_of(0, 0)
        recorder.add(step, stamps_of(step, 0.0))
        with pytest.raises(BusyError, match="another process is recording into this dataset"):
            open_recorder(tmp_path / "d")
        assert recorder.end_episode("success", "go") == 0
    open_recorder(tmp_path / "d").close()


def test_an_episode_is_ended_with_what_is_known_by_then(tmp_path):
    with open_recorder(tmp_path / "d") as recorder:
        with pytest.raises(DatasetError, match="an episode without a step cannot be ended"):
            recorder.end_episode("success", "go")
        step = step_of(0, 0)
        for at in (0.0, 0.1):
            recorder.add(step, stamps_of(step, at))
        with pytest.raises(DatasetError, match="outcome: got 'won', expected one of success, failure, cut"):
            recorder.end_episode("won", "go")  # type: ignore[arg-type]
        with pytest.raises(DatasetError, match="task: got an empty text"):
            recorder.end_episode("success", " ")
        recorder.end_episode("success", "go", reward=1.0, reward_source="person")
        recorder.add(step, stamps_of(step, 0.0))
        recorder.discard()
    table = load(tmp_path / "d")
    assert table.columns["reward"].ravel().tolist() == [0.0, 1.0]
    assert table.columns["reward_source"].ravel().tolist() == ["environment", "person"]


def test_the_recorder_goes_on_in_a_dataset_that_lerobot_wrote(tmp_path, lerobot_dataset, monkeypatch):
    from rlsvc.data.lerobot_write import write_lerobot

    with open_recorder(tmp_path / "mine", camera=True) as recorder:
        record(recorder, 0, camera=True)
        record(recorder, 1, camera=True)
    monkeypatch.setenv("SVT_LOG", "1")
    write_lerobot(load(tmp_path / "mine"), tmp_path / "theirs", robot_type="toy")
    with open_recorder(tmp_path / "theirs", camera=True) as recorder:
        assert record(recorder, 2, camera=True) == 2
    dataset = lerobot_dataset(tmp_path / "theirs", return_uint8=True)
    assert len(dataset) == 12
    assert [int(dataset[i]["observation.state"][0]) for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert seeds_in(tmp_path / "theirs", tolerance=12) == [0, 1, 2]  # AV1 by LeRobot's defaults is coarser


def test_many_episodes_are_described_in_few_files_and_lerobot_goes_on_from_there(
    tmp_path, lerobot_dataset, monkeypatch
):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    monkeypatch.setattr("rlsvc.data.lerobot_append.ROWS_PER_FILE", 2)
    for seeds in ((0, 1, 2), (3, 4)):
        with open_recorder(tmp_path / "d") as recorder:
            for seed in seeds:
                record(recorder, seed)
    described = sorted((tmp_path / "d/meta/episodes").glob("*/*.parquet"))
    assert [path.name for path in described] == ["file-000.parquet", "file-001.parquet", "file-002.parquet"]
    theirs = LeRobotDataset.resume("local/test", root=tmp_path / "d")
    step = step_of(5, 0)
    row = {key: np.atleast_1d(value) if not isinstance(value, str) else value for key, value in step.items()}
    row |= {"reward": np.zeros(1, np.float32), "capture_time": np.zeros(1, np.float32), "task": "task 1"}
    theirs.add_frame(row | {"next.done": np.array([True]), "next.success": np.array([True])})
    theirs.save_episode()
    theirs.finalize()
    with open_recorder(tmp_path / "d") as recorder:
        assert record(recorder, 6) == 6
    dataset = lerobot_dataset(tmp_path / "d")
    assert dataset.meta.episodes["length"] == [4] * 5 + [1, 4]
    seeds = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] + [6] * 4
    assert [int(dataset[i]["action"][0]) for i in range(25)] == seeds
    assert seeds_in(tmp_path / "d") == [0, 1, 2, 3, 4, 5, 6]
