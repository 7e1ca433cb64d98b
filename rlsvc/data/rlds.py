"""RLDS datasets (TFDS folders of .tfrecord files): their metadata and raw episodes, without tensorflow.

A record is one episode as a tf.train.Example: by name a flat list of byte strings, floats or integers over its steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.lerobot_meta import read_json

RawEpisode = dict[str, list[bytes] | np.ndarray]


@dataclass(frozen=True)
class Split:
    """A split as dataset_info.json declares it: shard files with their number of episodes, and its size in bytes."""

    name: str
    shards: dict[Path, int]
    num_bytes: int


def is_rlds(path: Path) -> bool:
    """Whether a folder holds a TFDS dataset."""
    return (path / "dataset_info.json").exists() and (path / "features.json").exists()


def read_splits(path: Path) -> list[Split]:
    """The declared splits.

    Raises:
        DatasetError: dataset_info.json is damaged, or of another layout.
    """
    info = read_json(path / "dataset_info.json")
    splits = []
    try:
        for split in info["splits"]:
            lengths = [int(length) for length in split["shardLengths"]]
            stem = f"{info['name']}-{split['name']}.{info.get('fileFormat', 'tfrecord')}"
            shards = {path / f"{stem}-{i:05d}-of-{len(lengths):05d}": length for i, length in enumerate(lengths)}
            splits.append(Split(split["name"], shards, int(split["numBytes"])))
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(
            f"{path / 'dataset_info.json'}: not in TFDS's layout ({type(error).__name__}: {error})"
        ) from error
    return splits


def declared_features(path: Path) -> list[str]:
    """Flat feature names of features.json, as they stand in the records (`steps/observation/image_0`).

    Raises:
        DatasetError: features.json is damaged.
    """
    return sorted(_flatten(read_json(path / "features.json"), ""))


def _flatten(node: dict, prefix: str) -> list[str]:
    if "featuresDict" in node:
        items = node["featuresDict"]["features"].items()
        return [name for key, child in items for name in _flatten(child, f"{prefix}/{key}" if prefix else key)]
    if "sequence" in node:
        return _flatten(node["sequence"]["feature"], prefix)
    return [prefix]


def read_records(path: Path) -> Iterator[RawEpisode]:
    """The episodes of one .tfrecord file, in order.

    Raises:
        DatasetError: the file is missing, truncated or not a tfrecord.
    """
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror or error}; copy the dataset again") from error
    at = 0
    while at < len(data):
        # length (8 bytes), its checksum (4), the record, its checksum (4)
        length = struct.unpack_from("<Q", data, at)[0] if at + 12 <= len(data) else len(data)
        if at + 16 + length > len(data):
            raise DatasetError(
                f"{path}: ends inside a record at byte {at} of {len(data)}; it is truncated, copy it again"
            )
        try:
            yield _example(data[at + 12 : at + 12 + length])
        except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
            raise DatasetError(
                f"{path}: the record at byte {at} is not a tf.train.Example ({error}); copy it again"
            ) from error
        at += 16 + length


def _example(data: memoryview) -> RawEpisode:
    episode: RawEpisode = {}
    for features in _messages(data, 1):
        for entry in _messages(features, 1):
            (key,), (value,) = _messages(entry, 1), _messages(entry, 2)
            episode[bytes(key).decode()] = _feature(value)
    return episode


def _feature(data: memoryview) -> list[bytes] | np.ndarray:
    """bytes_list (1), float_list (2) or int64_list (3); numbers are packed or not."""
    for values in _messages(data, 1):
        return [bytes(value) for value in _messages(values, 1)]
    for values in _messages(data, 2):
        return np.frombuffer(b"".join(bytes(value) for value in _messages(values, 1)), "<f4")
    integers: list[int] = []
    for values in _messages(data, 3):
        for _, value in _fields(values):
            integers.extend([value] if isinstance(value, int) else _varints(value))
    return np.asarray(integers, np.uint64).astype(np.int64)


def _messages(data: memoryview, number: int) -> list[memoryview]:
    """The fields of this number, which must not be plain integers."""
    return [value for got, value in _fields(data) if got == number and not isinstance(value, int)]


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Field number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("a field is longer than its message")
        yield number, data[at : at + size]
        at += size


def _varints(data: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        values.append(value)
    return values


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
