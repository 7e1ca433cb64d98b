"""Learning curves: those that were measured (results/curves), over published ones (published/).

`make bench-report` draws them into docs/images.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "benchmarks" / "results" / "curves"
PUBLISHED = ROOT / "benchmarks" / "published" / "tdmpc2"
PAGE_IMAGE = ROOT / "docs" / "images" / "tdmpc2_curves.png"
PEERS = {"tdmpc2": "TD-MPC2, published", "dreamerv3": "DreamerV3, published", "sac": "SAC, published"}


def published(method: str, task: str) -> list[tuple[int, float]]:
    """Environment steps and return of every seed, as the authors of TD-MPC2 published them."""
    with (PUBLISHED / method / f"{task}.csv").open(newline="") as file:
        return [(int(row["step"]), float(row["reward"])) for row in csv.DictReader(file)]


def measured() -> dict[str, Any]:
    """Our curves by task, as tdmpc2_learning.py writes them."""
    return {p.stem.removeprefix("tdmpc2_"): json.loads(p.read_text()) for p in sorted(CURVES.glob("tdmpc2_*.json"))}


def draw_tdmpc2(path: Path = PAGE_IMAGE) -> None:
    """One panel a task, up to twice the steps that were measured.

    Lines of published methods join points that lie 100k steps apart; their bands reach from the lowest to the highest
    seed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = measured()
    if not found:
        return
    figure, axes = plt.subplots(2, (len(found) + 1) // 2, figsize=(8, 6), layout="constrained", squeeze=False)
    for axis, (task, result) in zip(axes.flat, found.items(), strict=False):
        curve = result["curve"]
        reach = 2 * curve[-1]["env_steps"]
        for method, label in PEERS.items():
            rows = [row for row in published(method, task) if row[0] <= reach]
            steps = sorted({step for step, _ in rows})
            at = [[reward for step, reward in rows if step == here] for here in steps]
            thousands = [step / 1000 for step in steps]
            (line,) = axis.plot(thousands, [sum(x) / len(x) for x in at], "--", label=label)
            axis.fill_between(
                thousands, [min(x) for x in at], [max(x) for x in at], color=line.get_color(), alpha=0.1, linewidth=0
            )
        thousands = [point["env_steps"] / 1000 for point in curve]
        for i in range(len(result["seeds"])):
            label = f"rlsvc, {len(result['seeds'])} seeds" if i == 0 else None
            axis.plot(thousands, [point["returns"][i] for point in curve], "k.-", linewidth=1, label=label)
        axis.set(title=task, xlim=(0, reach / 1000), ylim=(0, 1000))
        axis.set(xlabel="environment steps, thousands", ylabel="return")
    axes.flat[0].legend(frameon=False, fontsize="small", loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
