"""Episodes for tests of the recorder, each with values that no other has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsvc.core.contract import Feature
from rlsvc.core.types import EpisodeTable
from rlsvc.data.load import load_table
from rlsvc.data.recorder import Recorder
from rlsvc.spec.data import DatasetSpec

FPS = 20
FRONT = "observation.images.front"
STATE = Feature((2,), "float32", "rad", ("pan", "lift"))
CAMERA = {FRONT: Feature((48, 64, 3), "uint8")}


def open_recorder(path: Path, *, camera: bool = False, **changes: Any) -> Recorder:
    observation = {"observation.state": STATE, **(CAMERA if camera else {})}
    fields = {"observation": observation, "action": STATE, "fps": FPS, "robot_type": "toy"} | changes
    return Recorder(path, **fields)


def picture(seed: int, step: int) -> np.ndarray:
    """12 blocks of colours."""
    blocks = np.random.default_rng([seed, step]).integers(0, 256, (3, 4, 3), np.uint8)
    return blocks.repeat(16, 0).repeat(16, 1)


def step_of(seed: int, step: int, *, camera: bool = False) -> dict[str, Any]:
    values = np.array([seed, step], np.float32)
    return {
        "observation.state": values,
        **({FRONT: picture(seed, step)} if camera else {}),
        "action": values + 0.25,
        "commanded": values + 0.5,
        "intervention": step % 2 == 1,
        "actor": "anna" if step % 2 else "policy-3",
        "reward": float(step),
        "reward_source": "environment",
    }


def stamps_of(step: Mapping[str, Any], at: float) -> dict[str, float]:
    return dict.fromkeys((key for key in step if key.startswith("observation.")), at)


def record(recorder: Recorder, seed: int, steps: int = 4, *, camera: bool = False, outcome="success") -> int:
    """Record one whole episode; gives its index."""
    for i in range(steps):
        step = step_of(seed, i, camera=camera)
        recorder.add(step, stamps_of(step, 50 + i / 8))
    return recorder.end_episode(outcome, f"task {seed % 2}")


def load(path: Path) -> EpisodeTable:
    return load_table(DatasetSpec.model_validate({"path": str(path)}))


def seeds_in(path: Path, tolerance: float = 6.0) -> list[int]:
    """The seeds of the episodes that are there, each checked for all its values."""
    table, seeds = load(path), []
    for e in range(table.num_episodes):
        rows = table.episode(e)
        seed = int(rows["observation.state"][0, 0])
        for i in range(len(rows["action"])):
            for key, value in step_of(seed, i, camera=FRONT in rows).items():
                if key == FRONT:
                    error = np.abs(rows[key][i].astype(float) - value).mean()
                    assert error < tolerance, (e, i, error)
                else:
                    assert np.array_equal(np.reshape(rows[key][i], np.shape(value)), value), (e, i, key)
        seeds.append(seed)
    return seeds
