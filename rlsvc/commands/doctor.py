"""`rlsvc doctor`: what works on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLORS = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    root: Annotated[str, typer.Option(help="Where runs shall lie.")] = "runs",
) -> None:
    """Say what works here and the mend for what does not; exit 1 only if something is broken that everything needs."""
    from rlsvc.doctor import examine

    checks = examine(root)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        table = Table("", "", "found", "mend", show_lines=False)
        for check in checks:
            table.add_row(
                f"[{COLORS[check.status]}]{check.status}[/]", check.name, escape(check.found), escape(check.mend)
            )
        Console().print(table)
    if any(check.broken for check in checks):
        raise typer.Exit(1)
