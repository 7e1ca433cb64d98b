"""The card of a dataset: README.md with the hub's metadata in front, written text kept, the rest made from meta/."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlsvc.core.errors import DatasetError, UserError
from rlsvc.data.lerobot_meta import BOOKKEEPING, LeRobotMeta, read_meta

CARD, ORIGIN, INFO = "README.md", "hub.json", "meta/info.json"
MADE = "<!-- rlsvc dataset push makes anew what follows -->"
FRONT = re.compile(r"\A---\r?\n(.*?)\r?\n---\r?\n(.*)\Z", re.DOTALL)
LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
MAX_ROWS = 200
"""Of a table of tasks."""


@dataclass(frozen=True)
class Described:
    """What a model card says of a dataset.

    Attributes:
        name: its folder's.
        episodes, steps: in all; None where the dataset is not here.
        licence: as its card or LICENSE file has it, "" where nobody says.
        source: where it comes from, likewise.
        hub: OWNER/NAME on the hub, "" where it is not from there.
        commit: of that, "" where it is not known.
    """

    name: str
    episodes: int | None = None
    steps: int | None = None
    licence: str = ""
    source: str = ""
    hub: str = ""
    commit: str = ""


def describe(path: Path) -> Described:
    """A dataset as far as it is known: nothing but its name where it is no LeRobot folder on this machine."""
    name = path.name
    if not (path / INFO).is_file():
        return Described(name)
    try:
        meta = read_meta(path)
    except DatasetError:
        return Described(name)
    front, _ = read_card(path)
    origin = read_origin(path)
    steps = sum(episode.length for episode in meta.episodes.values())
    return Described(
        name, len(meta.episodes), steps, _licence(path, front), str(front.get("source", "")), *(origin or ("", ""))
    )


def dataset_card(
    path: Path, meta: LeRobotMeta, repo: str, *, licence: str | None = None, source: str | None = None
) -> str:
    """README.md of a LeRobot v3.0 dataset on the hub.

    What a README.md in the folder says is kept, its metadata too; the tags are LeRobot's own.

    Args:
        path: the dataset.
        meta: of it.
        repo: OWNER/NAME on the hub.
        licence: identifier on the hub ("mit"); None takes the README's, then the LICENSE file's.
        source: where the data comes from, in words; None takes the README's.

    Raises:
        UserError: a licence that is no identifier, or metadata that is no YAML.
    """
    front, text = read_card(path)
    text = text.partition(MADE)[0].strip() or f"# {repo.partition('/')[2]}"
    if licence is not None:
        front |= license_fields(licence)
    elif "license" not in front and (first := _license_file(path)):
        front |= {"license": "other", "license_name": _slug(first[1]), "license_link": first[0]}
    if source is not None:
        front["source"] = source
    robot = meta.info.get("robot_type")
    known = front.get("tags")
    tags = [*(known if isinstance(known, list) else []), "LeRobot", *([str(robot)] if robot else [])]
    front |= {
        "task_categories": ["robotics"],
        "tags": list(dict.fromkeys(tags)),
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n{text}\n\n{MADE}\n\n{_made(meta, repo, front)}"


def license_fields(licence: str) -> dict[str, str]:
    """`license` of a card's metadata.

    Raises:
        UserError: not of the form of an identifier.
    """
    if not LICENSE.fullmatch(licence):
        raise UserError(
            f"--license: got '{licence}', expected an identifier of the hub such as mit, apache-2.0, cc-by-4.0 or other"
        )
    return {"license": licence}


def read_card(path: Path) -> tuple[dict[str, Any], str]:
    """Metadata and text of a folder's README.md; none where there is none.

    Raises:
        UserError: the metadata is not YAML of names and values.
    """
    file = path / CARD
    if not file.is_file():
        return {}, ""
    text = file.read_text(encoding="utf-8")
    match = FRONT.match(text)
    if match is None:
        return {}, text
    try:
        front = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{file}: its metadata is not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(front, dict):
        raise UserError(f"{file}: its metadata is {type(front).__name__}, expected names and values")
    return {str(key): value for key, value in front.items()}, match[2]


def write_origin(path: Path, repo: str, commit: str) -> None:
    """Note beside a dataset where on the hub it comes from."""
    noted = {"repo": repo, "commit": commit, "info": _info_sum(path)}
    (path / ORIGIN).write_text(json.dumps(noted, indent=1) + "\n")


def read_origin(path: Path) -> tuple[str, str] | None:
    """OWNER/NAME and commit that a dataset was pulled from, unless it was changed since, or comes from elsewhere."""
    try:
        noted = json.loads((path / ORIGIN).read_text())
        if noted["info"] != _info_sum(path):
            return None
        return str(noted["repo"]), str(noted["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def cell(value: object) -> str:
    """A value in a table of Markdown."""
    return " ".join(str(value).split()).replace("|", "\\|") or " "


def table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    """A table of Markdown, with its last line break."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell(value) for value in row) + " |\n" for row in lines)


def _made(meta: LeRobotMeta, repo: str, front: Mapping[str, Any]) -> str:
    steps = sum(episode.length for episode in meta.episodes.values())
    facts = [
        ("episodes", len(meta.episodes)),
        ("steps", f"{steps} at {meta.fps:g} Hz ({steps / meta.fps / 60:.1f} minutes)"),
        ("format", f"LeRobot {meta.version}"),
        ("robot", meta.info.get("robot_type") or "not stated"),
        ("licence", front.get("license_name") or front.get("license") or "not stated"),
        ("source", front.get("source") or "not stated"),
    ]
    features = [
        (f"`{key}`", f["dtype"], " x ".join(map(str, f["shape"])) or 1, f.get("unit") or "", _names(f.get("names")))
        for key, f in meta.declared.items()
        if key not in BOOKKEEPING
    ]
    tasks = list(meta.tasks.values())
    more = f"\n... and {len(tasks) - MAX_ROWS} more\n" if len(tasks) > MAX_ROWS else ""
    listed = "".join(f"- {cell(task)}\n" for task in tasks[:MAX_ROWS])
    name = repo.partition("/")[2]
    return (
        f"## What is in it\n\n{table(('', ''), facts)}\n"
        f"{table(('feature', 'dtype', 'shape', 'unit', 'names'), features)}\n"
        f"Tasks:\n\n{listed}{more}\n"
        "## Use\n\n"
        f'```python\nfrom lerobot.datasets import LeRobotDataset\n\ndataset = LeRobotDataset("{repo}")\n```\n\n'
        f"```bash\nrlsvc dataset pull {repo} datasets/{name}\n```\n"
    )


def _names(value: object) -> str:
    """Names of elements, which LeRobot has as a list, or as lists by kind."""
    if isinstance(value, dict):
        value = [name for part in value.values() if isinstance(part, list) for name in part]
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _licence(path: Path, front: Mapping[str, Any]) -> str:
    if stated := front.get("license"):
        return str(front.get("license_name") or stated) if stated == "other" else str(stated)
    first = _license_file(path)
    return "" if first is None else first[1]


def _license_file(path: Path) -> tuple[str, str] | None:
    """Name and first line of a LICENSE file."""
    for file in sorted(path.glob("LICENSE*")):
        lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
        if first := next(filter(None, lines), None):
            return file.name, first[:80]
    return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") or "other"


def _info_sum(path: Path) -> str:
    return hashlib.sha256((path / INFO).read_bytes()).hexdigest()
