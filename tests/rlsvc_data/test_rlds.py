import numpy as np
import pytest

from rlsvc.core.errors import DatasetError
from rlsvc.data.rlds import declared_features, read_records, read_splits


def test_records_hold_the_published_episodes(sample):
    path = sample("bridge_rlds")
    (shard,) = read_splits(path)[0].shards
    episodes = list(read_records(shard))
    assert len(episodes) == 2
    first = episodes[0]
    assert first["steps/action"].reshape(10, 7).dtype == np.float32
    assert first["steps/is_first"].tolist() == [1] + [0] * 9
    assert first["steps/language_instruction"][0].decode() == "put cup from counter or drying rack into sink"
    assert first["steps/observation/image_0"][0].startswith(b"\xff\xd8")
    assert set(first) == set(declared_features(path))


def test_splits_name_their_shards(sample):
    splits = {split.name: split for split in read_splits(sample("bridge_rlds"))}
    assert list(splits) == ["train", "val"]
    assert [path.name for path in splits["val"].shards] == ["bridge_dataset-val.tfrecord-00000-of-00001"]


@pytest.mark.parametrize("damage", [b"\xff" * 60, b"not a record at all, but long enough to be taken for one"])
def test_a_file_that_is_no_tfrecord_is_refused(damage, tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(damage)
    with pytest.raises(DatasetError, match=r"x\.tfrecord: ends inside a record"):
        list(read_records(path))


def test_a_record_that_is_no_example_is_refused(tmp_path):
    path = tmp_path / "x.tfrecord"
    for content in (b"\x0a\x05hello", b"\x0a\x7f", b"\x0b", b"\x80" * 12):
        path.write_bytes(len(content).to_bytes(8, "little") + b"\0" * 4 + content + b"\0" * 4)
        with pytest.raises(DatasetError, match=r"the record at byte 0 is not a tf\.train\.Example"):
            list(read_records(path))


def test_negative_integers_survive(tmp_path):
    # Example{1: Features{1: entry{1: "a", 2: Feature{3: Int64List{1: packed [-1, 300]}}}}}
    varints = b"\xff" * 9 + b"\x01" + b"\xac\x02"

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    example = field(1, field(1, field(1, b"a") + field(2, field(3, field(1, varints)))))
    path = tmp_path / "x.tfrecord"
    path.write_bytes(len(example).to_bytes(8, "little") + b"\0" * 4 + example + b"\0" * 4)
    assert next(read_records(path))["a"].tolist() == [-1, 300]
