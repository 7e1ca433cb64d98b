"""What every dataset reader is: a `Source`. `rlsvc.data.load` opens one and makes the table that training takes.

Letters: N steps of all selected episodes, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlsvc.core.contract import Feature
from rlsvc.core.types import EpisodeTable


class Source(Protocol):
    """A dataset on disk whose metadata has been read; columns are read when asked for.

    Attributes:
        path: the folder or file.
        format: what it is, for people ("LeRobot v2.1").
        fps: steps a second.
        features: what one step has, by LeRobot name; only what can be read.
        absent: by name, why a declared feature cannot be read.
        episode_ids: the numbers that `DatasetSpec.episodes` selects from, in order.
        num_steps: of all episodes, as the metadata says.
    """

    path: Path
    format: str
    fps: float
    features: dict[str, Feature]
    absent: dict[str, str]
    episode_ids: list[int]
    num_steps: int

    def episode_tasks(self, episodes: Sequence[int]) -> list[str]:
        """The prompt of each of these episodes ("" when the dataset has none)."""
        ...

    def file_of(self, episode: int) -> Path:
        """The file that holds an episode's numbers, for messages."""
        ...

    def read(self, keys: Sequence[str], episodes: Sequence[int]) -> EpisodeTable:
        """These columns of these episodes, in this order. Floating columns come as float32, images as uint8 (H, W, C).

        Raises:
            DatasetError: a file is missing, damaged, or does not hold what the metadata says.
        """
        ...
