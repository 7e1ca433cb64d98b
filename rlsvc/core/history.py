"""The last observations of one episode, stacked to the window that a policy sees. Letter: T observation steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np


class ObservationHistory:
    """Keeps the last T observations of one episode and stacks them, oldest first.

    At the start of an episode, when fewer than T were seen, the oldest one is repeated, as training windows are padded.
    """

    def __init__(self, n_obs_steps: int) -> None:
        """Start empty.

        Args:
            n_obs_steps: T, the contract's.

        Raises:
            ValueError: T is below 1.
        """
        if n_obs_steps < 1:
            raise ValueError(f"n_obs_steps: got {n_obs_steps}, expected 1 or more")
        self._steps: deque[dict[str, Any]] = deque(maxlen=n_obs_steps)

    def append(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Add the newest observation and return the window.

        Args:
            observation: of one step, by key an array of the feature's shape (or a number, or a text). It is copied,
            since
                robots and simulators write into the same buffers again.

        Returns:
            By key an array [T, ...], oldest first, newest last.

        Raises:
            ValueError: the keys or shapes differ from those of the step before.
        """
        step = {key: np.array(value) for key, value in observation.items()}
        if self._steps and step.keys() != self._steps[-1].keys():
            raise ValueError(
                f"observation keys changed within an episode: {sorted(self._steps[-1])}, then {sorted(step)}"
            )
        for key, value in step.items():
            if self._steps and value.shape != self._steps[-1][key].shape:
                raise ValueError(
                    f"observation '{key}' changed its shape: {self._steps[-1][key].shape}, then {value.shape}"
                )
        self._steps.append(step)
        return self.window()

    def window(self) -> dict[str, np.ndarray]:
        """The window as `append` last returned it.

        Raises:
            ValueError: nothing was appended since the last reset.
        """
        if not self._steps:
            raise ValueError("the observation history is empty: append an observation first")
        missing = (self._steps.maxlen or 1) - len(self._steps)
        steps = [self._steps[0]] * missing + list(self._steps)
        return {key: np.stack([step[key] for step in steps]) for key in self._steps[-1]}

    def copy(self) -> ObservationHistory:
        """The same observations, to which others are appended."""
        other = ObservationHistory(self._steps.maxlen or 1)
        other._steps.extend(self._steps)
        return other

    def reset(self) -> None:
        """Forget everything: an episode begins."""
        self._steps.clear()

    def __len__(self) -> int:
        """How many observations are kept, at most T."""
        return len(self._steps)
