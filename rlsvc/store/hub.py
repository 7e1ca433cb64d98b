"""The Hugging Face hub: what a repository shall hold goes there as one commit, and is taken from there whole or not.

Everything goes through huggingface_hub, whose errors become one sentence each. HF_ENDPOINT names another hub than
huggingface.co. The token is sent to the hub alone: it stands in no message, and no text that holds it is sent.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    errors,
    get_token,
    snapshot_download,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import disable_progress_bars, logging, validate_repo_id

from rlsvc.core.errors import NotFoundError, UserError

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy

Kind = Literal["model", "dataset"]
CARD = "README.md"
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
CHUNK = 2**20


class HubError(UserError):
    """The hub, or the way there, does not do what was asked."""


@dataclass(frozen=True)
class Repo:
    """A repository of the hub.

    Attributes:
        kind: "model" or "dataset".
        name: OWNER/NAME.
        revision: a branch, a tag or a commit; None means the branch main.
    """

    kind: Kind
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        """As messages name it."""
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass(frozen=True)
class Published:
    """What a push came to.

    Attributes:
        url: page of the repository.
        branch: that was written.
        commit: that the branch points at now.
        account: whose token it was.
        created: whether the repository is new.
        changed: whether there is a new commit.
    """

    url: str
    branch: str
    commit: str
    account: str
    created: bool
    changed: bool


def parse_repo(text: str, kind: Kind, revision: str | None = None) -> Repo:
    """The repository that OWNER/NAME or OWNER/NAME@REVISION means.

    Raises:
        UserError: no owner, a name that the hub does not allow, or two revisions.
    """
    name, at, given = text.partition("@")
    if at and (not given or revision is not None):
        raise UserError(f"'{text}': expected OWNER/NAME, and one revision")
    if name.count("/") != 1 or name.startswith("/") or name.endswith("/"):
        raise UserError(
            f"'{text}': expected OWNER/NAME, a repository of the hub with the user or organisation that has it"
        )
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise UserError(f"'{text}': {error}") from error
    return Repo(kind, name, given or revision)


def read_token(file: Path | None = None) -> str | None:
    """The token in a file; without one HF_TOKEN, or that of `hf auth login`; None where there is none at all.

    Raises:
        UserError: the file cannot be read, or what was found is no token. The message does not show it.
    """
    if file is None:
        found, where = get_token(), "HF_TOKEN, or the token of `hf auth login`"
    else:
        where = f"--token-file {file}"
        try:
            found = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UserError(f"{where}: cannot be read ({reason})") from error
    if found is not None and not re.fullmatch(r"[!-~]+", found):
        raise UserError(f"{where}: holds no token; expected one word, as the hub's settings show it (hf_...)")
    return found


class Hub:
    """One hub, asked with one token.

    Args:
        token: None asks as nobody, which does for public repositories.
    """

    def __init__(self, token: str | None = None) -> None:
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._token = token
        self.api = HfApi(endpoint=self.endpoint, token=token or False, library_name="rlsvc")
        logging.set_verbosity_error()
        if not sys.stderr.isatty():
            disable_progress_bars()

    def url(self, repo: Repo) -> str:
        """The repository's page."""
        return f"{self.endpoint}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.name}"

    def resolve(self, repo: Repo) -> str:
        """The commit that a revision means.

        Raises:
            HubError: no such repository or revision, or it may not be read.
        """
        with self.explained(repo):
            return str(self.api.repo_info(repo.name, repo_type=repo.kind, revision=repo.revision or MAIN).sha)

    def files(self, repo: Repo, commit: str) -> dict[str, RepoFile]:
        """The files of a commit by path, with the sums that the hub has of them."""
        with self.explained(repo):
            tree = self.api.list_repo_tree(repo.name, repo_type=repo.kind, revision=commit, recursive=True)
            return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def download(self, repo: Repo, commit: str, files: Iterable[RepoFile], folder: Path) -> None:
        """Put files of a commit into a folder, each held against the hub's sum of it.

        Raises:
            HubError: a file did not come as the hub has it, or not at all; or the disk is full.
        """
        wanted = {file.path: file for file in files}
        for path in wanted:
            parts = path.split("/")
            if path.startswith("/") or "\\" in path or {"", ".", ".."} & set(parts) or parts[0] == ".cache":
                raise HubError(f"{repo}: it names a file {path[:80]!r}, which would lie outside of its folder")
        with self.explained(repo):
            snapshot_download(
                repo.name,
                repo_type=repo.kind,
                revision=commit,
                local_dir=folder,
                allow_patterns=[_literally(path) for path in wanted],
                endpoint=self.endpoint,
                token=self._token or False,
                library_name="rlsvc",
            )
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        for path, file in wanted.items():
            _check_sum(repo, folder / path, file)

    def publish(
        self,
        repo: Repo,
        contents: Mapping[str, Path | bytes],
        *,
        message: str,
        private: bool = False,
        stale: Callable[[Mapping[str, RepoFile], str], Iterable[str]] = lambda there, head: (),
    ) -> Published:
        """Make a branch hold these files, by one commit; none where it holds them already.

        Until that commit the branch is as it was: an interrupted push leaves a new repository or branch at most, and
        is repeated by calling this again.

        Args:
            repo: its revision is the branch, which is made from main where it is not there.
            contents: by path in the repository a file, which is read as it is sent, or its bytes.
            message: of the commit.
            private: the repository is private if it is made now, and must be if it is there.
            stale: of the files that are there, in which commit, the paths of those that go, unless `contents` has them.

        Raises:
            HubError: no token, no permission, a public repository where private was asked for, a revision that is no
                branch, another push at the same time, ...
        """
        self._refuse_token_in({"the commit's message": message.encode(), **contents})
        branch = repo.revision or MAIN
        if self._token is None:
            raise HubError(
                f"{repo.name}: pushing needs a token of {self.endpoint} with write permission; give it in a file "
                "(--token-file), in HF_TOKEN, or log in with `hf auth login`"
            )
        with self.explained(repo):
            account = str(self.api.whoami()["name"])
            created = self._make(repo, private)
            head = self._branch(repo, branch)
            there = self.files(repo, head)
            gone = sorted(set(stale(there, head)) - set(contents))
            added = [CommitOperationAdd(path, file) for path, file in sorted(contents.items())]
            # A .gitignore in the repository would leave files out.
            self.api.preupload_lfs_files(
                repo.name, added, repo_type=repo.kind, revision=branch, gitignore_content="", free_memory=False
            )
            # Not upload_folder: with hf_xet it makes several commits of a large folder.
            operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
                *(CommitOperationDelete(path) for path in gone if path in there), *added
            ]  # fmt: skip
            commit = self.api.create_commit(
                repo.name, operations, repo_type=repo.kind, commit_message=message, revision=branch, parent_commit=head
            ).oid
        return Published(self.url(repo), branch, commit, account, created, commit != head)

    def tag(self, repo: Repo, name: str, commit: str) -> None:
        """Let a tag mean a commit, whatever it meant before."""
        with self.explained(repo):
            tags = {ref.name: ref.target_commit for ref in self.api.list_repo_refs(repo.name, repo_type=repo.kind).tags}
            if tags.get(name) == commit:
                return
            if name in tags:
                self.api.delete_tag(repo.name, tag=name, repo_type=repo.kind)
            self.api.create_tag(repo.name, tag=name, revision=commit, repo_type=repo.kind)

    def _make(self, repo: Repo, private: bool) -> bool:
        """See that the repository is there; whether it is new."""
        try:
            info = self.api.repo_info(repo.name, repo_type=repo.kind)
        except errors.GatedRepoError:
            raise
        except errors.RepositoryNotFoundError:
            self.api.create_repo(repo.name, repo_type=repo.kind, private=private or None)
            return True
        if private and not info.private:
            raise HubError(
                f"{repo.name}: is public already, and --private is for a new repository; make it private in its "
                "settings, or leave --private out"
            )
        return False

    def _branch(self, repo: Repo, branch: str) -> str:
        """The commit that the branch points at; the branch is made where it is not there."""
        refs = self.api.list_repo_refs(repo.name, repo_type=repo.kind)
        branches = {ref.name: ref.target_commit for ref in refs.branches}
        if branch not in branches:
            if COMMIT.fullmatch(branch) or branch in {tag.name for tag in refs.tags}:
                raise HubError(
                    f"{repo.name}: --revision {branch} is a commit or a tag, expected a branch, which may be new"
                )
            self.api.create_branch(repo.name, branch=branch, repo_type=repo.kind, exist_ok=True)
            return str(self.api.repo_info(repo.name, repo_type=repo.kind, revision=branch).sha)
        return branches[branch]

    def _refuse_token_in(self, contents: Mapping[str, Path | bytes]) -> None:
        for path, content in contents.items():
            if self._token is not None and isinstance(content, bytes) and self._token.encode() in content:
                raise HubError(f"{path} would hold the token that is used for pushing; nothing was sent")

    @contextlib.contextmanager
    def explained(self, repo: Repo) -> Iterator[None]:
        """What huggingface_hub raises, as one sentence for a person; what is unknown goes on as it is."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            told = next((text for each in _chain(error) if (text := self._sentence(each, repo))), None)
            if told is None and isinstance(error, RuntimeError | ValueError | errors.LocalEntryNotFoundError):
                told = f"{repo}: {self.endpoint} or the way there fails: {error}"
            if told is None:
                raise
            told = " ".join(told.split())
            if self._token is not None:
                told = told.replace(self._token, "<token>")
            kind = NotFoundError if isinstance(error, errors.RevisionNotFoundError) else HubError
            raise kind(told) from error

    def _sentence(self, error: BaseException, repo: Repo) -> str | None:
        what, at = f"{repo.kind} repository '{repo.name}'", self.endpoint
        match error:
            case errors.OfflineModeIsEnabled():
                return f"{repo}: HF_HUB_OFFLINE is set, so {at} is not asked; unset it to push or pull"
            case errors.GatedRepoError():
                return (
                    f"{repo}: is gated; ask for access on {self.url(repo)}, and give the token of an account that has "
                    f"it ({self._whose()})"
                )
            case errors.DisabledRepoError():
                return f"{repo}: the hub has disabled this repository"
            case errors.RevisionNotFoundError():
                return f"{repo.name}: no revision '{repo.revision}'. There are: {', '.join(self._revisions(repo))}."
            case errors.RepositoryNotFoundError():
                return f"no {what} at {at}, or it is private and may not be seen ({self._whose()})"
            case errors.HfHubHTTPError():
                return self._refused(error, repo)
            case httpx.TransportError():
                return f"{repo}: {at} cannot be reached ({type(error).__name__}); look at the network, then try again"
            case OSError(errno=errno.ENOSPC | errno.EDQUOT):
                return f"{repo}: the disk is full; nothing is left of what was pulled"
            case _:
                return None

    def _refused(self, error: errors.HfHubHTTPError, repo: Repo) -> str:
        status, said, at = error.response.status_code, error.server_message or "", self.endpoint
        told = {
            401: f"{at} does not take the token; make another at {at}/settings/tokens",
            403: f"the token may not do that ({said or 'no reason given'}); it needs write permission there",
            409: f"it changed meanwhile ({said or status}), and is as that left it; push again",
            412: f"it changed meanwhile ({said or status}), and is as that left it; push again",
            429: f"{at} is asked too often; try again later",
        }
        other = f"{at} failed ({status}); try again later"
        if status < 500:
            other = f"{at} refused ({status}): {said or 'no reason given'}"
        return f"{repo}: {told.get(status, other)}"

    def _revisions(self, repo: Repo) -> list[str]:
        with contextlib.suppress(Exception):  # a list that helps; what failed is told in any case
            refs = self.api.list_repo_refs(repo.name, repo_type=repo.kind)
            return [ref.name for ref in [*refs.branches, *refs.tags]]
        return ["(not known)"]

    def _whose(self) -> str:
        return "no token was given" if self._token is None else "with the token that was given"


def describe_files(files: Mapping[str, Path | bytes]) -> list[tuple[str, int]]:
    """Paths and sizes in bytes, in order."""
    sizes = {p: len(file) if isinstance(file, bytes) else file.stat().st_size for p, file in files.items()}
    return sorted(sizes.items())


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        yield at
        at = at.__cause__ or at.__context__


def _literally(path: str) -> str:
    """A pattern of fnmatch that means one path; without it one that ends in a slash would mean a folder."""
    return re.sub(r"([*?[])", r"[\1]", path)


def _check_sum(repo: Repo, file: Path, entry: RepoFile) -> None:
    """Hold a file against the hub's sum: sha256 of a large file, git's own of a small one."""
    if not file.is_file() or file.is_symlink():
        raise HubError(f"{repo}: '{entry.path}' did not come; pull again")
    size = file.stat().st_size
    if entry.lfs is not None:
        digest, stated = hashlib.sha256(), entry.lfs.sha256
    else:
        digest, stated = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), entry.blob_id
    with file.open("rb") as stream:
        while data := stream.read(CHUNK):
            digest.update(data)
    if digest.hexdigest() != stated:
        raise HubError(f"{repo}: '{entry.path}' did not come as the hub has it ({size} bytes); pull again")
