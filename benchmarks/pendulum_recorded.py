"""Makes datasets/pendulum_mixed: episodes of a scripted swing-up, at four levels of noise, with rewards.

    python benchmarks/pendulum_recorded.py datasets/pendulum_mixed

The script adds energy while the pendulum hangs and holds it once it stands; with a share of 0, 0.2, 0.5 and 1 of the
steps a uniform action takes its place. The same file follows from the same seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rlsvc.core.types import EpisodeTable
from rlsvc.data.lerobot_write import write_lerobot
from rlsvc.envs.make import make_env
from rlsvc.spec.env import GymnasiumSpec

SHARES = (0.0, 0.2, 0.5, 1.0)
EPISODES = 15
"""Of each share."""
TASK = "Swing the pendulum up and hold it."


def scripted(state: np.ndarray) -> np.ndarray:
    """Torque [1] for cos, sin and speed of the angle."""
    cos, sin, speed = (float(x) for x in state)
    angle = float(np.arctan2(sin, cos))
    if cos > 0.92:
        torque = -8 * angle - 2 * speed
    else:
        missing = 5 - (speed**2 / 6 + 5 * cos)  # of the energy that it has at rest on top
        torque = 2.0 * float(np.sign(speed) or 1.0) * float(np.sign(missing))
    return np.clip(np.array([torque], np.float32), -2, 2)


def record() -> EpisodeTable:
    """The episodes, one share after the other."""
    env = make_env(GymnasiumSpec(id="Pendulum-v1", action_repeat=2, max_steps=100))
    rng = np.random.default_rng(0)
    rows: dict[str, list[np.ndarray]] = {"observation.state": [], "action": [], "next.reward": []}
    ends = []
    for number, share in enumerate(np.repeat(SHARES, EPISODES)):
        observation, _ = env.reset(seed=number)
        truncated = False
        while not truncated:
            state = observation["observation.state"]
            noisy = rng.random() < share
            action = rng.uniform(-2, 2, 1).astype(np.float32) if noisy else scripted(state)
            observation, reward, _, truncated, _ = env.step(action)
            rows["observation.state"].append(state)
            rows["action"].append(action)
            rows["next.reward"].append(np.array([reward], np.float32))
        ends.append(len(rows["action"]))
    rate = env.contract().rate_hz
    env.close()
    columns = {name: np.stack(values) for name, values in rows.items()}
    tasks = np.zeros(ends[-1], np.int32)
    return EpisodeTable(columns, np.array(ends), rate, tasks, [TASK], "a scripted pendulum")


if __name__ == "__main__":
    table = record()
    write_lerobot(table, Path(sys.argv[1]))
    starts = [0, *table.episode_ends[:-1]]
    returns = np.add.reduceat(table.columns["next.reward"][:, 0], starts).reshape(len(SHARES), EPISODES)
    for share, values in zip(SHARES, returns, strict=True):
        print(f"noise {share:g}: return {values.mean():.0f} ({values.min():.0f} to {values.max():.0f})")
