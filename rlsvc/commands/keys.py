"""`rlsvc keys`: who may use a server."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError

app = typer.Typer(help="API keys of servers: make, list and remove them.", no_args_is_help=True)
File = Annotated[Path, typer.Option("--file", help="File of keys, which holds their hashes.")]
FILE = Path("keys.json")


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Whose key it is: a robot, a program, a person.")],
    role: Annotated[list[str], typer.Option(help="read, act, record, command or administer; may be repeated.")],
    file: File = FILE,
    days: Annotated[int | None, typer.Option(help="Days until it expires; never when left out.")] = None,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Most requests a second, of each replica; any number when left out.")
    ] = None,
    max_body_mb: Annotated[
        float | None, typer.Option(help="Largest request in MiB; the server's own limit when left out.")
    ] = None,
) -> None:
    """Make a key. It is printed once, and cannot be found again: its file keeps a hash."""
    from rlsvc.serve.keys import new_key, read_file, write_file

    if days is not None and days < 1:
        raise UserError(f"--days: got {days}, expected 1 or more")
    keys = read_file(file)
    if any(key.name == name for key in keys):
        raise UserError(f"{file}: there is a key for '{name}' already; remove it first: rlsvc keys remove {name}")
    today = datetime.datetime.now(datetime.UTC).date()
    expires = None if days is None else today + datetime.timedelta(days)
    limits = {"requests_per_s": requests_per_s, "max_body_mb": max_body_mb}
    key, kept = new_key(name, tuple(dict.fromkeys(role)), expires, **limits)
    write_file(file, (*keys, kept))
    typer.echo(key)
    Console(stderr=True).print(f"Written down nowhere; {file} has its hash. Servers read it when they start.")


@app.command("list")
def list_keys(file: File = FILE) -> None:
    """The keys of a file: names, roles, limits, and when they expire."""
    from rlsvc.serve.keys import Keys

    today = datetime.datetime.now(datetime.UTC).date()
    table = Table("name", "roles", "expires", "requests/s", "MiB", box=None)
    for key in Keys.read(file).keys:
        expires = f"{key.expires or 'never'}{' (expired)' * key.expired(today)}"
        limits = ["any" if limit is None else f"{limit:g}" for limit in (key.requests_per_s, key.max_body_mb)]
        table.add_row(key.name, ", ".join(key.roles), expires, *limits)
    Console().print(table)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: File = FILE,
) -> None:
    """Remove a key; servers refuse it once they start anew."""
    from rlsvc.core.errors import unknown_name
    from rlsvc.serve.keys import Keys, write_file

    keys = Keys.read(file).keys
    if all(key.name != name for key in keys):
        raise unknown_name(f"key of {file}", name, [key.name for key in keys])
    write_file(file, tuple(key for key in keys if key.name != name))
