"""The client of a served policy, blocking and asynchronous.

Letters: T observation steps, H action steps, A action dimensions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Self

from rlsvc.client.http import AsyncHttpLink, HttpLink
from rlsvc.client.protocol import (
    TRANSPORTS,
    Address,
    ClientOptions,
    Deadline,
    PolicyUnavailableError,
    Reply,
    Served,
    check_served,
    decode_reply,
    encode_request,
    pauses,
)
from rlsvc.client.websocket import AsyncWebSocketLink, WebSocketLink
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError, unknown_name


class PolicyClient:
    """A served policy that blocks until it answers, never longer than its options say.

    A request that finds the server away or overloaded is sent again, a bounded number of times, over a new connection
    where the
    old one is lost: the same seed and step give the same answer, so that this is harmless. When it stays away the
    error is raised; an action is never repeated in its place. Not to be shared by threads.
    """

    def __init__(
        self, url: str, *, policy: str | None = None, transport: str = "ws", options: ClientOptions | None = None
    ) -> None:
        """Connect and fetch the contract.

        Args:
            url: "host:port", or with the scheme http, https, ws or wss; the last letter decides about TLS.
            policy: name of the policy; the only one when left out, over "ws" the first of several.
            transport: "ws" (fastest) or "http".
            options: deadlines and retries.

        Raises:
            UserError: a bad URL or transport.
            RefusedError: another policy is served.
            PolicyUnavailableError: no policy server answers there.
            TimeoutError: something listens there and says nothing.
        """
        self._options = (options or ClientOptions()).named()
        self._policy = policy
        address = Address.parse(url)
        _check_transport(transport)
        self._transport = transport
        self._link = (
            WebSocketLink(address, self._options, policy)
            if transport == "ws"
            else HttpLink(address, self._options, policy)
        )
        self._what = f"the policy server at {address.host}"
        self._served: Served | None = None
        self._retry(None)

    @property
    def name(self) -> str:
        """The policy's name."""
        return _known(self._served).name

    @property
    def version(self) -> str:
        """The policy's version when last connected; a reply says which one made it."""
        return _known(self._served).version

    @property
    def contract(self) -> Contract:
        """What the policy sees and does."""
        return _known(self._served).contract

    @property
    def execute(self) -> int | None:
        """Actions of a chunk that the policy's robot executes before it asks again; None for all of them."""
        return _known(self._served).execute

    def act(self, observation: Mapping[str, Any], *, seed: int = 0, step: int = 0, carry: bytes | None = None) -> Reply:
        """A chunk of actions for an observation window.

        Args:
            observation: by key an array [T, ...], as the contract says.
            seed: of the policy's randomness, [0, 2**31); one for each robot or episode.
            step: of the episode, [0, 2**31).
            carry: what the policy handed on with the reply before (`Reply.carry`), b"" to begin anew; None begins anew
                with each request, and gives none.

        Raises:
            ContractError: the observation does not fit; nothing was sent.
            SessionLostError: another version than the one that answers made the carry; begin anew.
            RefusedError: the server refuses it.
            ServerFaultError: the server failed.
            PolicyUnavailableError: the server is away, and stayed away.
            TimeoutError: no answer within options.timeout_s.
        """
        reply = self._retry(encode_request(self.contract, observation, seed, step, carry=carry))
        assert reply is not None
        return reply

    def act_in_session(self, observation: Mapping[str, Any], *, seed: int = 0, step: int) -> Reply:
        """The action of one control step, of an episode that the server keeps; over the transport "ws".

        Args:
            observation: of one step, by key an array of the feature's shape.
            seed: of the policy's randomness in this episode, [0, 2**31).
            step: 0 begins an episode, each further one follows the one before.

        Returns:
            With an action [A].

        Raises:
            SessionLostError: the server does not have the episode; begin anew with step 0.
            Exception: as `act`.
        """
        _check_sessions(self._transport)
        request = encode_request(self.contract, observation, seed, step, session=True)
        reply = self._retry(request, session=True)
        assert reply is not None
        return reply

    def close(self) -> None:
        """Drop the connection; the next `act` would open a new one."""
        self._link.close()

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def _retry(self, data: bytes | None, *, session: bool = False) -> Reply | None:
        deadline = Deadline(self._options.timeout_s, self._what)
        waits = pauses(self._options)
        while True:
            try:
                if not self._link.connected:
                    self._open(deadline)
                if data is None:
                    return None
                reply = decode_reply(self._link.request(data, deadline), self.contract, session=session)
                if reply.version != self.version:  # another one is served since
                    if self._transport == "http":  # perhaps by another server: it must see and do the same
                        self._link.close()
                        self._open(deadline)
                    self._served = dataclasses.replace(_known(self._served), version=reply.version)
                return reply
            except PolicyUnavailableError:
                pause = next(waits, None)
                if pause is None or pause >= deadline.left():
                    raise
                time.sleep(pause)

    def _open(self, deadline: Deadline) -> None:
        served = self._link.open(deadline)
        try:
            check_served(self._served, served, self._policy)
        except UserError:
            self._link.close()
            raise
        self._served = served


class AsyncPolicyClient:
    """PolicyClient for asyncio: `async with AsyncPolicyClient(url) as client`. One request at a time."""

    def __init__(
        self, url: str, *, policy: str | None = None, transport: str = "ws", options: ClientOptions | None = None
    ) -> None:
        """Not connected yet: `connect` or `async with` does that. Arguments as of PolicyClient."""
        self._options = (options or ClientOptions()).named()
        self._policy = policy
        address = Address.parse(url)
        _check_transport(transport)
        self._transport = transport
        self._link = (
            AsyncWebSocketLink(address, self._options, policy)
            if transport == "ws"
            else AsyncHttpLink(address, self._options, policy)
        )
        self._what = f"the policy server at {address.host}"
        self._served: Served | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def name(self) -> str:
        """The policy's name."""
        return _known(self._served).name

    @property
    def version(self) -> str:
        """The policy's version when last connected; a reply says which one made it."""
        return _known(self._served).version

    @property
    def contract(self) -> Contract:
        """What the policy sees and does."""
        return _known(self._served).contract

    @property
    def execute(self) -> int | None:
        """Actions of a chunk that the policy's robot executes before it asks again; None for all of them."""
        return _known(self._served).execute

    async def connect(self) -> Self:
        """Connect and fetch the contract; raises as PolicyClient does."""
        await self._retry(None)
        return self

    async def act(
        self, observation: Mapping[str, Any], *, seed: int = 0, step: int = 0, carry: bytes | None = None
    ) -> Reply:
        """A chunk of actions for an observation window; arguments and errors as of PolicyClient.act."""
        reply = await self._retry(encode_request(self.contract, observation, seed, step, carry=carry))
        assert reply is not None
        return reply

    async def act_in_session(self, observation: Mapping[str, Any], *, seed: int = 0, step: int) -> Reply:
        """The action of one control step, of an episode that the server keeps; as PolicyClient.act_in_session."""
        _check_sessions(self._transport)
        request = encode_request(self.contract, observation, seed, step, session=True)
        reply = await self._retry(request, session=True)
        assert reply is not None
        return reply

    async def close(self) -> None:
        """Drop the connection; the next `act` would open a new one."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        """Connect."""
        return await self.connect()

    async def __aexit__(self, *exception: object) -> None:
        """Close."""
        await self.close()

    async def _retry(self, data: bytes | None, *, session: bool = False) -> Reply | None:
        deadline = Deadline(self._options.timeout_s, self._what)
        waits = pauses(self._options)
        async with self._one_at_a_time:
            while True:
                try:
                    if not self._link.connected:
                        await self._open(deadline)
                    if data is None:
                        return None
                    answer = await self._link.request(data, deadline)
                    reply = decode_reply(answer, self.contract, session=session)
                    if reply.version != self.version:
                        if self._transport == "http":
                            await self._link.close()
                            await self._open(deadline)
                        self._served = dataclasses.replace(_known(self._served), version=reply.version)
                    return reply
                except PolicyUnavailableError:
                    pause = next(waits, None)
                    if pause is None or pause >= deadline.left():
                        raise
                    await asyncio.sleep(pause)

    async def _open(self, deadline: Deadline) -> None:
        served = await self._link.open(deadline)
        try:
            check_served(self._served, served, self._policy)
        except UserError:
            await self._link.close()
            raise
        self._served = served


def _known(served: Served | None) -> Served:
    if served is None:
        raise RuntimeError("not connected yet: use `async with AsyncPolicyClient(...)` or await connect()")
    return served


def _check_transport(transport: str) -> None:
    if transport not in TRANSPORTS:
        raise unknown_name("transport", transport, TRANSPORTS)


def _check_sessions(transport: str) -> None:
    if transport != "ws":
        raise UserError(f"transport '{transport}': a server keeps episodes for connections; use the transport 'ws'")
