import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from videos import numbers_of, write_numbered_video

from rlsvc.core.errors import DatasetError
from rlsvc.data.lerobot_meta import flat_names
from rlsvc.data.load import load_table, open_source
from rlsvc.spec.data import DatasetSpec


def load(path, keys=None, **fields):
    return load_table(DatasetSpec.model_validate({"path": str(path), **fields}), keys)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_parquet(path, **columns):
    table = pq.read_table(path)
    for name, values in columns.items():
        index = table.column_names.index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    pq.write_table(table, path)


def shrink_cr5(path, rows=40):
    """CR5 episode 0 alone, cut to a few rows, with a small declared camera (its published videos are large)."""
    data = path / "data/chunk-000/episode_000000.parquet"
    pq.write_table(pq.read_table(data).slice(0, rows), data)
    line = json.loads((path / "meta/episodes.jsonl").read_text().splitlines()[0])
    (path / "meta/episodes.jsonl").write_text(json.dumps({**line, "length": rows}) + "\n")
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.images.top"]["shape"] = [48, 64, 3]
    (path / "meta/info.json").write_text(json.dumps(info))
    return path / "videos/chunk-000/observation.images.top/episode_000000.mp4"


def test_v21_rows_are_those_of_the_parquet_files(sample):
    path = sample("cr5_v21")
    table = load(path)
    first = pq.read_table(path / "data/chunk-000/episode_000000.parquet")
    assert table.num_episodes == 2
    assert np.array_equal(table.episode(0)["action"], np.stack(first["action"].to_numpy()))
    assert table.columns["observation.state"].shape == (table.num_steps, 6)
    assert table.tasks == ["put the banana on the plate"]
    assert table.names["action"][-1] == "gripper"


def test_frames_go_with_frame_index_when_the_timestamps_are_a_wall_clock(sample):
    path = sample("cr5_v21")
    video = shrink_cr5(path)
    write_numbered_video(video, 40)
    rows = pq.read_table(path / "data/chunk-000/episode_000000.parquet")
    drift = np.abs(rows["timestamp"].to_numpy() - rows["frame_index"].to_numpy() / 10)
    assert drift.max() > 0.1, "the sample must have wrong timestamps for this test to mean something"
    assert numbers_of(load(path).columns["observation.images.top"]) == list(range(40))


def test_rows_are_sorted_by_frame_index(sample):
    path = sample("cr5_v21")
    expected = load(path).columns["action"]
    file = path / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(file)
    pq.write_table(table.take(pa.array(np.random.default_rng(0).permutation(table.num_rows))), file)
    assert np.array_equal(load(path).columns["action"], expected)


def test_a_lost_frame_is_refused(sample):
    path = sample("cr5_v21")
    file = path / "data/chunk-000/episode_000000.parquet"
    frame = pq.read_table(file)["frame_index"].to_numpy().copy()
    frame[50:] += 1
    edit_parquet(file, frame_index=frame)
    with pytest.raises(DatasetError, match=r"episode_000000\.parquet: frame_index of episode 0 has 51 where 50 is due"):
        load(path)
    assert load(path, episodes=[2]).num_episodes == 1


@pytest.mark.parametrize("keep", [0, 7, 1000, -20])
def test_a_truncated_parquet_is_refused_by_name_and_the_other_episodes_load(keep, sample):
    path = sample("cr5_v21")
    file = path / "data/chunk-000/episode_000002.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DatasetError, match=r"episode_000002\.parquet: not readable as parquet .* truncated"):
        load(path)
    assert load(path, episodes=[0]).num_episodes == 1


def test_a_parquet_with_rows_cut_off_is_refused(sample):
    path = sample("cr5_v21")
    file = path / "data/chunk-000/episode_000000.parquet"
    pq.write_table(pq.read_table(file).slice(0, 100), file)
    with pytest.raises(DatasetError, match=r"100 rows of episode 0, meta/ says 197"):
        load(path)


def test_a_missing_parquet_is_refused_by_name(sample):
    path = sample("cr5_v21")
    (path / "data/chunk-000/episode_000000.parquet").unlink()
    with pytest.raises(DatasetError, match=r"episode_000000\.parquet: no such file"):
        load(path)


def test_nan_in_actions_names_the_file(sample):
    path = sample("cr5_v21")
    file = path / "data/chunk-000/episode_000002.parquet"
    action = np.stack(pq.read_table(file)["action"].to_numpy())
    action[3, 6] = np.nan
    edit_parquet(file, action=list(action))
    with pytest.raises(
        DatasetError, match=r"episode_000002\.parquet: 'action' is not finite in 1 rows, first in episode 2, row 3"
    ):
        load(path)


def test_a_column_of_another_width_than_declared_is_refused(sample):
    path = sample("cr5_v21")
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["action"]["shape"] = [6]
    edit_json(path / "meta/info.json", features=info["features"])
    with pytest.raises(DatasetError, match=r"column 'action' has 1379 numbers in 197 rows, .* declares shape \[6\]"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version 'v1.6', expected one of v3.0, v2.1, v2.0"),
        ({"fps": 0}, "fps is 0, expected a number above 0"),
        ({"features": {}}, "no 'features'"),
        ({"features": {"action": {"shape": [7]}}}, "feature 'action' is .* expected a dtype and a shape"),
        (
            {"features": {"action": {"dtype": "float32", "shape": 7}}},
            "feature 'action' is .* expected a dtype and a shape",
        ),
        ({"data_path": "data/{nonsense}.parquet"}, "does not follow LeRobot v2.1"),
    ],
)
def test_metadata_that_cannot_be_right_is_refused(changes, message, sample):
    path = sample("cr5_v21")
    edit_json(path / "meta/info.json", **changes)
    with pytest.raises(DatasetError, match=message):
        load(path)


def test_a_cut_metadata_line_is_named(sample):
    path = sample("cr5_v21")
    file = path / "meta/episodes.jsonl"
    file.write_text(file.read_text()[:-20])
    with pytest.raises(DatasetError, match=r"episodes\.jsonl: line 2 is not JSON"):
        load(path)


def test_v20_files_are_found_though_the_path_template_is_wrong(sample):
    table = load(sample("gr1_v20"), ["observation.state", "action"])
    assert list(np.diff(table.episode_ends, prepend=0)) == [412, 328]
    assert table.columns["action"].dtype == np.float32
    assert table.tasks == [
        "pick the salt from the counter and place it in the plate",
        "pick the cupcake from the counter and place it in the plate",
    ]


def test_a_real_video_has_a_frame_for_every_row(sample):
    path = sample("gr1_v20")
    table = load(path, ["observation.images.ego_view"], episodes=[4])
    frames = table.columns["observation.images.ego_view"]
    assert (frames.shape, frames.dtype) == ((328, 256, 256, 3), np.uint8)
    assert frames.std() > 10


def test_a_missing_video_of_one_episode_is_refused_by_name(sample):
    path = sample("gr1_v20")
    with pytest.raises(
        DatasetError, match=r"episode_000003\.mp4: no such video; episode 3 of 'observation.images.ego_view'"
    ):
        load(path, ["observation.images.ego_view"])


def test_a_video_with_another_number_of_frames_is_refused_with_both_numbers(sample):
    path = sample("cr5_v21")
    video = shrink_cr5(path)
    write_numbered_video(video, 39)
    with pytest.raises(DatasetError, match=r"episode_000000\.mp4: 39 frames, but 40 rows"):
        load(path)
    assert load(path, ["action"]).num_steps == 40


def test_a_video_of_another_size_is_refused(sample):
    path = sample("cr5_v21")
    write_numbered_video(shrink_cr5(path), 40, size=(32, 64))
    with pytest.raises(DatasetError, match=r"frames are \(32, 64, 3\), meta/info.json declares \(48, 64, 3\)"):
        load(path)


def test_a_truncated_video_is_refused(sample):
    path = sample("cr5_v21")
    video = shrink_cr5(path)
    write_numbered_video(video, 40)
    video.write_bytes(video.read_bytes()[:500])
    with pytest.raises(DatasetError, match=r"episode_000000\.mp4: not readable as video"):
        load(path)


def v30_with_video(path, starts=(0, 7, 19), lengths=(7, 12, 15)):
    """The G1 v3.0 sample cut to a few rows, its three episodes end to end in one numbered video."""
    data = path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(data)
    episode = table["episode_index"].to_numpy()
    rows = np.concatenate([np.flatnonzero(episode == i)[:n] for i, n in enumerate(lengths)])
    pq.write_table(table.take(pa.array(rows)), data)
    meta = path / "meta/episodes/chunk-000/file-000.parquet"
    edit_parquet(
        meta,
        length=list(lengths),
        **{"videos/observation.images.cam_high/from_timestamp": [start / 30 for start in starts]},
    )
    info = json.loads((path / "meta/info.json").read_text())
    info["features"]["observation.images.cam_high"]["shape"] = [48, 64, 3]
    (path / "meta/info.json").write_text(json.dumps(info))
    write_numbered_video(path / "videos/observation.images.cam_high/chunk-000/file-000.mp4", sum(lengths), fps=30)


def test_v30_frames_are_cut_out_of_the_shared_video(sample):
    path = sample("g1_v30")
    v30_with_video(path)
    assert numbers_of(load(path).columns["observation.images.cam_high"]) == list(range(34))
    picked = load(path, ["observation.images.cam_high"], episodes=[2, 0]).columns["observation.images.cam_high"]
    assert numbers_of(picked) == [*range(19, 34), *range(7)]


def test_v30_video_spans_that_do_not_lie_end_to_end_are_refused(sample):
    path = sample("g1_v30")
    v30_with_video(path, starts=(0, 8, 19))
    with pytest.raises(DatasetError, match="no episode begins at frame 7"):
        load(path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("frame_index", [None] + [0] * 196, "column 'frame_index' has 1 empty values"),
        ("action", [[None] + [0.0] * 6] * 197, "column 'action' has 197 empty values"),
        ("task_index", [3] * 197, "task_index 3 is not in meta/tasks"),
    ],
)
def test_empty_cells_and_unknown_tasks_are_refused(column, values, message, sample):
    path = sample("cr5_v21")
    edit_parquet(path / "data/chunk-000/episode_000000.parquet", **{column: values})
    with pytest.raises(DatasetError, match=message):
        load(path)


def test_an_empty_row_of_a_list_column_is_refused(sample):
    path = sample("gr1_v20")
    edit_parquet(path / "data/chunk-000/episode_000004.parquet", action=[None] + [[0.0] * 44] * 327)
    with pytest.raises(DatasetError, match=r"episode_000004\.parquet: column 'action' has 1 empty rows"):
        load(path, ["action"], episodes=[4])


def test_names_nested_in_lists_and_maps_become_one_tuple():
    assert flat_names([["a", "b"]]) == ("a", "b")
    assert flat_names({"motors": ["a", "b"]}) == ("a", "b")
    assert flat_names({"x": 0, "y": 1}) == ("x", "y")
    assert flat_names(None) == ()


def test_v30_element_names_are_flattened(sample):
    source = open_source(sample("g1_v30"))
    assert source.features["action"].names[:2] == ("kLeftShoulderPitch", "kLeftShoulderRoll")
    assert source.features["action"].shape == (26,)


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"dtype": "language", "shape": [1]}, "dtype 'language' is not supported"),
        ({"dtype": "image", "shape": [4, 4, 1], "info": {"is_depth_map": True}}, "depth images are not supported"),
    ],
)
def test_features_that_cannot_be_read_rightly_are_absent_never_misread(declared, why, sample):
    path = sample("cr5_v21")
    info = json.loads((path / "meta/info.json").read_text())
    edit_json(path / "meta/info.json", features={**info["features"], "extra": declared})
    assert open_source(path).absent["extra"] == why
    with pytest.raises(DatasetError, match=f"'extra' cannot be read: {why}"):
        load(path, ["extra"])
