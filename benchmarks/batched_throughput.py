"""Chunks a second of a diffusion policy for 16 clients, served in batches, beside openpi's own server.

    python benchmarks/batched_throughput.py --openpi-src PATH/TO/openpi/src [--gpu] [--rounds 5] [--seconds 20]

State PushT, horizon 16, ten DDIM steps, the U-Net of experiment=pusht_diffusion (256, 512, 1024; `--down-dims` takes
another); the weights are drawn at random, since speed does not depend on them. Both sides have the same bundle and
runner: ours behind Ray Serve, which batches up to 16 requests, theirs behind openpi's server, read from a checkout that
stands outside this project, which acts for one request after the other. Each side is asked over WebSocket by 16 clients
of its own kind, each as fast as it is answered. The sides take turns in each round; an answer that comes after the
round's end does not count.

Every answer of ours is held against that of the policy alone, asked one by one in another process: an element may
differ by TOLERANCE of the actions' range, which is what another batch shape does to the sums of floats.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from common import hardware, write_result

from rlsvc.client import PolicyClient
from rlsvc.core.contract import Contract, Feature
from rlsvc.data.normalize import Normalizer
from rlsvc.store.bundle import write_bundle

CLIENTS = 16
STEPS = 8
"""Different requests of each client, asked in turn."""
FEATURES = {"observation.state": Feature((2,), "float32"), "observation.environment_state": Feature((18,), "float32")}
CONTRACT = Contract(FEATURES, Feature((2,), "float32"), 10.0, 2, 8)
DOWN_DIMS = (256, 512, 1024)
TOLERANCE = {"cpu": 1e-3, "gpu": 1e-2}
"""Of the actions' range; on a GPU products run as TF32, whose sums depend more on their order."""
PACKAGES = ("rlsvc", "ray", "jax", "flax", "websockets", "openpi-client", "numpy")
OPENPI = "openpi's server"
NAME = "diffusion"

Observation = dict[str, np.ndarray]


def observation_of(client: int) -> Observation:
    """A window of random values."""
    rng = np.random.default_rng(client)
    return {key: rng.normal(size=(2, *feature.shape)).astype(np.float32) for key, feature in FEATURES.items()}


def make_bundle(path: Path, down_dims: tuple[int, ...]) -> None:
    """A policy with random weights."""
    import jax

    from rlsvc.nn.params import flatten_params
    from rlsvc.policies import make_policy
    from rlsvc.spec.diffusion import DiffusionSpec

    spec = DiffusionSpec.model_validate({"backbone": {"name": "unet1d", "down_dims": down_dims}})
    rng = np.random.default_rng(0)
    every = {**FEATURES, "action": CONTRACT.action}
    normalizer = Normalizer.fit(
        {"default": {key: rng.normal(size=(500, *f.shape)) for key, f in every.items()}}, every, {}
    )
    policy = spec.model_dump(mode="json")
    params = flatten_params(make_policy(policy, CONTRACT, "fp32").init(jax.random.key(0)))
    host = {name: np.asarray(value) for name, value in params.items()}
    write_bundle(path, policy=policy, contract=CONTRACT, normalizer=normalizer, params=host)


def runner_of(path: Path, device: str) -> Any:
    """The policy for one request at a time, compiled."""
    from rlsvc.runner import PolicyRunner

    runner = PolicyRunner.load(path, batch_sizes=(1,), device=device)
    runner.warm_up()
    return runner


def alone(path: Path, device: str, answer: Connection) -> None:
    """Every client's answers, [CLIENTS, STEPS, H, A], asked alone; in a process that frees the device at its end."""
    runner = runner_of(path, device)
    print("the policy is compiled", flush=True)
    answers = [
        [
            runner.act({k: v[None] for k, v in observation_of(i).items()}, np.array([i]), np.array([step])).action[0]
            for step in range(STEPS)
        ]
        for i in range(CLIENTS)
    ]
    answer.send(np.asarray(answers))


def serve_peer(source: str, port: int, path: Path, device: str) -> None:
    """Run openpi's server around the same policy; in a process of its own."""
    from serving_overhead import serve_openpi

    runner = runner_of(path, device)
    zero = np.zeros(1, np.int64)

    def infer(observation: dict[str, Any]) -> np.ndarray:
        return runner.act({key: value[None] for key, value in observation.items()}, zero, zero).action[0]

    serve_openpi(source, port, infer)


def ours(url: str, client: int) -> Callable[[int], np.ndarray]:
    """Asks our server."""
    policy, observation = PolicyClient(url), observation_of(client)
    return lambda step: policy.act(observation, seed=client, step=step).action


def theirs(url: str, client: int) -> Callable[[int], np.ndarray]:
    """Asks openpi's server, with its own client."""
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    warnings.simplefilter("ignore", DeprecationWarning)
    policy, observation = WebsocketClientPolicy(f"ws://{url}"), observation_of(client)
    return lambda step: policy.infer(observation)["actions"]


def ask(numbers: list[int], urls: dict[str, str], expected: np.ndarray, orders: Connection) -> None:
    """Clients of one process: takes (side, seconds), answers with chunks and the largest difference of an element."""
    make = {"ours": ours, OPENPI: theirs}
    calls = {side: [make[side](url, number) for number in numbers] for side, url in urls.items()}
    orders.send("ready")
    while (order := orders.recv()) is not None:
        side, seconds = order
        end = time.monotonic() + seconds
        held = expected if side == "ours" else None
        with ThreadPoolExecutor(len(numbers)) as pool:
            futures = [pool.submit(_loop, calls[side][i], end, held, number) for i, number in enumerate(numbers)]
            try:
                answers = [future.result() for future in futures]
                orders.send((sum(count for count, _ in answers), max(worst for _, worst in answers), ""))
            except Exception as error:
                orders.send((0, 0.0, f"{side}: {type(error).__name__}: {error}"))


def _loop(call: Callable[[int], np.ndarray], end: float, held: np.ndarray | None, number: int) -> tuple[int, float]:
    count, worst = 0, 0.0
    while time.monotonic() < end:
        action = call(count % STEPS)
        if held is not None:
            worst = max(worst, float(np.abs(action - held[number, count % STEPS]).max()))
        count += time.monotonic() <= end
    return count, worst


def measure(
    urls: dict[str, str], expected: np.ndarray, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], float]:
    """Chunks a second of each side in each round, and the largest difference of an element."""
    context = multiprocessing.get_context("spawn")
    # One process of clients a core that is to spare: sixteen threads of one interpreter ask a GPU too slowly.
    count = max(1, min(CLIENTS, (os.cpu_count() or 1) // 2))
    groups, rng, worst = [], np.random.default_rng(0), 0.0
    rates: dict[str, list[float]] = {side: [] for side in urls}
    with ExitStack() as stack:
        for numbers in np.array_split(np.arange(CLIENTS), count):
            here, there = context.Pipe()
            process = context.Process(target=ask, args=(numbers.tolist(), urls, expected, there), daemon=True)
            process.start()
            stack.callback(process.kill)
            groups.append(here)
        for group in groups:
            group.recv()
        print("the clients are connected", flush=True)
        for turn in range(rounds + 1):  # the first one warms up
            for side in rng.permutation(list(urls)):
                for group in groups:
                    group.send((str(side), seconds if turn else min(seconds, 5.0)))
                answers = [group.recv() for group in groups]
                if problems := [problem for _, _, problem in answers if problem]:
                    raise RuntimeError(problems[0])
                if turn:
                    rates[str(side)].append(sum(chunks for chunks, _, _ in answers) / seconds)
                    print(f"round {turn}, {side}: {rates[str(side)][-1]:.1f} chunks/s", flush=True)
                worst = max(worst, *(far for _, far, _ in answers))
        for group in groups:
            group.send(None)
    return rates, worst


def main() -> int:
    """Serve, ask, compare, store; exit code 1 when an answer differs."""
    from serving_overhead import wait_for

    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.haproxy import free_ports
    from rlsvc.serve.settings import ServeSettings
    from rlsvc.serve.source import PolicySource

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openpi-src", required=True, help="the src folder of an openpi checkout")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument(
        "--down-dims", type=int, nargs="+", default=DOWN_DIMS, help="of the U-Net; others are not stored"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each side in a round")
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    device = "gpu" if args.gpu else "cpu"
    print(hardware(args.gpu), flush=True)
    # Three processes share the card.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    port, peer_port = free_ports(2)
    urls = {"ours": f"127.0.0.1:{port}", OPENPI: f"127.0.0.1:{peer_port}"}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bundle"
        maker = context.Process(target=make_bundle, args=(path, tuple(args.down_dims)))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise RuntimeError(f"the bundle was not made: its process ended with {maker.exitcode}")
        here, there = context.Pipe()
        alone_process = context.Process(target=alone, args=(path, device, there), daemon=True)
        alone_process.start()
        there.close()  # or a process that dies is waited for
        expected = here.recv()
        alone_process.join()
        print("the policy alone has answered; serving it", flush=True)
        deployment = Deployment(
            NAME,
            PolicySource(str(path), batch_size=CLIENTS, device=device),
            port=port,
            gpus=0.5 if args.gpu else 0.0,
            settings=ServeSettings(max_batch=CLIENTS),
        )
        stack.enter_context(ray_for_serving(deployment))
        start(deployment)
        peer = context.Process(target=serve_peer, args=(args.openpi_src, peer_port, path, device), daemon=True)
        peer.start()
        stack.callback(peer.kill)
        wait_for(peer_port)
        print("both serve", flush=True)
        rates, worst = measure(urls, expected, args.rounds, args.seconds)
    ratios = [mine / other for mine, other in zip(rates["ours"], rates[OPENPI], strict=True)]
    for side, values in rates.items():
        print(f"{side}: {statistics.median(values):.1f} chunks/s, rounds {', '.join(f'{x:.1f}' for x in values)}")
    span = float(np.ptp(expected))
    print(f"ratio {statistics.median(ratios):.2f}, rounds {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"largest difference from the unbatched answer: {worst / span:.1e} of the actions' range ({span:.3g})")
    if not worst <= TOLERANCE[device] * span:
        print(f"that is more than {TOLERANCE[device]:g}: batched answers are not those of the policy alone")
        return 1
    if not args.no_store and tuple(args.down_dims) == DOWN_DIMS:
        write_result(
            f"batched_throughput_vs_openpi_{device}",
            statistics.median(ratios),
            "ratio",
            low=min(ratios),
            high=max(ratios),
            peer=OPENPI,
            peer_value=1e3 / statistics.median(rates[OPENPI]),  # ms a chunk
            ratio=statistics.median(ratios),
            gpu=args.gpu,
            packages=PACKAGES,
        )
    return 0


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    sys.exit(main())
