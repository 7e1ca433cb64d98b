"""The page of a sweep's report: one HTML file beside its pictures."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.judge import Configuration, pareto_front

TITLES = {
    "curves": "Learning curves",
    "importance": "Importance of the keys",
    "slices": "The metric by each key",
    "parallel": "Parallel coordinates",
    "pareto": "Pareto front",
}
SHOWN = 10
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;padding:.25rem .5rem;text-align:left}"
    "img{max-width:100%}tr.best{background:#fdecea}code{background:#f3f3f3;padding:0 .2rem}"
)


def write_page(
    path: Path, spec: SweepSpec, found: Sequence[Configuration], best: Configuration | None,
    plots: Mapping[str, Path], ended: str = "",
) -> Path:  # fmt: skip
    """Writes the page.

    Args:
        path: of the page, in the folder of the pictures.
        spec: of the sweep.
        found: all configurations.
        best: which of them; None when none could be judged.
        plots: pictures by name.
        ended: the rule that ended the sweep early, "" for none.
    """
    count = {status: sum(each.status == status for each in found) for status in dict.fromkeys(e.status for e in found)}
    parts = [
        f"<h1>Sweep {html.escape(spec.name)}</h1>",
        f"<p>{len(found)} of {spec.configurations} configurations"
        + (f", {spec.seeds} seeds each" if spec.seeds > 1 else "")
        + f": {html.escape(', '.join(f'{number} {status}' for status, number in count.items()) or 'none yet')}. "
        f"Searcher {spec.searcher.name}, scheduler {spec.scheduler.name}; "
        + html.escape(", ".join(f"{name} {mode}" for name, mode in spec.goals.items()))
        + (f". Ended by {html.escape(ended)}" if ended else "")
        + ".</p>",
    ]
    if best is not None and best.scores is not None:
        scores = ", ".join(f"{name} = {value:.6g}" for name, value in best.scores.items())
        parts.append(
            f"<p>Best: configuration {best.number}, {html.escape(scores)} at step {best.step}. "
            "Train it again: <code>rlsvc train best.yaml</code>.</p>"
        )
    parts.append(_table(spec, "Best configurations", _ranked(spec, found)[:SHOWN], best))
    if spec.objectives:
        parts.append(_table(spec, "Pareto front", pareto_front(spec, found), best))
    for name, title in TITLES.items():
        if name in plots:
            parts.append(f'<h2>{title}</h2><img src="{plots[name].name}" alt="{title}">')
        elif name == "importance":
            parts.append(f"<h2>{title}</h2><p>Too few configurations that differ in value and metric.</p>")
    failed = [(trial.name, trial.reason) for each in found for trial in each.trials if trial.status == "failed"]
    if failed:
        lines = "".join(f"<li>{name}: {html.escape(reason)}</li>" for name, reason in failed)
        parts.append(f"<h2>Failed trials</h2><ul>{lines}</ul>")
    head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(spec.name)}</title><style>{STYLE}</style>'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{head}\n" + "\n".join(parts) + "\n")
    temporary.replace(path)
    return path


def _ranked(spec: SweepSpec, found: Sequence[Configuration]) -> list[Configuration]:
    judged = [each for each in found if each.scores]
    return sorted(judged, key=lambda each: (each.scores or {})[spec.metric], reverse=spec.mode == "max")


def _table(spec: SweepSpec, title: str, found: Sequence[Configuration], best: Configuration | None) -> str:
    if not found:
        return f"<h2>{title}</h2><p>None yet.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("#", "status", *spec.goals, "step", *spec.space))
    lines = []
    for each in found:
        spread = next((std for step, _, std in each.curve if step == each.step), 0.0)
        scores = [f"{value:.5g}" for value in (each.scores or {}).values()]
        if spec.seeds > 1 and scores:
            scores[0] += f" ± {spread:.2g}"
        cells = [
            str(each.number),
            each.status,
            *scores,
            str(each.step),
            *(_shown(each.values, key) for key in spec.space),
        ]
        mark = ' class="best"' if each is best else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(lines)}</table>"


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return ""
    value = values[key]
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
