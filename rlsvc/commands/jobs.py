"""`rlsvc submit` and `rlsvc jobs`: Ray jobs, from an install without Ray."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rlsvc.commands.job_command import COMMANDS, HOME, Command, resolve
from rlsvc.core.errors import SpecError, UserError
from rlsvc.spec.run import NAME

if TYPE_CHECKING:
    from rlsvc.jobs.client import JobsClient

__all__ = ["COMMANDS", "app", "submit"]
app = typer.Typer(help="Jobs of a Ray cluster: list, status, logs, stop, resume, restore.", no_args_is_help=True)

Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Dashboard of the cluster.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the cluster's token; default RAY_AUTH_TOKEN, ~/.ray/auth_token.")
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
Follow = Annotated[bool, typer.Option("--follow/--no-follow", help="Print the job's log and exit with its code.")]
LOCAL = "http://127.0.0.1:8265"
PACKAGES = ("cluster", "uv", "pip")
QUEUE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,49}$")


def submit(
    command: Annotated[
        list[str], typer.Argument(help="After `--`: an rlsvc command, such as train experiment=pusht_diffusion.")
    ],
    address: Address = LOCAL,
    follow: Follow = True,
    working_dir: Annotated[
        str, typer.Option(help="Git working tree to send, or the URL of a .zip that the cluster gets by itself.")
    ] = ".",
    name: Annotated[
        str | None, typer.Option(help="The job's id. Submitted twice, the same job does not run twice.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE for the job's environment; may be repeated.")] = None,
    packages: Annotated[
        str, typer.Option(help="From where: cluster (what the nodes have), or the tree's uv.lock, by uv or by pip.")
    ] = "cluster",
    extra: Annotated[
        list[str] | None, typer.Option(help="With --packages uv or pip: an extra of the project; all when left out.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Container image to run in, which has rlsvc; the working tree is not sent.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs that the command's own process holds.")] = 0.0,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs likewise.")] = 0.0,
    memory: Annotated[float, typer.Option(min=0, help="Memory likewise, in GiB.")] = 0.0,
    resource: Annotated[
        list[str] | None, typer.Option(help="NAME=AMOUNT of another resource likewise; may be repeated.")
    ] = None,
    retries: Annotated[
        int, typer.Option(min=0, help="Further attempts when the command fails; each goes on from the last commit.")
    ] = 0,
    queue: Annotated[
        str | None, typer.Option(help="Wait in this queue of the cluster until what it asks for is free.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="In the queue; the higher goes first, 0 when left out.")] = None,
    record: Annotated[
        str | None,
        typer.Option(help="Folder or URL that the cluster reaches, where the job is written down until it has ended."),
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE to remember with the job; may be repeated.")
    ] = None,
    kuberay: Annotated[
        bool, typer.Option("--kuberay", help="As a KubeRay RayJob with a cluster of its own; needs --dry-run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Run an rlsvc command as a job of a Ray cluster: the resolved spec and the working tree are sent."""
    from rlsvc.jobs.package import PythonEnv, git_state, pack, python_env
    from rlsvc.jobs.run import SPEC, SPEC_FILE
    from rlsvc.jobs.sent import remember
    from rlsvc.jobs.types import COMMIT, ENTRYPOINT, PRIORITY, QUEUE, STOP_WAIT_S, UNCOMMITTED, Submission

    console = Console()
    made = resolve(command)
    _check_options(name, packages, extra, image, queue, priority, kuberay, dry_run)
    job = name or f"rlsvc-{command[0]}-{secrets.token_hex(4)}"
    variables = dict(_key_value("--env", each) for each in env or [])
    held = {**made.holds, **_held(cpus, gpus, memory, resource)}
    if kuberay:
        typer.echo(_manifest(made, job, image, variables, retries, working_dir), nl=False)
        return
    asks = _added(made.asks, {name: amount for name, amount in held.items() if name not in made.holds})
    wrapper = ["--attempts", str(retries + 1)] if retries else []
    if queue is not None:
        wrapper += ["--queue", queue, "--priority", str(priority or 0), "--asks", json.dumps(asks, sort_keys=True)]
    wrapper += ["--record", record] if record is not None else []
    notes = {f"user.{key}": value for key, value in (_key_value("--metadata", each) for each in metadata or [])}
    package, python, runtime_env = None, PythonEnv(), {}
    if image is None and "://" not in working_dir:
        tree = Path(working_dir)
        state = git_state(tree)
        package = pack(tree, {SPEC_FILE: made.text.encode()} if made.text else {})
        python = python_env(packages, tree, tuple(extra or ("all",)))
        runtime_env["working_dir"] = package.uri
        notes |= {COMMIT: state.commit, UNCOMMITTED: "\n".join(state.uncommitted)[:2000]}
        sent = f"{package.files} files, {len(package.data) / 2**20:.1f} MiB, {state}"
    else:
        runtime_env |= {"working_dir": working_dir} if image is None else {"image_uri": image}
        wrapper = wrapper or ["--attempts", "1"]
        variables |= {SPEC: made.text} if made.text else {}
        sent = f"the tree of {image or working_dir}"
    own = {**python.env_vars, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    runtime_env |= {**python.runtime_env, "env_vars": {**own, **variables}}
    entrypoint = made.entrypoint(python.python, wrapper)
    notes |= {QUEUE: queue, PRIORITY: str(priority or 0)} if queue is not None else {}
    notes |= {ENTRYPOINT: entrypoint} if record is not None else {}
    submission = Submission(job, entrypoint, runtime_env, notes, held)
    if dry_run:
        typer.echo(json.dumps(submission.to_json(), indent=2))
        return
    with _client(address, token_file) as client:
        client.capacity().check(asks)
        started = client.submit(submission, package)
        if started:
            remember(submission, package)
        _say(
            console, f"Job {job} {'submitted' if started else 'was submitted before; it does not run twice'} ({sent})."
        )
        if made.note and started:
            _say(console, made.note)
        _shown(client, job, console, follow=follow)


@app.command("list")
def list_jobs(address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """List the jobs of a cluster, the newest first; those that wait in a queue say so."""
    from rlsvc.jobs.types import PRIORITY, QUEUE

    table = Table("id", "status", "queue", "started", "commit", "command")
    with _client(address, token_file) as client:
        for job in client.jobs():
            started = datetime.fromtimestamp(job.started).strftime("%Y-%m-%d %H:%M") if job.started else ""
            queue = f"{job.metadata[QUEUE]} {job.metadata[PRIORITY]}" if QUEUE in job.metadata else ""
            table.add_row(job.id, client.state(job), queue, started, job.tree, job.command)
    Console().print(table if table.row_count else f"No jobs on {client.address}.")


@app.command()
def status(job: JobId, address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """Print a job's status and what is known of it; exit with its code once it is over."""
    from rlsvc.jobs.types import COMMIT, RESUMED, UNCOMMITTED

    with _client(address, token_file) as client:
        found = client.job(job)
        _say(Console(), f"{client.state(found)}: {found.message}")
    named = {"commit": COMMIT, "not committed": UNCOMMITTED, "resumed": RESUMED}
    rows = {"command": found.command, **{name: found.metadata.get(key, "") for name, key in named.items()}}
    rows |= {key.removeprefix("user."): value for key, value in found.metadata.items() if key.startswith("user.")}
    for key, value in rows.items():
        if value:
            _say(Console(), f"  {key}: {value.replace(chr(10), ', ')}")
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
    with _client(address, token_file) as client:
        if follow:
            _follow(client, job, Console())
        typer.echo(client.logs(job), nl=False)


@app.command()
def stop(job: JobId, address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """Stop a job, or take it out of its queue, and wait until it has ended; a run writes a checkpoint before."""
    from rlsvc.jobs.types import STOP_WAIT_S

    with _client(address, token_file) as client:
        stopped = client.stop(job)
        found = client.wait(job, STOP_WAIT_S + 30.0)
    _say(Console(), f"Job {job} {'stops' if stopped else 'had ended already'}: {found.status}.")


@app.command()
def resume(job: JobId, follow: Follow = True, address: Address = LOCAL, token_file: TokenFile = None) -> None:
    """Start a job once more that failed or was stopped, from its run's last commit; on a new cluster too."""
    from rlsvc.jobs.sent import recall
    from rlsvc.jobs.types import continued

    console = Console()
    with _client(address, token_file) as client:
        sent, package = recall(job)
        if client.find(job) is not None or sent is None:
            known = client.submission(job)
            # Another cluster's job of this name has another tree.
            package = package if sent is not None and sent.digest == known.digest else None
            sent = known
        client.resume(sent.again(continued(sent.entrypoint)), package)
        _say(console, f"Job {job} goes on.")
        _shown(client, job, console, follow=follow)


@app.command()
def restore(
    folder: Annotated[str, typer.Argument(help="Folder or URL of --record.")],
    address: Address = LOCAL,
    token_file: TokenFile = None,
) -> None:
    """Submit again what a lost cluster had not done: jobs that ran go on, jobs that waited wait again."""
    from rlsvc.jobs.package import Package
    from rlsvc.jobs.record import read_records
    from rlsvc.jobs.types import Submission, continued
    from rlsvc.store.storage import Storage

    console, storage = Console(), Storage(folder)
    with _client(address, token_file) as client:
        for body in read_records(storage):
            one = Submission.from_json(body)
            data = storage.read(f"{one.name}.zip")
            if client.find(one.name) is not None:
                _say(console, f"Job {one.name} is there already.")
                continue
            tree = None if data is None else Package(data, 0)
            client.resume(one.again(continued(one.entrypoint, body["since"])), tree)
            _say(console, f"Job {one.name} goes on.")


def _check_options(
    name: str | None,
    packages: str,
    extra: Sequence[str] | None,
    image: str | None,
    queue: str | None,
    priority: int | None,
    kuberay: bool,
    dry_run: bool,
) -> None:
    if name is not None and not re.match(NAME, name):
        raise SpecError(f"--name '{name}': expected letters, digits, '.', '_' and '-' (at most 100)")
    if packages not in PACKAGES:
        raise SpecError(f"--packages '{packages}': expected {', '.join(PACKAGES)}")
    if image is not None and packages != "cluster":
        raise SpecError(f"--image, --packages {packages}: an image brings its own packages; choose one")
    if extra and packages == "cluster":
        raise SpecError("--extra: goes with --packages uv or pip; a cluster's own packages are what they are")
    if queue is not None and not QUEUE_NAME.match(queue):
        raise SpecError(f"--queue '{queue}': expected letters, digits, '.', '_' and '-' (at most 50)")
    if priority is not None and queue is None:
        raise SpecError(f"--priority {priority}: of which queue? Give --queue too")
    if kuberay and not dry_run:
        raise UserError("--kuberay: prints a manifest and sends nothing: add --dry-run, and give it to kubectl apply")
    if kuberay and queue is not None:
        raise SpecError("--queue, --kuberay: a RayJob has a cluster of its own, in which nobody waits; choose one")


def _held(cpus: float, gpus: float, memory: float, resources: Sequence[str] | None) -> dict[str, float]:
    """What the command's own process holds, by Ray's names; memory in bytes."""
    held = {"CPU": cpus, "GPU": gpus, "memory": memory * 2**30}
    for each in resources or []:
        name, _, amount = each.partition("=")
        try:
            held[name] = float(amount)
        except ValueError:
            raise SpecError(f"--resource '{each}': expected NAME=AMOUNT, such as robot:arm1=1") from None
        if not name or held[name] < 0:
            raise SpecError(f"--resource '{each}': expected a name and an amount of at least 0")
    return {name: amount for name, amount in held.items() if amount}


def _added(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in sorted({*first, *second})}


def _client(address: str, token_file: Path | None) -> JobsClient:
    from rlsvc.jobs.client import JobsClient, find_token

    return JobsClient(address, find_token(token_file))


def _manifest(
    made: Command, job: str, image: str | None, variables: Mapping[str, str], retries: int, working_dir: str
) -> str:
    """The RayJob of a command."""
    from rlsvc.jobs.kuberay import check_root, gpus_as_numbers, groups_of, ray_job, to_yaml
    from rlsvc.jobs.run import SPEC, going_on
    from rlsvc.spec.needs import needs_of_run

    spec, asks, words = made.spec, dict(made.asks), made.words
    if spec is not None:
        check_root(spec.root)
        spec = gpus_as_numbers(spec)
        asks = needs_of_run(spec)
    for word in made.shell:
        if HOME in word:
            check_root(word.strip('"').removeprefix("root="))
    words = (*words, *(going_on(words) if retries else []))
    runtime_env: dict[str, Any] = {"env_vars": {**variables, **({SPEC: made.text} if made.text else {})}}
    runtime_env |= {"working_dir": working_dir} if "://" in working_dir else {}
    entrypoint = replace(made, words=words).entrypoint(wrapper=["--attempts", "1"])
    return to_yaml(ray_job(job, entrypoint, runtime_env, groups_of(spec, asks, image), image, retries))


def _shown(client: JobsClient, job: str, console: Console, *, follow: bool) -> None:
    if follow:
        _follow(client, job, console)
    _say(console, f"rlsvc jobs logs {job} --address {client.address}")


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


def _key_value(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise SpecError(f"{option} '{text}': expected KEY=VALUE")
    return key, value


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
