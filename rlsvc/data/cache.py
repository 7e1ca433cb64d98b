"""What is kept beside a dataset so as not to be computed twice: statistics, and decoded video frames.

Everything is keyed by the bytes that it was made from, so a dataset that changed never gets what belonged to the old
one. A cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.data.lerobot_meta import VideoSpan
from rlsvc.data.normalize import Stats, compute_stats
from rlsvc.data.video import count_frames, decode_frames
from rlsvc.spec.data import DatasetSpec

FOLDER = ".rlsvc"


def content_hash(path: str | Path) -> str:
    """32 hex digits over names, sizes and bytes of a dataset's files (a folder, or one file); its cache is left out.

    Args:
        path: of the dataset.

    Raises:
        DatasetError: there is nothing at `path`.
    """
    path = Path(path)
    if not path.exists():
        raise DatasetError(f"{path}: no such file or folder")
    files = (
        [path]
        if path.is_file()
        else sorted(p for p in path.rglob("*") if p.is_file() and FOLDER not in p.relative_to(path).parts)
    )
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        name = file.name if file == path else file.relative_to(path).as_posix()
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        _update(digest, file)
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, file: Path) -> None:
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)


def cache_folder(path: str | Path) -> Path:
    """Where a dataset's cache lies: `.rlsvc` in its folder, or, where that is read-only, a folder of the user's.

    `RLSVC_CACHE` moves the user's folder (~/.cache/rlsvc).
    """
    path = Path(path).resolve()
    folder = (path if path.is_dir() else path.parent) / FOLDER
    if not _writable(folder if folder.exists() else folder.parent):
        base = Path(os.environ.get("RLSVC_CACHE") or Path.home() / ".cache" / "rlsvc")
        folder = base / hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    # A dataset that lies in a git work tree does not get its cache committed.
    ignore = folder / ".gitignore"
    if not ignore.exists():
        ignore.write_text("*\n")
    return folder


def dataset_stats(dataset: DatasetSpec, keys: Sequence[str]) -> dict[str, Stats]:
    """Statistics of these features over the episodes that the spec selects, from the cache where the data is unchanged.

    Args:
        dataset: path, and which tasks and episodes.
        keys: names of numeric features; images and texts have no statistics here.

    Raises:
        DatasetError: as `load_table`.
    """
    from rlsvc.data.load import load_table

    selection = {
        "tasks": sorted(dataset.tasks or ()),
        "episodes": sorted(dataset.episodes or ()),
        "format": dataset.format,
    }
    selection["all"] = [dataset.tasks is None, dataset.episodes is None]
    key = hashlib.blake2b(
        f"{content_hash(dataset.path)} {json.dumps(selection, sort_keys=True)}".encode(), digest_size=16
    )
    path = cache_folder(dataset.path) / f"stats-{key.hexdigest()}.json"
    known = _read_stats(path)
    missing = [name for name in keys if name not in known]
    if missing:
        columns = load_table(dataset, missing).columns
        known |= {name: compute_stats(column) for name, column in columns.items()}
        write_json_atomically(path, {name: stats.to_json() for name, stats in known.items()})
    return {name: known[name] for name in keys}


def _read_stats(path: Path) -> dict[str, Stats]:
    # What cannot be read is computed again: nothing but time is lost.
    try:
        return {name: Stats.from_json(value) for name, value in json.loads(path.read_text("utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _writable(folder: Path) -> bool:
    # The mode is asked besides: root may write everywhere, and a data set marked read-only is to stay as it is.
    return bool(folder.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(folder, os.W_OK)


def write_json_atomically(path: Path, value: object) -> None:
    """Write JSON under a temporary name, then rename: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cached_frames(dataset: Path, spans: Sequence[VideoSpan], shape: tuple[int, ...]) -> np.ndarray:
    """The frames of these spans, end to end: [N, H, W, 3] uint8, read-only, mapped from the cache.

    They are decoded at the first use.

    Args:
        dataset: that the videos belong to, for its cache folder.
        spans: frames by order; a file's spans may come in any order.
        shape: (H, W, 3) as declared.

    Raises:
        DatasetError: a video cannot be read, has not one frame for each row, or another size; or no room on disk.
    """
    key = hashlib.blake2b(f"{shape}".encode(), digest_size=16)
    for span in spans:
        key.update(f"{span.first} {span.length} {span.total}\0".encode())
    for file in dict.fromkeys(span.path for span in spans):
        key.update(file.name.encode())
        _update(key, file)
    path = cache_folder(dataset) / f"frames-{key.hexdigest()}.npy"
    if not path.exists():
        _write_frames(path, spans, shape)
    return np.load(path, mmap_mode="r")


def _write_frames(path: Path, spans: Sequence[VideoSpan], shape: tuple[int, ...]) -> None:
    """Decode into a .npy file, written frame by frame (where a memory map crashes, a full disk is an error)."""
    for file, total in {span.path: span.total for span in spans}.items():
        if (got := count_frames(file)) != total:
            raise DatasetError(
                f"{file}: {got} frames, but {total} rows in the data; copy the video again or leave the camera out"
            )
    starts = np.cumsum([0, *(span.length for span in spans)])
    size = int(np.prod(shape))
    needed = int(starts[-1]) * size
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DatasetError(
            f"{path.parent}: {needed / 1e6:.0f} MB are needed for decoded video, {free / 1e6:.0f} MB are free; "
            "make room, or select fewer `episodes`"
        )
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as out:
            header = {"descr": "|u1", "fortran_order": False, "shape": (int(starts[-1]), *shape)}
            np.lib.format.write_array_header_1_0(out, header)
            begin = out.tell()
            for file in dict.fromkeys(span.path for span in spans):
                places = {
                    span.first + i: begin + (int(starts[n]) + i) * size
                    for n, span in enumerate(spans)
                    if span.path == file
                    for i in range(span.length)
                }
                _write_file(file, places, shape, out)
        temporary.replace(path)
    except OSError as error:
        raise DatasetError(
            f"{path.parent}: decoded video cannot be written ({error.strerror or error}); make room or set RLSVC_CACHE"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_file(file: Path, places: dict[int, int], shape: tuple[int, ...], out: BinaryIO) -> None:
    missing = len(places)
    for index, frame in enumerate(decode_frames(file)):
        if index not in places:
            continue
        if frame.shape != shape:
            raise DatasetError(f"{file}: frames are {frame.shape}, meta/info.json declares {shape}")
        out.seek(places[index])
        out.write(frame.tobytes())
        missing -= 1
        if not missing:
            return
    raise DatasetError(f"{file}: ends {missing} frames too early; copy the video again or leave the camera out")
