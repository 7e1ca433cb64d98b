"""Training pi0.5 at its published size on GPUs: samples a second, and the share of the card's arithmetic they use.

    python benchmarks/pi0_training.py full lora            # on one GPU
    python benchmarks/pi0_training.py full --fsdp 2        # on one and on two, weights cut over both

Fine-tuning as `rlsvc train` does it: three 224x224 cameras, prompts of 200 tokens, chunks of 50 actions, bf16 products
over float32 weights, moments in bf16, no averaging, `--batch` windows a GPU. Images are random; they lie on the GPU, as
"auto" placement has it for a dataset that fits. Each side is a process of its own, and its figure the median of
`--calls` calls of `--updates` updates.

Model-FLOP utilisation counts three times the forward products (towers, backbone, expert, attention), and nothing that
rematerialisation does again, over the card's dense bf16 rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result

from rlsvc.spec.run import RunSpec

CAMERAS = ("base", "left_wrist", "right_wrist")
RATE = 989e12
"""Dense bf16 FLOP/s of an H100 or H200."""
PACKAGES = ("rlsvc", "jax", "flax", "optax")
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora_backbone": {"rank": 16}, "lora_expert": {"rank": 32, "alpha": 32}},
}
TINY: dict[str, Any] = {"vision": "dummy", "backbone": "dummy", "expert": "dummy", "image_size": [28, 28]}


def write_data(path: Path, side: int, steps: int = 64) -> None:
    """One episode of random images, states and actions."""
    rng = np.random.default_rng(0)
    columns = {f"observation.images.{name}": rng.integers(0, 256, (steps, side, side, 3), np.uint8) for name in CAMERAS}
    vectors = {
        name: rng.normal(size=(steps, 32)).clip(-1, 1).astype(np.float32) for name in ("observation.state", "action")
    }
    np.savez(path, **columns, **vectors, episode_ends=np.asarray([steps]), fps=np.asarray(50.0))


def spec_of(kind: str, folder: Path, batch: int, fsdp: int, tiny: bool) -> RunSpec:
    """The run; random tokens from the whole vocabulary cost what real ones do."""
    tokenizer = {"name": "byte", "action_tokens": 0 if tiny else 256_893}
    policy = {"name": "pi0", "variant": "pi05", "tokenizer": tokenizer, "prompt": "pick up the cube"}
    algo = {"name": "imitation", "ema": None, "batch_size": batch, "optimizer": {"moments": "bf16", "grad_clip": 1.0}}
    whole = {"validation_fraction": 0}
    observation = [*(f"observation.images.{name}" for name in CAMERAS), "observation.state"]
    return RunSpec.model_validate(
        {
            "name": "pi0_training", "root": str(folder), "precision": "bf16", "total_steps": 1000,
            "policy": {**policy, **KINDS[kind], **(TINY if tiny else {})}, "algo": algo,
            "data": {"datasets": [{"path": str(folder / "data.npz")}], "observation": observation, **whole},
            "learner": {"fsdp": fsdp}, "tracking": {"trackers": []},
        }
    )  # fmt: skip


def forward_flop(policy: Any) -> float:
    """FLOP of the products of one sample's forward pass."""
    from pi0_latency import gemma_weights, siglip_weights

    patches = policy.image_size[0] * policy.image_size[1] // policy.vision.patch**2
    prefix, suffix = len(CAMERAS) * patches + policy.prompt_tokens, policy.horizon
    size = policy.backbone
    products = (
        len(CAMERAS) * patches * siglip_weights(policy.vision)
        + prefix * gemma_weights(policy.backbone)
        + suffix * gemma_weights(policy.expert)
    )
    attention = 4 * size.depth * size.heads * size.head_dim * (prefix + suffix) ** 2
    attention += len(CAMERAS) * 4 * policy.vision.depth * policy.vision.width * patches**2
    return float(2 * products + attention)


def side(kind: str, batch: int, fsdp: int, updates: int, calls: int, tiny: bool) -> None:
    """Train in this process; print one line of JSON."""
    import jax

    from rlsvc.train.learner import Learner
    from rlsvc.train.orchestrator import Order

    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "data.npz", 28 if tiny else 224)
        spec = spec_of(kind, Path(folder), batch * fsdp, fsdp, tiny)
        learner = Learner(spec, Path(folder))
        times = []
        for call in range(calls + 2):  # two to compile and to warm up
            order = Order(
                "update", (call + 1) * updates, hook="update", num_updates=updates, buffer={"demonstrations": 1.0}
            )
            start = time.perf_counter()
            loss = learner.execute(order)["loss"]
            times.append(time.perf_counter() - start)
    rates = [updates * batch * fsdp / seconds for seconds in times[2:]]
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    result = {
        "samples_per_s": statistics.median(rates), "low": min(rates), "high": max(rates), "loss": loss,
        "peak_gib": memory / 2**30, "compile_s": times[0], "flop": 3 * forward_flop(spec.policy),
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def run_side(args: argparse.Namespace, kind: str, fsdp: int) -> dict[str, float]:
    """`side` in a process that sees as many GPUs as it uses."""
    words = [sys.executable, __file__, kind, "--side", "--fsdp", str(fsdp), "--batch", str(args.batch)]
    words += ["--updates", str(args.updates), "--calls", str(args.calls), *(["--tiny"] if args.tiny else [])]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(fsdp)))}
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=list(KINDS))
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs; above 1, one GPU is measured beside them")
    parser.add_argument("--batch", type=int, default=32, help="windows a GPU")
    parser.add_argument("--updates", type=int, default=4, help="of one call")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--side", action="store_true", help="one side, in this process")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to try the script; nothing is stored")
    args = parser.parse_args()
    if args.side:
        side(args.kinds[0], args.batch, args.fsdp, args.updates, args.calls, args.tiny)
        return
    kw: dict[str, Any] = {"gpu": True, "packages": PACKAGES, "seeds": [0]}
    for kind in args.kinds:
        rates = {}
        for fsdp in sorted({1, args.fsdp}):
            got = run_side(args, kind, fsdp)
            rates[fsdp] = rate = got["samples_per_s"]
            used = 100 * rate * got["flop"] / (RATE * fsdp)
            share = f", {used:.1f} % of the dense bf16 rate" if kind == "full" else ""
            print(
                f"{kind} on {fsdp}: {rate:.1f} samples/s [{got['low']:.1f}, {got['high']:.1f}]{share}, "
                f"{got['peak_gib']:.0f} GiB, first call {got['compile_s']:.0f} s, loss {got['loss']:.3f}",
                flush=True,
            )
            if args.tiny or fsdp > 1:
                continue
            name = "pi0_train_samples_per_s" if kind == "full" else "pi0_lora_samples_per_s"
            write_result(name, rate, "samples/s", low=got["low"], high=got["high"], gpus=1, **kw)
            if kind == "full":
                ends = {end: used * got[end] / rate for end in ("low", "high")}
                write_result("pi0_train_mfu", used, "percent", **ends, gpus=1, **kw)
        if args.fsdp > 1:
            ratio = rates[args.fsdp] / rates[1]
            print(f"{kind}: {ratio:.2f} times on {args.fsdp}", flush=True)
            if not args.tiny and kind == "full":
                name = f"pi0_fsdp_scaling_{args.fsdp}"
                one = rates[1]
                write_result(
                    name, ratio, "ratio", peer="one GPU, samples/s", peer_value=one, ratio=ratio, gpus=args.fsdp, **kw
                )


if __name__ == "__main__":
    main()
