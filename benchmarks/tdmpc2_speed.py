"""TD-MPC2 on one GPU beside the official torch program and tdmpc2-jax: an update, and plans for 1, 16, 64 observations.

    python benchmarks/tdmpc2_speed.py --official <nicklashansen/tdmpc2> --tdmpc2-jax <ShaneFlandermeyer/tdmpc2-jax>

Sizes of walker-walk: 24 observations, 6 actions, the 5M model, batch 256, horizon 3, 6 iterations of 512 samples. fp32
weights; products run as TF32 on all sides (JAX's default on this hardware; torch with
set_float32_matmul_precision("high"), as the official training script has it), but for our planner's, which are bf16 as
in every run on a GPU (`policy.plan_precision`; curves of tdmpc2_learning.py were made so).
Update: ours draws its batches from a replay on the GPU and does `--updates` of them in one call; the peers get a batch
that lies on the GPU. Plan: from host observation to host action. The official program plans for one observation at a
time, so its figure for B is B calls.
Sides are timed in turn, `--rounds` times; the figure is the median, the interval the range of the rounds' medians. A
side that fails is left out, and says why. `--variants` times other settings of ours and stores nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and JAX share the card

import jax
import jax.numpy as jnp
import numpy as np
from common import write_result

from rlsvc.algos.tdmpc2 import TDMPC2
from rlsvc.core.contract import Contract, Feature
from rlsvc.core.types import EpisodeTable
from rlsvc.data.normalize import Normalizer
from rlsvc.data.replay_table import replay_from_table
from rlsvc.nn.backend import for_host, on_device, setup_jax
from rlsvc.policies import ActOptions, make_policy
from rlsvc.policies.tdmpc2 import TDMPC2Policy
from rlsvc.spec.tdmpc2 import TDMPC2PolicySpec, TDMPC2Spec

OBS, ACTION_DIM, HORIZON = 24, 6, 3
FEATURES = {"observation.state": Feature((OBS,), "float32")}
ACTION = Feature((ACTION_DIM,), "float32")
CONTRACT = Contract(FEATURES, ACTION, 20.0, 1, 1)
PACKAGES = ("rlsvc", "jax", "flax", "optax", "torch", "tensordict")
Times = dict[str, tuple[float, float, float]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed, the same on every side."""

    batch: int = 256
    latent: int = 512
    hidden: int = 512
    encoder: int = 256
    samples: int = 512
    policy_samples: int = 24
    elites: int = 64


TINY = Sizes(16, 16, 16, 16, 32, 4, 8)


class Ours:
    """This project's update and plan."""

    def __init__(
        self,
        sizes: Sizes,
        updates: int,
        precision: str = "fp32",
        unroll: int | None = None,
        plan_precision: Literal["fp32", "bf16"] | None = None,
    ) -> None:
        spec = TDMPC2PolicySpec(
            latent_dim=sizes.latent,
            hidden_dim=sizes.hidden,
            encoder_dim=sizes.encoder,
            samples=sizes.samples,
            policy_samples=sizes.policy_samples,
            elites=sizes.elites,
            plan_precision=plan_precision,
        )
        policy = make_policy(spec.model_dump(mode="json"), CONTRACT, precision)
        assert isinstance(policy, TDMPC2Policy)
        policy.unroll = unroll
        normalizer = Normalizer.identity({**FEATURES, "action": ACTION})
        self.policy, self.updates, self.key = policy, updates, jax.random.key(1)
        self.algorithm = TDMPC2(policy, normalizer, TDMPC2Spec(batch_size=sizes.batch), total_steps=1)
        self.state = jax.jit(self.algorithm.init)(jax.random.key(0))
        self.tree = jax.tree.structure(self.state.params)
        self.data = random_replay()
        self.plan = jax.jit(self._plan, out_shardings=(for_host(), on_device()))  # as PolicyRunner does it
        self.rng = np.random.default_rng(0)
        self.carry: dict[int, Any] = {}
        self.calls = 0

    def update_ms(self) -> float:
        """Milliseconds an update, amortised over one call of `updates`."""
        start = time.perf_counter()
        self.state, metrics = self.algorithm.update("update", self.state, self.data, self.key, self.updates)
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - start) / self.updates * 1e3

    def plan_ms(self, batch: int) -> float:
        """Milliseconds from host observations to host actions; the keys are made on the device from two numbers."""
        observation = {"observation.state": self.rng.normal(size=(batch, 1, OBS)).astype(np.float32)}
        carry = self.carry.get(batch)
        if carry is None:
            carry = jax.device_put(self.policy.initial_carry(batch))
        self.calls += 1
        weights = jax.tree.leaves(self.state.params)  # as PolicyRunner keeps them
        start = time.perf_counter()
        action, carry = self.plan(weights, observation, carry, np.uint32(self.calls))
        np.asarray(action)
        elapsed = time.perf_counter() - start
        self.carry[batch] = carry
        return elapsed * 1e3

    def _plan(self, weights: list[Any], observation: dict[str, Any], carry: Any, call: Any) -> tuple[Any, Any]:
        """Actions and the next carry."""
        params = jax.tree.unflatten(self.tree, weights)
        keys = jax.random.split(jax.random.fold_in(self.key, call), carry.shape[0])
        action, carry, _ = self.policy.act(params, observation, carry, keys, ActOptions(explore=True))
        return action, carry

    def kernels(self) -> dict[str, int]:
        """Instructions of the compiled programs that are a kernel or a library call of their own."""
        update = self.algorithm._update.lower(self.state, self.data, self.key, num_updates=self.updates)  # pyright: ignore[reportPrivateUsage]
        carry = self.policy.initial_carry(1)
        observation = {"observation.state": jnp.zeros((1, 1, OBS))}
        plan = self.plan.lower(jax.tree.leaves(self.state.params), observation, carry, np.uint32(0))
        return {"update": count_kernels(update.compile()), "plan": count_kernels(plan.compile())}


def random_replay() -> Any:
    """100 random episodes of 500 steps on the device; speed does not depend on what they hold."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(np.full(100, 500))
    columns = {
        "observation.state": rng.normal(size=(ends[-1], OBS)).astype(np.float32),
        "action": rng.uniform(-1, 1, (ends[-1], ACTION_DIM)).astype(np.float32),
        "reward": rng.uniform(0, 2, ends[-1]).astype(np.float32),
    }
    table = EpisodeTable(columns, ends, 20.0, np.zeros(ends[-1], np.int32), [""])
    return replay_from_table(table, observation=tuple(FEATURES), reward="reward", streams=4).view()


def count_kernels(compiled: Any) -> int:
    """Fusions, library calls, sorts and copies outside of fused computations (one pass through each loop)."""
    count, inside_fusion = 0, False
    for line in compiled.as_text().splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside_fusion = line.startswith(("%fused", "%region", "%wrapped", "%command", "%gemm", "%triton"))
        elif not inside_fusion and any(f" {op}(" in line for op in ("fusion", "custom-call", "sort", "copy", "gather")):
            count += 1
    return count


class Official:
    """The authors' torch program, eager or with its own torch.compile."""

    def __init__(self, source: Path, sizes: Sizes, compiled: bool) -> None:
        import torch
        import yaml

        sys.path.insert(0, str(source / "tdmpc2"))
        if not hasattr(sys.modules.get("common"), "__path__"):  # its package of that name, not our module
            sys.modules.pop("common", None)
        from tdmpc2 import TDMPC2 as Agent  # pyright: ignore  # noqa: N811

        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        raw = yaml.safe_load((source / "tdmpc2" / "config.yaml").read_text())
        fields = {name: value for name, value in raw.items() if value != "???" and name != "defaults"}
        # YAML 1.1 reads 3e-4 as a text.
        fields |= {name: float(fields[name]) for name in ("lr", "entropy_coef", "tau", "vmin", "vmax")}
        fields |= {
            "obs_shape": {"state": (OBS,)},
            "action_dim": ACTION_DIM,
            "episode_length": 500,
            "multitask": False,
            "tasks": ["walker-walk"],
            "task_dim": 0,
            "bin_size": (fields["vmax"] - fields["vmin"]) / (fields["num_bins"] - 1),
            "compile": compiled,
            "batch_size": sizes.batch,
            "latent_dim": sizes.latent,
            "mlp_dim": sizes.hidden,
            "enc_dim": sizes.encoder,
            "num_samples": sizes.samples,
            "num_pi_trajs": sizes.policy_samples,
            "num_elites": sizes.elites,
        }
        self.agent = Agent(dataclass_of(fields))
        self.parameters = self.agent.model.total_params
        rand = partial(torch.rand, device=self.device)
        h, b = HORIZON, sizes.batch
        self.batch = (
            torch.randn(h + 1, b, OBS, device=self.device),
            rand(h, b, ACTION_DIM) * 2 - 1,
            rand(h, b, 1) * 2,
            torch.zeros(h, b, 1, device=self.device),
        )

    def update_ms(self, count: int = 5) -> float:
        """Milliseconds an update."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            self.torch.compiler.cudagraph_mark_step_begin()
            self.agent._update(*self.batch)
        self._wait()
        return (time.perf_counter() - start) / count * 1e3

    def plan_ms(self) -> float:
        """Milliseconds from one host observation to the host action."""
        observation = self.torch.randn(OBS)
        start = time.perf_counter()
        self.torch.compiler.cudagraph_mark_step_begin()
        self.agent.act(observation).numpy()
        return (time.perf_counter() - start) * 1e3

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def dataclass_of(fields: dict[str, Any]) -> Any:
    """An object with these attributes and the `get` that the official program's own configuration has."""
    kinds = [
        (name, object, dataclasses.field(default_factory=lambda value=value: value)) for name, value in fields.items()
    ]
    get = {"get": lambda self, name, default=None: getattr(self, name, default)}
    return dataclasses.make_dataclass("Config", kinds, namespace=get)()


class TDMPC2Jax:
    """tdmpc2-jax with its own configuration at these sizes."""

    def __init__(self, source: Path, sizes: Sizes) -> None:
        import optax
        import yaml
        from flax import linen as nn
        from flax.training.train_state import TrainState

        sys.path.insert(0, str(source))
        from tdmpc2_jax import TDMPC2 as Agent  # pyright: ignore  # noqa: N811
        from tdmpc2_jax import WorldModel  # pyright: ignore
        from tdmpc2_jax.common.activations import mish, simnorm  # pyright: ignore
        from tdmpc2_jax.networks import NormedLinear  # pyright: ignore

        raw = yaml.safe_load((source / "tdmpc2_jax" / "config.yaml").read_text())
        model_fields = {**raw["world_model"], "latent_dim": sizes.latent, "learning_rate": 3e-4}
        model_fields["dtype"] = jnp.dtype(model_fields["dtype"])
        plan_fields = {
            **raw["tdmpc2"],
            "entropy_coef": 1e-4,
            "batch_size": sizes.batch,
            "population_size": sizes.samples,
            "policy_prior_samples": sizes.policy_samples,
            "num_elites": sizes.elites,
        }
        net = nn.Sequential(
            [
                NormedLinear(sizes.encoder, activation=mish),
                NormedLinear(sizes.latent, activation=partial(simnorm, simplex_dim=8)),
            ]
        )
        encoder = TrainState.create(
            apply_fn=net.apply,
            params=net.init(jax.random.key(0), jnp.zeros((1, OBS)))["params"],
            tx=optax.chain(optax.zero_nans(), optax.clip_by_global_norm(20.0), optax.adam(3e-4)),
        )
        model = WorldModel.create(action_dim=ACTION_DIM, encoder=encoder, **model_fields, key=jax.random.key(1))
        self.agent = Agent.create(world_model=model, **plan_fields)
        rng, h, b = np.random.default_rng(0), HORIZON, sizes.batch
        observations = rng.normal(size=(h + 1, b, OBS)).astype(np.float32)
        self.batch = jax.device_put(
            {
                "observations": observations[:-1],
                "next_observations": observations[1:],
                "actions": rng.uniform(-1, 1, (h, b, ACTION_DIM)).astype(np.float32),
                "rewards": rng.uniform(0, 2, (h, b)).astype(np.float32),
                "terminated": np.zeros((h, b), bool),
                "truncated": np.zeros((h, b), bool),
            }
        )
        self.key, self.rng, self.plans = jax.random.key(2), rng, {}

    def update_ms(self, count: int = 10) -> float:
        """Milliseconds an update."""
        start = time.perf_counter()
        for _ in range(count):
            self.key, key = jax.random.split(self.key)
            self.agent, _ = self.agent.update(**self.batch, key=key)
        jax.block_until_ready(self.agent)
        return (time.perf_counter() - start) / count * 1e3

    def plan_ms(self, batch: int) -> float:
        """Milliseconds from host observations to host actions."""
        shape = (OBS,) if batch == 1 else (batch, OBS)
        observation = self.rng.normal(size=shape).astype(np.float32)
        self.key, key = jax.random.split(self.key)
        jax.block_until_ready(key)
        start = time.perf_counter()
        _, self.plans[batch] = self.agent.act(observation, self.plans.get(batch), train=True, key=key)
        return (time.perf_counter() - start) * 1e3


def attempt(name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, or None with the reason printed: a peer that fails leaves the others be."""
    start = time.perf_counter()
    try:
        made = make()
    except Exception:
        traceback.print_exc(limit=-4)
        print(f"{name}: failed, left out", flush=True)
        return None
    print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    return made


def interleave(sides: dict[str, Callable[[], float]], rounds: int, repeats: int) -> Times:
    """Median, and range of the rounds' medians, of each side; sides take turns. A side that fails is left out."""

    def warm_up(call: Callable[[], float]) -> bool:
        for _ in range(3):
            call()
        return True

    working = {name: call for name, call in sides.items() if attempt(name, partial(warm_up, call))}
    medians: dict[str, list[float]] = {name: [] for name in working}
    for _ in range(rounds):
        for name, call in working.items():
            medians[name].append(statistics.median(call() for _ in range(repeats)))
    return {name: (statistics.median(m), min(m), max(m)) for name, m in medians.items()}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", type=Path, help="its repository; left out when not given")
    parser.add_argument("--tdmpc2-jax", type=Path, help="likewise")
    parser.add_argument("--no-compiled", action="store_true", help="without torch.compile of the official program")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], help="observations of a plan, 1 first")
    parser.add_argument("--updates", type=int, default=100, help="of ours in one call")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of ours; bf16 is only printed")
    parser.add_argument("--tiny", action="store_true", help="small nets, to try the script; nothing is stored")
    parser.add_argument("--variants", action="store_true", help="only ours, in several settings; nothing is stored")
    args = parser.parse_args()
    gpu = setup_jax() == "gpu"
    sizes = TINY if args.tiny else Sizes()
    if args.variants:
        variants(sizes, args.updates, args.rounds, args.batches)
        return
    store = gpu and args.precision == "fp32" and not args.tiny

    ours = Ours(sizes, args.updates, args.precision)
    parameters = sum(x.size for x in jax.tree.leaves(ours.state.params))
    print(f"ours: {parameters:,} parameters, kernels {ours.kernels()}", flush=True)
    peers: dict[str, Any] = {}
    if args.tdmpc2_jax:
        peers["tdmpc2-jax"] = attempt("tdmpc2-jax", lambda: TDMPC2Jax(args.tdmpc2_jax, sizes))
    if args.official:
        peers["official eager"] = attempt("official eager", lambda: Official(args.official, sizes, compiled=False))
        if not args.no_compiled:
            peers["official compiled"] = attempt(
                "official compiled", lambda: Official(args.official, sizes, compiled=True)
            )
    peers = {name: peer for name, peer in peers.items() if peer is not None}

    updates = {"ours": ours.update_ms} | {name: peer.update_ms for name, peer in peers.items()}
    report("update", "tdmpc2_update", interleave(updates, args.rounds, 3), store)
    for batch in args.batches:
        plans: dict[str, Callable[[], float]] = {"ours": partial(ours.plan_ms, batch)}
        for name, peer in peers.items():
            if isinstance(peer, TDMPC2Jax):
                plans[name] = partial(peer.plan_ms, batch)
            elif batch == 1:
                plans[name] = peer.plan_ms
        times = interleave(plans, args.rounds, 20)
        if batch == 1:
            single = times
        for name, value in single.items():
            # One observation at a time is all that the official program plans for.
            if name not in times:
                times[name] = (value[0] * batch, value[1] * batch, value[2] * batch)
        report(f"plan, {batch} observations", f"tdmpc2_plan{'' if batch == 1 else batch}", times, store)


def report(what: str, figure: str, times: Times, store: bool) -> None:
    """Print a table of the sides; store ours, and the ratio to the faster mode of each peer."""
    for name, (median, low, high) in times.items():
        print(f"{what}, {name}: {median:.3f} ms [{low:.3f}, {high:.3f}]", flush=True)
    if "ours" not in times:
        return
    kw: dict[str, Any] = {"gpu": True, "packages": PACKAGES, "seeds": [0]}
    median, low, high = times["ours"]
    if store:
        write_result(f"{figure}_ms", median, "ms", low=low, high=high, **kw)
    for prefix, short in (("official", "official"), ("tdmpc2-jax", "jax")):
        theirs = {name: value for name, value in times.items() if name.startswith(prefix)}
        if not theirs:
            continue
        name, peer = min(theirs.items(), key=lambda item: item[1][0])
        ratio = peer[0] / median
        print(f"{what}: {ratio:.2f} times as fast as {name}", flush=True)
        if store:
            ends = {"low": peer[1] / high, "high": peer[2] / low}
            write_result(
                f"{figure}_speedup_{short}", ratio, "ratio", **ends, peer=name, peer_value=peer[0], ratio=ratio, **kw
            )


def variants(sizes: Sizes, updates: int, rounds: int, batches: list[int]) -> None:
    """Ours in other settings, in turn."""
    settings: dict[str, dict[str, Any]] = {
        "as it is": {},
        "plans in fp32": {"plan_precision": "fp32"},
        "bf16": {"precision": "bf16"},
        "plans unrolled": {"unroll": 6},
        "plans in a loop": {"unroll": 1},
    }
    sides = {name: attempt(name, partial(Ours, sizes, updates, **fields)) for name, fields in settings.items()}
    sides = {name: side for name, side in sides.items() if side is not None}
    for name, side in sides.items():
        print(f"{name}: kernels {attempt(name, side.kernels)}", flush=True)
    report("update", "", interleave({name: side.update_ms for name, side in sides.items()}, rounds, 3), False)
    for batch in batches:
        plans = {name: partial(side.plan_ms, batch) for name, side in sides.items()}
        report(f"plan, {batch} observations", "", interleave(plans, rounds, 20), False)


if __name__ == "__main__":
    main()
