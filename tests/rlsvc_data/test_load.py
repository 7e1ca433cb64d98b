import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec

PUSHT = Path(__file__).parents[2] / "datasets" / "pusht_human"


def spec(path, **fields) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": str(path), **fields})


def test_the_shipped_demonstrations_are_the_206_human_episodes():
    table = load_table(spec(PUSHT))
    assert (table.num_episodes, table.num_steps, table.fps) == (206, 25650, 10.0)
    assert {key: column.shape[1:] for key, column in table.columns.items()} == {
        "observation.state": (2,),
        "observation.environment_state": (18,),
        "block_pose": (3,),
        "action": (2,),
    }
    assert table.tasks == ["Push the T-shaped block onto the T-shaped target."]
    assert table.names["action"] == ("x", "y")
    assert table.names["observation.state"] == ("agent_x", "agent_y")
    assert table.units["action"] == "px"


def test_the_shipped_demonstrations_equal_the_recording_bit_for_bit(sample):
    recorded = np.load(sample("pusht/pusht_first3.npz"))
    table = load_table(spec(PUSHT, episodes=[0, 1, 2]))
    assert np.array_equal(table.episode_ends, recorded["episode_ends"])
    assert np.array_equal(table.columns["observation.state"], recorded["state"][:, :2])
    assert np.array_equal(table.columns["block_pose"], recorded["state"][:, 2:])
    assert np.array_equal(table.columns["observation.environment_state"], recorded["keypoint"].reshape(-1, 18))
    assert np.array_equal(table.columns["action"], recorded["action"])
    assert all(column.dtype == np.float32 for column in table.columns.values())


def test_low_dimensional_data_is_read_without_torch_or_lerobot(sample):
    npz, zarr = sample("pusht/pusht_first3.npz"), sample("pusht/pusht_first1.zarr")
    code = f"""
import sys
from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec
for path in {[str(PUSHT), str(npz), str(zarr)]!r}:
    load_table(DatasetSpec(path=path), ["observation.state", "action"])
loaded = {{"torch", "lerobot", "datasets", "pandas", "jax", "ray"}} & set(sys.modules)
sys.exit(f"imported {{loaded}}" if loaded else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_named_columns_are_read_and_task_may_be_named():
    table = load_table(spec(PUSHT), ["action", "task"])
    assert list(table.columns) == ["action", "task"]
    assert set(table.columns["task"]) == set(table.tasks)
    assert list(load_table(spec(PUSHT), ["action"]).columns) == ["action"]


def test_episodes_come_in_the_order_asked_for():
    table = load_table(spec(PUSHT, episodes=[5, 1]), ["action"])
    whole = load_table(spec(PUSHT), ["action"])
    expected = np.concatenate([whole.episode(5)["action"], whole.episode(1)["action"]])
    assert np.array_equal(table.columns["action"], expected)


def test_the_task_filter_keeps_the_episodes_of_that_task(sample):
    task = "pick the salt from the counter and place it in the plate"
    table = load_table(spec(sample("gr1_v20"), tasks=[task]), ["action"])
    assert (table.num_episodes, table.num_steps, table.tasks) == (1, 412, [task])


@pytest.mark.parametrize(
    ("fields", "keys", "message"),
    [
        ({"episodes": [206]}, None, "no episode 206; it has 206, from 0 to 205"),
        ({"episodes": [1, 1]}, None, "names an episode twice"),
        ({"episodes": []}, None, "no episode is selected"),
        (
            {"tasks": ["Push the T-shaped block"]},
            None,
            "Did you mean 'Push the T-shaped block onto the T-shaped target.'",
        ),
        ({}, ["observation.stat"], "did you mean 'observation.state'"),
    ],
)
def test_what_the_dataset_has_not_is_refused_by_name(fields, keys, message):
    with pytest.raises(DatasetError, match=message.replace(".", r"\.")):
        load_table(spec(PUSHT, **fields), keys)


@pytest.mark.parametrize("kind", ["missing", "empty folder", "text file", "folder of datasets"])
def test_a_path_that_is_not_a_dataset_is_refused(kind, tmp_path, sample):
    path = tmp_path / "here"
    if kind == "missing":
        message = "no such file or folder"
    elif kind == "empty folder":
        path.mkdir()
        message = "a folder that is not a dataset"
    elif kind == "text file":
        path.write_text("hello")
        message = "a file that is not a dataset"
    else:
        path = sample("pusht/pusht_first3.npz").parent
        message = r"it holds pusht_first3\.npz: name one of them"
    with pytest.raises(DatasetError, match=message):
        load_table(spec(path))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused_by_column_episode_and_row(value, sample, tmp_path):
    arrays = dict(np.load(sample("pusht/pusht_first3.npz")))
    arrays["action"][arrays["episode_ends"][0] + 7, 1] = value
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DatasetError, match=r"bad\.npz: 'action' is not finite in 1 rows, first in episode 1, row 7"):
        load_table(spec(path))
    # What the NaN does not touch can be used.
    assert load_table(spec(path, episodes=[0, 2])).num_episodes == 2
    assert "action" not in load_table(spec(path), ["observation.state"]).columns


def test_absent_cameras_are_left_out_with_a_warning_and_refused_when_named(sample, caplog):
    path = sample("cr5_v21")
    table = load_table(spec(path))
    assert "observation.images.top" not in table.columns
    assert "'observation.images.top' left out" in caplog.text
    with pytest.raises(
        DatasetError, match=r"'observation.images.top' cannot be read: .* none of its 2 episodes has a video"
    ):
        load_table(spec(path), ["observation.images.top", "action"])
