"""`rlsvc dataset values`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from rlsvc.core.errors import UserError


def values(
    path: Annotated[Path, typer.Argument(help="A LeRobot or zarr folder, or an .npz file.")],
    bundle: Annotated[str, typer.Argument(help="Folder of a value function's bundle, or models:/name@alias.")],
    reward: Annotated[str | None, typer.Option(help="Feature name of the reward.")] = None,
    success: Annotated[
        str | None, typer.Option(help="Feature name of a flag: the episode succeeded; or `all`, or `none`.")
    ] = None,
    terminated: Annotated[str | None, typer.Option(help="Feature name of a flag: the end was no cut.")] = None,
    n_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps that an advantage looks ahead; the whole episode when left out.")
    ] = None,
    action: Annotated[str, typer.Option(help="Feature name of the action.")] = "action",
    group: Annotated[str | None, typer.Option(help="Normaliser group, for a bundle that has several.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write what is found of every step here, as .npz.")] = None,
    root: Annotated[str, typer.Option(help="Where runs and the model registry live.")] = "runs",
    device: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
) -> None:
    """Judge every step of a dataset: its value, and with rewards or successes its return and advantage."""
    from rlsvc.data.load import load_table
    from rlsvc.data.monte_carlo import monte_carlo_returns, outcome_columns, read_outcomes
    from rlsvc.spec.compose import validate
    from rlsvc.spec.data import DataSpec
    from rlsvc.store.registry import resolve
    from rlsvc.value import ValueRunner

    if output is not None and output.suffix != ".npz":
        raise UserError(f"--output: got '{output}', expected a file that ends with .npz")
    runner = ValueRunner.load(resolve(bundle, root=root), device=device)
    every = {"all": True, "none": False}.get(success or "")
    data = validate(
        DataSpec,
        {
            "datasets": [{"path": str(path), "success": every}],
            "observation": tuple(runner.contract.observation),
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "success": success if every is None else None,
        },
    )
    (dataset,) = data.datasets
    table = load_table(dataset, (*data.observation, action, *outcome_columns(data, dataset)))
    found: dict[str, Any] = {
        "value": runner.values(table, action=action, group=group),
        "episode_ends": table.episode_ends,
    }
    if reward is not None or success is not None:
        outcomes = read_outcomes(table, data, runner.returns.success_bonus, every)
        found["return"], found["return_known"] = monte_carlo_returns(outcomes, runner.returns)
        if not runner.contract.action_horizon:
            found["advantage"], found["advantage_known"] = runner.advantages(outcomes, found["value"], n_steps)
    shown = Table("", "steps", "mean", "std", "min", "max", title=f"{path}: {table.num_episodes} episodes")
    for name in ("value", "return", "advantage"):
        if name in found:
            x = found[name][found.get(f"{name}_known", slice(None))]
            numbers = (x.mean(), x.std(), x.min(), x.max()) if len(x) else ()
            shown.add_row(name, str(len(x)), *(f"{number:.4g}" for number in numbers))
    console = Console()
    console.print(shown)
    if "return" in found and found["return_known"].any():
        known = found["return_known"]
        spread = found["return"][known].var()
        if spread > 0:
            share = 1 - (found["return"] - found["value"])[known].var() / spread
            console.print(f"The values explain {100 * share:.1f} % of the variance of the returns.", highlight=False)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        np.savez(output, **found)
        console.print(f"values: {output}", soft_wrap=True)
