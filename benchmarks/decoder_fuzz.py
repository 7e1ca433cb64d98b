"""Fuzzed messages against the decoders of the served path, in this process and over sockets.

    python benchmarks/decoder_fuzz.py [--messages 1000000] [--socket-messages 50000] [--seed 0] [--no-store]

In this process each message goes through the decoder and, where that takes it, through the contract's check, as in the
server: JSON and msgpack of the act route, the Open Inference Protocol with and without its binary tensors, frames of a
WebSocket. Most messages are good ones with a few changes that know the structure (another type, size, dtype or depth, a
key gone or doubled) or that do not (bytes changed, cut, doubled); the rest are random bytes. Everything but a message
taken or the project's own refusal is a crash. Over sockets the same messages go to a policy on Ray Serve, over HTTP
(headers fuzzed too) and WebSocket: an answer of 5xx, or none, is a failure, and the replica must be the same process at
the end.

The figure is crashes and 5xx together; beside it stands by how much memory grew, of this process and of the replica.
"""

from __future__ import annotations

import argparse
import base64
import collections
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import msgpack
import numpy as np
import psutil
import websockets.exceptions
import websockets.sync.client
from common import write_result

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import ContractError
from rlsvc.serve.codec import JSON, MSGPACK, ActRequest, RequestError, as_request, decode_message, decode_request
from rlsvc.serve.oip import DATATYPES, HEADER_LENGTH, decode_infer

CONTRACT = Contract(
    observation={
        "observation.state": Feature((3,), "float32"),
        "observation.image": Feature((4, 4, 3), "uint8"),
        "observation.gripper": Feature((1,), "bool"),
        "task": Feature((), TEXT),
    },
    action=Feature((2,), "float32"),
    rate_hz=10.0,
    n_obs_steps=2,
    action_horizon=4,
)
MAX_BYTES = 2**20
KINDS = ("json", "msgpack", "oip json", "oip binary", "websocket")
RANDOM = 0.1
"""Share of messages that are random bytes."""
WARM = 0.05
"""Share of messages after which memory is first looked at: caches and lazy imports come before."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 255, 256, 2**31 - 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, 1e39, 1e308,
    "", " ", "x", "\0", "\u00e9" * 40, "9" * 400, "<f4", "|O", "object", "FP32", "FP64", "BYTES", "INT64", "action",
    "data",
    [], {}, [[]], [None], [0] * 100, [True, 1.5], {"b64": "", "dtype": "float32", "shape": [0]}, ["a", 1],
    [2**31] * 8,
)  # fmt: skip
"""What takes the place of a part of a message."""
ODD_BYTES: tuple[Any, ...] = (
    b"", b"\xff", b"\0" * 24, b"__ndarray__", float("nan"), float("inf"), msgpack.ExtType(1, b"x"),
    {b"__ndarray__": True}, {b"__ndarray__": True, b"data": b"", b"dtype": "<f4", b"shape": [0]},
    {b"__ndarray__": True, b"data": b"\2" * 2, b"dtype": "|b1", b"shape": [2, 1]},
    {b"__npgeneric__": True, b"data": 1, b"dtype": "<i4"}, {b"__npgeneric__": True, b"data": 1e300, b"dtype": "<f2"},
    {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"},
)  # fmt: skip
"""Likewise, where there is msgpack to carry it."""


@dataclass
class Tally:
    """What became of the messages.

    Attributes:
        taken, refused: how many.
        crashes: what else was raised, or answered, by its kind.
        example: a message of each kind of crash.
    """

    taken: int = 0
    refused: int = 0
    crashes: collections.Counter[str] = field(default_factory=collections.Counter)
    example: dict[str, str] = field(default_factory=dict)

    def crash(self, what: str, message: Message) -> None:
        """Count one."""
        self.crashes[what] += 1
        self.example.setdefault(what, f"{message.kind}, header {message.header!r}: {message.body[:400]!r}")


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: of KINDS.
        body: bytes.
        header: the length of the JSON that the Open Inference Protocol's header states; None without it.
    """

    kind: str
    body: bytes
    header: str | None = None


class Fuzzer:
    """Messages drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        arrays = {
            "observation.state": self.rng.normal(size=(2, 3)).astype(np.float32),
            "observation.image": self.rng.integers(0, 256, (2, 4, 4, 3), np.uint8),
            "observation.gripper": np.array([[True], [False]]),
        }
        lists = {key: array.tolist() for key, array in arrays.items()}
        encoded = {
            key: {"b64": base64.b64encode(array).decode(), "dtype": str(array.dtype), "shape": list(array.shape)}
            for key, array in arrays.items()
        }
        on_wire = {
            key: {
                b"__ndarray__": True,
                b"data": array.tobytes(),
                b"dtype": array.dtype.str,
                b"shape": list(array.shape),
            }
            for key, array in arrays.items()
        }
        tail = {"seed": 3, "step": 16}
        tensors = [
            {
                "name": key,
                "datatype": DATATYPES[str(array.dtype)],
                "shape": list(array.shape),
                "data": array.ravel().tolist(),
            }
            for key, array in arrays.items()
        ]
        text = {"name": "task", "datatype": "BYTES", "shape": [2]}
        self.binary = [array.tobytes() for array in arrays.values()] + [b"\4\0\0\0push" * 2]
        sized = [
            {**{k: v for k, v in tensor.items() if k != "data"}, "parameters": {"binary_data_size": len(data)}}
            for tensor, data in zip([*tensors, text], self.binary, strict=True)
        ]
        more = {"id": "r1", "parameters": {**tail, "binary_data_output": True}, "outputs": [{"name": "action"}]}
        self.good: dict[str, list[Any]] = {
            "json": [{"observation": {**shape, "task": "push"}, **tail} for shape in (lists, encoded)],
            "msgpack": [{"observation": {**shape, "task": "push"}, **tail} for shape in (on_wire, lists, encoded)],
            "oip json": [{"inputs": [*tensors, {**text, "data": ["push", "pull"]}], **more}],
            "oip binary": [{"inputs": sized, **more}],
            "websocket": [{**on_wire, "task": "push"}, {"observation": {**on_wire, "task": "push"}, **tail}],
        }

    def draw(self, kind: str) -> Message:
        """The next message of a kind."""
        while True:
            try:
                return self._draw(kind)
            except (RecursionError, ValueError):  # deeper than json and msgpack write
                continue

    def _draw(self, kind: str) -> Message:
        rng = self.rng
        if rng.random() < RANDOM:
            return Message(kind, rng.bytes(int(rng.integers(0, 300))), self._header(kind, None))
        good = self.good[kind]
        tree = copy.deepcopy(good[rng.integers(len(good))])
        for _ in range(int(rng.choice([0, 1, 1, 1, 2, 4]))):
            tree = self._change(tree, binary=kind in ("msgpack", "websocket"))
        if kind in ("msgpack", "websocket"):
            body, header = msgpack.packb(tree), None
        else:
            head = json.dumps(tree).encode()  # with NaN and Infinity, which are no JSON
            behind = list(self.binary) if kind == "oip binary" else []
            if behind and rng.random() < 0.3:
                at = rng.integers(len(behind))
                behind[at] = self._scramble(behind[at])
            body, header = head + b"".join(behind), self._header(kind, len(head))
        if rng.random() < 0.3:
            body = self._scramble(body)
        return Message(kind, body, header)

    def _header(self, kind: str, length: int | None) -> str | None:
        rng = self.rng
        if kind == "oip binary" and length is not None and rng.random() < 0.85:
            return str(length)
        if not kind.startswith("oip") or rng.random() < 0.7:
            return None
        odd = ("", "0", "-1", "1e3", "99999999999999999999", "x", "0x10", "+5", str(int(rng.integers(0, 400))))
        return odd[rng.integers(len(odd))]

    def _change(self, tree: Any, binary: bool) -> Any:
        """Change one place of a tree, chosen by walking down from the top."""
        rng = self.rng
        holder, node = None, tree
        place: Any = None
        while isinstance(node, dict | list) and node and (holder is None or rng.random() < 0.75):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            holder, place = node, keys[int(rng.integers(len(keys)))]
            node = node[place]
        if holder is None:
            return self._odd(binary)
        action = rng.integers(6)
        if action == 0:
            del holder[place]
        elif action == 1 and isinstance(holder, dict):
            holder[self._odd_key(binary)] = holder.pop(place)
        elif action == 2 and isinstance(holder, list):
            holder.insert(int(place), node)
        elif action == 3:
            for _ in range(int(rng.choice([1, 7, 60, 400]))):
                node = [node] if rng.random() < 0.9 else {"x": node}
            holder[place] = node
        elif action == 4 and isinstance(node, bytes | str):
            data = self._scramble(node if isinstance(node, bytes) else node.encode())
            holder[place] = data if isinstance(node, bytes) else data.decode("latin-1")
        else:
            holder[place] = self._odd(binary)
        return tree

    def _odd(self, binary: bool) -> Any:
        choices = ODD + ODD_BYTES if binary else ODD
        return copy.deepcopy(choices[self.rng.integers(len(choices))])

    def _odd_key(self, binary: bool) -> Any:
        choices = ("", "observation", "observatio", "seed", "x" * 300, "\0", "task", "data", "shape", "dtype", "b64")
        keys = (*choices, b"\xff", b"__ndarray__", b"observation", 3, None, 1.5) if binary else choices
        return keys[self.rng.integers(len(keys))]

    def _scramble(self, data: bytes) -> bytes:
        """Change, cut, double or lengthen bytes."""
        rng, out = self.rng, bytearray(data)
        for _ in range(int(rng.integers(1, 5))):
            at = int(rng.integers(len(out) + 1))
            match int(rng.integers(5)):
                case 0 if at < len(out):
                    out[at] = rng.integers(256)
                case 1:
                    del out[at:]
                case 2:
                    del out[at : at + int(rng.integers(1, 9))]
                case 3:
                    out[at:at] = rng.bytes(int(rng.integers(1, 9)))
                case _:
                    out[at:at] = out[at : at + int(rng.integers(1, 33))]
        return bytes(out)


def decode(message: Message) -> ActRequest:
    """As the server does."""
    if message.kind == "json":
        return decode_request(message.body, JSON, MAX_BYTES)
    if message.kind == "msgpack":
        return decode_request(message.body, MSGPACK, MAX_BYTES)
    if message.kind == "websocket":
        decoded = decode_message(message.body, MSGPACK, MAX_BYTES)
        if not isinstance(decoded, dict):
            raise RequestError(400, "malformed", "no map")
        return as_request(decoded) if isinstance(decoded.get("observation"), dict) else ActRequest(decoded)
    return decode_infer(message.body, message.header).asked


def in_process(messages: int, seed: int, say: Callable[[str], None]) -> tuple[Tally, float]:
    """Every message through its decoder and the contract; what became of them, and MiB by which memory grew."""
    tally, fuzzer, process = Tally(), Fuzzer(seed), psutil.Process()
    before, begun = 0, time.monotonic()
    for i in range(messages):
        if i == int(messages * WARM):
            gc.collect()
            before = process.memory_info().rss
        message = fuzzer.draw(KINDS[i % len(KINDS)])
        try:
            CONTRACT.check_observation(decode(message).observation)
            tally.taken += 1
        except (RequestError, ContractError):
            tally.refused += 1
        except Exception as error:
            tally.crash(f"{type(error).__name__}: {str(error)[:100]}", message)
        if (i + 1) % 100_000 == 0:
            say(f"{i + 1} messages, {tally.crashes.total()} crashes, {time.monotonic() - begun:.0f} s")
    gc.collect()
    return tally, (process.memory_info().rss - before) / 2**20


def over_sockets(
    url: str, name: str, messages: int, seed: int, replica: psutil.Process, say: Callable[[str], None]
) -> tuple[Tally, float]:
    """Every message to a served policy; likewise, of the replica."""
    tally, fuzzer = Tally(), Fuzzer(seed)
    act, infer = f"/v1/policies/{name}/act", f"/v2/models/{name}/infer"
    types = {"json": JSON, "msgpack": MSGPACK, "oip json": JSON, "oip binary": "application/octet-stream"}
    before, begun = 0, time.monotonic()
    socket = None
    with httpx.Client(base_url=f"http://{url}", trust_env=False, timeout=30) as client:
        for i in range(messages):
            if i == int(messages * WARM):
                before = replica.memory_info().rss
            message = fuzzer.draw(KINDS[i % len(KINDS)])
            try:
                if message.kind == "websocket":
                    if socket is None:
                        socket = websockets.sync.client.connect(
                            f"ws://{url}/", compression=None, proxy=None, legacy=True
                        )
                        socket.recv(30)
                    socket.send(message.body)
                    answer = socket.recv(30)
                    status = 200
                    if isinstance(answer, str) or "error" in msgpack.unpackb(answer):
                        status = 500 if "request id" in str(answer) else 400
                else:
                    headers = {"content-type": types[message.kind]}
                    if message.header is not None:
                        headers[HEADER_LENGTH] = message.header
                    path = infer if message.kind.startswith("oip") else act
                    status = client.post(path, content=message.body, headers=headers).status_code
            except (httpx.HTTPError, OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
                tally.crash(f"no answer: {type(error).__name__}: {str(error)[:100]}", message)
                socket = None
                continue
            if status >= 500:
                tally.crash(f"status {status}", message)
            elif status < 400:
                tally.taken += 1
            else:
                tally.refused += 1
            if (i + 1) % 10_000 == 0:
                say(
                    f"{i + 1} messages over sockets, {tally.crashes.total()} failures, {time.monotonic() - begun:.0f} s"
                )
    if socket is not None:
        socket.close()
    if not replica.is_running():
        tally.crash("the replica died", Message("", b""))
        return tally, 0.0
    return tally, (replica.memory_info().rss - before) / 2**20


def served(messages: int, seed: int, say: Callable[[str], None]) -> tuple[Tally, float]:
    """Start a Ray and a policy on it, and fuzz it."""
    from rlsvc.runner import BaselineRunner
    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.haproxy import free_ports
    from rlsvc.serve.settings import ServeSettings

    (port,) = free_ports(1)
    settings = ServeSettings(max_body_bytes=MAX_BYTES)
    deployment = Deployment("zero", partial(BaselineRunner, "zero", CONTRACT), port=port, settings=settings)
    with ray_for_serving(deployment):
        start(deployment)
        (replica,) = (
            process
            for process in psutil.Process().children(recursive=True)
            if "ServeReplica:rlsvc:zero" in " ".join(process.cmdline())
        )
        return over_sockets(f"127.0.0.1:{port}", "zero", messages, seed, replica, say)


def main() -> int:
    """Fuzz, print, store; exit code 1 when something crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000, help="in this process")
    parser.add_argument("--socket-messages", type=int, default=50_000, help="over sockets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only, as with fewer messages")
    args = parser.parse_args()
    say = partial(print, flush=True)
    results = {"in process": in_process(args.messages, args.seed, say)}
    if args.socket_messages:
        results["over sockets"] = served(args.socket_messages, args.seed + 1, say)
    for where, (tally, growth) in results.items():
        print(
            f"{where}: {tally.taken} taken, {tally.refused} refused, {dict(tally.crashes)} crashes, {growth:+.1f} MiB"
        )
        for what, example in tally.example.items():
            print(f"  {what}\n    {example}")
    crashes = sum(tally.crashes.total() for tally, _ in results.values())
    if not args.no_store and args.messages >= 1_000_000 and args.socket_messages >= 50_000:
        packages = ("rlsvc", "ray", "msgpack", "orjson", "numpy", "uvicorn", "websockets")
        seeds = [args.seed, args.seed + 1]
        write_result("decoder_fuzz_crashes", float(crashes), "count of 1M", seeds=seeds, packages=packages)
        growth = max(growth for _, growth in results.values())
        write_result("decoder_fuzz_memory_mib", growth, "MiB of growth", seeds=seeds, packages=packages)
    return 1 if crashes else 0


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    sys.exit(main())
