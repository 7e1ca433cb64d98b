"""Weights cut over devices: what lies where, and that it computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from rlsvc.core.errors import UserError
from rlsvc.train.sharding import state_shardings

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from rlsvc.nn.params import leaf_names
from rlsvc.spec.compose import compose
from rlsvc.train.learner import Learner
from rlsvc.train.orchestrator import Order
from rlsvc.train.sharding import gathered

def run(folder, *words):
    spec = compose([*sys.argv[2:], *words])
    learner = Learner(spec, __import__("pathlib").Path(folder))
    order = Order("update", 4, hook="update", num_updates=4, buffer={"demonstrations": 1.0})
    return learner, learner.execute(order)["loss"]

assert jax.device_count() == 4
whole, loss = run(sys.argv[1] + "/whole")
cut, same = run(sys.argv[1] + "/cut", "learner.fsdp=2", "learner.tensor=2")
assert abs(loss - same) < 1e-4 * abs(loss), (loss, same)
names = leaf_names(cut.state)
leaves = dict(zip(names, jax.tree.leaves(cut.state)))
for part in ("params.", ".mu."):
    x = next(leaf for name, leaf in leaves.items() if part in name and name.endswith("backbone.layers.gate_up"))
    shape = x.addressable_shards[0].data.shape
    assert shape == (x.shape[0], x.shape[1] // 2, x.shape[2] // 2), (shape, x.shape)
for a, b in zip(jax.tree.leaves(whole.state.params), jax.tree.leaves(cut.state.params)):
    np.testing.assert_allclose(gathered(a), gathered(b), atol=2e-4)
print("equal")
"""

COLLECTIVES = r"""
import re
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from rlsvc.nn.gemma import Expert, transformer
from rlsvc.nn.sharding import ROWS
from rlsvc.nn.siglip import Siglip
from rlsvc.spec.learner import LearnerSpec
from rlsvc.spec.pi0 import GemmaSpec, SiglipSpec
from rlsvc.train.sharding import make_mesh, state_shardings

B, T, W = 6, 11, 16
class Both(nnx.Module):
    def __init__(self, rngs):
        gemma = GemmaSpec(width=W, depth=2, mlp_dim=32, heads=2, head_dim=8)
        siglip = SiglipSpec(width=16, depth=2, mlp_dim=32, heads=2, patch=5)
        self.backbone = Expert(gemma, adaptive=True, dtype=jnp.bfloat16, rngs=rngs)
        self.vision = Siglip(siglip, (10, 10), W, dtype=jnp.bfloat16, rngs=rngs)

graph, params = nnx.split(Both(nnx.Rngs(0)))
params = nnx.to_pure_dict(params)

def loss(params, image, text, condition):
    model = nnx.merge(graph, nnx.restore_int_paths(params))
    x = jnp.concatenate([model.vision(image, remat=True), text], axis=1)
    mask, positions = jnp.ones((B, T, T), bool), jnp.broadcast_to(jnp.arange(T), (B, T))
    (out,), _ = transformer([model.backbone], [x], mask, positions, conditions=[condition], remat=True)
    return (out.astype(jnp.float32) ** 2).mean()

mesh = make_mesh(LearnerSpec(fsdp=2))
cut, rows = state_shardings(params, mesh), NamedSharding(mesh, P(ROWS))
shapes = [(B, 10, 10, 3), (B, T - 4, W), (B, W)]
with jax.set_mesh(mesh):
    step = jax.jit(jax.grad(loss), in_shardings=(cut, rows, rows, rows), out_shardings=cut)
    text = step.lower(params, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()
found = re.findall(r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(", text)
moved = {tuple(map(int, dims.split(","))) for each in found for dims in re.findall(r"\[([\d,]+)\]", each)}
weights = {s for x in jax.tree.leaves(params) for s in (x.shape, x.shape[1:], x.shape[::-1], x.shape[:0:-1])}
print(sorted(moved - weights), len(moved & weights))
"""


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"fsdp": 4},
            r"learner.fsdp: 4 does not divide the 98 of weight 'params.backbone.layers.gate_up' \(3, 98, 12\)",
        ),
        ({"tensor": 8}, r"learner.tensor: 8 does not divide the 12 of weight 'params.backbone.layers.gate_up'"),
    ],
)
def test_a_mesh_that_does_not_divide_a_weight_is_refused_by_the_names_of_both(mesh, message):
    shape = {"data": 1, "fsdp": 1, "tensor": 1, **mesh}
    state = {"params": {"backbone": {"layers": {"gate_up": jax.ShapeDtypeStruct((3, 98, 12), jnp.float32)}}}}
    with pytest.raises(UserError, match=message):
        state_shardings(state, AbstractMesh(tuple(shape.values()), tuple(shape)))


@pytest.mark.slow
def test_weights_cut_over_four_devices_train_as_whole_ones_and_each_device_holds_its_part(tmp_path, root):
    import numpy as np

    from rlsvc.envs.two_goals import demonstrations

    data = tmp_path / "two_goals.npz"
    np.savez_compressed(data, **demonstrations(4))
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(root),
        "JAX_PLATFORMS": "cpu",
    }
    words = [
        "experiment=pi05_debug", f"data.datasets.0.path={data}", f"root={tmp_path}", "algo.batch_size=8", "env=null",
        "algo.schedule.warmup_steps=0", "policy.vision={width: 8, depth: 1, mlp_dim: 16, heads: 2, patch: 24}",
        "policy.backbone={width: 16, depth: 2, mlp_dim: 32, heads: 2, head_dim: 8}",
        "policy.expert={width: 8, depth: 2, mlp_dim: 16, heads: 2, head_dim: 8}", "policy.sample_steps=2",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *words], env=env, capture_output=True, text=True, cwd=Path(root)
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


def test_between_two_devices_that_share_a_batch_only_weights_and_their_gradients_move(root):
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(root),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], env=env, capture_output=True, text=True, cwd=Path(root))
    others, _, weights = done.stdout.strip().rpartition(" ")
    assert done.returncode == 0, done.stderr[-3000:]
    assert others == "[]", others
    assert int(weights) >= 6
