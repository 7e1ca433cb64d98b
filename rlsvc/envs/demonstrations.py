"""Demonstrations by the script of an environment, as a replay buffer in one .npz file (rlsvc.data.npz).

Letters: N steps, D numbers of an observation, A action dimensions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def of_script(
    env: Any, rate_hz: float, episodes: int, seed: int, noise: float, *, only_successes: bool = False
) -> dict[str, np.ndarray]:
    """Episodes of an environment of vectors whose `expert(rng, noise)` gives an action.

    Args:
        env: as of gymnasium; observations [D] float32.
        rate_hz: of its steps.
        episodes: how many.
        seed: of the starts and of the noise.
        noise: standard deviation on the actions, as a share of their range.
        only_successes: leave out episodes that do not end as one.

    Returns:
        `observation.state` [N, D], `action` [N, A], `episode_ends`, `fps`.
    """
    rng = np.random.default_rng(seed)
    states, actions, ends = [], [], []
    while len(ends) < episodes:
        observation, _ = env.reset(seed=int(rng.integers(2**31)))
        rows, terminated, truncated, info = [], False, False, {}
        while not (terminated or truncated):
            action = env.expert(rng, noise)
            rows.append((observation, action))
            observation, _, terminated, truncated, info = env.step(action)
        if only_successes and not info["is_success"]:
            continue
        states += [row[0] for row in rows]
        actions += [row[1] for row in rows]
        ends.append(len(actions))
    return {
        "observation.state": np.stack(states),
        "action": np.stack(actions),
        "episode_ends": np.asarray(ends),
        "fps": np.asarray(float(rate_hz)),
    }


def write_from_command_line(
    description: str | None, make: Callable[[int, int], dict[str, np.ndarray]], episodes: int
) -> None:
    """`python -m MODULE PATH [--episodes N] [--seed S]`.

    Args:
        description: of the module, for --help.
        make: gives the columns for a number of episodes and a seed.
        episodes: when none are named.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--episodes", type=int, default=episodes)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.path, **make(args.episodes, args.seed))  # pyright: ignore[reportArgumentType]
