"""The `rlsvc` command. Bad input is answered by one clear message and exit code 2."""

from __future__ import annotations

import logging
import os
import sys

import typer
from rich.console import Console
from rich.logging import RichHandler

from rlsvc import __version__
from rlsvc.commands import (
    collect,
    dataset,
    dataset_edit,
    demo,
    doctor,
    jobs,
    keys,
    policies,
    query,
    serve,
    share,
    sweep,
    timelapse,
    train,
    values,
)
from rlsvc.core.errors import UserError

USER_ERROR = UserError.exit_code
EXTRAS = {
    **dict.fromkeys(
        ("jax", "flax", "optax", "orbax", "safetensors", "pyarrow", "matplotlib", "jaxtyping", "PIL"), "learn"
    ),
    **dict.fromkeys(
        ("ray", "optuna", "sklearn", "mlflow", "fastapi", "uvicorn", "orjson", "prometheus_client"), "cluster"
    ),
    **dict.fromkeys(("gymnasium", "gym_pusht", "pygame", "av"), "sim"),
    **dict.fromkeys(("lerobot", "torch", "datasets"), "lerobot"),
    **dict.fromkeys(("scservo_sdk", "serial", "mujoco"), "robot"),
    **dict.fromkeys(("tree", "lz4", "ormsgpack"), "rllib"),
    "zarr": "zarr",
    "rerun": "rerun",
    "huggingface_hub": "hub",
}
"""The extra that brings a package, by the name it is imported under."""
app = typer.Typer(
    help="Train, sweep and serve robot policies on a Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    train.train,
    train.evaluate,
    serve.serve,
    query.query,
    collect.collect,
    collect.replay,
    collect.console,
    doctor.doctor,
    demo.demo,
    timelapse.timelapse,
):
    app.command()(command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(jobs.submit)
dataset.app.command()(values.values)
dataset.app.command()(collect.send)
dataset.app.command("push")(share.push_dataset)
dataset.app.command("pull")(share.pull_dataset)
policies.app.command("push")(share.push_policy)
policies.app.command("pull")(share.pull_policy)
for command in dataset_edit.COMMANDS:
    dataset.app.command()(command)
app.add_typer(sweep.app, name="sweep")
app.add_typer(jobs.app, name="jobs")
app.add_typer(dataset.app, name="dataset")
app.add_typer(policies.app, name="policies")
app.add_typer(keys.app, name="keys")


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and end.")) -> None:
    if version:
        Console().print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    # Under `uv run` Ray would start every worker with uv again, in a copy of the environment; the workers share this
    # one.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    errors = Console(stderr=True)
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)]
    )
    try:
        app()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        errors.print(
            f"error: this command needs {error.name}, which is not installed; install rlsvc[{extra}]",
            style="red",
            markup=False,
        )
        sys.exit(USER_ERROR)
    except UserError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
