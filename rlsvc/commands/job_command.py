"""The command of a job, checked and resolved on the submitter's side, from an install without Ray.

A run is composed and validated here, and sent resolved. A relative `root` would lie in the job's temporary folder on
the cluster and be deleted with it, so it becomes one under the home folder of the cluster's head.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from rlsvc.commands.collect import collect
from rlsvc.commands.serve import serve
from rlsvc.commands.train import evaluate
from rlsvc.core.errors import SpecError, unknown_name
from rlsvc.jobs.run import SPEC_FILE
from rlsvc.spec.run import RunSpec

COMMANDS = ("train", "evaluate", "sweep", "dataset", "policies", "doctor", "collect", "serve", "jobs")
HOME = "$HOME/rlsvc"


@dataclass(frozen=True)
class Command:
    """What a job runs.

    Attributes:
        words: of the rlsvc command.
        shell: further words, which the cluster's shell expands (`root=$HOME/...`).
        text: of its specification, which it reads from SPEC_FILE; "" for none.
        note: what to tell the person.
        asks: what it and all that it starts hold of the cluster, by resource.
        holds: what the command's own process holds of that: a robot, whose computer it must be on.
        spec: of a training run.
    """

    words: tuple[str, ...]
    shell: tuple[str, ...] = ()
    text: str = ""
    note: str = ""
    asks: Mapping[str, float] = field(default_factory=dict)
    holds: Mapping[str, float] = field(default_factory=dict)
    spec: RunSpec | None = None

    def entrypoint(self, python: str = "python", wrapper: Sequence[str] = ()) -> str:
        """The shell command of the job.

        Args:
            python: what runs Python.
            wrapper: options of `rlsvc.jobs.run`, through which it runs when there are any.
        """
        module = ["-m", "rlsvc.jobs.run", *wrapper, "--"] if wrapper else ["-m", "rlsvc.cli"]
        return " ".join([python, shlex.join([*module, *self.words]), *self.shell])


def resolve(command: Sequence[str]) -> Command:
    """The job of an rlsvc command.

    Raises:
        NotFoundError: no such command, or an experiment that does not exist.
        SpecError: the run, the search space or an option is wrong.
    """
    verb, *words = command
    if verb not in COMMANDS:
        raise unknown_name("command", verb, COMMANDS)
    if verb == "train":
        return _train(words)
    if verb == "sweep":
        return _sweep(words)
    if verb == "collect":
        return _collect(words)
    if verb == "evaluate":
        given = _parsed(verb, words)
        asks = {} if given["local"] else {"CPU": float(given["workers"])}
        return _with_root(Command((verb, *words), asks=asks), given["bundle"], given["root"])
    if verb == "serve":
        given = _parsed(verb, words)
        if given["policy"].endswith((".yaml", ".yml")):
            return Command((verb, *words))
        asks = {"CPU": given["replicas"] * given["cpus"], "GPU": given["replicas"] * given["gpus"]}
        made = Command((verb, *words), asks={name: amount for name, amount in asks.items() if amount})
        return _with_root(made, given["policy"], given["root"])
    return Command((verb, *words))


def _train(words: Sequence[str]) -> Command:
    from rlsvc.spec.compose import compose, to_yaml
    from rlsvc.spec.needs import needs_of_run

    options = [word for word in words if word.startswith("-")]
    spec = compose([word for word in words if not word.startswith("-")])
    asks = {} if "--local" in options else needs_of_run(spec)
    command = Command(("train", SPEC_FILE, *options), text=to_yaml(spec), asks=asks, spec=spec)
    return _moved(command, spec.root)


def _sweep(words: Sequence[str]) -> Command:
    from rlsvc.spec.compose import compose
    from rlsvc.spec.sweep import check_space
    from rlsvc.tune.resources import needs_of
    from rlsvc.tune.space import load_sweep

    keys = [word for word in words if not word.startswith("-")]
    if keys[:1] in (["status"], ["report"], ["best"], ["promote"]):
        return Command(("sweep", *words))
    keys = keys[1:] if keys[:1] == ["run"] else keys
    if not keys:
        raise SpecError("sweep: expected the file of a search space, such as tune_spaces/pusht_diffusion.yaml")
    sweep = load_sweep(Path(keys[0]), keys[1:])
    base = compose(sweep.run)
    check_space(sweep, base)
    trial = needs_of(sweep, base, 0.0)
    names = {name for bundle in trial.bundles for name in bundle}
    return _moved(Command(("sweep", *words), asks={name: trial.total(name) for name in names}), base.root)


def _collect(words: Sequence[str]) -> Command:
    from rlsvc.spec.collect import CollectSpec
    from rlsvc.spec.compose import compose_file, to_yaml

    given = _parsed("collect", words)
    spec = compose_file(CollectSpec, given["file"], given["overrides"] or [])
    robot = {f"robot:{spec.station.id}": 1.0}
    made = Command(("collect", SPEC_FILE), text=to_yaml(spec), asks=robot, holds=robot)
    if Path(spec.dataset).is_absolute():
        return made
    dataset = f"{HOME}/{spec.dataset}"
    return replace(made, shell=(f'"dataset={dataset}"',), note=f"Its dataset is {dataset} on the robot's computer.")


def _moved(command: Command, root: str) -> Command:
    """With a root that outlives the job."""
    if Path(root).is_absolute() or "://" in root:
        return command
    moved = f"{HOME}/{root}"
    note = f"Its folder is {moved} on the cluster's head; root=/a/shared/folder puts it where every node reaches it."
    return replace(command, shell=(f'"root={moved}"',), note=note)


def _with_root(command: Command, policy: str, root: str) -> Command:
    """With the registry where jobs that train have theirs."""
    if not policy.startswith("models:") or Path(root).is_absolute() or "://" in root:
        return command
    return replace(command, shell=("--root", f'"{HOME}/{root}"'))


def _parsed(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """The options and arguments of a command line that is not run here."""
    app = typer.Typer()
    app.command("evaluate")(evaluate)
    app.command("serve")(serve)
    app.command("collect")(collect)
    group: Any = typer.main.get_command(app)
    try:
        return group.commands[verb].make_context(verb, list(words)).params
    except typer.TyperException as error:
        raise SpecError(f"{verb}: {error.format_message()}") from error
