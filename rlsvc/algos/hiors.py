"""Hi-ORS: human-in-the-loop online rejection sampling (arXiv:2510.26406).

    accept      R(tau) > m and |tau| >= l           R(tau): the reward of the episode's last step; the value of a whole
                                                    episode is its outcome, so no critic can be wrong about it
    learn       min E_(s, a) ~ accepted [ L(s, a) ]  L: the policy's own loss (flow matching, or denoising), which draws
                                                    a time of the flow for every window, so that all intermediate steps
                                                    between noise and action are supervised

The indicator of acceptance is the weight of the paper's reward-weighted objective. Steps in which a person acted are
rows like all others: where they saved an episode they are what is learned most from. Updates draw from accepted
episodes and from demonstrations by the shares that a phase names (`buffer: {replay: 0.5, demonstrations: 0.5}`).

Departures: the paper drops rows in which nothing moved as places to begin a chunk; here they leave the episode, so that
no chunk holds them. Shares of a batch hold on average.

Letters: n steps of an episode, D numbers of a vector, A action dimensions.
"""

from __future__ import annotations

import numpy as np

from rlsvc.algos.imitation import Imitation
from rlsvc.core.contract import Contract
from rlsvc.core.errors import DatasetError
from rlsvc.data.episodes import Episode
from rlsvc.spec.hiors import HiORSSpec


def accepts(reward: np.ndarray, above: float, min_length: int) -> bool:
    """Whether an episode is learned from.

    Args:
        reward: [n] float, of its steps.
        above: what the last one must be above.
        min_length: fewest steps.
    """
    return len(reward) >= min_length and bool(reward[-1] > above)


def moves(rows: np.ndarray, threshold: float) -> np.ndarray:
    """[n] bool: whether any number of a vector changes by more than `threshold` in a step.

    Args:
        rows: [n + 1, D], before each step and after the last one.
        threshold: in the vector's unit.
    """
    return np.abs(np.diff(rows, axis=0)).max(axis=1) > threshold


def targets(episode: Episode, kind: str, state: str) -> np.ndarray:
    """What the policy is to ask for in each step, [n, A].

    Args:
        episode: its columns, [n + 1, ...].
        kind: action, commanded or state.
        state: name of the measured vector, for kind state.

    Raises:
        DatasetError: rows that do not say it, or a state of another shape than the action.
    """
    if kind == "state":
        if episode[state].shape != episode["action"].shape:
            raise DatasetError(
                f"algo.targets: state takes '{state}' for actions, which has shape {list(episode[state].shape[1:])}, "
                f"actions have {list(episode['action'].shape[1:])}; take action or commanded"
            )
        return episode[state][1:]
    if kind not in episode:
        raise DatasetError(
            f"algo.targets: {kind}, which this environment does not record; it records what was executed: take action"
        )
    return episode[kind][:-1]


def learned_rows(episode: Episode, spec: HiORSSpec, contract: Contract) -> Episode | None:
    """What is learned from a whole episode: its observations and `action`, the target, [m, ...]; None is nothing.

    Args:
        episode: its columns, [n + 1, ...].
        spec: of the algorithm.
        contract: of the policy; names the observations.

    Raises:
        DatasetError: a vector that the specification names is not there.
    """
    if not accepts(episode["reward"][:-1], spec.reward_above, spec.min_length):
        return None
    needed = [spec.state] if spec.targets == "state" else []
    if spec.no_op is not None:
        needed.append(spec.no_op.of)
    for name in needed:
        if name not in (*contract.observation, "action"):
            raise DatasetError(
                f"algo.state, algo.no_op.of: there is no '{name}'; the policy sees: {', '.join(contract.observation)}"
            )
    rows = {name: episode[name][:-1] for name in contract.observation}
    rows["action"] = targets(episode, spec.targets, spec.state)
    if spec.no_op is None:
        return rows
    if spec.no_op.of == "action":
        keep = np.abs(episode["action"][:-1]).max(axis=1) > spec.no_op.threshold
    else:
        keep = moves(episode[spec.no_op.of], spec.no_op.threshold)
    keep[-1] = True  # the step that ended the episode
    return {name: column[keep] for name, column in rows.items()}


class HiORS(Imitation):
    """The algorithm of `rlsvc.algos.api`: the updates of imitation, over what `learned_rows` leaves of rollouts."""
