"""A replay that is filled from demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlsvc.core.errors import DatasetError, nearest
from rlsvc.core.types import Chunk, EpisodeTable
from rlsvc.data.replay import Replay
from rlsvc.spec.replay import MARGIN, ReplaySpec


def replay_from_table(
    table: EpisodeTable,
    *,
    observation: Sequence[str],
    action: str = "action",
    reward: str | None = None,
    terminated: str | None = None,
    spec: ReplaySpec | None = None,
    streams: int = 1,
    folder: Path | None = None,
    device: Any = None,
) -> Replay:
    """A replay that holds all of a table's episodes (demonstrations), to be mixed with rollouts or learned from alone.

    A table has no final observations. An episode whose last step is terminated keeps that step, with its last
    observation repeated as the final one, which nothing bootstraps from; any other gives up its last step, whose
    observation is then the final one.

    Args:
        table: the episodes.
        observation: names of the columns that the policy sees.
        action: name of the action's column, which is `action` in the replay.
        reward: name of the reward's column; None stores zeros.
        terminated: name of a column that is True at a step that ended its episode for good; None takes every end for a
            truncation.
        spec: placement and priority; its capacity is not looked at.
        streams: the episodes are dealt out over so many.
        folder: see `Replay`.
        device: see `Replay`.

    Raises:
        DatasetError: a column that the table lacks, or what `Replay.add` refuses; named.
    """
    for name in (*observation, action, *filter(None, (reward, terminated))):
        if name not in table.columns:
            guess = nearest(name, table.columns)
            hint = f" (did you mean '{guess}'?)" if guess else ""
            raise DatasetError(
                f"{table.source or 'table'}: no column '{name}'{hint}; it has: {', '.join(table.columns)}"
            )
    if table.num_episodes < streams:
        raise DatasetError(f"{table.source or 'table'}: {table.num_episodes} episodes cannot fill {streams} streams")
    kept = {name: table.columns[name] for name in (*observation, action)}
    schema = {name: jax.ShapeDtypeStruct(column.shape[1:], column.dtype) for name, column in kept.items()}
    schema["action"] = schema[action] if action == "action" else schema.pop(action)
    lengths = table.episode_ends - table.episode_starts + 1
    longest = max(int(lengths[stream::streams].sum()) for stream in range(streams))
    spec = (spec or ReplaySpec()).replace(capacity=streams * (longest + MARGIN))
    replay = Replay(spec, schema, range(streams), observation=observation, folder=folder, device=device)
    for number in range(table.num_episodes):
        rows = rows_of_episode(table.episode(number), number, observation, action, reward, terminated)
        ends = np.array([0, len(rows["reward"])], np.int64)
        replay.add(Chunk(0, 0, number, np.array([number % streams], np.int32), ends, rows))
    return replay


def rows_of_episode(
    episode: dict[str, np.ndarray],
    number: int,
    observation: Sequence[str],
    action: str,
    reward: str | None,
    terminated: str | None,
) -> dict[str, np.ndarray]:
    """One episode of a table as rows of a `Chunk`, with a final observation as `replay_from_table` says.

    Args:
        episode: its columns, [n, ...].
        number: what the rows are to say as `episode`.
        observation: names of columns that are kept.
        action: likewise; it becomes `action`.
        reward: name of the reward's column; None gives zeros.
        terminated: name of a column that is True at a step that ended the episode for good; None is a truncation.
    """
    steps = len(episode[action])
    ends = terminated is not None and bool(np.reshape(episode[terminated], steps)[-1])
    row = np.arange(steps + ends)
    final = row.size - 1
    step = np.minimum(row, steps - 1)
    rewards = np.zeros(steps) if reward is None else np.reshape(episode[reward], steps)
    actions = episode[action][step]
    actions[final] = 0
    return {
        **{name: episode[name][step] for name in observation},
        "action": actions,
        "reward": np.where(row == final, 0, rewards[step]).astype(np.float32),
        "terminated": (row == final - 1) & ends,
        "truncated": (row == final - 1) & (not ends),
        "is_first": row == 0,
        "is_last": row == final,
        "episode": np.full(row.size, number, np.int64),
        "step": row.astype(np.int32),
    }
