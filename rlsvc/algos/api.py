"""How a policy learns: the interface of every algorithm.

An algorithm knows nothing of loops, Ray, files, clocks or loggers. The learner calls `update`, stores the state, and
asks for the weights to act with.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jaxtyping import Array, Float, Key

from rlsvc.data.windows import Windows
from rlsvc.policies.api import Params, Policy

TrainState = Any
"""A pytree that holds `step`, an int32 scalar: the number of updates done."""


class Algorithm(Protocol):
    """Hooks over a train state."""

    hooks: tuple[str, ...]
    policy: Policy

    def init(self, key: Key[Array, ""]) -> TrainState:
        """The state before the first update."""
        ...

    def update(
        self, hook: str, state: TrainState, data: Windows, key: Key[Array, ""], num_updates: int
    ) -> tuple[TrainState, dict[str, Array]]:
        """`num_updates` gradient steps in one compiled call; donates `state`.

        Args:
            hook: one of `hooks`.
            state: consumed.
            data: windows on the device.
            key: of the run; the batch and noise of an update follow from it and `state.step` alone.
            num_updates: K.

        Returns:
            The new state, and metrics averaged over the K steps.
        """
        ...

    def validate(self, state: TrainState, data: Windows, key: Key[Array, ""]) -> Float[Array, ""]:
        """Loss of the acting weights on windows that are not trained on, with fixed noise."""
        ...

    def acting_params(self, state: TrainState) -> Params:
        """The weights that the bundle gets."""
        ...


def update_key(key: Key[Array, ""], step: Array) -> Key[Array, ""]:
    """The key of one update: a function of the run's key and the update's number, so that resuming is exact."""
    return jax.random.fold_in(key, step)
