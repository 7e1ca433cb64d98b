import contextlib
import dataclasses
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from chunks import episode, make_chunk

from rlsvc.core.errors import BusyError, DatasetError
from rlsvc.core.types import Chunk
from rlsvc.data.journal import HEADER_BYTES, Journal

SUFFIX = "*.journal"


def chunk(number: int, worker: int = 0) -> Chunk:
    made = make_chunk(number, {3: episode(number + 1, 3), 5: episode(number + 2, 1)}, worker)
    return dataclasses.replace(made, ended={"return": np.array([1.5, 2.5]), "success": np.array([True, False])}, lost=2)


def assert_equal(one: Chunk, other: Chunk) -> None:
    assert (one.id, one.lost) == (other.id, other.lost)
    for left, right in ((one.columns, other.columns), (one.ended, other.ended)):
        assert list(left) == list(right)
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
            assert left[name].dtype == right[name].dtype
    np.testing.assert_array_equal(one.streams, other.streams)
    np.testing.assert_array_equal(one.offsets, other.offsets)


def fill(folder: Path, count: int, **options) -> None:
    with Journal(folder, **options) as journal:
        for number in range(count):
            journal.append(chunk(number))


def numbers(folder: Path) -> list[int]:
    with Journal(folder, read_only=True) as journal:
        return [chunk.number for chunk in journal.read()]


def test_what_is_read_is_what_was_appended(tmp_path):
    with Journal(tmp_path) as journal:
        assert [journal.append(chunk(number)) for number in range(4)] == [1, 2, 3, 4]
        for number, found in enumerate(journal.read()):
            assert_equal(found, chunk(number))
        assert [found.number for found in journal.read(1, 3)] == [1, 2]
        assert list(journal.ids()) == [(0, 0, number) for number in range(4)]
    with Journal(tmp_path) as journal:
        assert len(journal) == 4
        assert journal.append(chunk(4)) == 5
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]


def test_a_chunk_that_is_sent_again_gets_its_old_cursor_and_is_not_written_twice(tmp_path):
    fill(tmp_path, 3)
    with Journal(tmp_path) as journal:
        assert journal.append(chunk(1)) == 2
        assert journal.append(chunk(1, worker=1)) == 4
        assert journal.append(chunk(1, worker=1)) == 4
        assert len(journal) == 4


def test_records_go_on_in_a_new_segment_when_one_is_full(tmp_path):
    fill(tmp_path, 10, segment_bytes=1500)
    names = sorted(path.name for path in tmp_path.glob(SUFFIX))
    assert len(names) > 3
    assert names[0] == "000000000000.journal"
    fill(tmp_path, 12, segment_bytes=1500)
    assert numbers(tmp_path) == list(range(12))


def test_strided_empty_and_many_columns_come_back_as_they_were(tmp_path):
    plain = chunk(0)
    strided = np.arange(24, dtype=np.float64).reshape(6, 4)[:, ::2]
    many = {f"extra{i}": np.full(6, i, np.int16) for i in range(1500)}  # more than one system call takes
    odd = dataclasses.replace(plain, columns={**plain.columns, "strided": strided, **many})
    with Journal(tmp_path) as journal:
        journal.append(odd)
        journal.append(make_chunk(1, {3: []}))
        assert_equal(next(journal.read()), odd)
        assert next(journal.read(1)).num_rows == 0


def test_texts_are_refused_by_name_and_leave_the_journal_as_it_was(tmp_path):
    bad = dataclasses.replace(chunk(0), columns={"task": np.array(["push"] * 6)})
    with Journal(tmp_path) as journal:
        with pytest.raises(DatasetError, match="'task' is <U4"):
            journal.append(bad)
        assert journal.append(chunk(0)) == 1


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path):
    with Journal(tmp_path) as journal:
        journal.append(chunk(0))
        with pytest.raises(BusyError, match="written by another process"):
            Journal(tmp_path)
        assert numbers(tmp_path) == [0]
        journal.append(chunk(1))
        assert numbers(tmp_path) == [0, 1]
    Journal(tmp_path).close()


def test_a_cursor_beyond_the_journal_is_refused(tmp_path):
    fill(tmp_path, 3)
    with Journal(tmp_path, read_only=True) as journal, pytest.raises(DatasetError, match=r"has 3 records; 1 \.\. 9"):
        next(journal.read(1, 9))


# Torn ends


def test_a_record_cut_at_any_byte_is_cut_off_and_the_records_before_it_stay(tmp_path, caplog):
    fill(tmp_path, 3)
    (path,) = tmp_path.glob(SUFFIX)
    whole = path.read_bytes()
    with Journal(tmp_path, read_only=True) as journal:
        start = len(whole) * 2 // 3
        assert journal.nbytes == len(whole)
    assert len(whole) % 3 == 0  # three records of one size
    for size in range(start, len(whole)):
        path.write_bytes(whole[:size])
        assert numbers(tmp_path) == [0, 1]
        assert path.stat().st_size == size  # a reader changes nothing
        caplog.clear()
        with caplog.at_level(logging.WARNING), Journal(tmp_path) as journal:
            assert len(journal) == 2
            assert ("unfinished record" in caplog.text) == (size > start)
            assert path.stat().st_size == start
            assert journal.append(chunk(2)) == 3
        assert path.read_bytes() == whole


def test_zeros_that_a_lost_machine_left_at_the_end_are_cut_off(tmp_path):
    fill(tmp_path, 3)
    (path,) = tmp_path.glob(SUFFIX)
    with path.open("ab") as file:
        file.write(bytes(5000))
    with Journal(tmp_path) as journal:
        assert journal.append(chunk(3)) == 4
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_a_segment_that_was_begun_and_never_written_to_is_gone_on_with(tmp_path):
    fill(tmp_path, 2)
    (tmp_path / "000000000002.journal").touch()
    fill(tmp_path, 4)
    assert numbers(tmp_path) == [0, 1, 2, 3]


WRITER = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
from chunks import episode, make_chunk
from rlsvc.data.journal import Journal

journal = Journal(Path(sys.argv[1]), segment_bytes=2_000_000)
number = len(journal)
while True:
    made = make_chunk(number, {0: episode(number + 1, 4)})
    made.columns["image"] = np.full((made.num_rows, 64, 64, 3), number % 251, np.uint8)
    print(journal.append(made), flush=True)
    number += 1
"""


@contextlib.contextmanager
def writer(folder: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_every_acknowledged_chunk_is_readable_after_a_kill_at_any_moment(tmp_path):
    rng, acknowledged = random.Random(0), 0
    for _ in range(8):
        with writer(tmp_path) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            # Lines that stand in the pipe were printed, and so acknowledged, before the kill.
            acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        with Journal(tmp_path, read_only=True) as journal:
            assert len(journal) >= acknowledged
            for number, found in enumerate(journal.read()):
                assert found.number == number
                assert (found.columns["image"] == number % 251).all()
    assert acknowledged > 8


# Damage


def test_a_changed_byte_anywhere_in_a_record_is_refused_by_file_and_offset(tmp_path):
    fill(tmp_path, 3)
    (path,) = tmp_path.glob(SUFFIX)
    whole = path.read_bytes()
    size = len(whole) // 3
    for at in range(size, 2 * size):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=f"{path.name} is damaged at byte {size}"):
            Journal(tmp_path)
    assert path.read_bytes() == bytes(damaged)  # it is left for a person to look at


def test_a_changed_byte_in_the_last_record_is_not_taken_for_a_torn_end(tmp_path):
    fill(tmp_path, 3)
    (path,) = tmp_path.glob(SUFFIX)
    whole = path.read_bytes()
    for at in range(len(whole) * 2 // 3, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x80
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match="is damaged at byte"):
            Journal(tmp_path)


def test_without_verifying_damage_is_found_when_it_is_read(tmp_path):
    fill(tmp_path, 3)
    (path,) = tmp_path.glob(SUFFIX)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3 + HEADER_BYTES + 500] ^= 1
    path.write_bytes(damaged)
    with Journal(tmp_path, verify=False) as journal:
        read = journal.read()
        assert next(read).number == 0
        with pytest.raises(DatasetError, match=r"chunk \(0, 0, 1\) does not match its checksum"):
            next(read)


def test_a_missing_or_cut_segment_in_the_middle_is_refused_by_name(tmp_path):
    fill(tmp_path, 12, segment_bytes=1500)
    first, second, *_ = sorted(tmp_path.glob(SUFFIX))
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(DatasetError, match="a file before this one is missing"):
        Journal(tmp_path)
    second.write_bytes(kept[:-1])
    with pytest.raises(DatasetError, match=f"{second.name} .*cut short, although later files exist"):
        Journal(tmp_path)
    second.write_bytes(kept)
    first.write_bytes(first.read_bytes() + b"x")
    with pytest.raises(DatasetError, match=f"{first.name} .*cut short"):
        Journal(tmp_path)


# A full disk

FILLER = """
import os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
from chunks import episode, make_chunk
from rlsvc.core.errors import UserError
from rlsvc.data.journal import Journal

with Journal(Path(sys.argv[1])) as journal:
    for number in range(10_000):
        try:
            journal.append(make_chunk(number, {0: episode(number + 1, 50)}))
        except UserError as error:
            print(len(journal), journal.nbytes, error)
            break
    (path,) = Path(sys.argv[1]).glob("*.journal")
    assert path.stat().st_size == journal.nbytes, "a part of a record was left"
    if len(sys.argv) > 3:  # room again
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        journal.append(make_chunk(number, {0: episode(number + 1, 50)}))
"""


def fill_up(folder: Path, *limit: str) -> tuple[int, str]:
    command = [sys.executable, "-c", FILLER, str(folder), str(Path(__file__).parent), *limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    whole, _, message = done.stdout.split(" ", 2)
    return int(whole), message


def test_a_full_disk_is_an_error_for_people_and_leaves_whole_records(tmp_path):
    # A limit on file sizes stands for the disk; the process is its own.
    whole, message = fill_up(tmp_path, "100000")
    assert message.startswith("disk full: a chunk does not fit into the journal")
    assert f"The {whole} chunks before it are whole" in message
    assert whole > 5
    assert numbers(tmp_path) == list(range(whole + 1))  # and once there was room, it went on


def test_a_full_file_system_is_an_error_for_people_and_leaves_whole_records(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        whole, message = fill_up(tmp_path)
        assert "No space left on device" in message
        assert numbers(tmp_path) == list(range(whole))
        assert whole > 5
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
