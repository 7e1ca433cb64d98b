"""What the served path adds to the bare policy call: HTTP (JSON, msgpack) and WebSocket, beside openpi's own server.

    python benchmarks/serving_overhead.py [--openpi-src PATH/TO/openpi/src] [--requests 1000] [--rounds 5]

One client on the same machine, the "zero" policy (it answers at once), an observation of 24 floats and one of 301 KB.
The paths take turns within each round, so that what else the machine does falls on all of them. openpi's server is
read from a checkout that stands outside this project; without one its row is left out. openpi's client asks openpi's
server; ours asks ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import hardware, percentile_interval, write_result
from rich.console import Console
from rich.table import Table

from rlsvc.client import PolicyClient
from rlsvc.core.contract import Contract, Feature
from rlsvc.runner import BaselineRunner
from rlsvc.serve.deploy import Deployment, ray_for_serving, start
from rlsvc.serve.haproxy import free_ports

PACKAGES = ("rlsvc", "ray", "websockets", "uvicorn", "httpx", "msgpack", "orjson", "numpy", "openpi-client")
CONTRACTS = {
    "small": Contract({"observation.state": Feature((24,), "float32")}, Feature((7,), "float32"), 10.0, 1, 16),
    # Two cameras of 224 x 224: 301,056 bytes.
    "301kb": Contract(
        {f"observation.images.{view}": Feature((224, 224, 3), "uint8") for view in ("base", "wrist")},
        Feature((7,), "float32"),
        10.0,
        1,
        16,
    ),
}
OPENPI = "openpi's server"
# JSON lists of 300,000 numbers take a third of a second: fewer of those are enough.
SLOW_SHARE = 50

Call = Callable[[], Any]


def observation_of(contract: Contract, seed: int = 0) -> dict[str, np.ndarray]:
    """Random values, never zeros."""
    rng = np.random.default_rng(seed)
    return {
        key: rng.integers(0, 256, feature.shape, np.uint8)
        if feature.dtype == "uint8"
        else rng.normal(size=feature.shape).astype(np.float32)
        for key, feature in contract.observation.items()
    }


class ZeroLoader:
    """Makes the "zero" policy in a replica."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def __call__(self) -> BaselineRunner:
        """The policy."""
        return BaselineRunner("zero", self.contract)


def bare_call(contract: Contract, observation: dict[str, np.ndarray]) -> Call:
    """The policy itself, in this process, on a batch of one."""
    runner = BaselineRunner("zero", contract)
    batch = {key: value[None, None] for key, value in observation.items()}
    zero = np.zeros(1, np.int64)
    return lambda: runner.act(batch, zero, zero)


def http_json(stack: ExitStack, url: str, observation: dict[str, np.ndarray]) -> Call:
    """A POST of nested lists, encoded anew each time, as a program would."""
    client = stack.enter_context(httpx.Client(trust_env=False, timeout=30))

    def call() -> Any:
        body = json.dumps({"observation": {key: value.tolist() for key, value in observation.items()}})
        answer = client.post(
            f"http://{url}/v1/policies/zero/act", content=body, headers={"content-type": "application/json"}
        )
        answer.raise_for_status()
        return np.asarray(answer.json()["action"], np.float32)

    return call


def rlsvc_client(stack: ExitStack, url: str, observation: dict[str, np.ndarray], transport: str) -> Call:
    """PolicyClient.act: the contract checked, msgpack over this transport."""
    client = stack.enter_context(PolicyClient(url, transport=transport))
    return lambda: client.act(observation)


def openpi_client(url: str, observation: dict[str, np.ndarray]) -> Call:
    """The client that openpi ships."""
    import warnings

    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    warnings.simplefilter("ignore", DeprecationWarning)
    policy = WebsocketClientPolicy(f"ws://{url}")
    return lambda: policy.infer(observation)


def zeros(observation: dict[str, Any]) -> np.ndarray:
    """The policy that does nothing, [16, 7] float32."""
    return np.zeros((16, 7), np.float32)


def serve_openpi(source: str, port: int, infer: Callable[[dict[str, Any]], np.ndarray]) -> None:
    """Run openpi's server around a function from an observation to actions, in a process of its own."""
    path = Path(source) / "openpi" / "serving" / "websocket_policy_server.py"
    spec = importlib.util.spec_from_file_location("openpi_websocket_policy_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Policy:
        def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
            return {"actions": infer(observation)}

    module.WebsocketPolicyServer(Policy(), host="127.0.0.1", port=port, metadata={}).serve_forever()


def measure(calls: dict[str, Call], requests: int, rounds: int, slow: set[str]) -> dict[str, np.ndarray]:
    """Milliseconds of each request, by path; the paths take turns in each round, in an order that changes."""
    rng = np.random.default_rng(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(3 if name in slow else 50):
            call()
    for _ in range(rounds):
        for name in rng.permutation(list(calls)):
            for _ in range(max(2, requests // SLOW_SHARE) if name in slow else requests):
                begun = time.perf_counter()
                calls[name]()
                samples[name].append((time.perf_counter() - begun) * 1e3)
    return {name: np.asarray(times) for name, times in samples.items()}


def report(size: str, samples: dict[str, np.ndarray], rounds: int, console: Console) -> None:
    """Print the table and store the figures of one observation size."""
    bare = np.percentile(samples["bare"], 50)
    table = Table(
        "path",
        "requests",
        "p50 ms",
        "p99 ms",
        "over the bare call, p50 ms",
        "p50 / openpi",
        title=f"observation: {size}",
    )
    peer = samples.get(OPENPI)
    for name, times in samples.items():
        p50, p99 = np.percentile(times, [50, 99])
        ratio = "" if peer is None or name == "bare" else f"{p50 / np.percentile(peer, 50):.2f}"
        table.add_row(name, str(len(times)), f"{p50:.3f}", f"{p99:.3f}", f"{p50 - bare:.3f}", ratio)
    console.print(table)
    for name, key in (("HTTP JSON", "http_json"), ("HTTP msgpack", "http_msgpack"), ("WebSocket", "ws")):
        for q in (50, 99):
            value, low, high = percentile_interval(samples[name], q)
            base = float(np.percentile(samples["bare"], q))
            other = None if peer is None else float(np.percentile(peer, q)) - base
            write_result(
                f"{key}_overhead_{size}_p{q}_ms",
                value - base,
                "ms over the bare policy call",
                low=low - base,
                high=high - base,
                peer="" if other is None else OPENPI,
                peer_value=other,
                ratio=None if other is None else (value - base) / other,
                packages=PACKAGES,
            )
    if peer is not None:
        # Whole requests, as the figures of these names ask; least and most of five rounds hold the median at 94 %.
        ratios = [
            np.percentile(ours, 50) / np.percentile(theirs, 50)
            for ours, theirs in zip(np.split(samples["WebSocket"], rounds), np.split(peer, rounds), strict=True)
        ]
        p50, peer_p50 = (float(np.percentile(times, 50)) for times in (samples["WebSocket"], peer))
        write_result(
            f"ws_overhead_vs_openpi_{size}",
            p50 / peer_p50,
            "ratio of p50",
            low=float(min(ratios)),
            high=float(max(ratios)),
            peer=OPENPI,
            peer_value=peer_p50,
            ratio=p50 / peer_p50,
            packages=PACKAGES,
        )
    if size == "small":
        value, low, high = percentile_interval(samples["HTTP msgpack"], 50)
        write_result("http_small_p50_ms", value, "ms", low=low, high=high, packages=PACKAGES)


def main() -> None:
    """Measure both sizes on one Ray, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openpi-src", help="the src folder of an openpi checkout")
    parser.add_argument("--requests", type=int, default=400, help="requests of each path in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    console.print(hardware())
    if options.openpi_src is None:
        console.print("no --openpi-src: openpi's server is not measured, the peer's columns stay empty")
    for size, contract in CONTRACTS.items():
        observation = observation_of(contract)
        ours, theirs = free_ports(2)
        deployment = Deployment("zero", ZeroLoader(contract), port=ours)
        with ExitStack() as stack:
            stack.enter_context(ray_for_serving(deployment))
            start(deployment)
            url = f"127.0.0.1:{ours}"
            calls: dict[str, Call] = {
                "bare": bare_call(contract, observation),
                "HTTP JSON": http_json(stack, url, observation),
                "HTTP msgpack": rlsvc_client(stack, url, observation, "http"),
                "WebSocket": rlsvc_client(stack, url, observation, "ws"),
                "WebSocket, openpi's client": openpi_client(url, observation),
            }
            if options.openpi_src is not None:
                peer = multiprocessing.get_context("spawn").Process(
                    target=serve_openpi, args=(options.openpi_src, theirs, zeros), daemon=True
                )
                peer.start()
                stack.callback(peer.kill)
                wait_for(theirs)
                calls[OPENPI] = openpi_client(f"127.0.0.1:{theirs}", observation)
            slow = {"HTTP JSON"} if size == "301kb" else set()
            report(size, measure(calls, options.requests, options.rounds, slow), options.rounds, console)


def wait_for(port: int) -> None:
    """Until something listens there, at most half a minute."""
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=1)
            return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                sys.exit(f"openpi's server did not start on port {port}")
            time.sleep(0.2)


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    main()
