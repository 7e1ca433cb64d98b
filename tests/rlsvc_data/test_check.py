import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.check import Report, check_path

PUSHT = Path(__file__).parents[2] / "datasets" / "pusht_human"


def one(path, **options) -> Report:
    (report,) = check_path(path, **options)
    return report


def found(report: Report, what: str):
    return [finding for finding in report.findings if finding.what == what]


def the(report: Report, what: str):
    (finding,) = found(report, what)
    return finding


def edit_stats(path, change):
    file = path / "meta/stats.json"
    stats = json.loads(file.read_text())
    change(stats)
    file.write_text(json.dumps(stats))


def test_the_shipped_demonstrations_have_nothing_but_a_note():
    report = one(PUSHT)
    assert report.usable
    assert [(f.severity, f.what) for f in report.findings] == [("note", "no reward")]


def test_cr5_timestamps_drift_and_the_data_can_be_used(sample):
    report = one(sample("cr5_v21"))
    drift = the(report, "timestamp")
    assert report.usable
    assert drift.severity == "warning"
    # The share over half a frame, and the worst case of all 81 episodes, which is in episode 2.
    rows = pa.concat_tables(pq.read_table(p) for p in sorted((Path(report.path) / "data").rglob("*.parquet")))
    off = np.abs(rows["timestamp"].to_numpy() - rows["frame_index"].to_numpy() / 10)
    assert f"{100 * (off > 0.05).mean():.0f} % of timestamps drift" in drift.got
    assert "worst 2.17 s (episode 2)" in drift.got
    assert "frame_index" in drift.todo


def test_cr5_declared_videos_episodes_and_splits_that_are_not_there(sample):
    report = one(sample("cr5_v21"))
    assert the(report, "absent feature").where == "observation.images.top"
    assert "none of its 2 episodes" in the(report, "absent feature").got
    totals = {f.where: (f.got, f.expected) for f in found(report, "totals")}
    assert totals["meta/info.json total_episodes"] == ("81", "2")
    assert totals["meta/info.json total_videos"] == ("81", "0")
    assert the(report, "splits").got == "0:81"
    assert the(report, "schema version").got == "v2.1"
    assert "no quantiles" in the(report, "statistics").got


def test_gr1_declares_what_is_not_there_and_can_be_used(sample):
    report = one(sample("gr1_v20"))
    assert report.usable
    assert the(report, "absent feature").where == "observation.images.egoview"
    assert "no file for 1 of 2 episodes: 3" in the(report, "missing videos").got
    assert the(report, "splits").got == "0:100"
    assert the(report, "schema version").got == "v2.0"
    assert "shifted by a constant" in the(report, "timestamp").got
    assert {f.where for f in found(report, "path template")} == {
        "meta/info.json data_path",
        "meta/info.json video_path",
    }
    still = {f.where: f for f in found(report, "constant dimensions")}
    assert still["action"].severity == "warning"
    assert still["action"].got.startswith("25 of 44 never change")
    assert the(report, "frame_index").got == "not declared"


def test_gr1_statistics_of_five_episodes_are_not_those_of_two(sample):
    report = one(sample("gr1_v20"))
    wrong = {f.where for f in found(report, "statistics") if "are not the data's" in f.got}
    assert wrong >= {"meta/stats.json 'action'", "meta/stats.json 'observation.state'"}


def test_g1_nested_names_and_statistics_without_quantiles(sample):
    report = one(sample("g1_v30"))
    assert report.usable
    assert the(report, "nested names").where == "observation.state, action"
    assert the(report, "statistics").got == "no quantiles (q01, q99) for action, observation.state"
    # Joint angles rest beyond 1 rad; that is not a normalised action out of its range.
    assert not found(report, "action range")


def test_statistics_under_a_wrong_key_are_named(sample):
    path = sample("g1_v30")
    edit_stats(path, lambda stats: stats.update({"actions": stats.pop("action")}))
    got = [f.got for f in found(one(path), "statistics")]
    assert "nothing for action" in got
    assert "for actions, which are not features" in got


def test_statistics_of_other_data_or_another_width_are_named(sample):
    path = sample("g1_v30")
    edit_stats(path, lambda stats: stats["action"]["mean"].__setitem__(3, 9.0))
    edit_stats(path, lambda stats: stats["observation.state"]["std"].pop())
    got = {f.where + f.got for f in found(one(path), "statistics")}
    assert any("'action'mean are not the data's; worst mean of element 3: 9 where the data has" in text for text in got)
    assert any("'std' of 'observation.state' has shape (25,)" in text for text in got)


def test_rlds_flags_markers_and_splits(sample):
    report = one(sample("bridge_rlds"))
    assert not report.usable
    assert (report.episodes, report.steps) == (2, 20)
    assert the(report, "is_last").got == "never set in 2 of 2 episodes"
    assert the(report, "is_terminal").got == "never set in 2 of 2 episodes"
    assert [f.where.rpartition("/")[2] for f in found(report, "image flag")] == [
        "has_image_0",
        "has_image_1",
        "has_image_2",
    ]
    assert the(report, "empty camera").where == "steps/observation/image_3"
    assert the(report, "missing split").where == "val"
    assert the(report, "same clips in two splits").where == "train, val"


def test_rlds_clips_that_are_in_both_splits_are_counted(sample):
    path = sample("bridge_rlds")
    (train,) = path.glob("*train.tfrecord*")
    train.with_name(train.name.replace("-train", "-val")).write_bytes(train.read_bytes())
    report = one(path)
    assert the(report, "same clips in two splits").got == "2 episodes are in both"
    assert not found(report, "missing split")


@pytest.mark.parametrize("cut", [5, 100, 1000])
def test_a_truncated_tfrecord_is_an_error(cut, sample):
    path = sample("bridge_rlds")
    (train,) = path.glob("*train.tfrecord*")
    train.write_bytes(train.read_bytes()[:-cut])
    report = one(path)
    assert "it is truncated" in the(report, "unreadable record").got
    assert report.episodes == 1


def test_dapg_actions_outside_the_unit_box_and_no_control_rate(sample):
    report = one(sample("dapg_door"))
    assert the(report, "action range").got.startswith("4.6 % of values outside [-1, 1]")
    rate = the(report, "control rate")
    assert (rate.severity, report.usable) == ("error", False)
    assert "--fps" in rate.todo
    assert not found(report, "no reward")


def test_a_folder_of_datasets_has_a_report_for_each(sample):
    sample("pusht/pusht_first1.zarr")
    path = sample("pusht/pusht_first3.npz").parent
    assert [report.format for report in check_path(path)] == ["zarr replay buffer", "npz replay buffer"]


def test_nan_truncated_files_and_doubled_episodes_are_found_together(sample):
    path = sample("cr5_v21")
    files = [path / f"data/chunk-000/episode_{i:06d}.parquet" for i in (0, 2)]
    table = pq.read_table(files[0])
    action = np.stack(table["action"].to_numpy())
    action[5, 2] = np.inf
    index = table.column_names.index("action")
    field = table.schema.field(index)
    pq.write_table(table.set_column(index, field, pa.array(list(action), field.type)), files[0])
    files[1].write_bytes(files[1].read_bytes()[:900])
    report = one(path)
    assert not report.usable
    assert the(report, "unreadable episode").where == "episode 2"
    bad = the(report, "not finite")
    assert bad.where.endswith("episode_000000.parquet, 'action', episode 0, row 5")
    assert bad.severity == "error"


def test_the_same_episode_twice_is_named(sample, tmp_path):
    arrays = dict(np.load(sample("pusht/pusht_first3.npz")))
    n = int(arrays["episode_ends"][0])
    rows = {key: np.concatenate([value[:n], value[:n]]) for key, value in arrays.items() if key != "episode_ends"}
    np.savez(tmp_path / "twice.npz", **rows, episode_ends=np.array([n, 2 * n]))
    assert the(one(tmp_path / "twice.npz"), "same episode twice").where == "episodes 1 = 0"


def test_a_video_with_a_frame_too_few_is_found_only_from_the_file(sample):
    path = sample("gr1_v20")
    meta = path / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in meta.read_text().splitlines()]
    data = path / "data/chunk-000/episode_000004.parquet"
    pq.write_table(pq.read_table(data).slice(0, 327), data)
    meta.write_text("".join(json.dumps({**line, "length": min(line["length"], 327)}) + "\n" for line in lines[1:]))
    for deep in (False, True):
        frames = the(one(path, deep=deep), "video frames")
        assert (frames.got, frames.expected) == ("328 frames", "327, one for each row")


def test_deep_reads_images_that_are_stored_as_arrays(sample):
    path = sample("pusht/pusht_first1.zarr")
    chunk = path / "data/img/0.0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:500])
    assert not found(one(path), "unreadable images")
    assert the(one(path, deep=True), "unreadable images").where == "observation.image, episode 0"


def test_broken_metadata_is_a_report_and_nothing_there_is_an_error(sample, tmp_path):
    path = sample("cr5_v21")
    (path / "meta/info.json").write_text("{")
    assert "not readable as JSON" in the(one(path), "metadata").got
    with pytest.raises(DatasetError, match="no such file or folder"):
        check_path(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="a folder that is not a dataset"):
        check_path(tmp_path / "empty")
