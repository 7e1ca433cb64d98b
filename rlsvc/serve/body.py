"""Reading a request's body, however large it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request

from rlsvc.serve.codec import RequestError

LINGER_S = 30.0
"""Longest that a body which is refused is read on, seconds."""


async def pieces_of(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes, at most `limit` bytes of it.

    What is too large is read to its end, or for `LINGER_S`, and dropped: a connection that closes while the caller
    still sends loses the answer on its way, and the caller would see a broken connection instead of the reason. A
    caller that asks first (`Expect: 100-continue`) sends nothing.

    Raises:
        RequestError: 413, after the last piece.
        ClientDisconnect: the caller is gone.
    """
    refusal = RequestError(413, "too_large", f"the body is larger than {limit} bytes, which is the limit here")
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and "expect" in request.headers:
        raise refusal
    stream, size = request.stream(), 0
    if not too_large:
        async for piece in stream:
            size += len(piece)
            if size > limit:
                too_large = True
                break
            yield piece
    if too_large:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                async for _ in stream:
                    pass
        raise refusal


async def read_body(request: Request, limit: int) -> bytes:
    """The body; raises as `pieces_of`."""
    return b"".join([piece async for piece in pieces_of(request, limit)])
