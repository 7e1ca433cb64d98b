"""One episode of a LeRobot dataset as one file, to be sent to another machine, and back.

The file is a tar of a LeRobot v3.0 dataset that has this episode alone; video is copied, not encoded again. What comes
from another machine is trusted with nothing: names, kinds and sizes are checked before a byte is written.

    python -m rlsvc.data.pack_episode DATASET NUMBER FILE
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import tempfile
import uuid
from pathlib import Path

from rlsvc.core.errors import DatasetError
from rlsvc.data.commit import FULL
from rlsvc.data.edit import all_cuts, open_lerobot, write_cuts

ID = re.compile(r"[0-9a-f]{32}")
"""Of a dataset."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MOST_FILES = 256


def dataset_id(path: Path) -> str:
    """What tells this dataset from all others, 32 hexadecimal digits; made with the first call, and kept in meta/.

    Raises:
        DatasetError: the file that holds it does not.
    """
    file = path / "meta" / "rlsvc.json"
    try:
        with file.open("x") as new:
            json.dump({"id": uuid.uuid4().hex}, new)
    except FileExistsError:
        pass
    try:
        found = str(json.loads(file.read_text())["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file}: expected a map with an id; delete it, and episodes are sent anew") from error
    if not ID.fullmatch(found):
        raise DatasetError(f"{file}: id '{found[:60]}', expected 32 hexadecimal digits")
    return found


def pack_episode(path: Path, episode: int, file: Path) -> None:
    """Write an episode as a file.

    Args:
        path: the dataset.
        episode: number in it.
        file: to write.

    Raises:
        DatasetError: there is no such episode, or the dataset is damaged.
    """
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        alone = Path(folder) / "episode"
        write_cuts(all_cuts(open_lerobot(path), [episode]), alone)
        with tarfile.open(file, "w") as tar:
            for part in sorted(alone.rglob("*")):
                if part.is_file():
                    tar.add(part, str(part.relative_to(alone)), recursive=False)


def unpack_episode(file: Path, folder: Path, max_bytes: int) -> None:
    """Make the dataset that a file holds.

    Args:
        file: as of `pack_episode`, from whomever.
        folder: new.
        max_bytes: that its files may have together.

    Raises:
        DatasetError: it is no such file; nothing of it was written.
        OSError: the disk is full.
    """
    try:
        with tarfile.open(file, "r:") as tar:
            members = []
            total = 0
            for member in tar:
                parts = member.name.split("/")
                total += member.size
                if not member.isreg() or not all(_PART.fullmatch(part) for part in parts) or len(parts) > 8:
                    raise DatasetError(f"an episode's file has an entry that has no place there: '{member.name[:80]}'")
                if total > max_bytes or len(members) >= MOST_FILES:
                    raise DatasetError(f"an episode has at most {MOST_FILES} files and {max_bytes} bytes")
                members.append(member)
            folder.mkdir()
            tar.extractall(folder, members, filter="data")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, DatasetError) or getattr(error, "errno", None) in FULL:
            raise
        raise DatasetError(f"this is not an episode's file: {error}") from error


if __name__ == "__main__":
    pack_episode(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
