"""How a policy learns: the interface of every algorithm.

An algorithm knows nothing of loops, Ray, files, clocks or loggers. The learner calls `update`, stores the state, and
asks for the weights to act with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Key

from rlsvc.policies.api import Params, Policy

TrainState = Any
"""A pytree that holds `step`, an int32 scalar: the number of updates done."""


@dataclass(frozen=True)
class Phase:
    """Where a run stands in its curriculum.

    Attributes:
        name: of the phase, as the run calls it.
        progress: share of the phase that is done, 0 to 1.
    """

    name: str = "train"
    progress: float = 0.0


START = Phase()
"""For callers that have no curriculum."""


@runtime_checkable
class SequenceSource(Protocol):
    """Replay, or a mix of several, as an algorithm sees it.

    A batch: observation: by name [B, L + 1, ...]; action [B, L, A]; reward, terminated, mask [B, L], mask False beyond
    the episode's end; weight [B], importance; index [B], of the first row; what was recorded besides [B, L, ...].
    """

    @property
    def on_host(self) -> bool:
        """Whether batches are drawn in numpy, outside of compiled programs."""
        ...

    def sample(self, key: Key[Array, ""], batch_size: int, length: int) -> dict[str, Any]:
        """One batch of sequences of `length` steps."""
        ...

    def sample_many(self, key: Key[Array, ""], count: int, batch_size: int, length: int) -> dict[str, Any]:
        """`count` batches, on a leading axis, from the host."""
        ...


class Algorithm(Protocol):
    """Hooks over a train state."""

    hooks: tuple[str, ...]
    policy: Policy

    def init(self, key: Key[Array, ""]) -> TrainState:
        """The state before the first update."""
        ...

    def update(
        self, hook: str, state: TrainState, data: Any, key: Key[Array, ""], num_updates: int, phase: Phase = START
    ) -> tuple[TrainState, dict[str, Array]]:
        """`num_updates` gradient steps in one compiled call; donates `state`.

        Args:
            hook: one of `hooks`.
            state: consumed.
            data: what the algorithm draws its batches from: `Windows` of demonstrations, or a `SequenceSource`.
            key: of the run; the batch and noise of an update follow from it and `state.step` alone.
            num_updates: K.
            phase: where the run stands, for what is scheduled by it.

        Returns:
            The new state, and metrics averaged over the K steps; with a prioritised replay also `index` and `priority`
            [K, B] for it.
        """
        ...

    def validate(self, state: TrainState, data: Any, key: Key[Array, ""]) -> dict[str, Array]:
        """Metrics of the acting weights on data that is not trained on, with fixed noise; `loss` is among them."""
        ...

    def acting_params(self, state: TrainState) -> Params:
        """The weights that the bundle gets."""
        ...


def update_key(key: Key[Array, ""], step: Array) -> Key[Array, ""]:
    """The key of one update: a function of the run's key and the update's number, so that resuming is exact."""
    return jax.random.fold_in(key, step)
