"""What a run folder says of its bundles: which is best, how it was trained, what was measured of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlsvc.core.errors import NotFoundError, UserError

SPEC, SCORES, METRICS = "spec.yaml", "evaluations.json", "metrics.jsonl"
EVAL = "eval/"
SCORE_NAMES = ("success", "max_reward", "return", "length")


@dataclass(frozen=True)
class Score:
    """A mean over episodes and its 95 % interval, None where one episode gave none."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Measured:
    """One evaluation.

    Attributes:
        env: specification of the environment, as JSON.
        episodes: how many.
        scores: by name, one of SCORE_NAMES.
        tasks: share of successes by task, where there are several.
    """

    env: dict[str, Any]
    episodes: int
    scores: dict[str, Score]
    tasks: dict[str, float]


def best_step(bundles: Path, scores: Mapping[int, float]) -> int | None:
    """Step of the best bundle that is still there, the later of equals; the last one's where none has a score."""
    there = sorted(int(b.name) for b in bundles.iterdir() if b.name.isdigit()) if bundles.is_dir() else []
    scored = [step for step in there if step in scores]
    if scored:
        return max(scored, key=lambda step: (scores[step], step))
    return there[-1] if there else None


def best_bundle(run: Path) -> Path:
    """The best bundle of a run folder.

    Raises:
        NotFoundError: it has none.
    """
    file = run / SCORES
    found = json.loads(file.read_text()) if file.exists() else {}
    step = best_step(run / "bundles", {int(step): score for step, score in found.items()})
    if step is None:
        raise NotFoundError(f"{run}: the run has no bundle yet; it writes one with each checkpoint and evaluation")
    return run / "bundles" / str(step)


def measured(metrics: Mapping[str, float], env: Mapping[str, Any]) -> Measured:
    """An evaluation from its metrics, as `rlsvc.train.evaluate.Evaluation.metrics` names them."""
    scores = {
        name: Score(metrics[name], metrics.get(f"{name}_low"), metrics.get(f"{name}_high"))
        for name in SCORE_NAMES
        if name in metrics
    }
    prefix = "task_success/"
    tasks = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return Measured(dict(env), int(metrics["episodes"]), scores, tasks)


def stored_spec(run: Path) -> dict[str, Any] | None:
    """A run's specification as it stands in its folder, of whatever version of rlsvc; None where there is none."""
    try:
        found = yaml.safe_load((run / SPEC).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def measured_in_run(run: Path, env: Mapping[str, Any], step: int) -> Measured | None:
    """The run's own evaluation in `env` of the bundle of this step, the last one; None where there was none."""
    file = run / METRICS
    if not file.is_file():
        return None
    found: dict[str, float] | None = None
    for line in file.read_text().splitlines():
        if EVAL not in line:
            continue
        try:
            row = json.loads(line)
        except ValueError:  # a full disk cut it short
            continue
        if row.get("step") == step and f"{EVAL}episodes" in row:
            found = {name.removeprefix(EVAL): value for name, value in row.items() if name.startswith(EVAL)}
    return None if found is None else measured(found, env)


def measured_in_file(file: Path, bundle_id: str) -> Measured:
    """What `rlsvc evaluate --output FILE` wrote of this bundle.

    Raises:
        UserError: no such file, or it is of another policy.
    """
    try:
        stored = json.loads(file.read_text())
        made, metrics = stored["made"], stored["metrics"]
        policy, env = made["policy"], dict(made["env"])
        found = measured(metrics, env)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"--evaluation {file}: is no file of scores, as `rlsvc evaluate --output` writes them "
            f"({type(error).__name__}: {error})"
        ) from error
    if policy != bundle_id:
        raise UserError(
            f"--evaluation {file}: is of the policy {str(policy)[:12]}, but this bundle is {bundle_id[:12]}; evaluate "
            "this one"
        )
    return found
