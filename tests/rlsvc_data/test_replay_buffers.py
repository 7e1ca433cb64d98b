import json
import shutil

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.load import load_table, open_source
from rlsvc.spec.data import DatasetSpec


def load(path, keys=None, **fields):
    return load_table(DatasetSpec.model_validate({"path": str(path), **fields}), keys)


def small(**changes):
    arrays = {
        "state": np.arange(12, dtype=np.float64).reshape(6, 2),
        "actions": np.ones((6, 3), np.float32),
        "episode_ends": np.array([2, 6]),
        "fps": np.array(5.0),
    }
    return {**arrays, **changes}


def save(path, **arrays):
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_the_zarr_and_the_npz_of_pusht_give_the_same_columns(sample):
    zarr = load(sample("pusht/pusht_first1.zarr"))
    npz = load(sample("pusht/pusht_first3.npz"), episodes=[0])
    for key in ("observation.state", "observation.environment_state", "block_pose", "action"):
        assert np.array_equal(zarr.columns[key], npz.columns[key])
        assert zarr.names.get(key) == npz.names.get(key)
    assert zarr.fps == npz.fps == 10


def test_float_images_of_whole_numbers_become_bytes(sample):
    import zarr

    path = sample("pusht/pusht_first1.zarr")
    raw = np.asarray(zarr.open_group(str(path), mode="r")["data"]["img"][:])
    images = load(path, ["observation.image"]).columns["observation.image"]
    assert raw.dtype == np.float32
    assert images.dtype == np.uint8
    assert np.array_equal(images, raw)


@pytest.mark.parametrize("scale", [1 / 255, 2.0])
def test_float_images_of_another_range_are_refused(scale, tmp_path):
    image = np.full((6, 4, 4, 3), 255.0 * scale, np.float32)
    image[0, 0, 0, 0] = 0.5
    path = save(tmp_path / "a.npz", **small(img=image))
    with pytest.raises(DatasetError, match=r"image 'img' is float32 .* expected whole numbers from 0 to 255"):
        load(path)


def test_a_chunk_that_is_not_on_disk_is_never_read_as_zeros(sample):
    path = sample("pusht/pusht_first1.zarr")
    (path / "data/keypoint/0.0.0").unlink()
    with pytest.raises(
        DatasetError, match=r"'observation.environment_state' cannot be read: 1 of 1 chunks of 'keypoint'"
    ):
        load(path, ["observation.environment_state", "action"])
    assert set(load(path, ["observation.state", "action"]).columns) == {"observation.state", "action"}


def test_a_damaged_chunk_is_refused(sample):
    path = sample("pusht/pusht_first1.zarr")
    chunk = path / "data/action/0.0"
    chunk.write_bytes(chunk.read_bytes()[:40])
    with pytest.raises(DatasetError, match="steps 0 to 161 of 'action' are not readable"):
        load(path)


def test_a_zarr_without_the_two_groups_is_refused(sample):
    path = sample("pusht/pusht_first1.zarr")
    shutil.rmtree(path / "meta")
    with pytest.raises(DatasetError, match="not readable as a zarr replay buffer with the groups 'data' and 'meta'"):
        load(path)


def test_usual_names_are_translated_and_doubles_become_floats(tmp_path):
    table = load(save(tmp_path / "a.npz", **small(rewards=np.arange(6.0), language=np.array(["a", "b"]))))
    assert set(table.columns) == {"observation.state", "action", "next.reward"}
    assert table.columns["observation.state"].dtype == np.float32
    assert table.columns["next.reward"].shape == (6, 1)
    assert table.tasks == ["a", "b"]
    assert table.task.tolist() == [0, 0, 1, 1, 1, 1]
    assert table.fps == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episode_ends": None}, "no array 'episode_ends'"),
        ({"episode_ends": np.array([2, 2])}, "must be rising whole numbers"),
        ({"episode_ends": np.array([2, 7])}, "has 6 steps, episode_ends says 7; the dataset is incomplete or cut"),
        ({"actions": None}, "no array 'action'"),
        ({"fps": None}, "control rate is not known .* --fps RATE"),
        ({"obs": np.zeros((6, 1))}, "arrays 'state' and 'obs' are both 'observation.state'"),
        (
            {"language": np.array(["a", "b", "c"])},
            "'language' has 3 texts, expected one, or one for each of 2 episodes",
        ),
    ],
)
def test_a_replay_buffer_that_cannot_be_right_is_refused(changes, message, tmp_path):
    with pytest.raises(DatasetError, match=message):
        load(save(tmp_path / "a.npz", **small(**changes)))


def test_a_truncated_npz_is_refused(sample):
    path = sample("pusht/pusht_first3.npz")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DatasetError, match=r"pusht_first3\.npz: not readable as \.npz"):
        load(path)


def test_pickled_objects_are_never_loaded(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **small(action=np.array([{"a": 1}] * 6, object)))
    with pytest.raises(DatasetError, match="holds pickled objects"):
        load(path)


def test_the_zarr_metadata_says_what_the_sample_was_cut_to(sample):
    path = sample("pusht/pusht_first1.zarr")
    assert json.loads((path / "data/img/.zarray").read_text())["shape"] == [161, 96, 96, 3]
    assert open_source(path).num_steps == 161
