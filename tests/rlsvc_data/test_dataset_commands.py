import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlsvc.commands.dataset import app, parse_episodes
from rlsvc.core.errors import DatasetError
from rlsvc.data.load import load_table
from rlsvc.spec.data import DatasetSpec

PUSHT = Path(__file__).parents[2] / "datasets" / "pusht_human"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_info_shows_features_and_tasks():
    value = json.loads(run("info", PUSHT, "--json"))
    assert (value["episodes"], value["steps"], value["fps"]) == (206, 25650, 10.0)
    assert value["features"]["action"]["names"] == ["x", "y"]
    assert value["tasks"] == {"Push the T-shaped block onto the T-shaped target.": 206}
    text = run("info", PUSHT)
    assert "206 episodes, 25650 steps at 10 Hz (42.8 minutes)" in text
    assert "206 episodes: Push the T-shaped block" in text


def test_stats_shows_every_element(sample):
    path = sample("pusht/pusht_first3.npz")
    action = load_table(DatasetSpec.model_validate({"path": str(path)})).columns["action"]
    value = json.loads(run("stats", path, "--key", "action", "--json"))
    assert value["action"]["max"] == action.max(0).tolist()
    assert value["action"]["count"] == len(action)
    assert "agent_x" in run("stats", path)


def test_check_exits_with_2_only_when_the_data_cannot_be_used(sample):
    text = run("check", sample("cr5_v21"))
    assert "can be used" in text
    assert "worst 2.17 s (episode 2)" in text
    (report,) = json.loads(run("check", sample("dapg_door"), "--json", code=2))
    assert report["usable"] is False
    assert report["findings"][0]["severity"] == "error"
    assert set(report["findings"][0]) == {"severity", "what", "where", "got", "expected", "todo"}


def test_import_writes_v30_and_says_what_does_not_fit(sample, tmp_path):
    text = run("import", sample("cr5_v21"), tmp_path / "new", "--episodes", "2")
    assert "drift (a wall clock?)" in text
    assert "left out: observation.images.top" in text
    assert "LeRobot v3.0, 1 episodes" in text
    new = load_table(DatasetSpec.model_validate({"path": str(tmp_path / "new")}))
    old = load_table(DatasetSpec.model_validate({"path": str(sample("gr1_v20").with_name("cr5_v21")), "episodes": [2]}))
    assert (new.columns["action"] == old.columns["action"]).all()


def test_import_takes_a_rate_and_a_prompt_where_the_source_has_none(sample, tmp_path):
    source = sample("dapg_door") / "door_2demos.npz"
    with pytest.raises(DatasetError, match="control rate is not known"):
        run("import", source, tmp_path / "door")
    run("import", source, tmp_path / "door", "--fps", "25", "--task", "Open the door.")
    table = load_table(DatasetSpec.model_validate({"path": str(tmp_path / "door")}))
    assert (table.fps, table.tasks) == (25.0, ["Open the door."])
    assert set(table.columns) == {"observation.state", "action", "next.reward"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "gif"], "--images: got 'gif', expected video or image"),
        (["--format", "rlds"], "--format: got 'rlds', expected auto, lerobot, zarr, npz"),
        (["--episodes", "1-x"], "--episodes: got '1-x', expected numbers and ranges"),
        (["--fps", "10"], "a LeRobot dataset says its own fps"),
    ],
)
def test_import_refuses_options_that_mean_nothing(arguments, message, tmp_path):
    with pytest.raises(DatasetError, match=message):
        run("import", PUSHT, tmp_path / "d", *arguments)
    assert not (tmp_path / "d").exists()


def test_episode_ranges_are_inclusive():
    assert parse_episodes("0-2, 7") == (0, 1, 2, 7)
