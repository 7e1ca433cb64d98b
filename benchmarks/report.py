"""Writes docs/benchmarks.md from benchmarks/results/*.json and benchmarks/figures.csv (`make bench-report`).

    python benchmarks/report.py

Nothing on that page is typed by hand. figures.csv names the figures that the project answers for, each with a target
(what must be reached) and an aim (what it is after); one that has no result says "not measured yet".
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from curves import draw_tdmpc2, measured

ROOT = Path(__file__).resolve().parent.parent
RESULTS, FIGURES, PAGE = (
    ROOT / "benchmarks" / "results",
    ROOT / "benchmarks" / "figures.csv",
    ROOT / "docs" / "benchmarks.md",
)
KEYS = ("name", "value", "unit", "low", "high", "peer", "peer_value", "ratio", "hardware", "command", "commit", "date")
NOT_MEASURED = "not measured yet"
INTRODUCTION = """\
# Benchmarks

Written by `make bench-report` from `benchmarks/results/*.json` and `benchmarks/figures.csv`; do not edit this page.

- *value [low, high]*: what was measured and its interval as the script states it: 95 % of the mean or percentile;
  for speedups the range of the rounds' medians; for TD-MPC2's returns the lowest and the highest seed.
- *target* must be reached, *aim* is what the project is after. The verdict compares the value, not an end of its
  interval. A figure that was measured on other hardware than was asked for says so.
- *peer* and *ratio*: what it was measured beside. The number behind the peer has the row's unit; where that is a ratio
  it is the peer's time in ms. "Published" peers come from papers; all others ran in the same script, on one machine.
- *commit* is the code that was measured; "+changes" means that tracked files differed from it.
"""


CURVES = """\
## Learning curves

TD-MPC2 (black, each line a seed) on {}, over what its authors published; `benchmarks/tdmpc2_learning.py`. The published
curves have a point every 100k steps; their bands reach from the lowest to the highest seed.

![returns by environment steps](images/tdmpc2_curves.png)
"""


@dataclass(frozen=True)
class Figure:
    """A row of figures.csv.

    Attributes:
        name, unit, hardware, what: as written there.
        better: whether a higher or a lower value is better.
        target, aim: in `unit`.
    """

    name: str
    unit: str
    better: Literal["higher", "lower"]
    target: float
    aim: float
    hardware: str
    what: str

    def verdict(self, value: float, hardware: str) -> str:
        """Which of aim and target a value reaches, and whether another machine was asked for."""
        sign = 1 if self.better == "higher" else -1
        if sign * value >= sign * self.aim:
            reached = "aim reached"
        else:
            reached = "target reached" if sign * value >= sign * self.target else "**missed**"
        same = set(self.hardware.split()) <= set(hardware.split())
        return reached if same else f"{reached}, but asked for on {self.hardware}"


def read_figures(path: Path) -> list[Figure]:
    """The figures of a CSV file, in its order.

    Raises:
        ValueError: a column is missing, a number is none, or `better` is neither higher nor lower.
    """
    figures = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            try:
                better = row["better"]
                if better != "higher" and better != "lower":
                    raise ValueError(f"better: got '{better}', expected higher or lower")
                target, aim = float(row["target"]), float(row["aim"])
                figures.append(Figure(row["name"], row["unit"], better, target, aim, row["hardware"], row["what"]))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path.name}:{line}: {error}") from error
    return figures


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of a folder by figure name.

    Raises:
        ValueError: a file lacks a key, or is named differently from its figure.
    """
    results = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        missing = [key for key in KEYS if key not in result]
        if missing or result["name"] != path.stem:
            raise ValueError(f"{path.name}: {f'lacks {missing[0]}' if missing else 'holds ' + result['name']}")
        results[path.stem] = result
    return results


def render(
    figures: Sequence[Figure], results: Mapping[str, Mapping[str, Any]], tasks_with_curves: Sequence[str] = ()
) -> str:
    """The page.

    Args:
        figures: that the project answers for, in the order of the page.
        results: by figure name, as benchmarks/common.py writes them; those that no figure names come in a second table.
        tasks_with_curves: that the picture of learning curves shows.
    """
    header = (
        "figure",
        "value [low, high]",
        "unit",
        "target",
        "aim",
        "verdict",
        "peer",
        "ratio",
        "hardware",
        "date",
        "commit",
    )
    rows = [_figure_row(figure, results.get(figure.name)) for figure in figures]
    named = {figure.name for figure in figures}
    others = [result for name, result in sorted(results.items()) if name not in named]
    other_header = tuple(column for column in header if column not in ("target", "aim", "verdict"))
    commands = sorted({result["command"] for result in results.values()})
    curves = CURVES.format(", ".join(tasks_with_curves)) if tasks_with_curves else ""
    parts = [
        INTRODUCTION,
        "## Figures with a target\n",
        _table(header, rows),
        "What each of them is:\n",
        "".join(
            f"- `{figure.name}` ({figure.better} is better; asked for on {figure.hardware}): {figure.what}\n"
            for figure in figures
        ),
        *([curves] if curves else []),
        "## Other results\n",
        _table(other_header, [_other_row(result) for result in others]),
        "## Commands\n",
        "```\n" + "\n".join(commands) + "\n```\n",
    ]
    return "\n".join(parts)


def _figure_row(figure: Figure, result: Mapping[str, Any] | None) -> tuple[str, ...]:
    target, aim = f"{figure.target:g}", f"{figure.aim:g}"
    if result is None:
        return (
            f"`{figure.name}`",
            NOT_MEASURED,
            figure.unit,
            target,
            aim,
            NOT_MEASURED,
            "",
            "",
            figure.hardware,
            "",
            "",
        )
    name, value, _, *rest = _other_row(result)
    return (name, value, figure.unit, target, aim, figure.verdict(result["value"], result["hardware"]), *rest)


def _other_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    value, low, high = result["value"], result["low"], result["high"]
    interval = "" if low is None or high is None else f" [{_number(low)}, {_number(high)}]"
    peer = result["peer"] + ("" if result["peer_value"] is None else f": {_number(result['peer_value'])}")
    ratio = "" if result["ratio"] is None else _number(result["ratio"])
    commit, plus, changes = result["commit"].partition("+")
    return (
        f"`{result['name']}`",
        _number(value) + interval,
        result["unit"],
        peer,
        ratio,
        result["hardware"],
        result["date"][:10],
        commit[:7] + plus + changes,
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def main() -> None:
    """Write the page and its pictures."""
    draw_tdmpc2()
    PAGE.write_text(render(read_figures(FIGURES), read_results(RESULTS), list(measured())))
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
