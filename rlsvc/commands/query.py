"""`rlsvc query`: ask a served policy, from the light install."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError


def query(
    url: Annotated[str, typer.Argument(help="Of the server: host:port, http(s)://host:port or ws(s)://host:port.")],
    observation: Annotated[
        Path | None, typer.Option(help="A window [T, ...] by feature name: .json (nested lists) or .npz.")
    ] = None,
    example: Annotated[bool, typer.Option("--example", help="Send zeros that fit the contract.")] = False,
    policy: Annotated[str | None, typer.Option(help="Name of the policy; the only one when left out.")] = None,
    transport: Annotated[str, typer.Option(help="ws or http.")] = "ws",
    n: Annotated[int, typer.Option("-n", help="How many requests, one after the other.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the policy's randomness.")] = 0,
    timeout_s: Annotated[float, typer.Option(help="Longest that a request may take, retries included.")] = 10.0,
    key: Annotated[
        str | None, typer.Option(envvar="RLSVC_API_KEY", help="API key; better in the variable than on the line.")
    ] = None,
) -> None:
    """Print a policy's actions for one observation, and the latency of asking."""
    from rlsvc.client import ClientOptions, PolicyClient, PolicyUnavailableError, ServerFaultError

    if (observation is None) == (not example):
        raise UserError("give either --observation FILE or --example")
    if n < 1:
        raise UserError(f"-n {n}: expected 1 or more")
    sent = None if observation is None else read_observation(observation)
    console = Console()
    try:
        with PolicyClient(
            url, policy=policy, transport=transport, options=ClientOptions(timeout_s=timeout_s, retries=3, key=key)
        ) as client:
            window = client.contract.example_observation() if sent is None else sent
            replies, seconds = [], []
            for step in range(n):
                start = perf_counter()
                replies.append(client.act(window, seed=seed, step=step))
                seconds.append(perf_counter() - start)
            first, last = replies[0], replies[-1]
            console.print(f"policy '{client.name}' version {first.version[:12]}, {client.contract.rate_hz:g} actions/s")
            console.print(_action_table(first.action, client.contract.action.names))
            p50, p95 = np.percentile(np.asarray(seconds) * 1e3, [50, 95])
            served = "  ".join(f"{part} {value:.3g}" for part, value in last.timing.items())
            console.print(f"latency over {transport}: p50 {p50:.2f} ms  p95 {p95:.2f} ms  (n = {n})")
            console.print(f"of which in the server, last request: {served}")
    except (PolicyUnavailableError, ServerFaultError, TimeoutError) as error:
        raise UserError(str(error)) from error


def read_observation(path: Path) -> dict[str, Any]:
    """An observation window from a file.

    Args:
        path: .npz with an array by feature name, or .json with nested lists by feature name (or these as
            "observation" in a map, as a request has them).

    Raises:
        UserError: no such file, another ending, or not readable as what its ending says.
    """
    if path.suffix not in (".json", ".npz"):
        raise UserError(f"{path}: expected a .json or .npz file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {key: arrays[key] for key in arrays.files}
        message = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not readable as {path.suffix}: {error}") from error
    if isinstance(message, dict) and isinstance(message.get("observation"), dict):
        message = message["observation"]
    if not isinstance(message, dict):
        raise UserError(f"{path}: expected a map of arrays by feature name, got {type(message).__name__}")
    return message


def _action_table(action: np.ndarray, names: tuple[str, ...]) -> Table:
    rows = action.reshape(len(action), -1)
    table = Table("step", *(names if len(names) == rows.shape[1] else [f"action[{i}]" for i in range(rows.shape[1])]))
    for step, row in enumerate(rows):
        table.add_row(str(step), *(f"{value:.4g}" for value in row))
    return table
