"""The scores of an evaluation as a JSON file, from which one that was stopped goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsvc.core.errors import UserError
from rlsvc.spec.env import EnvBase
from rlsvc.train.evaluate import Evaluation
from rlsvc.train.workers import EpisodeResult


@dataclass(frozen=True)
class Made:
    """What the scores of an episode depend on, beside its seed.

    Attributes:
        policy: id of the bundle, or a baseline's name.
        env: the environment's specification, without what has no effect on scores.
        sample_steps: of the policy where they are not its own.
    """

    policy: str
    env: dict[str, Any]
    sample_steps: int | None

    @classmethod
    def by(cls, policy: str, env: EnvBase, sample_steps: int | None) -> Made:
        """Of a policy in an environment."""
        without = {"isolation", "step_timeout_s", "max_memory_mb"}
        return cls(policy, env.model_dump(mode="json", exclude=without), sample_steps)


def write_scores(evaluation: Evaluation, made: Made, path: Path) -> Path:
    """Every episode's seed, task and scores, an episode a line, and what they come to. Replaces the file at once."""
    rows = [
        {
            "seed": e.seed,
            "task": e.task,
            "max_reward": max(e.rewards),
            "return": sum(e.rewards),
            "length": e.length,
            "success": e.success,
            "rewards": e.rewards,
        }
        for e in evaluation.episodes
    ]
    head = {"made": asdict(made), "metrics": evaluation.metrics()}
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{json.dumps(head)[:-1]},\n"episodes": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(text)
    partial.replace(path)
    return path


def read_scores(path: Path, made: Made) -> list[EpisodeResult]:
    """The episodes of a file, without their actions; none where there is no file yet.

    Raises:
        UserError: the file is none of `write_scores`, or was made by another policy or in another environment.
    """
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text())
        theirs = Made(**stored["made"])
        episodes = [EpisodeResult(e["seed"], e["rewards"], [], e["success"], e["task"]) for e in stored["episodes"]]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--resume: {path} is no file of scores ({type(error).__name__}: {error})") from error
    for what in ("policy", "env", "sample_steps"):
        if getattr(theirs, what) != getattr(made, what):
            raise UserError(
                f"--resume: {path} was made with another {what}: it has {getattr(theirs, what)}, got "
                f"{getattr(made, what)}. Choose another --output, or leave out --resume"
            )
    return episodes
