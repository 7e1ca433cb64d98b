"""Diffusion policy on one GPU beside LeRobot's: update at batch 64 and 256, inference of one chunk, same sizes.

    python benchmarks/diffusion_speed.py            (needs lerobot[diffusion] for the peer)

State PushT, horizon 16, U-Net (256, 512, 1024), 63.5 M parameters on both sides. float32 weights; products and
convolutions run as TF32 on both sides (JAX's default on this hardware; PyTorch with allow_tf32, as lerobot-train sets
it). Batches lie on the GPU on both sides; ours draws and normalises them in the update and keeps an average of the
weights besides, LeRobot's does neither.
Sides are timed in turn, `--rounds` times; the figure is the median, the interval the range of the rounds' medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from common import write_result

from rlsvc.algos.imitation import Imitation
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.types import EpisodeTable
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import flatten_params
from rlsvc.policies import make_policy
from rlsvc.runner import PolicyRunner
from rlsvc.spec.diffusion import DiffusionSpec
from rlsvc.spec.imitation import ImitationSpec
from rlsvc.store.bundle import Bundle

FEATURES = {"observation.state": Feature((2,), "float32"), "observation.environment_state": Feature((18,), "float32")}
ACTION = Feature((2,), "float32")
CONTRACT = Contract(FEATURES, ACTION, 10.0, 2, 8)
PACKAGES = ("rlsvc", "jax", "flax", "torch", "lerobot")


def demonstrations() -> EpisodeTable:
    """206 random episodes of PushT's size; speed does not depend on what they hold."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(np.full(206, 124))
    columns = {
        key: rng.normal(size=(ends[-1], *f.shape)).astype(np.float32)
        for key, f in (*FEATURES.items(), ("action", ACTION))
    }
    return EpisodeTable(columns, ends, 10.0, np.zeros(ends[-1], np.int32), [""])


class Ours:
    """This project's update and inference."""

    def __init__(self, batch: int, precision: str, down_dims: tuple[int, ...], updates: int) -> None:
        table = demonstrations()
        spec = DiffusionSpec.model_validate(
            {"backbone": {"name": "unet1d", "down_dims": down_dims, "step_embed_dim": 128}}
        )
        self.policy_spec, self.updates, self.precision = spec.model_dump(mode="json"), updates, precision
        self.normalizer = Normalizer.fit({"default": table.columns}, {**FEATURES, "action": ACTION}, {})
        policy = make_policy(self.policy_spec, CONTRACT, precision)
        windows = Windows.build(
            [table], weights=[1.0], groups=[0], observation=tuple(FEATURES), action="action", n_obs_steps=2, horizon=16
        )
        self.data = jax.device_put(windows)
        self.algorithm = Imitation(policy, self.normalizer, ImitationSpec(batch_size=batch), total_steps=100_000)
        self.state = jax.jit(self.algorithm.init)(jax.random.key(0))
        self.parameters = sum(x.size for x in jax.tree.leaves(self.state.params))

    def update_ms(self) -> float:
        """Milliseconds an update, amortised over one call of `updates`."""
        start = time.perf_counter()
        self.state, metrics = self.algorithm.update("update", self.state, self.data, jax.random.key(1), self.updates)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - start) / self.updates * 1e3

    def runner(self, sample_steps: int) -> PolicyRunner:
        """Ready to act with these weights."""
        params = flatten_params(self.algorithm.acting_params(self.state))
        bundle = Bundle("", self.policy_spec, self.precision, CONTRACT, self.normalizer, params, {}, None)  # type: ignore[arg-type]
        return PolicyRunner(bundle, batch_sizes=(1,), sample_steps=sample_steps)


class LeRobot:
    """LeRobot's update and inference, eager or compiled with its own `compile_model`."""

    def __init__(self, batch: int, compiled: bool, down_dims: tuple[int, ...], sample_steps: int) -> None:
        import torch
        from lerobot.configs.types import FeatureType, PolicyFeature
        from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
        from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        kinds = {"observation.state": FeatureType.STATE, "observation.environment_state": FeatureType.ENV}
        config = DiffusionConfig(
            n_obs_steps=2,
            horizon=16,
            n_action_steps=8,
            down_dims=down_dims,
            num_inference_steps=sample_steps,
            noise_scheduler_type="DDIM",
            input_features={key: PolicyFeature(kinds[key], f.shape) for key, f in FEATURES.items()},
            output_features={"action": PolicyFeature(FeatureType.ACTION, ACTION.shape)},
            compile_model=compiled,
            device=self.device,
        )
        self.policy = DiffusionPolicy(config).to(self.device)
        self.parameters = sum(p.numel() for p in self.policy.parameters())
        self.optimizer = config.get_optimizer_preset().build(self.policy.parameters())
        self.scheduler = config.get_scheduler_preset().build(self.optimizer, 100_000)
        rng = torch.Generator(self.device).manual_seed(0)
        normal = lambda *shape: torch.randn(*shape, generator=rng, device=self.device)  # noqa: E731
        self.batch = {key: normal(batch, 2, *f.shape) for key, f in FEATURES.items()}
        self.batch |= {
            "action": normal(batch, 16, 2),
            "action_is_pad": torch.zeros(batch, 16, dtype=torch.bool, device=self.device),
        }
        self.host = {
            key: np.random.default_rng(0).normal(size=(1, 2, *f.shape)).astype(np.float32)
            for key, f in FEATURES.items()
        }

    def update_ms(self, count: int = 20) -> float:
        """Milliseconds an update: forward, backward, clip, step, schedule."""
        self.policy.train()
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            loss, _ = self.policy.forward(self.batch)
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self._wait()
        return (time.perf_counter() - start) / count * 1e3

    def act_ms(self) -> float:
        """Milliseconds from host observation to host actions."""
        self.policy.eval()
        start = time.perf_counter()
        with self.torch.inference_mode():
            batch = {key: self.torch.from_numpy(x).to(self.device) for key, x in self.host.items()}
            self.policy.diffusion.generate_actions(batch).cpu().numpy()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def interleave(
    sides: dict[str, Callable[[], float]], rounds: int, repeats: int
) -> dict[str, tuple[float, float, float]]:
    """Median, and range of the rounds' medians, of each side; sides take turns. Each is warmed up first."""
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100, help="of ours in one call")
    parser.add_argument("--down-dims", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--sample-steps", type=int, default=10)
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="of ours; other than fp32 is printed, not stored"
    )
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    dims = tuple(args.down_dims)
    gpu = setup_jax() == "gpu"

    def store(name: str, peer: str, ours: tuple[float, float, float], theirs: tuple[float, float, float]) -> None:
        ratio = theirs[0] / ours[0]
        print(f"{name}: {ratio:.2f} (ours {ours[0]:.3f} ms [{ours[1]:.3f}, {ours[2]:.3f}], {peer} {theirs[0]:.2f} ms)")
        if gpu and args.precision == "fp32" and dims == (256, 512, 1024):
            write_result(
                name,
                ratio,
                "ratio",
                low=theirs[1] / ours[2],
                high=theirs[2] / ours[1],
                peer=peer,
                peer_value=theirs[0],
                ratio=ratio,
                gpu=True,
                packages=PACKAGES,
                seeds=[0],
            )

    figures = {
        256: ("diffusion_update_speedup_lerobot", False),
        64: ("diffusion_update_speedup_lerobot_compiled", True),
    }
    for batch, (figure, compiled) in figures.items():
        ours = Ours(batch, args.precision, dims, args.updates)
        sides: dict[str, Callable[[], float]] = {"ours": ours.update_ms}
        if not args.no_peer:
            eager = LeRobot(batch, False, dims, args.sample_steps)
            print(f"batch {batch}: parameters {ours.parameters:,} and {eager.parameters:,}")
            sides["eager"] = eager.update_ms
            if compiled:
                sides["compiled"] = LeRobot(batch, True, dims, args.sample_steps).update_ms
        times = interleave(sides, args.rounds, 3)
        for name, (median, low, high) in times.items():
            print(f"update, batch {batch}, {name}: {median:.3f} ms [{low:.3f}, {high:.3f}]")
        if not args.no_peer:
            side = "compiled" if compiled else "eager"
            store(figure, f"lerobot 0.6.1, {side}, batch {batch}", times["ours"], times[side])

    runner = ours.runner(args.sample_steps)
    rng, one = np.random.default_rng(1), np.zeros(1, np.int64)
    observation = {key: rng.normal(size=(1, 2, *f.shape)).astype(np.float32) for key, f in FEATURES.items()}

    def act_ms() -> float:
        start = time.perf_counter()
        runner.act(observation, one, one)
        return (time.perf_counter() - start) * 1e3

    sides = {"ours": act_ms} | ({} if args.no_peer else {"eager": eager.act_ms})
    times = interleave(sides, args.rounds, 20)
    for name, (median, low, high) in times.items():
        print(f"inference, DDIM {args.sample_steps}, {name}: {median:.3f} ms [{low:.3f}, {high:.3f}]")
    if not args.no_peer:
        store("diffusion_infer_speedup_lerobot", "lerobot 0.6.1, eager, batch 1", times["ours"], times["eager"])


if __name__ == "__main__":
    main()
