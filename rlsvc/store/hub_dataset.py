"""LeRobot datasets on the hub, so that LeRobot's own `LeRobotDataset(OWNER/NAME)` loads what was pushed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.hf_api import RepoFile

from rlsvc.core.errors import DatasetError
from rlsvc.data.check import check_dataset
from rlsvc.data.commit import STAGING
from rlsvc.data.lerobot_meta import LeRobotMeta, read_meta
from rlsvc.store.dataset_card import CARD, INFO, ORIGIN, dataset_card, write_origin
from rlsvc.store.folders import new_folder, refuse_in_the_way
from rlsvc.store.hub import MAIN, Hub, HubError, Published, Repo

VERSION = "v3.0"
FILES = re.compile(
    r"meta/[\w./-]+\.(json|jsonl|parquet)|data/[\w./-]+\.parquet|videos/[\w./-]+\.mp4|images/[\w./-]+\.(png|jpe?g)"
)
"""What a LeRobot dataset is made of: tables, videos and images. Nothing that a loader would execute."""
BESIDE = re.compile(r"README\.md|LICENSE(\.\w+)?")
OWN = ("meta/", "data/", "videos/")
"""Folders that belong to the dataset: what lies there and is not pushed goes."""


def dataset_contents(
    repo: Repo, path: Path, *, licence: str | None = None, source: str | None = None
) -> tuple[dict[str, Path | bytes], list[str]]:
    """What the repository shall hold, by path, and what of the folder is left out.

    Args:
        repo: where it goes.
        path: a LeRobot v3.0 folder.
        licence: identifier on the hub; see `dataset_card`.
        source: where the data comes from, in words.

    Raises:
        DatasetError: no LeRobot v3.0 dataset, one that training could not use, or one that is being recorded.
        UserError: a licence that is no identifier.
    """
    meta = _usable(path)
    found = {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}
    contents: dict[str, Path | bytes] = {
        name: file for name, file in found.items() if name.startswith(OWN) and FILES.fullmatch(name)
    }
    contents |= {name: file for name, file in found.items() if BESIDE.fullmatch(name)}
    left_out = sorted(name for name in set(found) - set(contents) if name != ORIGIN and not name.startswith("."))
    contents[CARD] = dataset_card(path, meta, repo.name, licence=licence, source=source).encode()
    return contents, left_out


def push_dataset(
    hub: Hub, repo: Repo, contents: Mapping[str, Path | bytes], *, message: str, private: bool = False
) -> Published:
    """Put a dataset on the hub, in one commit; on main it gets the tag by which LeRobot finds datasets of its version.

    Raises:
        HubError: see `Hub.publish`. A push that was interrupted before the tag is mended by pushing again.
    """

    def stale(there: Mapping[str, RepoFile], head: str) -> list[str]:
        del head
        return [path for path in there if path.startswith(OWN)]

    published = hub.publish(repo, contents, message=message, private=private, stale=stale)
    if published.branch == MAIN:
        hub.tag(repo, VERSION, published.commit)
    return published


def pull_dataset(hub: Hub, repo: Repo, target: Path) -> tuple[LeRobotMeta, str]:
    """A LeRobot dataset from the hub, every file held against the hub's sum; and the commit that it is of.

    Where it comes from is noted in hub.json, which later model cards name.

    Raises:
        HubError: no such repository or revision, no LeRobot dataset in it, or a file that did not come as it is there.
        DatasetError: its metadata is damaged. Nothing is left at the target.
    """
    refuse_in_the_way(target)
    commit = hub.resolve(repo)
    there = hub.files(repo, commit)
    if INFO not in there:
        listed = ", ".join(sorted(there)[:5]) or "nothing"
        raise HubError(f"{repo}: is no LeRobot dataset, since it has no {INFO}; it holds {listed}")
    wanted = [entry for name, entry in there.items() if FILES.fullmatch(name) or BESIDE.fullmatch(name)]
    with new_folder(target) as folder:
        hub.download(repo, commit, wanted, folder)
        try:
            meta = read_meta(folder)
        except DatasetError as error:
            told = str(error).replace(f"{folder}/", "").replace(str(folder), "the dataset")
            raise DatasetError(f"{repo} (commit {commit[:12]}): {told}") from error
        write_origin(folder, repo.name, commit)
    return meta, commit


def _usable(path: Path) -> LeRobotMeta:
    if not (path / INFO).is_file():
        raise DatasetError(
            f"{path}: no LeRobot dataset (it has no {INFO}); `rlsvc dataset import {path} FOLDER` makes one of others"
        )
    if any((path / STAGING).glob("*")):
        raise DatasetError(f"{path}: is being recorded, or a recording broke off; end the session first")
    meta = read_meta(path)
    if meta.version != VERSION:
        raise DatasetError(
            f"{path}: LeRobot {meta.version}, and the hub gets {VERSION}; convert it: rlsvc dataset import {path} "
            "FOLDER"
        )
    report = check_dataset(path)
    if not report.usable:
        worst = next(finding for finding in report.findings if finding.severity == "error")
        raise DatasetError(
            f"{path}: cannot be used as it stands ({worst.what}: {worst.where}: got {worst.got}, expected "
            f"{worst.expected}); `rlsvc dataset check {path}` says more"
        )
    return meta
