"""What runs on a robot's computer: numpy, msgpack, websockets and httpcore, nothing else.

with PolicyClient("127.0.0.1:8000") as client:
    policy = ChunkedPolicy(client)
    while True:
        robot.send(policy.act(robot.observe()))
"""

from rlsvc.client.chunked import AsyncChunkedPolicy, ChunkedPolicy
from rlsvc.client.client import AsyncPolicyClient, PolicyClient
from rlsvc.client.protocol import (
    ClientOptions,
    PolicyUnavailableError,
    RefusedError,
    Reply,
    ServerFaultError,
    SessionLostError,
)
from rlsvc.client.session import AsyncSessionPolicy, SessionPolicy

__all__ = [
    "AsyncChunkedPolicy",
    "AsyncPolicyClient",
    "AsyncSessionPolicy",
    "ChunkedPolicy",
    "ClientOptions",
    "PolicyClient",
    "PolicyUnavailableError",
    "RefusedError",
    "Reply",
    "ServerFaultError",
    "SessionLostError",
    "SessionPolicy",
]
