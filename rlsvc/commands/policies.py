"""`rlsvc policies`: registered policies, and policies in the files of others."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.store.registry import Registry
    from rlsvc.store.url_registry import UrlRegistry

app = typer.Typer(
    help="Policies: list, show, promote and roll back registered ones, convert, share.", no_args_is_help=True
)

Root = Annotated[str, typer.Option(help="Folder of runs; its mlflow.db is the default store.")]
Store = Annotated[str | None, typer.Option(help="MLflow store; default MLFLOW_TRACKING_URI, then <root>/mlflow.db.")]
Name = Annotated[str, typer.Argument(help="Name of the policy.")]


@app.command("list")
def list_policies(root: Root = "runs", store: Store = None) -> None:
    """List the registered policies with their newest version and aliases."""
    registry = _registry(root, store)
    table = Table("policy", "versions", "newest", "aliases")
    for name in registry.names():
        versions = registry.versions(name)
        aliases = ", ".join(f"{alias} -> {version.version}" for version in versions for alias in version.aliases)
        table.add_row(name, str(len(versions)), _date(versions[-1].created) if versions else "", aliases)
    console = Console()
    console.print(
        table if table.row_count else f"No policies in {registry.uri}. A training run registers its best bundle."
    )


@app.command()
def show(name: Name, root: Root = "runs", store: Store = None) -> None:
    """Show the versions of a policy: aliases, bundle, run and where it lies."""
    table = Table("version", "aliases", "created", "bundle", "run", "source", title=name)
    for version in reversed(_registry(root, store).versions(name)):
        table.add_row(
            str(version.version),
            ", ".join(version.aliases),
            _date(version.created),
            version.bundle[:12],
            version.run_id[:12],
            version.source,
        )
    Console().print(table)


@app.command()
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(help="Version that the alias shall mean.")],
    alias: Annotated[str, typer.Argument(help="Alias, such as `production`.")],
    root: Root = "runs",
    store: Store = None,
) -> None:
    """Point an alias at a version; `rlsvc serve models:/NAME@ALIAS` serves it."""
    _registry(root, store).promote(name, version, alias)
    Console().print(f"models:/{name}@{alias} is version {version} now.")


@app.command()
def rollback(
    name: Name,
    alias: Annotated[str, typer.Argument(help="Alias, such as `production`.")],
    root: Root = "runs",
    store: Store = None,
) -> None:
    """Point an alias at the version that it pointed at before."""
    version = _registry(root, store).rollback(name, alias)
    Console().print(f"models:/{name}@{alias} is version {version} again.")


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A bundle of pi0 or pi0.5 (folder, models:/NAME@ALIAS), or a LeRobot folder of one.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write; not there yet.")],
    rate: Annotated[float | None, typer.Option(min=0, help="To a bundle: control rate in Hz.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="To a bundle: PaliGemma's tokenizer; default SOURCE/tokenizer.model.")
    ] = None,
    norm_stats: Annotated[
        Path | None, typer.Option(help="To a bundle: openpi's norm_stats.json; default the statistics in SOURCE.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="To LeRobot: normaliser group, for a bundle that has several.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="To LeRobot: config.json and model.safetensors alone.")
    ] = False,
    root: Root = "runs",
    store: Store = None,
) -> None:
    """Make a LeRobot folder of a bundle, or a bundle of a LeRobot folder: pi0 and pi0.5."""
    to_bundle = Path(source, "config.json").is_file()
    options = {"--rate": rate, "--tokenizer": tokenizer, "--norm-stats": norm_stats}
    others = {"--group": group, "--weights-only": weights_only or None}
    if wrong := [name for name, value in (others if to_bundle else options).items() if value is not None]:
        kind, other = ("a LeRobot folder", "a bundle") if to_bundle else ("a bundle", "a LeRobot folder")
        raise UserError(f"{wrong[0]}: is for {other}; {source} is {kind}")
    from rlsvc.store.bundle import read_bundle
    from rlsvc.store.lerobot_policy import from_lerobot_folder, to_lerobot_folder

    if to_bundle:
        if not rate:
            raise UserError(f"--rate: give the control rate in Hz, which {source} does not know")
        notes = from_lerobot_folder(Path(source), target, rate_hz=rate, tokenizer=tokenizer, norm_stats=norm_stats)
    else:
        path = _registry(root, store).resolve(source) if source.startswith("models:") else Path(source)
        notes = to_lerobot_folder(read_bundle(path), target, group=group, processors=not weights_only)
    console = Console()
    console.print(f"{target} is written.")
    for note in notes:
        console.print(note, markup=False)


@app.command("import")
def import_policy(
    source: Annotated[
        Path, typer.Argument(help="A folder that LeRobot's save_pretrained or lerobot-train wrote (pretrained_model).")
    ],
    target: Annotated[Path, typer.Argument(help="The bundle to write; not there yet.")],
    rate: Annotated[float, typer.Option(min=0.001, help="Control rate in Hz, which the folder does not know.")],
    name: Annotated[str | None, typer.Option(help="Register the bundle under this name, too.")] = None,
    root: Root = "runs",
    store: Store = None,
) -> None:
    """Make a bundle of a LeRobot policy, which LeRobot's own Torch code then runs: act, diffusion, vqbet, ..."""
    from rlsvc.store.bundle import LEROBOT_WEIGHTS, write_bundle

    try:
        from rlsvc.backends.torch_lerobot import from_folder
    except ImportError as error:
        raise UserError(
            f"LeRobot's policies need {error.name}, which is not installed: pip install 'rlsvc[torch]'"
        ) from error
    if target.exists():
        raise UserError(f"{target}: is there already; give another name, or delete it first")
    write_bundle(target, **from_folder(source, rate), weights=LEROBOT_WEIGHTS)
    console = Console()
    console.print(f"{target} is written.")
    if name is not None:
        console.print(f"registered as models:/{name}/{_registry(root, store).register(target, name)}")


def _registry(root: str, store: str | None) -> Registry | UrlRegistry:
    try:
        from rlsvc.store.registry import open_registry
    except ImportError as error:
        raise UserError(
            f"policies are kept by {error.name}, which is not installed: pip install 'rlsvc[all]'"
        ) from error
    return open_registry(root, store)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
