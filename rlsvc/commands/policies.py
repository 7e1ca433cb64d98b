"""`rlsvc policies`: registered policies."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError

if TYPE_CHECKING:
    from rlsvc.store.registry import Registry

app = typer.Typer(help="Registered policies: list, show, promote.", no_args_is_help=True)

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


def _registry(root: str, store: str | None) -> Registry:
    try:
        from rlsvc.store.registry import Registry
    except ImportError as error:
        raise UserError(
            f"policies are kept by {error.name}, which is not installed: pip install 'rlsvc[all]'"
        ) from error
    return Registry(root, store)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
