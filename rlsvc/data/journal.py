"""The journal: every chunk that a run has acknowledged, in the order of arrival, on disk. Replay's only store.

A folder of segments `<number of the first record>.journal`, each a row of records:

    header   magic "RLJ1" | worker, incarnation, number of the chunk | number of the record | bytes of meta, bytes of
             data | crc32 of meta and data | crc32 of the header before it
    meta     msgpack: group, name, dtype and shape of each array; the chunk's count of lost episodes
    data     the arrays' bytes, one after the other

What a kill can do: leave the last record short. It was never acknowledged, and opening the journal cuts it off. A
record that is whole but does not match its checksum was damaged later; that is refused by file and offset, since what
follows it can be trusted no more than it.

One process writes (a lock says so); any number may open it with `read_only` meanwhile and see the records that were
whole then. `append` hands the bytes to the operating system, so they survive the death of the process; `sync`, every
`sync_interval_s` at the latest, makes them survive the machine's.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import math
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from rlsvc.core.errors import BusyError, DatasetError, UserError
from rlsvc.core.types import Chunk
from rlsvc.core.wire import ARRAY_KINDS, WireError, array_from_bytes, pack, unpack
from rlsvc.data.commit import FULL, sync

logger = logging.getLogger(__name__)

SUFFIX = ".journal"
MAGIC = b"RLJ1"
HEADER = struct.Struct("<4s qqq q IQ I")
CHECK = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CHECK.size
VECTOR = 512
"""Buffers that one system call takes (the limit is at least 1024)."""


@dataclass(frozen=True)
class _Record:
    """Where a record is, and what its header says."""

    path: Path
    offset: int
    id: tuple[int, int, int]
    meta_bytes: int
    data_bytes: int
    crc: int

    @property
    def payload(self) -> int:
        return self.offset + HEADER_BYTES

    @property
    def end(self) -> int:
        return self.payload + self.meta_bytes + self.data_bytes


class Journal:
    """Append-only record of chunks; see the module. Not for several threads at once."""

    def __init__(
        self,
        folder: Path,
        *,
        read_only: bool = False,
        verify: bool = True,
        sync_interval_s: float = 1.0,
        segment_bytes: int = 256 * 2**20,
    ) -> None:
        """Open a journal, or begin one.

        Args:
            folder: made when it is not there.
            read_only: change nothing, and take no lock.
            verify: compare every record with its checksum now. Otherwise headers are, and records when they are read.
            sync_interval_s: longest time between appending and fsync, as long as appending goes on.
            segment_bytes: a new file is begun once the newest is as large.

        Raises:
            BusyError: another process writes it.
            DatasetError: damage; names file and offset.
        """
        self.folder = folder
        self._read_only = read_only
        self._sync_interval, self._segment_bytes = sync_interval_s, segment_bytes
        self._records: list[_Record] = []
        self._cursor_of: dict[tuple[int, int, int], int] = {}
        self._segment, self._end = folder, 0  # the newest file and where its records end
        self._file, self._lock = -1, -1
        self._unsynced, self._synced_at = False, time.monotonic()
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
        try:
            self._open(verify)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Records; the cursor after the last one."""
        return len(self._records)

    def __enter__(self) -> Self:
        """Itself; closed at the end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    def ids(self) -> Iterator[tuple[int, int, int]]:
        """Ids of all chunks, in the order of arrival."""
        return (record.id for record in self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(record.end - record.offset for record in self._records)

    def append(self, chunk: Chunk) -> int:
        """Write a chunk, so that it outlives this process. A chunk that is there already is not written again.

        Returns:
            The cursor: the number of records up to and with this one.

        Raises:
            UserError: the disk is full; all earlier records are whole.
            DatasetError: a column that is not numbers or booleans.
        """
        if chunk.id in self._cursor_of:
            return self._cursor_of[chunk.id]
        assert not self._read_only
        parts = {
            "": {"streams": chunk.streams, "offsets": chunk.offsets},
            "columns": chunk.columns,
            "ended": chunk.ended,
        }
        arrays = {(group, name): array for group, part in parts.items() for name, array in part.items()}
        for (_, name), array in arrays.items():
            if array.dtype.kind not in ARRAY_KINDS:
                raise DatasetError(f"journal: column '{name}' is {array.dtype}; only numbers and booleans are kept")
        described = [[*key, array.dtype.str, list(array.shape)] for key, array in arrays.items()]
        meta = pack({"arrays": described, "lost": chunk.lost})
        data = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
        crc = zlib.crc32(meta)
        for block in data:
            crc = zlib.crc32(block, crc)
        size = sum(len(block) for block in data)
        header = HEADER.pack(MAGIC, *chunk.id, len(self), len(meta), size, crc)
        if self._file < 0 or self._end >= self._segment_bytes:
            self._begin_segment()
        record = _Record(self._segment, self._end, chunk.id, len(meta), size, crc)
        self._write([memoryview(header + CHECK.pack(zlib.crc32(header)) + meta), *data])
        self._end = record.end
        self._records.append(record)
        self._cursor_of[chunk.id] = len(self)
        self._unsynced = True
        if time.monotonic() - self._synced_at >= self._sync_interval:
            self.sync()
        return len(self)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Chunk]:
        """Chunks of the records start .. stop, in order; None reads to the end. Arrays are read-only.

        Raises:
            DatasetError: a record is damaged, or the journal is shorter than `stop` (a cursor of another journal).
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise DatasetError(
                f"journal {self.folder} has {len(self)} records; {start} .. {stop} were asked for. It is not the "
                "journal that this cursor was taken from, or it was cut."
            )
        for path, records in itertools.groupby(self._records[start:stop], lambda record: record.path):
            with path.open("rb") as file:
                for record in records:
                    yield _decode(record, _read_payload(file.fileno(), record))

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        if self._unsynced:
            os.fsync(self._file)
        self._unsynced, self._synced_at = False, time.monotonic()

    def close(self) -> None:
        """Sync, and let another process write."""
        self._close_segment()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _close_segment(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
        self._file = -1

    def _begin_segment(self) -> None:
        self._close_segment()
        self._segment, self._end = self.folder / f"{len(self):012d}{SUFFIX}", 0
        self._file = os.open(self._segment, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        sync(self.folder)

    def _write(self, blocks: list[memoryview]) -> None:
        """All bytes at the end of the segment, or none."""
        blocks, at = [block for block in blocks if len(block)], self._end
        try:
            while blocks:
                written = os.pwritev(self._file, blocks[:VECTOR], at)
                at += written
                while blocks and written >= len(blocks[0]):
                    written -= len(blocks.pop(0))
                if written:
                    blocks[0] = blocks[0][written:]
        except OSError as error:
            os.ftruncate(self._file, self._end)
            if error.errno in FULL:
                raise UserError(
                    f"disk full: a chunk does not fit into the journal {self._segment} ({error.strerror}). The "
                    f"{len(self)} chunks before it are whole; free some space and go on with --resume."
                ) from error
            raise

    def _open(self, verify: bool) -> None:
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        for path in paths:
            self._close_segment()
            if path.name != f"{len(self):012d}{SUFFIX}":
                raise _damaged(path, 0, f"record {len(self)} should come next; a file before this one is missing")
            self._segment = path
            self._file = os.open(path, (os.O_RDONLY if self._read_only else os.O_RDWR) | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            self._end = self._scan(size, verify)
            if self._end == size:
                continue
            if path != paths[-1]:
                raise _damaged(path, self._end, "a record is cut short, although later files exist")
            if not self._read_only:
                logger.warning("journal %s: cut off an unfinished record, from byte %d to %d", path, self._end, size)
                os.ftruncate(self._file, self._end)
        # Whoever wrote it may have been killed before it synced.
        self._unsynced = self._file >= 0 and not self._read_only

    def _scan(self, size: int, verify: bool) -> int:
        """Take in the records of the segment that is open; gives the offset at which the whole ones end."""
        offset = 0
        while size - offset >= HEADER_BYTES:
            header = os.pread(self._file, HEADER_BYTES, offset)
            if CHECK.pack(zlib.crc32(header[: HEADER.size])) != header[HEADER.size :]:
                # Zeros up to the end: the machine died after the file had grown and before its bytes came.
                if _only_zeros(self._file, offset, size):
                    return offset
                raise _damaged(self._segment, offset, "this is not the header of a record")
            magic, worker, incarnation, chunk, number, meta_bytes, data_bytes, crc = HEADER.unpack(
                header[: HEADER.size]
            )
            if magic != MAGIC or number != len(self):
                raise _damaged(self._segment, offset, f"record {len(self)} should be here")
            record = _Record(self._segment, offset, (worker, incarnation, chunk), meta_bytes, data_bytes, crc)
            if record.end > size:
                return offset
            if verify:
                _read_payload(self._file, record)
            self._records.append(record)
            self._cursor_of[record.id] = len(self)
            offset = record.end
        return offset


def _read_payload(file: int, record: _Record) -> bytes:
    payload = os.pread(file, record.end - record.payload, record.payload)
    if len(payload) != record.end - record.payload or zlib.crc32(payload) != record.crc:
        raise _damaged(record.path, record.offset, f"chunk {record.id} does not match its checksum")
    return payload


def _decode(record: _Record, payload: bytes) -> Chunk:
    parts: dict[str, dict[str, np.ndarray]] = {"": {}, "columns": {}, "ended": {}}
    at = record.meta_bytes
    try:
        meta = unpack(payload[:at])
        for group, name, dtype, shape in meta["arrays"]:
            size = np.dtype(dtype).itemsize * math.prod(shape)
            parts[group][name] = array_from_bytes(payload[at : at + size], dtype, shape)
            at += size
        return Chunk(*record.id, **parts[""], columns=parts["columns"], ended=parts["ended"], lost=int(meta["lost"]))
    except (WireError, ValueError, TypeError, KeyError) as error:
        raise _damaged(record.path, record.offset, f"its arrays cannot be read ({error})") from error


def _damaged(path: Path, offset: int, what: str) -> DatasetError:
    return DatasetError(
        f"journal {path} is damaged at byte {offset}: {what}. Restore the file from a backup, or start a new run."
    )


def _only_zeros(file: int, offset: int, size: int) -> bool:
    while offset < size:
        block = os.pread(file, 2**20, offset)
        if not block or block.strip(b"\0"):
            return False
        offset += len(block)
    return True


def _lock(folder: Path) -> int:
    """A lock that the operating system gives back when this process ends, however it ends."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise BusyError(
            f"journal {folder} is being written by another process. Wait until that run has ended, or stop it."
        ) from error
    return lock
