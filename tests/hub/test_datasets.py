"""LeRobot datasets that are pushed to the stand-in hub and pulled from it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from shared_bundle import TOKEN

from rlsvc.data.lerobot_meta import read_meta
from rlsvc.store.dataset_card import ORIGIN, describe, read_card, write_origin

ROOT = Path(__file__).parents[2]
PUSHT = ROOT / "datasets" / "pusht_human"
SAMPLES = ROOT / "tests" / "data"


@pytest.fixture
def dataset(tmp_path):
    """A copy that may be changed."""
    shutil.copytree(PUSHT, tmp_path / "pusht")
    return tmp_path / "pusht"


@pytest.fixture
def pushed(rlsvc, hub, dataset, token_file):
    rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file)
    return hub.repos["dataset", "mylab/pusht"]


def contents(folder):
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_dataset_that_was_pushed_is_pulled_byte_for_byte(rlsvc, hub, pushed, dataset, tmp_path):
    printed = rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "pulled")
    assert f"mylab/pusht at commit {pushed.branches['main']}" in printed
    assert "LeRobot v3.0, 206 episodes, 25650 steps, 10 Hz" in printed
    mine, theirs = contents(dataset), contents(tmp_path / "pulled")
    assert theirs.keys() == mine.keys() | {ORIGIN}
    assert all(theirs[name] == data for name, data in mine.items() if name != "README.md")
    assert rlsvc("dataset", "check", tmp_path / "pulled")


def test_it_is_one_commit_and_has_the_tag_that_lerobot_looks_for(pushed):
    assert pushed.history() == ["initial commit", "Dataset pusht"]
    assert pushed.tags == {"v3.0": pushed.branches["main"]}


def test_the_same_dataset_twice_makes_one_commit_and_mends_a_tag_that_is_missing(rlsvc, pushed, dataset, token_file):
    before = pushed.history()
    pushed.tags.clear()
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file)
    assert "holds this already, there is no new commit" in printed
    assert pushed.history() == before
    assert pushed.tags == {"v3.0": pushed.branches["main"]}


def test_what_was_pulled_and_is_pushed_again_changes_nothing(rlsvc, hub, pushed, token_file, tmp_path):
    rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "pulled")
    before = hub.files("dataset", "mylab/pusht")
    printed = rlsvc("dataset", "push", tmp_path / "pulled", "mylab/pusht", "--token-file", token_file)
    assert "there is no new commit" in printed
    assert hub.files("dataset", "mylab/pusht") == before


def test_a_file_that_the_dataset_no_longer_has_goes_and_the_tag_moves(rlsvc, hub, pushed, dataset, token_file):
    first = pushed.branches["main"]
    files = hub.files("dataset", "mylab/pusht")
    hub.put("dataset", "mylab/pusht", {**files, "data/chunk-000/file-001.parquet": b"old", "figure.png": b"mine"})
    rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file)
    assert hub.files("dataset", "mylab/pusht").keys() == files.keys() | {"figure.png"}
    assert first != pushed.tags["v3.0"] == pushed.branches["main"]


def test_a_branch_leaves_the_tag_where_it_was(rlsvc, pushed, dataset, token_file):
    tags = dict(pushed.tags)
    (dataset / "LICENSE").write_text("another")
    rlsvc("dataset", "push", dataset, "mylab/pusht", "--revision", "wide", "--token-file", token_file)
    assert pushed.branches["wide"] != pushed.branches["main"]
    assert pushed.tags == tags


def test_only_a_datasets_own_files_go_and_come(rlsvc, hub, dataset, token_file, tmp_path):
    (dataset / "data" / "evil.pkl").write_bytes(b"boom")
    (dataset / "loader.py").write_text("boom")
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file)
    assert "note: left out, since no dataset has it: data/evil.pkl and 1 more" in printed
    files = hub.files("dataset", "mylab/pusht")
    assert not [name for name in files if name.endswith((".py", ".pkl"))]
    hub.put("dataset", "mylab/pusht", {**files, "pusht.py": b"boom", "data/x.pkl": b"boom", "meta/run.sh": b"boom"})
    rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "pulled")
    assert not [name for name in contents(tmp_path / "pulled") if name.endswith((".py", ".pkl", ".sh"))]


@pytest.mark.parametrize("name", ["data/../../evil.parquet", "meta/../../../evil.json", "data//evil.parquet"])
def test_a_file_that_would_lie_outside_is_refused_and_nothing_is_written(rlsvc, hub, pushed, tmp_path, name):
    hub.put("dataset", "mylab/pusht", {**hub.files("dataset", "mylab/pusht"), name: b"boom"})
    (tmp_path / "here").mkdir()
    printed = rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "here" / "pulled", code=2)
    assert "would lie outside of its folder" in printed
    assert list((tmp_path / "here").iterdir()) == []


def test_what_is_no_dataset_on_the_hub_is_said(rlsvc, hub, tmp_path):
    hub.put("dataset", "mylab/texts", {"train.jsonl": b"{}"})
    printed = rlsvc("dataset", "pull", "mylab/texts", tmp_path / "x", code=2)
    assert "mylab/texts: is no LeRobot dataset, since it has no meta/info.json; it holds train.jsonl" in printed
    hub.put("dataset", "mylab/broken", {"meta/info.json": b"{}"})
    printed = rlsvc("dataset", "pull", "mylab/broken", tmp_path / "x", code=2)
    assert "codebase_version 'None', expected one of v3.0" in printed
    assert not (tmp_path / "x").exists()


def test_an_older_version_says_how_to_convert_it(rlsvc, hub, token_file):
    printed = rlsvc("dataset", "push", SAMPLES / "cr5_v21", "mylab/cr5", "--token-file", token_file, code=2)
    assert "LeRobot v2.1, and the hub gets v3.0; convert it: rlsvc dataset import" in printed
    printed = rlsvc("dataset", "push", SAMPLES / "pusht", "mylab/cr5", "--token-file", token_file, code=2)
    assert "no LeRobot dataset" in printed
    assert hub.requests == []


def test_a_dataset_that_cannot_be_used_is_not_pushed(rlsvc, hub, dataset, token_file):
    (dataset / "data" / "chunk-000" / "file-000.parquet").write_bytes(b"short")
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file, code=2)
    assert f"rlsvc dataset check {dataset}" in printed
    assert hub.requests == []


def test_a_dataset_that_is_being_recorded_is_not_pushed(rlsvc, hub, dataset, token_file):
    (dataset / ".recording" / "episode").mkdir(parents=True)
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file, code=2)
    assert "is being recorded" in printed
    assert hub.requests == []


def test_the_card_has_lerobots_tags_and_keeps_what_was_written(rlsvc, hub, pushed, dataset):
    card = hub.files("dataset", "mylab/pusht")["README.md"].decode()
    front, text = yaml.safe_load(card.split("---\n")[1]), card.split("---\n", 2)[2]
    assert front["tags"] == ["LeRobot"]
    assert front["task_categories"] == ["robotics"]
    assert front["configs"] == [{"config_name": "default", "data_files": "data/*/*.parquet"}]
    assert front["license"] == "mit"
    _, written = read_card(PUSHT)
    assert text.startswith(written.strip())
    assert "| episodes | 206 |" in text
    assert "| `observation.state` | float32 | 2 | px | agent_x, agent_y |" in text
    assert "- Push the T-shaped block onto the T-shaped target." in text
    assert 'LeRobotDataset("mylab/pusht")' in text


def test_a_licence_and_a_source_may_be_said_and_else_are_the_files(rlsvc, hub, dataset, token_file):
    words = ("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file)

    def front():
        return yaml.safe_load(hub.files("dataset", "mylab/pusht")["README.md"].decode().split("---\n")[1])

    rlsvc(*words, "--license", "cc-by-4.0", "--source", "our own table")
    assert (front()["license"], front()["source"]) == ("cc-by-4.0", "our own table")
    (dataset / "README.md").unlink()
    rlsvc(*words)
    assert (front()["license"], front()["license_name"], front()["license_link"]) == ("other", "mit-license", "LICENSE")
    (dataset / "LICENSE").unlink()
    rlsvc(*words)
    assert "license" not in front()
    assert "| licence | not stated |" in hub.files("dataset", "mylab/pusht")["README.md"].decode()
    assert "expected an identifier of the hub" in rlsvc(*words, "--license", "My Own", code=2)


def test_a_card_whose_metadata_is_no_yaml_is_said(rlsvc, hub, dataset, token_file):
    (dataset / "README.md").write_text("---\ntags: [a\n---\ntext\n")
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--token-file", token_file, code=2)
    assert "its metadata is not YAML" in printed


def test_a_dry_run_shows_the_card_and_sends_nothing(rlsvc, hub, dataset):
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", "--dry-run")
    assert "- LeRobot" in printed
    assert "data/chunk-000/file-000.parquet: 2.6 MiB" in printed
    assert hub.requests == []


def test_private_and_gated_datasets_need_the_token_of_somebody_who_may(rlsvc, hub, dataset, token_file, tmp_path):
    rlsvc("dataset", "push", dataset, "mylab/pusht", "--private", "--token-file", token_file)
    assert "no dataset repository 'mylab/pusht'" in rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "x", code=2)
    repo = hub.repos["dataset", "mylab/pusht"]
    repo.private, repo.gated = False, True
    printed = rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "x", code=2)
    assert f"is gated; ask for access on {hub.url}/datasets/mylab/pusht" in printed
    rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "x", "--token-file", token_file)


def test_where_a_dataset_was_pulled_from_is_known_until_it_is_changed(rlsvc, pushed, tmp_path):
    rlsvc("dataset", "pull", "mylab/pusht", tmp_path / "pulled")
    known = describe(tmp_path / "pulled")
    assert (known.hub, known.commit, known.licence) == ("mylab/pusht", pushed.branches["main"], "mit")
    assert (known.episodes, known.steps) == (206, 25650)
    info = json.loads((tmp_path / "pulled/meta/info.json").read_text())
    (tmp_path / "pulled/meta/info.json").write_text(json.dumps({**info, "total_episodes": 207}))
    assert describe(tmp_path / "pulled").hub == ""


def test_a_card_that_would_hold_the_token_is_not_sent(rlsvc, hub, dataset, token_file):
    words = ("--source", f"see {TOKEN}", "--token-file", token_file)
    printed = rlsvc("dataset", "push", dataset, "mylab/pusht", *words, code=2)
    assert "README.md would hold the token" in printed
    assert TOKEN not in printed
    assert hub.requests == []


def test_a_note_of_the_origin_is_read_as_it_was_written(dataset):
    write_origin(dataset, "mylab/pusht", "f" * 40)
    assert describe(dataset).commit == "f" * 40
    assert len(read_meta(dataset).episodes) == 206
