"""Policies that are pushed to the stand-in hub and pulled from it, by huggingface_hub itself."""

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hub_server import PART
from shared_bundle import TOKEN, make_bundle

from rlsvc.store.bundle import read_bundle
from rlsvc.store.hub import Hub, Repo
from rlsvc.store.registry import Registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pushed(rlsvc, hub, bundle, token_file):
    """The bundle on the hub, as mylab/demo."""
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    return hub.repos["model", "mylab/demo"]


def edit_on_the_hub(hub, change, name="mylab/demo"):
    """A commit by somebody else: `change` gets the files by path."""
    files = hub.files("model", name)
    change(files)
    hub.put("model", name, files)


def hidden(folder):
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def test_a_bundle_that_was_pushed_is_pulled_bit_for_bit(rlsvc, hub, pushed, bundle, tmp_path):
    assert pushed.history() == ["initial commit", f"Policy bundle {read_bundle(bundle).id[:12]}"]
    printed = rlsvc("policies", "pull", "mylab/demo", tmp_path / "pulled")
    assert f"mylab/demo at commit {pushed.branches['main']}" in printed
    there = {file.name: file.read_bytes() for file in (tmp_path / "pulled").iterdir()}
    assert there == {file.name: file.read_bytes() for file in bundle.iterdir()}
    assert not hidden(tmp_path)


def test_the_same_bundle_twice_makes_one_commit(rlsvc, pushed, bundle, token_file):
    before = pushed.history()
    printed = rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    assert "holds this already, there is no new commit" in printed
    assert pushed.history() == before


def test_a_token_in_the_environment_does_as_one_in_a_file(rlsvc, hub, bundle, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "as mylab" in rlsvc("policies", "push", bundle, "lab/demo", "--message", "the first one")
    assert hub.repos["model", "lab/demo"].history()[-1] == "the first one"


def test_files_that_only_the_bundle_before_had_go_and_those_of_others_stay(rlsvc, hub, tmp_path, token_file):
    old = make_bundle(tmp_path / "old", files={"tokenizer.model": b"pieces"})
    rlsvc("policies", "push", old, "mylab/demo", "--token-file", token_file)
    edit_on_the_hub(hub, lambda files: files.update({"LICENSE": b"mine", "notes.json": b"{}"}))
    new = make_bundle(tmp_path / "new", params={"net.bias": np.ones(3, np.float32)})
    rlsvc("policies", "push", new, "mylab/demo", "--token-file", token_file)
    there = hub.files("model", "mylab/demo")
    assert there.keys() == {".gitattributes", "LICENSE", "notes.json", "README.md", "bundle.json", "params.safetensors"}
    assert there["params.safetensors"] == (new / "params.safetensors").read_bytes()


@pytest.mark.parametrize("broken", ["PUT /lfs/*", "POST */commit/*", "POST */preupload/*"])
def test_a_push_that_fails_midway_publishes_nothing_and_is_repeated(rlsvc, hub, bundle, token_file, broken):
    hub.fail[broken] = 400
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file, code=2)
    assert hub.files("model", "mylab/demo").keys() == {".gitattributes"}
    hub.fail.clear()
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    assert len(hub.repos["model", "mylab/demo"].history()) == 2
    assert {"bundle.json", "params.safetensors"} < hub.files("model", "mylab/demo").keys()


def test_a_push_that_is_killed_midway_publishes_nothing_and_is_repeated(rlsvc, hub, bundle, token_file, tmp_path):
    reached, go_on = threading.Event(), threading.Event()
    hub.before["PUT /lfs/*"] = lambda: (reached.set(), go_on.wait(60))
    script = "from rlsvc.cli import main\nimport sys\nsys.argv[0] = 'rlsvc'\nmain()"
    words = ["policies", "push", str(bundle), "mylab/demo", "--token-file", str(token_file)]
    environment = os.environ | {"HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", script, *words], cwd=tmp_path, env=environment) as process:
        assert reached.wait(120)
        process.kill()
    go_on.set()
    hub.before.clear()
    assert hub.files("model", "mylab/demo").keys() == {".gitattributes"}
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    assert len(hub.repos["model", "mylab/demo"].history()) == 2


def test_a_commit_by_somebody_else_meanwhile_is_not_overwritten(rlsvc, hub, pushed, tmp_path, token_file):
    new = make_bundle(tmp_path / "new", params={"net.bias": np.ones(3, np.float32)})
    theirs = {"README.md": b"---\ntags: [theirs]\n---\n"}
    hub.before["POST */commit/*"] = lambda: edit_on_the_hub(hub, lambda files: files.update(theirs))
    printed = rlsvc("policies", "push", new, "mylab/demo", "--token-file", token_file, code=2)
    assert "it changed meanwhile" in printed
    assert "push again" in printed
    assert hub.files("model", "mylab/demo")["README.md"] == theirs["README.md"]


def test_a_gitignore_in_the_repository_leaves_nothing_out(rlsvc, hub, bundle, token_file, tmp_path):
    hub.put("model", "mylab/demo", {".gitignore": b"*.safetensors\n*.json\n"})
    rlsvc("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    rlsvc("policies", "pull", "mylab/demo", tmp_path / "pulled")
    assert read_bundle(tmp_path / "pulled").id == read_bundle(bundle).id


def test_a_branch_is_made_and_main_stays_as_it_was(rlsvc, hub, pushed, tmp_path, token_file):
    main = pushed.branches["main"]
    new = make_bundle(tmp_path / "new", params={"net.bias": np.ones(3, np.float32)})
    printed = rlsvc("policies", "push", new, "mylab/demo", "--revision", "wide", "--token-file", token_file)
    assert "branch wide" in printed
    assert pushed.branches["main"] == main
    assert len(pushed.history("wide")) == 3
    rlsvc("policies", "pull", "mylab/demo@wide", tmp_path / "wide")
    assert read_bundle(tmp_path / "wide").id == read_bundle(new).id


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_its_commit_is_said(rlsvc, hub, pushed, tmp_path, token_file):
    first, first_id = pushed.branches["main"], read_bundle(tmp_path / "bundle").id
    pushed.tags["v1"] = first
    new = make_bundle(tmp_path / "new", params={"net.bias": np.ones(3, np.float32)})
    rlsvc("policies", "push", new, "mylab/demo", "--token-file", token_file)
    for revision in ("v1", first):
        printed = rlsvc("policies", "pull", f"mylab/demo@{revision}", tmp_path / revision)
        assert f"at commit {first}" in printed
        assert read_bundle(tmp_path / revision).id == first_id
    rlsvc("policies", "pull", "mylab/demo", tmp_path / "newest")
    assert read_bundle(tmp_path / "newest").id == read_bundle(new).id


@pytest.mark.parametrize("revision", ["v1", "a" * 40])
def test_what_is_no_branch_cannot_be_pushed_to(rlsvc, pushed, bundle, token_file, revision):
    pushed.tags["v1"] = pushed.branches["main"]
    printed = rlsvc(
        "policies", "push", bundle, "mylab/demo", "--revision", revision, "--token-file", token_file, code=2
    )
    assert f"--revision {revision} is a commit or a tag, expected a branch" in printed


def test_private_makes_a_private_repository_and_never_pushes_to_a_public_one(
    rlsvc, hub, pushed, bundle, token_file, tmp_path
):
    words = ("policies", "push", bundle)
    rlsvc(*words, "mylab/secret", "--private", "--token-file", token_file)
    assert hub.repos["model", "mylab/secret"].private
    assert "may not be seen (no token was given)" in rlsvc("policies", "pull", "mylab/secret", tmp_path / "x", code=2)
    rlsvc("policies", "pull", "mylab/secret", tmp_path / "x", "--token-file", token_file)
    before = pushed.history()
    other = make_bundle(tmp_path / "other", params={"net.bias": np.ones(3, np.float32)})
    printed = rlsvc("policies", "push", other, "mylab/demo", "--private", "--token-file", token_file, code=2)
    assert "is public already" in printed
    assert pushed.history() == before


def test_a_dry_run_shows_the_card_and_the_files_and_asks_nobody(rlsvc, hub, bundle):
    printed = rlsvc("policies", "push", bundle, "mylab/demo", "--dry-run")
    assert "library_name: rlsvc" in printed
    assert "params.safetensors: " in printed
    assert "3 files, " in printed
    assert hub.requests == []


def test_only_a_bundles_own_files_are_pulled(rlsvc, hub, pushed, tmp_path):
    edit_on_the_hub(
        hub, lambda files: files.update({"evil.py": b"boom", "evil.pkl": b"boom", "x/params.safetensors": b""})
    )
    rlsvc("policies", "pull", "mylab/demo", tmp_path / "pulled")
    assert {file.name for file in (tmp_path / "pulled").iterdir()} == {"bundle.json", "params.safetensors"}
    assert not [path for _, path, _ in hub.requests if "evil" in path]


def forge(files, **entries):
    """Give the manifest more entries, or others."""
    meta = json.loads(files["bundle.json"])
    meta["manifest"] |= entries
    files["bundle.json"] = json.dumps(meta).encode()


SUM = "0" * 64
CHANGES = {
    "a pickle": (
        lambda files: (files.update({"evil.pkl": b"boom"}), forge(files, **{"evil.pkl": {"sha256": SUM, "bytes": 4}})),
        "its manifest names 'evil.pkl'",
    ),
    "code": (
        lambda files: (files.update({"evil.py": b"boom"}), forge(files, **{"evil.py": {"sha256": SUM, "bytes": 4}})),
        "its manifest names 'evil.py'",
    ),
    "a path": (
        lambda files: forge(files, **{"../../evil.json": {"sha256": SUM, "bytes": 4}}),
        "is not a plain file name",
    ),
    "a file that is not there": (
        lambda files: forge(files, **{"tokenizer.model": {"sha256": SUM, "bytes": 4}}),
        "'tokenizer.model' is in its manifest, but not in the repository",
    ),
    "other weights": (
        lambda files: files.update({"params.safetensors": files["params.safetensors"][::-1]}),
        "'params.safetensors' is not the file that its manifest names",
    ),
    "another contract": (
        lambda files: files.update(
            {"bundle.json": files["bundle.json"].replace(b'"rate_hz": 10.0', b'"rate_hz": 20.0')}
        ),
        "its contents do not give its id",
    ),
    "a huge bundle.json": (
        lambda files: files.update({"bundle.json": files["bundle.json"] + b" " * 2**23}),
        "bytes, at most 8388608 are read",
    ),
    "no JSON": (lambda files: files.update({"bundle.json": b"{"}), "not JSON"),
    "no bundle": (lambda files: files.pop("bundle.json"), "is no policy of rlsvc, since it has no bundle.json"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_bundle_that_was_changed_on_the_hub_is_refused_and_leaves_nothing(rlsvc, hub, pushed, tmp_path, what):
    change, message = CHANGES[what]
    edit_on_the_hub(hub, change)
    (tmp_path / "here").mkdir()
    printed = rlsvc("policies", "pull", "mylab/demo", tmp_path / "here" / "pulled", code=2)
    assert message in printed
    assert "mylab/demo" in printed
    assert list((tmp_path / "here").iterdir()) == []
    assert "Traceback" not in printed


def test_bytes_that_changed_on_their_way_are_refused_and_leave_nothing(rlsvc, hub, pushed, tmp_path):
    (large,) = (stored.lfs for stored in pushed.find("main").files.values() if stored.lfs)
    data = bytearray(hub.object(large).read_bytes())
    data[-1] ^= 1
    hub.object(large).write_bytes(data)
    printed = rlsvc("policies", "pull", "mylab/demo", tmp_path / "pulled", code=2)
    assert "'params.safetensors' did not come as the hub has it" in printed
    assert not (tmp_path / "pulled").exists()
    assert not hidden(tmp_path)


def test_a_target_with_something_in_it_is_left_alone_and_an_empty_one_is_taken(rlsvc, hub, pushed, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("mine")
    assert "is there already" in rlsvc("policies", "pull", "mylab/demo", target, code=2)
    assert [file.name for file in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    rlsvc("policies", "pull", "mylab/demo", target)
    assert (target / "bundle.json").is_file()


def test_a_registered_policy_is_pushed_by_its_alias(rlsvc, hub, bundle, token_file, tmp_path):
    registry = Registry(tmp_path / "runs")
    registry.promote("demo", registry.register(bundle, "demo"), "production")
    words = ("--root", tmp_path / "runs", "--token-file", token_file)
    rlsvc("policies", "push", "models:/demo@production", "mylab/demo", *words)
    assert hub.files("model", "mylab/demo")["bundle.json"] == (bundle / "bundle.json").read_bytes()


def test_a_large_file_goes_in_parts_and_comes_back_without_being_held_whole(hub, tmp_path):
    size = 64 * PART + 7
    large = tmp_path / "large.mp4"
    with large.open("wb") as stream:
        for number in range(65):
            stream.write(bytes([number]) * min(PART, size - number * PART))
    client, repo = Hub(TOKEN), Repo("dataset", "mylab/large")
    tracemalloc.start()
    try:
        commit = client.publish(repo, {"videos/large.mp4": large}, message="large").commit
        client.download(repo, commit, client.files(repo, commit).values(), tmp_path / "back")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len([path for method, path, _ in hub.requests if method == "PUT"]) == 65
    assert (tmp_path / "back" / "videos" / "large.mp4").read_bytes() == large.read_bytes()
    assert peak < 3 * size / 4, "huggingface_hub reads 10 MiB at a time, and holds four of them"


def test_the_token_goes_to_the_hub_alone_and_stands_nowhere(rlsvc, hub, bundle, token_file, tmp_path, caplog):
    caplog.set_level(0)
    printed = rlsvc("policies", "push", bundle, "mylab/demo", "--private", "--token-file", token_file)
    printed += rlsvc("policies", "pull", "mylab/demo", tmp_path / "pulled", "--token-file", token_file)
    for status in (400, 401, 403, 404, 409, 412, 413):
        hub.fail = {"POST */commit/*": status}
        other = make_bundle(tmp_path / f"b{status}", params={"net.bias": np.full(3, status, np.float32)})
        printed += rlsvc("policies", "push", other, "mylab/demo", "--token-file", token_file, code=2)
    hub.fail = {}
    sent_to = {path.split("/")[1] for _, path, authorization in hub.requests if TOKEN in authorization}
    assert sent_to == {"api", "mylab", "lfs"}
    # Of what lies at another host only the hub's own check of an upload sees it.
    assert all(path.endswith("/verify") for _, path, auth in hub.requests if auth and path.startswith(("/lfs", "/cdn")))
    assert TOKEN not in printed + caplog.text
    assert not any(TOKEN.encode() in content for content in hub.files("model", "mylab/demo").values())
    pulled = [file.read_bytes() for file in (tmp_path / "pulled").rglob("*") if file.is_file()]
    assert not any(TOKEN.encode() in content for content in pulled)


def test_text_that_holds_the_token_is_never_sent(rlsvc, hub, bundle, token_file):
    words = ("policies", "push", bundle, "mylab/demo", "--token-file", token_file)
    printed = rlsvc(*words, "--message", f"with {TOKEN}", code=2)
    assert "would hold the token" in printed
    assert TOKEN not in printed
    assert hub.requests == []
