"""`rlsvc submit` and `rlsvc jobs`: Ray jobs, from an install without Ray."""

from __future__ import annotations

import re
import secrets
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import SpecError, unknown_name
from rlsvc.spec.run import NAME

if TYPE_CHECKING:
    from rlsvc.jobs import JobsClient

app = typer.Typer(help="Jobs of a Ray cluster: list, status, logs, stop.", no_args_is_help=True)

Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Dashboard of the cluster.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the cluster's token; default RAY_AUTH_TOKEN, ~/.ray/auth_token.")
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
LOCAL = "http://127.0.0.1:8265"
COMMANDS = ("train", "evaluate", "sweep", "dataset", "policies", "doctor", "collect", "serve")
SPEC_FILE = "rlsvc_spec.yaml"


def submit(
    command: Annotated[
        list[str], typer.Argument(help="After `--`: an rlsvc command, such as train experiment=pusht_diffusion.")
    ],
    address: Address = LOCAL,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Print the job's log and exit with its code.")
    ] = True,
    working_dir: Annotated[Path, typer.Option(help="Git working tree to send.")] = Path(),
    name: Annotated[
        str | None, typer.Option(help="The job's id. Submitted twice, the same job does not run twice.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the job's environment; may be repeated.")] = None,
    token_file: TokenFile = None,
) -> None:
    """Run an rlsvc command as a job of a Ray cluster: the resolved spec and the working tree are sent."""
    from rlsvc.jobs import JobsClient, find_token, pack

    console = Console()
    if command[0] not in COMMANDS:
        raise unknown_name("command", command[0], COMMANDS)
    if name is not None and not re.match(NAME, name):
        raise SpecError(f"--name '{name}': expected letters, digits, '.', '_' and '-' (at most 100)")
    entrypoint, files, note = resolve(command)
    variables = dict(_key_value(each) for each in env or [])
    package = pack(working_dir, files)
    job = name or f"rlsvc-{command[0]}-{secrets.token_hex(4)}"
    with JobsClient(address, find_token(token_file)) as client:
        started = client.submit(entrypoint, package, job, variables)
        sent = f"{package.files} files, {len(package.data) / 2**20:.1f} MiB"
        _say(
            console, f"Job {job} {'submitted' if started else 'was submitted before; it does not run twice'} ({sent})."
        )
        if note and started:
            _say(console, note)
        if not follow:
            _say(console, f"rlsvc jobs logs {job} --address {client.address}")
            return
        _follow(client, job, console)


def resolve(command: list[str]) -> tuple[str, dict[str, bytes], str]:
    """The job's shell command, the files that it needs besides the tree, and what to tell the person.

    A run is composed and validated here, and sent resolved. A relative `root` would lie in the job's temporary folder
    on the cluster and be deleted with it, so it becomes one under the home folder of the cluster's head.

    Raises:
        SpecError: the run or the search space is wrong.
    """
    verb, *words = command
    if verb not in ("train", "sweep"):
        return shlex.join(["python", "-m", "rlsvc.cli", *command]), {}, ""
    from rlsvc.spec.compose import compose, to_yaml

    options = [word for word in words if word.startswith("-")]
    keys = [word for word in words if not word.startswith("-")]
    if verb == "train":
        spec = compose(keys)
        files, arguments = {SPEC_FILE: to_yaml(spec).encode()}, [SPEC_FILE, *options]
    else:
        from rlsvc.spec.sweep import check_space
        from rlsvc.tune.space import load_sweep

        if not keys:
            raise SpecError("sweep: expected the file of a search space, such as tune_spaces/pusht_diffusion.yaml")
        sweep = load_sweep(Path(keys[0]), keys[1:])
        spec = compose(sweep.run)
        check_space(sweep, spec)
        files, arguments = {}, words
    entrypoint = shlex.join(["python", "-m", "rlsvc.cli", verb, *arguments])
    if Path(spec.root).is_absolute():
        return entrypoint, files, ""
    root = f"$HOME/rlsvc/{spec.root}"
    note = f"Its folder is {root} on the cluster's head; root=/a/shared/folder puts it where every node reaches it."
    return f'{entrypoint} "root={root}"', files, note


@app.command("list")
def list_jobs(address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """List the jobs of a cluster, the newest first."""
    from rlsvc.jobs import JobsClient, find_token

    table = Table("id", "status", "started", "command")
    with JobsClient(address, find_token(token_file)) as client:
        for job in client.jobs():
            started = datetime.fromtimestamp(job.started).strftime("%Y-%m-%d %H:%M") if job.started else ""
            table.add_row(job.id, job.status, started, job.entrypoint)
    Console().print(table if table.row_count else f"No jobs on {client.address}.")


@app.command()
def status(job: JobId, address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """Print a job's status; exit with its code once it is over."""
    from rlsvc.jobs import JobsClient, find_token

    with JobsClient(address, find_token(token_file)) as client:
        found = client.job(job)
    _say(Console(), f"{found.status}: {found.message}")
    raise typer.Exit(found.code if found.over else 0)


@app.command()
def logs(
    job: JobId,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job is over; exit with its code.")
    ] = False,
    address: Address = LOCAL,
    token_file: TokenFile = None,
) -> None:
    """Print what a job has printed."""
    from rlsvc.jobs import JobsClient, find_token

    with JobsClient(address, find_token(token_file)) as client:
        if follow:
            _follow(client, job, Console())
        typer.echo(client.logs(job), nl=False)


@app.command()
def stop(job: JobId, address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """Stop a job, and wait until it has ended."""
    from rlsvc.jobs import JobsClient, find_token

    with JobsClient(address, find_token(token_file)) as client:
        stopped = client.stop(job)
        found = client.wait(job, 60.0)
    _say(Console(), f"Job {job} {'stops' if stopped else 'had ended already'}: {found.status}.")


def _follow(client: JobsClient, job: str, console: Console) -> None:
    try:
        for text in client.follow(job):
            typer.echo(text, nl=False)
    except KeyboardInterrupt:
        _say(console, f"\nThe job goes on. rlsvc jobs logs -f {job} follows it again, rlsvc jobs stop {job} ends it.")
        raise typer.Exit(130) from None
    found = client.job(job)
    _say(console, f"Job {job} {found.status}{'' if found.status == 'SUCCEEDED' else f': {found.message.strip()}'}")
    raise typer.Exit(found.code)


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise SpecError(f"--env '{text}': expected KEY=VALUE")
    return key, value


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
