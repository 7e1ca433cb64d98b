import json

import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data import cache
from rlsvc.data.cache import cache_folder, content_hash, dataset_stats
from rlsvc.data.load import load_table
from rlsvc.data.normalize import compute_stats
from rlsvc.spec.data import DatasetSpec


def spec(path, **fields) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": str(path), **fields})


def test_the_hash_follows_bytes_and_names_but_not_the_cache(sample):
    path = sample("cr5_v21")
    before = content_hash(path)
    dataset_stats(spec(path), ["action"])
    assert content_hash(path) == before
    file = path / "data/chunk-000/episode_000000.parquet"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    changed = content_hash(path)
    assert changed != before
    file.rename(file.with_name("episode_000009.parquet"))
    assert content_hash(path) not in (before, changed)


def test_moving_bytes_from_one_file_to_the_next_changes_the_hash(tmp_path):
    for name, parts in (("one", (b"ab", b"c")), ("two", (b"a", b"bc"))):
        (tmp_path / name).mkdir()
        for file, part in zip("xy", parts, strict=True):
            (tmp_path / name / file).write_bytes(part)
    assert content_hash(tmp_path / "one") != content_hash(tmp_path / "two")


def test_nothing_at_a_path_has_no_hash(tmp_path):
    with pytest.raises(DatasetError, match="no such file or folder"):
        content_hash(tmp_path / "nothing")


def test_cached_statistics_are_those_of_the_data(sample):
    path = sample("cr5_v21")
    expected = compute_stats(load_table(spec(path)).columns["action"])
    for _ in range(2):
        got = dataset_stats(spec(path), ["action"])["action"]
        assert got.to_json() == expected.to_json()
    assert len(list((path / ".rlsvc").glob("stats-*.json"))) == 1


def test_unchanged_data_is_not_read_again(sample, monkeypatch):
    path = sample("cr5_v21")
    first = dataset_stats(spec(path), ["action"])["action"]

    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(cache, "compute_stats", never)
    assert dataset_stats(spec(path), ["action"])["action"].to_json() == first.to_json()
    with pytest.raises(AssertionError):
        dataset_stats(spec(path, episodes=[0]), ["action"])


def test_changed_data_never_gets_the_old_statistics(sample):
    path = sample("pusht/pusht_first3.npz")
    before = dataset_stats(spec(path), ["action"])["action"]
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "action": arrays["action"] + 1})
    after = dataset_stats(spec(path), ["action"])["action"]
    assert np.allclose(after.mean, before.mean + 1)


def test_each_selection_of_episodes_has_its_own_statistics(sample):
    path = sample("cr5_v21")
    one, both = (dataset_stats(spec(path, episodes=e), ["action"])["action"] for e in ([0], [0, 2]))
    assert (one.count, both.count) == (197, load_table(spec(path), ["action"]).num_steps)


def test_a_damaged_cache_file_is_computed_again(sample):
    path = sample("cr5_v21")
    expected = dataset_stats(spec(path), ["action"])["action"].to_json()
    (file,) = (path / ".rlsvc").glob("stats-*.json")
    for damage in ("", "{", json.dumps({"action": {"mean": [0]}}), "[]"):
        file.write_text(damage)
        assert dataset_stats(spec(path), ["action"])["action"].to_json() == expected


def test_a_read_only_dataset_is_left_as_it_is(sample, monkeypatch, tmp_path):
    path = sample("cr5_v21")
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "elsewhere"))
    path.chmod(0o555)
    try:
        dataset_stats(spec(path), ["action"])
        assert not (path / ".rlsvc").exists()
        assert cache_folder(path).is_relative_to(tmp_path / "elsewhere")
    finally:
        path.chmod(0o755)


def test_decoded_frames_are_mapped_from_disk_and_decoded_once(sample, monkeypatch):
    path = sample("gr1_v20")
    camera = "observation.images.ego_view"
    first = load_table(spec(path, episodes=[4]), [camera]).columns[camera]
    assert isinstance(first, np.memmap)
    assert not first.flags.writeable

    def never(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(cache, "decode_frames", never)
    again = load_table(spec(path, episodes=[4]), [camera]).columns[camera]
    assert np.array_equal(first, again)
    video = path / "videos/chunk-000" / camera / "episode_000004.mp4"
    video.write_bytes(video.read_bytes() + b"\0")
    with pytest.raises(AssertionError):
        load_table(spec(path, episodes=[4]), [camera])


def test_a_full_disk_is_one_clear_message_and_leaves_nothing(sample, monkeypatch):
    path = sample("gr1_v20")
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: cache.shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(DatasetError, match=r"64 MB are needed for decoded video, 1 MB are free"):
        load_table(spec(path, episodes=[4]), ["observation.images.ego_view"])
    assert [p.name for p in (path / ".rlsvc").iterdir()] == [".gitignore"]


def test_a_disk_that_fills_up_while_decoding_leaves_no_half_file(sample, monkeypatch):
    path = sample("gr1_v20")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write_file", no_space)
    with pytest.raises(DatasetError, match="No space left on device"):
        load_table(spec(path, episodes=[4]), ["observation.images.ego_view"])
    assert [p.name for p in (path / ".rlsvc").iterdir()] == [".gitignore"]
