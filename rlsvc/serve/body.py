"""Reading a request's body, however large it is."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Request

from rlsvc.serve.codec import RequestError

LINGER_S = 10.0
"""Longest that a body which is refused is read on, seconds."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of which never more than `limit` bytes and a piece are held.

    What is too large is read to its end, or for `LINGER_S`, and dropped: a connection that closes while the caller
    still sends loses the answer on its way, and the caller would see a broken connection instead of the reason. A
    caller that asks first (`Expect: 100-continue`) sends nothing.
    """
    refusal = RequestError(413, "too_large", f"the body is larger than {limit} bytes, which is the limit here")
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared) > limit
    if too_large and "expect" in request.headers:
        raise refusal
    pieces: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S if too_large else None) as lingering:
            async for piece in request.stream():
                size += len(piece)
                if size > limit and not too_large:
                    too_large = True
                    pieces.clear()
                    lingering.reschedule(loop.time() + LINGER_S)
                if not too_large:
                    pieces.append(piece)
    if too_large:
        raise refusal
    return b"".join(pieces)
