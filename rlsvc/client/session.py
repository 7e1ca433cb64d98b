"""One action at each control step, of an episode that the server keeps: for a computer that does nothing but pass on.

The server has the observation history, the chunk under way and the policy's carry, such as a planner's warm start or
the chunk before, for real-time chunking. Letter: A action dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlsvc.client.client import AsyncPolicyClient, PolicyClient
from rlsvc.client.protocol import SessionLostError

logger = logging.getLogger(__name__)


class _Episode:
    """Where a client is in an episode that the server keeps.

    Attributes:
        step: of the episode as the server counts it, the next one.
        restarts: how often an episode had to begin anew.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.step = self.restarts = 0

    def reset(self, seed: int | None = None) -> None:
        """Another episode begins."""
        self.step = 0
        self._seed = self._seed if seed is None else seed

    def _restart(self, error: SessionLostError) -> None:
        logger.warning("the episode begins anew: %s", error)
        self.restarts += 1
        self.step = 0


class SessionPolicy(_Episode):
    """Sends each observation, and gives the action that comes back.

    Where the server lost the episode, with its replica or since nothing was heard of it, the episode begins anew with
    the observation at hand: the policy acts as at a start. It is logged as a warning and counted in `restarts`.
    """

    def __init__(self, client: PolicyClient, *, seed: int = 0) -> None:
        """An episode begins.

        Args:
            client: of the served policy, over its WebSocket.
            seed: of the policy's randomness in this episode, [0, 2**31).
        """
        super().__init__(seed)
        self._client = client

    def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action of this control step.

        Args:
            observation: of one step, by key an array of the feature's shape.

        Returns:
            [A] float32, in the contract's units.

        Raises:
            Exception: as PolicyClient.act; no action is repeated in the place of one that did not come.
        """
        try:
            reply = self._client.act_in_session(observation, seed=self._seed, step=self.step)
        except SessionLostError as error:
            self._restart(error)
            reply = self._client.act_in_session(observation, seed=self._seed, step=0)
        self.step += 1
        return reply.action


class AsyncSessionPolicy(_Episode):
    """SessionPolicy for asyncio, over an AsyncPolicyClient that is connected."""

    def __init__(self, client: AsyncPolicyClient, *, seed: int = 0) -> None:
        """An episode begins; arguments as of SessionPolicy."""
        super().__init__(seed)
        self._client = client

    async def act(self, observation: Mapping[str, Any]) -> np.ndarray:
        """The action of this control step, [A] float32; see SessionPolicy.act."""
        try:
            reply = await self._client.act_in_session(observation, seed=self._seed, step=self.step)
        except SessionLostError as error:
            self._restart(error)
            reply = await self._client.act_in_session(observation, seed=self._seed, step=0)
        self.step += 1
        return reply.action
