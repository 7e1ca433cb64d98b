"""Storages: a folder and an S3 alike, what fails, and runs that are committed to them."""

import hashlib
import json
import logging
from pathlib import Path

import pytest

from rlsvc.core.errors import NotFoundError, SpecError, UserError
from rlsvc.store.run_store import OBJECTS, RunStore, fetch_bundle
from rlsvc.store.storage import TRIES, Storage, StorageError, is_url, join


@pytest.fixture(params=["folder", "file", "s3", "memory"])
def url(request, tmp_path) -> str:
    """A place of each kind: what pyarrow knows, and one that fsspec brings."""
    if request.param == "s3":
        return request.getfixturevalue("s3").bucket(f"b{hashlib.md5(str(tmp_path).encode()).hexdigest()}") + "/runs"
    return {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": f"memory://{tmp_path}"}[
        request.param
    ]


def test_what_was_written_is_read_listed_and_deleted(url, tmp_path):
    storage = Storage(url)
    assert storage.read("x/a.json") is None
    assert storage.names("") == storage.names("x") == []
    storage.write("x/a.json", b"1")
    storage.write("x/a.json", b"22")
    (tmp_path / "big").write_bytes(bytes(range(256)) * 40_000)
    storage.upload(tmp_path / "big", "x/y/big")
    assert (storage.read("x/a.json"), storage.size("x/a.json"), storage.size("x")) == (b"22", 2, None)
    assert (storage.names(""), storage.names("x")) == (["x"], ["a.json", "y"])
    storage.download("x/y/big", tmp_path / "got" / "big", hashlib.sha256((tmp_path / "big").read_bytes()).hexdigest())
    assert (tmp_path / "got" / "big").read_bytes() == (tmp_path / "big").read_bytes()
    storage.delete("x/a.json")
    storage.delete("x/a.json")
    assert storage.names("x") == ["y"]
    storage.delete_folder("x/y")
    assert storage.size("x/y/big") is None


def test_a_damaged_object_does_not_become_a_file(url, tmp_path):
    storage = Storage(url)
    storage.write("a", b"right")
    with pytest.raises(UserError, match=r"a is damaged: its SHA-256 is .*expected 0000"):
        storage.download("a", tmp_path / "file", "0" * 64)
    assert not (tmp_path / "file").exists()
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_a_scheme_that_nothing_knows_is_refused():
    with pytest.raises(SpecError, match=r"nosuch://a/b: no file system for 'nosuch://'.*Expected a folder, s3://"):
        Storage("nosuch://a/b")


def test_what_fails_is_tried_again_and_then_raised(s3, caplog):
    s3.bucket("retries")
    storage = Storage("s3://nobody-made-this-bucket/runs", pause_s=0.01)
    with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match=f"cannot write a, {TRIES} times: .*"):
        storage.write("a", b"1")
    assert len([r for r in caplog.records if "again in" in r.message]) == TRIES - 1
    assert StorageError.exit_code == 75  # not a person's mistake: a job's next attempt is worth it


@pytest.mark.parametrize(
    ("root", "expected"), [("s3://b/r", True), ("runs", False), ("/a/b", False), ("file:///a", False), ("gs://b", True)]
)
def test_a_url_is_told_from_a_folder(root, expected):
    assert is_url(root) is expected


def test_parts_go_before_the_query_of_a_url():
    assert join("s3://b/r/?endpoint_override=x", "p", "n") == "s3://b/r/p/n?endpoint_override=x"
    assert join("s3://b/r", "p") == "s3://b/r/p"


def fill(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def bucket(s3, tmp_path) -> str:
    return s3.bucket(f"r{hashlib.md5(str(tmp_path).encode()).hexdigest()}") + "/runs"


def another_machine(monkeypatch, tmp_path: Path, name: str = "other") -> None:
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / name))


def test_a_run_comes_back_elsewhere_as_it_was_committed(bucket, tmp_path, monkeypatch):
    run = RunStore(bucket, "p", "n")
    fill(
        run.folder, spec="a", checkpoints__4__meta="m4", bundles__4__w="w", replay__rank0__x="no", **{".train__x": "no"}
    )
    run.commit(4)
    fill(run.folder, spec="b")  # after the commit
    another_machine(monkeypatch, tmp_path)
    other = RunStore(bucket, "p", "n")
    other.fetch()
    found = {str(p.relative_to(other.folder)): p.read_text() for p in other.folder.rglob("*") if p.is_file()}
    assert found.pop(".run_id") == run.manifest()["run"]
    assert found == {"spec": "a", "checkpoints/4/meta": "m4", "bundles/4/w": "w"}


def test_a_commit_uploads_what_is_new_and_lets_go_what_is_gone(bucket):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, spec="a", checkpoints__4__meta="m4")
    run.commit(4)
    before = set(Storage(run.url).names(OBJECTS))
    (run.folder / "checkpoints/4/meta").unlink()
    fill(run.folder, checkpoints__8__meta="m8")
    run.commit(8)
    after = set(Storage(run.url).names(OBJECTS))
    assert (len(before), len(after), len(before & after)) == (2, 2, 1)


def test_a_run_that_died_while_it_uploaded_is_what_was_committed_before(bucket, tmp_path, monkeypatch):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, spec="a", checkpoints__4__meta="m4")
    run.commit(4)
    fill(run.folder, spec="changed", checkpoints__8__meta="m8")
    write = Storage.write

    def die_at_the_manifest(self, key, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(Storage, "write", die_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        run.commit(8)
    monkeypatch.setattr(Storage, "write", write)
    another_machine(monkeypatch, tmp_path)
    other = RunStore(bucket, "p", "n")
    other.fetch()
    assert (other.folder / "spec").read_text() == "a"
    assert [p.name for p in (other.folder / "checkpoints").iterdir()] == ["4"]


def test_a_folder_that_is_further_than_its_storage_is_gone_on_from(bucket):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, **{"spec.yaml": "a"}, checkpoints__4__meta="m4")
    run.commit(4)
    fill(run.folder, checkpoints__8__meta="m8")  # whose upload failed
    run.fetch()
    assert (run.folder / "checkpoints/8/meta").read_text() == "m8"
    (run.folder / "checkpoints/8/meta").unlink()
    (run.folder / "checkpoints/8").rmdir()
    fill(run.folder, **{"spec.yaml": "b"})  # as far as the storage: then the storage has it
    run.fetch()
    assert (run.folder / "spec.yaml").read_text() == "a"


def test_what_is_further_here_but_of_another_run_of_that_name_is_neither_gone_on_from_nor_deleted(
    bucket, tmp_path, monkeypatch
):
    mine = RunStore(bucket, "p", "n")
    fill(mine.folder, **{"spec.yaml": "a"}, checkpoints__8__meta="m8")
    mine.commit(8)
    another_machine(monkeypatch, tmp_path)
    other = RunStore(bucket, "p", "n")
    other.delete()
    fill(other.folder, **{"spec.yaml": "b"}, checkpoints__4__meta="n4")
    other.commit(4)
    with pytest.raises(UserError, match=r"is at step 8 of another run of this name than s3://.*move that folder away"):
        mine.fetch()
    assert (mine.folder / "checkpoints/8/meta").read_text() == "m8"


def test_a_run_that_is_nowhere_and_an_object_that_is_gone_are_named(bucket, tmp_path, monkeypatch):
    run = RunStore(bucket, "p", "n")
    with pytest.raises(NotFoundError, match=r"--resume: there is no run at s3://.*/p/n"):
        run.fetch()
    fill(run.folder, spec="a")
    run.commit(1)
    (digest,) = Storage(run.url).names(OBJECTS)
    Storage(run.url).delete(f"{OBJECTS}/{digest}")
    another_machine(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="spec is missing"):
        RunStore(bucket, "p", "n").fetch()


def test_a_deleted_run_is_gone_here_and_there(bucket):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, spec="a")
    run.commit(1)
    run.delete()
    assert run.manifest() is None
    assert not run.folder.exists()
    assert Storage(run.url).names(OBJECTS) == []


def test_a_bundle_of_a_run_is_brought_by_its_url_and_changes_with_it(bucket):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, bundles__4__w="w", bundles__40__w="other")
    run.commit(4)
    first = fetch_bundle(f"{bucket}/p/n/bundles/4")
    assert [(p.name, p.read_text()) for p in first.iterdir()] == [("w", "w")]
    fill(run.folder, bundles__4__w="anew")
    run.commit(5)
    assert (fetch_bundle(f"{bucket}/p/n/bundles/4") / "w").read_text() == "anew"
    with pytest.raises(NotFoundError, match="nothing was committed there"):
        fetch_bundle(f"{bucket}/p/n/bundles/7")
    with pytest.raises(NotFoundError, match="expected ROOT/PROJECT/RUN/bundles/STEP"):
        fetch_bundle(f"{bucket}/p/n")


def test_the_manifest_says_what_each_file_is(bucket):
    run = RunStore(bucket, "p", "n")
    fill(run.folder, spec="abc")
    run.commit(3)
    body = json.loads(Storage(run.url).read("manifest.json") or b"")
    assert body == {"run": body["run"], "step": 3, "files": {"spec": [hashlib.sha256(b"abc").hexdigest(), 3]}}
