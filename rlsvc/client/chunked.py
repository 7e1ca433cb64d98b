"""One action at each control step out of a policy that returns chunks.

Letters: T observation steps, H action steps, A action dimensions, n actions executed of each chunk.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import Any

import numpy as np

from rlsvc.client.client import AsyncPolicyClient, PolicyClient
from rlsvc.client.protocol import Reply, SessionLostError
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.core.history import ObservationHistory

logger = logging.getLogger(__name__)


class _Chunk:
    """The observation history, what is left of the chunk under way, and what its policy handed on with it.

    Attributes:
        carry: for the next request; empty where the policy begins anew, and of one that hands on nothing.
        restarts: how often the policy had to begin anew within an episode.
    """

    def __init__(self, contract: Contract, n_execute: int | None, seed: int, expire: bool) -> None:
        horizon = contract.action_horizon
        if n_execute is not None and not 1 <= n_execute <= horizon:
            raise UserError(f"n_execute: got {n_execute}, expected 1 to {horizon}, the policy's action horizon")
        self.n_execute = n_execute or horizon
        self.seed = seed
        self.step = 0
        self._one_step = dataclasses.replace(contract, n_obs_steps=1)
        self._history = ObservationHistory(contract.n_obs_steps)
        self._left: deque[np.ndarray] = deque()
        self._expire = expire
        self._until = math.inf
        self.carry = b""
        self.restarts = 0

    def observe(self, observation: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """Remember an observation; the window to ask with when the chunk is used up or has expired, else None."""
        checked = self._one_step.check_observation(observation)
        window = self._history.append({key: array[0] for key, array in checked.items()})
        if monotonic() >= self._until:
            self._left.clear()
        return None if self._left else window

    def refresh(self, reply: Reply) -> None:
        self._left.extend(reply.action[: self.n_execute])
        expiry = reply.expires_in_ms if self._expire else None
        self._until = math.inf if expiry is None else monotonic() + expiry / 1e3
        self.carry = reply.carry or b""

    def begin_anew(self, error: SessionLostError) -> None:
        logger.warning("the policy begins anew: %s", error)
        self.carry = b""
        self.restarts += 1

    def next_action(self) -> np.ndarray:
        self.step += 1
        return self._left.popleft()

    def reset(self, seed: int | None) -> None:
        self._history.reset()
        self._left.clear()
        self.step = 0
        self.carry = b""
        self.seed = self.seed if seed is None else seed


class ChunkedPolicy:
    """Executes n actions of each chunk, then asks for the next one.

    Keeps the last T observations; at the start of an episode the first one is repeated, as in training. Keeps also what
    the policy hands from one chunk to the next (a planner's warm start), so that the server knows nothing of the
    episode; where another version took the place of its own, the policy begins anew, which `restarts` counts. When the
    policy cannot be asked the error is raised and no action returned: what a robot does then is its own safe stop,
    never the last action again. A chunk that is older than the server lets it become, since the loop is slow or stood
    still, is dropped and the policy asked anew.
    """

    def __init__(
        self, client: PolicyClient, *, n_execute: int | None = None, seed: int = 0, expire: bool = True
    ) -> None:
        """An episode begins.

        Args:
            client: of the served policy.
            n_execute: n, at most H; when left out what the policy's robot executes, or H.
            seed: of the policy's randomness in this episode.
            expire: whether a chunk gets too old; False where time is simulated, and no robot waits.

        Raises:
            UserError: n is not within [1, H].
        """
        self._client = client
        self._chunk = _Chunk(client.contract, client.execute if n_execute is None else n_execute, seed, expire)

    def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action of this control step.

        Args:
            observation: of one step, by key an array of the feature's shape.

        Returns:
            [A] float32, in the contract's units.

        Raises:
            ContractError: the observation does not fit; it is not remembered.
            Exception: as PolicyClient.act.
        """
        window = self._chunk.observe(observation)
        if window is not None:
            try:
                reply = self._ask(window)
            except SessionLostError as error:
                self._chunk.begin_anew(error)
                reply = self._ask(window)
            self._chunk.refresh(reply)
        return self._chunk.next_action()

    def _ask(self, window: Mapping[str, Any]) -> Reply:
        chunk = self._chunk
        return self._client.act(window, seed=chunk.seed, step=chunk.step, carry=chunk.carry)

    @property
    def restarts(self) -> int:
        """How often the policy's carry was lost with its version, and the policy began anew."""
        return self._chunk.restarts

    def reset(self, seed: int | None = None) -> None:
        """Another episode begins: history and chunk are forgotten."""
        self._chunk.reset(seed)


class AsyncChunkedPolicy:
    """ChunkedPolicy for asyncio, over an AsyncPolicyClient that is connected."""

    def __init__(
        self, client: AsyncPolicyClient, *, n_execute: int | None = None, seed: int = 0, expire: bool = True
    ) -> None:
        """An episode begins; arguments as of ChunkedPolicy."""
        self._client = client
        self._chunk = _Chunk(client.contract, client.execute if n_execute is None else n_execute, seed, expire)

    async def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action of this control step, [A] float32; see ChunkedPolicy.act."""
        window = self._chunk.observe(observation)
        if window is not None:
            try:
                reply = await self._ask(window)
            except SessionLostError as error:
                self._chunk.begin_anew(error)
                reply = await self._ask(window)
            self._chunk.refresh(reply)
        return self._chunk.next_action()

    async def _ask(self, window: Mapping[str, Any]) -> Reply:
        chunk = self._chunk
        return await self._client.act(window, seed=chunk.seed, step=chunk.step, carry=chunk.carry)

    @property
    def restarts(self) -> int:
        """See ChunkedPolicy.restarts."""
        return self._chunk.restarts

    def reset(self, seed: int | None = None) -> None:
        """Another episode begins: history and chunk are forgotten."""
        self._chunk.reset(seed)
