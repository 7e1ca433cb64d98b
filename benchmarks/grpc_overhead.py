"""Whether gRPC through Ray Serve would be faster than the WebSocket: the least it could cost, beside all of ours.

    python benchmarks/grpc_overhead.py [--requests 400] [--rounds 5]

The gRPC side is a deployment that decodes the same msgpack, makes the same zeros and encodes them: no contract is
checked, nothing is batched, counted or logged. The WebSocket side is rlsvc.client and a served "zero" policy, whole.
Both stand behind the same HAProxy of one Serve, and take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np
from common import percentile_interval, write_result
from google.protobuf.wrappers_pb2 import BytesValue
from rich.console import Console
from serving_overhead import CONTRACTS, ZeroLoader, observation_of

from rlsvc.client import PolicyClient
from rlsvc.core.wire import pack, unpack
from rlsvc.serve.deploy import Deployment, ray_for_serving, start
from rlsvc.serve.haproxy import free_ports

SERVICE, METHOD, APP = "rlsvc.Zero", "Act", "grpc"


def add_servicer(servicer: Any, server: Any) -> None:
    """What protoc would generate for one unary method of bytes."""
    handler = grpc.unary_unary_rpc_method_handler(
        getattr(servicer, METHOD), BytesValue.FromString, BytesValue.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


class Zero:
    """Answers zeros, [16, 7] float32."""

    async def Act(self, request: BytesValue) -> BytesValue:  # noqa: N802 - the method's name on the wire
        """One request."""
        unpack(request.value)
        return BytesValue(value=pack({"action": np.zeros((16, 7), np.float32)}))


def grpc_call(stack: ExitStack, address: str, observation: dict[str, np.ndarray]) -> Callable[[], Any]:
    """A request over a channel that stays open."""
    channel = stack.enter_context(grpc.insecure_channel(address))
    method = channel.unary_unary(f"/{SERVICE}/{METHOD}", BytesValue.SerializeToString, BytesValue.FromString)
    metadata = (("application", APP),)

    def call() -> Any:
        data = pack({"observation": observation, "seed": 0, "step": 0})
        return unpack(method(BytesValue(value=data), metadata=metadata, timeout=10).value)["action"]

    return call


def main() -> None:
    """Measure both sizes, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="of each side in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    console = Console()
    for size, contract in CONTRACTS.items():
        observation = {key: value[None] for key, value in observation_of(contract).items()}
        port, grpc_port = free_ports(2)
        deployment = Deployment("zero", ZeroLoader(contract), port=port, cpus=0.5)
        with ExitStack() as stack:
            stack.enter_context(ray_for_serving(deployment))
            from ray import serve
            from ray.serve.config import gRPCOptions

            functions = ["grpc_overhead.add_servicer"]
            serve.start(
                http_options={"host": "127.0.0.1", "port": port},
                grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=functions),
            )
            start(deployment)
            zero = serve.deployment(ray_actor_options={"num_cpus": 0.5})(Zero)
            serve.run(zero.bind(), name=APP, route_prefix="/grpc")
            client = stack.enter_context(PolicyClient(f"127.0.0.1:{port}"))
            calls = {
                "gRPC, nothing around it": grpc_call(stack, f"127.0.0.1:{grpc_port}", observation),
                "WebSocket": lambda: client.act(observation),  # noqa: B023 - used within the iteration
            }
            samples: dict[str, list[float]] = {name: [] for name in calls}
            for call in calls.values():
                for _ in range(100):
                    call()
            for _ in range(args.rounds):
                for name, call in calls.items():
                    for _ in range(args.requests):
                        begun = time.perf_counter()
                        call()
                        samples[name].append((time.perf_counter() - begun) * 1e3)
        found = {name: percentile_interval(np.asarray(times), 50) for name, times in samples.items()}
        for name, (value, low, high) in found.items():
            console.print(f"{size}: {name}: p50 {value:.3f} ms [{low:.3f}, {high:.3f}]")
        (peer, *_), (value, low, high) = found.values()
        if not args.no_store:
            write_result(
                f"grpc_floor_over_ws_{size}",
                peer / value,
                "ratio of p50",
                peer="rlsvc's WebSocket, p50 in ms",
                peer_value=value,
                ratio=peer / value,
                packages=("rlsvc", "ray", "grpcio", "websockets"),
            )


if __name__ == "__main__":
    main()
