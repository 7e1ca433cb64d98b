"""Returns and advantages of recorded episodes, from rewards, outcomes and how episodes ended.

    G_t = r_t + discount * G_(t+1)                                          the return, over the steps of one episode
    A_t = G_t - V(s_t)                                                      the advantage
    A_t = sum_(i<n) discount^i r_(t+i) + discount^n V(s_(t+n)) - V(s_t)     likewise, n steps ahead

A recorded episode has no observation after its last step, so the return of one that was cut (truncated) cannot be
bootstrapped: what its steps lack is not known, and by how much that counts is said step by step.

Letters: N steps of all episodes, E episodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlsvc.core.errors import DatasetError, nearest
from rlsvc.core.types import EpisodeTable
from rlsvc.spec.data import DatasetSpec, DataSpec
from rlsvc.spec.value_function import ReturnsSpec


@dataclass(frozen=True)
class Outcomes:
    """What is known of the steps of a table, and of how its episodes ended.

    Attributes:
        reward: [N] float64, bonuses of success included.
        episode_ends: [E] int64, exclusive end of each episode in N.
        truncated: [E] bool, True where an episode was cut and would have gone on.
    """

    reward: np.ndarray
    episode_ends: np.ndarray
    truncated: np.ndarray


def outcome_columns(data: DataSpec, dataset: DatasetSpec) -> tuple[str, ...]:
    """The columns of a dataset that `read_outcomes` looks at."""
    success = data.success if dataset.success is None else None
    return tuple(name for name in (data.reward, data.terminated, success) if name is not None)


def read_outcomes(table: EpisodeTable, data: DataSpec, success_bonus: float, success: bool | None = None) -> Outcomes:
    """Rewards and ends of a table, from the columns that `data` names.

    An episode ended for good where `data.terminated` is true at its last step. Without that column every end is for
    good if it is known how episodes went (`data.success`), since then it was the outcome, and else every end is a cut.

    Args:
        table: the episodes.
        data: names of the columns; a reward of null is 0 everywhere.
        success_bonus: added to the reward of the last step of an episode that succeeded.
        success: whether all episodes succeeded; None asks the column at each one's last step.

    Raises:
        DatasetError: a column that is missing, not a number a step, or not finite; or nothing that returns could be
            made of. The message names it.
    """
    last = table.episode_ends - 1
    known = success is not None or data.success is not None
    if data.reward is None and not (known and success_bonus):
        raise DatasetError(
            f"{table.source}: every return would be 0; name the reward's column (data.reward), or say which episodes "
            "succeeded (data.success, or `success` of the dataset) and give them a success_bonus (policy.returns)"
        )
    reward = np.zeros(table.num_steps) if data.reward is None else numbers(table, data.reward).astype(np.float64)
    succeeded = np.zeros(table.num_episodes, bool)
    if success is not None:
        succeeded[:] = success
    elif data.success is not None:
        succeeded = numbers(table, data.success)[last] != 0
    reward[last] += np.where(succeeded, success_bonus, 0.0)
    if data.terminated is not None:
        truncated = numbers(table, data.terminated)[last] == 0
    else:
        truncated = np.full(table.num_episodes, not known)
    return Outcomes(reward, table.episode_ends, truncated)


def monte_carlo_returns(outcomes: Outcomes, spec: ReturnsSpec) -> tuple[np.ndarray, np.ndarray]:
    """Discounted returns of every step, and which of them may be learned from.

    Returns:
        G [N] float32, and [N] bool: False at the steps of cut episodes that `spec.truncated` drops.
    """
    ends = outcomes.episode_ends
    lengths = np.diff(ends, prepend=0)
    returns, follows = np.zeros(len(outcomes.reward)), np.zeros(len(ends))
    for back in range(1, int(lengths.max()) + 1):
        there = lengths >= back
        rows = ends[there] - back
        follows[there] = returns[rows] = outcomes.reward[rows] + spec.discount * follows[there]
    if spec.truncated == "keep":
        return returns.astype(np.float32), np.ones(len(returns), bool)
    missing = spec.discount ** (np.repeat(ends, lengths) - np.arange(len(returns)))
    known = ~np.repeat(outcomes.truncated, lengths) | (missing <= spec.tolerance)
    return returns.astype(np.float32), known


def n_step_advantages(outcomes: Outcomes, values: np.ndarray, discount: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Advantages that look n steps ahead, or to the end of the episode where that is nearer.

    A terminated episode is worth nothing after its end. A cut one gives up its last step, whose observation stands for
    the final one: there the value goes on, so that no reward is missing.

    Args:
        outcomes: of the table.
        values: V of every step [N].
        discount: of one step.
        n: steps, 1 or more.

    Returns:
        A [N] float32, and [N] bool: False at the last step of a cut episode, after which nothing is recorded.
    """
    ends = outcomes.episode_ends
    lengths = np.diff(ends, prepend=0)
    truncated, step = np.repeat(outcomes.truncated, lengths), np.arange(len(values))
    limit = np.repeat(ends, lengths) - truncated
    ahead = np.minimum(n, limit - step)
    target = np.zeros(len(values))
    for i in range(min(n, int(lengths.max()))):
        within = ahead > i
        target[within] += discount**i * outcomes.reward[step[within] + i]
    goes_on = truncated | (step + ahead < limit)
    at = np.minimum(step + ahead, len(values) - 1)
    target += np.where(goes_on, discount**ahead * values[at], 0.0)
    return (target - values).astype(np.float32), ahead > 0


def is_positive(
    advantage: np.ndarray,
    known: np.ndarray,
    task: np.ndarray,
    *,
    quantile: float | None = None,
    threshold: float | None = None,
) -> np.ndarray:
    """Which steps are good enough: the indicator of RECAP (arXiv:2511.14759), I = 1(A >= bound).

    Args:
        advantage: [N].
        known: [N] bool; where False the step is not good enough, and no bound is taken from it.
        task: [N] integers; each task has a bound of its own, as one that is always done well would drown the others.
        quantile: the bound is this quantile of the task's advantages.
        threshold: the bound itself, of every task; one of the two must be given.

    Returns:
        [N] bool.
    """
    assert (quantile is None) != (threshold is None)
    bound = np.full(len(advantage), np.inf if threshold is None else threshold)
    if quantile is not None:
        for one in np.unique(task[known]):
            rows = task == one
            bound[rows] = np.quantile(advantage[rows & known], quantile)
    return known & (advantage >= bound)


def numbers(table: EpisodeTable, name: str) -> np.ndarray:
    """A column as one number a step, [N]."""
    if name not in table.columns:
        guess = nearest(name, table.columns)
        hint = f" (did you mean '{guess}'?)" if guess else ""
        raise DatasetError(f"{table.source}: no column '{name}'{hint}; it has: {', '.join(table.columns)}")
    column = table.columns[name]
    if column.dtype.kind not in "biuf" or column.size != table.num_steps:
        raise DatasetError(
            f"{table.source}: '{name}' is {column.dtype} {column.shape[1:]} a step, expected one number or flag"
        )
    return column.reshape(table.num_steps)
