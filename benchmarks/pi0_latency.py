"""A pi0 action chunk on one GPU, from host images to host actions, beside LeRobot's PyTorch pi0 and openpi's JAX one.

    python benchmarks/pi0_latency.py [--lerobot] [--openpi-src PATH/TO/openpi/src]

Published sizes (3.3 billion parameters with both experts), bf16, chunks of 50 actions, 10 Euler steps, one observation
of two and of three 224x224 cameras, a prompt of 48 tokens, random weights and random images. Ours is
`PolicyRunner.act`, as rollouts and served replicas call it. LeRobot's is its policy's `sample_actions`, eager and
compiled, on images that come from the host too; it is given tokens. openpi's is read from a checkout that stands
outside this project, with bf16 weights as it loads them for acting; it always computes three cameras. Sides take turns,
`--rounds` times; the figure is the median of the rounds' medians.

The breakdown times the parts alone (tower, backbone over the prefix, one Euler step); the floors are the products' work
at the card's dense bf16 rate, and the bytes of weights and keys at its memory's rate. `--profile` counts the kernels of
a chunk, and says how long they keep the card busy and which take longest.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and JAX share the card

import jax
import jax.numpy as jnp
import numpy as np
from common import write_result
from flax import nnx

from rlsvc.core.contract import Contract, Feature
from rlsvc.data.normalize import Normalizer
from rlsvc.nn.backend import setup_jax
from rlsvc.policies.pi0 import Pi0Policy
from rlsvc.runner import PolicyRunner
from rlsvc.spec.pi0 import GemmaSpec, Pi0Spec, SiglipSpec
from rlsvc.store.bundle import Bundle

CAMERAS = ("observation.images.base", "observation.images.left_wrist", "observation.images.right_wrist")
ACTION, HORIZON, STEPS, TOKENS = 32, 50, 10, 48
RATES = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12)}
"""Dense bf16 FLOP/s and memory B/s of a card."""
PACKAGES = ("rlsvc", "jax", "flax", "torch", "lerobot", "transformers")


def spec_of(tiny: bool) -> Pi0Spec:
    """The published sizes, or the smallest to try the script."""
    sizes: dict[str, Any] = {"vision": "dummy", "backbone": "dummy", "expert": "dummy"} if tiny else {}
    # Random ids from the whole vocabulary cost what real ones do.
    return Pi0Spec.model_validate(
        {"tokenizer": {"name": "byte", "action_tokens": 0 if tiny else 256_893}, "prompt": "pick up the cube", **sizes}
    )


def contract_of(spec: Pi0Spec, views: int) -> Contract:
    """Cameras, a state and an action of the padded width."""
    features = dict.fromkeys(CAMERAS[:views], Feature((*spec.image_size, 3), "uint8"))
    vector = Feature((ACTION,), "float32")
    return Contract({**features, "observation.state": vector}, vector, 50.0, 1, spec.n_action_steps)


def random_params(policy: Pi0Policy) -> Any:
    """Weights drawn at random, bf16, on the device."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(policy.init, jax.random.key(0)))
    draw = jax.jit(lambda key, shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1)
    return jax.tree.unflatten(tree, [draw(jax.random.key(i), leaf.shape) for i, leaf in enumerate(leaves)])


def random_runner(spec: Pi0Spec, views: int, batch_sizes: tuple[int, ...], params: Any = None) -> PolicyRunner:
    """A runner of the policy, with these weights or others drawn at random."""
    contract = contract_of(spec, views)
    normalizer = Normalizer.identity({**contract.observation, "action": contract.action})
    bundle = Bundle("x" * 64, spec.model_dump(mode="json"), "bf16", contract, normalizer, {}, {}, Path())
    runner = PolicyRunner(bundle, batch_sizes=batch_sizes)
    runner.set_params(random_params(Pi0Policy(spec, contract, jnp.bfloat16)) if params is None else params, "random")
    return runner


class Ours:
    """PolicyRunner, and the parts of its policy."""

    def __init__(self, spec: Pi0Spec, views: int, batch: int) -> None:
        self.policy = Pi0Policy(spec, contract_of(spec, views), jnp.bfloat16)
        self.params = random_params(self.policy)
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        self.runner = random_runner(spec, views, (batch,), self.params)
        self.rng, self.views, self.batch, self.spec = np.random.default_rng(0), views, batch, spec

    def act_ms(self) -> float:
        """Milliseconds from host images to host actions."""
        shape = (self.batch, 1, *self.spec.image_size, 3)
        observation = {name: self.rng.integers(0, 256, shape, np.uint8) for name in CAMERAS[: self.views]}
        observation["observation.state"] = self.rng.normal(size=(self.batch, 1, ACTION)).astype(np.float32)
        seeds, steps = np.arange(self.batch), np.full(self.batch, int(self.rng.integers(1000)))
        start = time.perf_counter()
        self.runner.act(observation, seeds, steps)
        return (time.perf_counter() - start) * 1e3

    def parts(self) -> dict[str, float]:
        """Milliseconds of each part alone, on arrays that lie on the device."""
        b, spec = self.batch, self.spec
        graph = nnx.split(nnx.eval_shape(lambda: self.policy.net(self.params)))[0]
        observation = {
            **{name: jnp.zeros((b, *spec.image_size, 3)) for name in CAMERAS[: self.views]},
            "observation.state": jnp.zeros((b, ACTION)),
            "prompt_tokens": jnp.ones((b, spec.prompt_tokens), jnp.int32),
            "prompt_mask": jnp.ones((b, spec.prompt_tokens), bool),
        }
        images = jnp.zeros((b * self.views, *spec.image_size, 3))
        net: Callable[[Any], Any] = lambda params: nnx.merge(graph, params)  # noqa: E731
        tower = jax.jit(lambda p, x: net(p).vision(x))
        read = jax.jit(lambda p, o: net(p).read(o))
        cache, valid = read(self.params, observation)
        x, t = jnp.zeros((b, spec.horizon, ACTION)), jnp.full(b, 0.5)
        seen = jax.jit(lambda p, o, c, v: net(p).seen(o, c, v))(self.params, observation, cache, valid)
        velocity = jax.jit(lambda p, s, x, t: net(p).velocity(s, x, t))
        times = {
            "vision tower": median_ms(lambda: tower(self.params, images)),
            "tower and backbone": median_ms(lambda: read(self.params, observation)),
            "one Euler step": median_ms(lambda: velocity(self.params, seen, x, t)),
        }
        return {**times, f"{spec.sample_steps} Euler steps": times["one Euler step"] * spec.sample_steps}


def median_ms(call: Callable[[], Any], repeats: int = 30) -> float:
    """Median milliseconds of a call that leaves its result on the device."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def kernels(act: Callable[[], Any], calls: int = 5) -> dict[str, tuple[float, float]]:
    """Microseconds and number of each kernel in one call, by name, out of JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                act()
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    named = [e for e in events if e.get("ph") == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    streams = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    found: dict[str, tuple[float, float]] = {}
    for event in events:
        place = processes.get(event.get("pid"), "")
        stream = streams.get((event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and "GPU" in place and "Stream" in stream:
            us, count = found.get(event["name"], (0.0, 0.0))
            found[event["name"]] = (us + event["dur"] / calls, count + 1 / calls)
    return found


def gemma_weights(size: GemmaSpec) -> int:
    """Weights of the products of all layers."""
    heads = (size.heads + 2 * size.kv_heads) * size.head_dim
    return size.depth * size.width * (heads + size.heads * size.head_dim + 3 * size.mlp_dim)


def siglip_weights(size: SiglipSpec) -> int:
    """Likewise."""
    return size.depth * size.width * (4 * size.width + 2 * size.mlp_dim)


def floors(spec: Pi0Spec, views: int) -> tuple[float, float]:
    """FLOP of the products of one chunk, and bytes of weights and keys that it has to read at least once."""
    patches = spec.image_size[0] * spec.image_size[1] // spec.vision.patch**2
    prefix, suffix = views * patches + spec.prompt_tokens, spec.horizon + 1
    backbone, expert, tower = gemma_weights(spec.backbone), gemma_weights(spec.expert), siglip_weights(spec.vision)
    size = spec.backbone
    attention = 4 * size.depth * size.heads * size.head_dim
    flop = 2 * (views * patches * tower + prefix * backbone) + attention * prefix**2
    flop += views * 4 * spec.vision.depth * spec.vision.width * patches**2
    flop += spec.sample_steps * (2 * suffix * expert + attention * suffix * (prefix + suffix))
    keys = 2 * size.depth * size.kv_heads * size.head_dim * prefix
    return float(flop), 2.0 * (tower + backbone + spec.sample_steps * (expert + keys))


def lerobot_side(views: int, compiled: bool) -> Callable[[], float]:
    """LeRobot's pi0 of the published sizes, random weights, bf16 as its configuration has it."""
    import torch
    from lerobot.policies.pi0.configuration_pi0 import PI0Config
    from lerobot.policies.pi0.modeling_pi0 import PI0Pytorch

    config = PI0Config(dtype="bfloat16", compile_model=compiled, device="cuda")
    torch.set_default_device("cuda")
    model = PI0Pytorch(config).eval()
    torch.set_default_device("cpu")
    rng = np.random.default_rng(0)

    def call() -> float:
        host = [rng.integers(0, 256, (1, 224, 224, 3), np.uint8) for _ in range(views)]
        state = rng.normal(size=(1, ACTION)).astype(np.float32)
        tokens = torch.ones((1, TOKENS), dtype=torch.long, device="cuda")
        there = torch.ones(1, dtype=torch.bool, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        images = [torch.from_numpy(x).cuda().permute(0, 3, 1, 2).float() / 127.5 - 1 for x in host]
        with torch.no_grad():
            chunk = model.sample_actions(
                images, [there] * views, tokens, tokens.bool(), torch.from_numpy(state).cuda(), num_steps=STEPS
            )
        chunk.float().cpu().numpy()
        return (time.perf_counter() - start) * 1e3

    return call


def openpi_side(source: str) -> Callable[[], float]:
    """Openpi's pi0 of the published sizes, random weights, compiled as its policies are."""
    sys.path.insert(0, source)
    from openpi.models import model, pi0_config  # pyright: ignore[reportMissingImports]

    graph, state = nnx.split(pi0_config.Pi0Config().create(jax.random.key(0)))
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    sample = jax.jit(lambda s, key, o: nnx.merge(graph, s).sample_actions(key, o, num_steps=STEPS))
    rng, key = np.random.default_rng(0), jax.random.key(0)

    def call() -> float:
        observation = {
            "image": {name: rng.integers(0, 256, (1, 224, 224, 3), np.uint8) for name in model.IMAGE_KEYS},
            "image_mask": dict.fromkeys(model.IMAGE_KEYS, np.ones(1, bool)),
            "state": rng.normal(size=(1, ACTION)).astype(np.float32),
            "tokenized_prompt": np.ones((1, TOKENS), np.int32),
            "tokenized_prompt_mask": np.ones((1, TOKENS), bool),
        }
        start = time.perf_counter()
        np.asarray(sample(state, key, model.Observation.from_dict(jax.tree.map(jnp.asarray, observation))))
        return (time.perf_counter() - start) * 1e3

    return call


def interleave(
    sides: dict[str, Callable[[], float]], rounds: int, repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Median, and range of the rounds' medians, of each side; sides take turns."""
    for call in sides.values():
        for _ in range(3):
            call()
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            medians[name].append(statistics.median(call() for _ in range(repeats)))
    return {name: (statistics.median(m), min(m), max(m)) for name, m in medians.items()}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lerobot", action="store_true", help="beside LeRobot's pi0, which has to be installed")
    parser.add_argument("--compiled", action="store_true", help="also LeRobot's compiled mode; compiling takes minutes")
    parser.add_argument("--openpi-src", help="the src folder of an openpi checkout, whose packages are installed")
    parser.add_argument("--views", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batch", type=int, default=8, help="of the throughput that is printed besides; 0 leaves it out"
    )
    parser.add_argument("--no-parts", action="store_true", help="without the breakdown, which compiles each part")
    parser.add_argument("--profile", action="store_true", help="also which kernels a chunk is made of")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the script; nothing is stored")
    args = parser.parse_args()
    gpu = setup_jax() == "gpu"
    store, spec = gpu and not args.tiny, spec_of(args.tiny)
    card = jax.devices()[0].device_kind
    openpi = openpi_side(args.openpi_src) if args.openpi_src else None
    for views in args.views:
        ours = Ours(spec, views, 1)
        sides: dict[str, Callable[[], float]] = {"ours": ours.act_ms}
        if args.lerobot:
            sides["lerobot eager"] = lerobot_side(views, compiled=False)
            if args.compiled:
                sides["lerobot compiled"] = lerobot_side(views, compiled=True)
        if openpi is not None:
            sides["openpi"] = openpi
        times = interleave(sides, args.rounds, 10)
        print(f"{views} views, {ours.parameters:,} parameters", flush=True)
        for name, (median, low, high) in times.items():
            print(f"  {name}: {median:.2f} ms [{low:.2f}, {high:.2f}]", flush=True)
        median, low, high = times.pop("ours")
        kw: dict[str, Any] = {"gpu": True, "packages": PACKAGES, "seeds": [0]}
        if store:
            write_result(f"pi0_latency_{views}view_ms", median, "ms", low=low, high=high, **kw)
        for whose in ("lerobot", "openpi"):
            peers = {name: value for name, value in times.items() if name.startswith(whose)}
            if not peers:
                continue
            name, peer = min(peers.items(), key=lambda item: item[1][0])
            print(f"  {peer[0] / median:.2f} times as fast as {name}", flush=True)
            if store and views == (3 if whose == "openpi" else 2):
                kw |= {"low": peer[1] / high, "high": peer[2] / low}
                write_result(f"pi0_speedup_{whose}", peer[0] / median, "ratio", peer=name, peer_value=peer[0], **kw)
        for name, ms in ({} if args.no_parts else ours.parts()).items():
            print(f"    {name}: {ms:.2f} ms", flush=True)
        if args.profile:
            found = sorted(kernels(ours.act_ms).items(), key=lambda item: -item[1][0])
            busy, count = sum(us for _, (us, _) in found), sum(count for _, (_, count) in found)
            print(f"    {count:.0f} kernels keep the card busy for {busy / 1e3:.2f} ms", flush=True)
            for name, (us, count) in found[:20]:
                print(f"      {us:8.0f} us, {count:5.0f} times: {name[:90]}", flush=True)
        flop, read = floors(spec, views)
        rates = next((rates for name, rates in RATES.items() if name in card), None)
        if rates is not None:
            print(f"    floor of {flop / 1e12:.2f} TFLOP: {flop / rates[0] * 1e3:.2f} ms", flush=True)
            print(f"    floor of {read / 1e9:.1f} GB: {read / rates[1] * 1e3:.2f} ms", flush=True)
        del ours, sides
    if args.batch:
        batch = Ours(spec, 2, args.batch)
        median = interleave({"ours": batch.act_ms}, args.rounds, 10)["ours"][0]
        print(f"2 views, batch {args.batch}: {median:.2f} ms, {args.batch / median * 1e3:.0f} chunks/s", flush=True)


if __name__ == "__main__":
    main()
