"""Labels of steps for a reward classifier: given, or made from which episodes succeeded.

Letters: N steps of all episodes, E episodes, n classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlsvc.core.errors import DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.monte_carlo import numbers
from rlsvc.spec.data import DatasetSpec, DataSpec
from rlsvc.spec.reward_classifier import RewardLearningSpec

LABEL = "label"
UNKNOWN = -1


@dataclass(frozen=True)
class Labels:
    """What gives windows the label of their step.

    Attributes:
        columns: of a dataset, that have to be read.
        of: from its table and its specification to [N] int32, below 0 for steps that are left out.
    """

    columns: Callable[[DatasetSpec], tuple[str, ...]]
    of: Callable[[EpisodeTable, DatasetSpec], np.ndarray]


def outcome_labels(
    episode_ends: np.ndarray, succeeded: np.ndarray, classes: int, success_steps: int, margin_steps: int
) -> np.ndarray:
    """Labels from outcomes, [N] int32.

    Args:
        episode_ends: [E], exclusive.
        succeeded: [E] bool.
        classes: 2: the last `success_steps` of an episode that succeeded are 1, the `margin_steps` before them unknown,
            all else 0. More: step i of L of an episode that succeeded is floor(n i / L), all else unknown.
        success_steps: see `classes`.
        margin_steps: see `classes`.
    """
    out = []
    for length, success in zip(np.diff(episode_ends, prepend=0), succeeded, strict=True):
        if classes > 2:
            out.append(classes * np.arange(length) // length if success else np.full(length, UNKNOWN))
            continue
        labels = np.zeros(length, np.int64)
        if success:
            labels[-(success_steps + margin_steps) :] = UNKNOWN
            labels[-success_steps:] = 1
        out.append(labels)
    return np.concatenate(out).astype(np.int32)


def reward_labels(spec: RewardLearningSpec, data: DataSpec, classes: int) -> Labels:
    """The labels that a run learns from.

    The table that they are of raises DatasetError: a label that is no class, or an episode of which it is not known
    whether it succeeded; by name.
    """

    def columns(dataset: DatasetSpec) -> tuple[str, ...]:
        name = spec.label or (data.success if dataset.success is None else None)
        return () if name is None else (name,)

    def of(table: EpisodeTable, dataset: DatasetSpec) -> np.ndarray:
        if spec.label is not None:
            given = numbers(table, spec.label)
            if not np.array_equal(given, given.astype(np.int32)) or given.max() >= classes:
                raise DatasetError(
                    f"{table.source}: '{spec.label}' has labels from {given.min()} to {given.max()}, expected whole "
                    f"numbers below policy.classes = {classes}"
                )
            return given.astype(np.int32)
        if dataset.success is not None:
            succeeded = np.full(table.num_episodes, dataset.success)
        elif data.success is not None:
            succeeded = numbers(table, data.success)[table.episode_ends - 1] != 0
        else:
            raise DatasetError(
                f"{table.source}: nothing says which episodes succeeded; name algo.label, data.success, or `success` "
                "of the dataset"
            )
        return outcome_labels(table.episode_ends, succeeded, classes, spec.success_steps, spec.margin_steps)

    return Labels(columns, of)
