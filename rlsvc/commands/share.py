"""`rlsvc policies push | pull` and `rlsvc dataset push | pull`: the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.store.hub import Published, Repo

SHOWN = 20
"""Files that are listed by name."""

Name = Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME.")]
Pulled = Annotated[str, typer.Argument(help="Repository on the hub: OWNER/NAME, or OWNER/NAME@REVISION.")]
Target = Annotated[Path, typer.Argument(help="The folder to write; not there yet, or empty.")]
Revision = Annotated[str | None, typer.Option(help="Branch to push to, made if it is new; default main.")]
Private = Annotated[bool, typer.Option("--private", help="Make a private repository.")]
Message = Annotated[str | None, typer.Option(help="Of the commit.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the hub's token; default HF_TOKEN, then its login.")]
License = Annotated[str | None, typer.Option(help="Licence for the card, as the hub calls it: mit, apache-2.0, ...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the card and what would be sent, and send nothing.")]


def push_policy(
    source: Annotated[
        str, typer.Argument(help="Folder of a bundle or a run (its best bundle), or models:/NAME@ALIAS.")
    ],
    name: Name,
    revision: Revision = None,
    private: Private = False,
    message: Message = None,
    license: License = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="OWNER/NAME of the run's dataset on the hub, for the card; once for each, in their order."),
    ] = None,
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(help="Scores of this bundle by rlsvc evaluate --output, for the card; may be repeated."),
    ] = None,
    token_file: TokenFile = None,
    dry_run: DryRun = False,
    root: Annotated[str, typer.Option(help="Where runs and the model registry live.")] = "runs",
    store: Annotated[
        str | None, typer.Option(help="MLflow store; default MLFLOW_TRACKING_URI, then <root>/mlflow.db.")
    ] = None,
) -> None:
    """Put a policy on the Hugging Face hub, with a card made from its run."""
    from rlsvc.store.hub import Hub, parse_repo, read_token
    from rlsvc.store.hub_policy import find_source, policy_contents
    from rlsvc.store.hub_policy import push_policy as push

    repo, console = _branch_of(parse_repo(name, "model"), revision), Console()
    found = find_source(source, root=root, store=store, datasets=dataset or (), evaluations=evaluation or ())
    contents = policy_contents(repo, found, license)
    for note in found.notes:
        _say(console, f"note: {note}")
    if dry_run:
        _show(console, repo, contents)
        return
    told = message or f"Policy bundle {found.bundle.id[:12]}"
    published = push(Hub(read_token(token_file)), repo, contents, message=told, private=private)
    _say_published(console, repo, published)


def pull_policy(
    name: Pulled,
    target: Target,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Control rate in Hz: make a bundle of a policy of LeRobot's, which has none."),
    ] = None,
    token_file: TokenFile = None,
) -> None:
    """Take a policy from the Hugging Face hub: a bundle, verified; or with --rate a LeRobot policy, made one."""
    from rlsvc.store.hub import Hub, parse_repo, read_token
    from rlsvc.store.hub_policy import pull_policy as pull
    from rlsvc.store.hub_policy import pulled_lerobot

    repo, console = parse_repo(name, "model"), Console()
    hub = Hub(read_token(token_file))
    if rate is None:
        bundle, commit = pull(hub, repo, target)
        _say(console, f"{repo.name} at commit {commit}")
        _say(console, f"{target}: bundle {bundle.id[:12]}, {bundle.policy['name']}, every file as its manifest says")
        return
    from rlsvc.store.bundle import LEROBOT_WEIGHTS, write_bundle

    try:
        from rlsvc.backends.torch_lerobot import from_folder
    except ImportError as error:
        raise UserError(
            f"LeRobot's policies need {error.name}, which is not installed: pip install 'rlsvc[torch]'"
        ) from error
    with pulled_lerobot(hub, repo, target) as (folder, commit):
        fields = from_folder(folder, rate)
        fields["run"] = {"converted_from": repo.name, "commit": commit}
        write_bundle(target, **fields, weights=LEROBOT_WEIGHTS)
    _say(console, f"{repo.name} at commit {commit}")
    _say(console, f"{target}: a bundle of LeRobot's {fields['policy']['type']}")


def push_dataset(
    path: Annotated[Path, typer.Argument(help="A LeRobot v3.0 folder.")],
    name: Name,
    revision: Revision = None,
    private: Private = False,
    message: Message = None,
    license: License = None,
    source: Annotated[str | None, typer.Option(help="Where the data comes from, in words, for the card.")] = None,
    token_file: TokenFile = None,
    dry_run: DryRun = False,
) -> None:
    """Put a LeRobot v3.0 dataset on the Hugging Face hub, where LeRobot's own LeRobotDataset finds it."""
    from rlsvc.store.hub import Hub, parse_repo, read_token
    from rlsvc.store.hub_dataset import dataset_contents
    from rlsvc.store.hub_dataset import push_dataset as push

    repo, console = _branch_of(parse_repo(name, "dataset"), revision), Console()
    contents, left_out = dataset_contents(repo, path, licence=license, source=source)
    if left_out:
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        _say(console, f"note: left out, since no dataset has it: {left_out[0]}{more}")
    if dry_run:
        _show(console, repo, contents)
        return
    published = push(
        Hub(read_token(token_file)),
        repo,
        contents,
        message=message or f"Dataset {path.resolve().name}",
        private=private,
    )
    _say_published(console, repo, published)


def pull_dataset(name: Pulled, target: Target, token_file: TokenFile = None) -> None:
    """Take a LeRobot dataset from the Hugging Face hub."""
    from rlsvc.store.hub import Hub, parse_repo, read_token
    from rlsvc.store.hub_dataset import pull_dataset as pull

    repo, console = parse_repo(name, "dataset"), Console()
    meta, commit = pull(Hub(read_token(token_file)), repo, target)
    steps = sum(episode.length for episode in meta.episodes.values())
    _say(console, f"{repo.name} at commit {commit}")
    _say(console, f"{target}: LeRobot {meta.version}, {len(meta.episodes)} episodes, {steps} steps, {meta.fps:g} Hz")


def _branch_of(repo: Repo, revision: str | None) -> Repo:
    if repo.revision is not None:
        raise UserError(f"'{repo}': expected OWNER/NAME; give the branch with --revision {repo.revision}")
    return replace(repo, revision=revision)


def _show(console: Console, repo: Repo, contents: Mapping[str, Path | bytes]) -> None:
    from rlsvc.store.hub import CARD, MAIN, describe_files

    files = describe_files(contents)
    card = contents[CARD]
    assert isinstance(card, bytes)
    _say(console, card.decode())
    _say(console, f"Would push to {repo.name}, branch {repo.revision or MAIN}:")
    for path, size in files[:SHOWN]:
        _say(console, f"  {path}: {_size(size)}")
    more = f" ({len(files) - SHOWN} more)" if len(files) > SHOWN else ""
    _say(console, f"{len(files)} files{more}, {_size(sum(size for _, size in files))}; nothing was sent.")


def _say_published(console: Console, repo: Repo, published: Published) -> None:
    what = "is pushed" if published.changed else "holds this already, there is no new commit"
    new = " (a new repository)" if published.created else ""
    _say(console, f"{published.url} {what}{new}")
    _say(console, f"branch {published.branch}, commit {published.commit}, as {published.account}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _size(count: int) -> str:
    return f"{count} bytes" if count < 2**20 else f"{count / 2**20:.1f} MiB"
