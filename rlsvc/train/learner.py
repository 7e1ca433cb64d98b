"""One rank of the learner group: data on the device, the algorithm's state, and the orders it carries out.

Ranks are data parallel: every rank draws the same window numbers, the rows of a batch are spread over the devices of
all
ranks, and XLA adds the gradients up. So the loss does not depend on the number of ranks, up to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlsvc.algos import ALGORITHMS
from rlsvc.algos.api import Algorithm
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.data.mixture import load_demonstrations
from rlsvc.data.windows import Windows
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import flatten_params
from rlsvc.policies import make_policy
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import write_bundle
from rlsvc.train.orchestrator import Order

DEVICE_SHARE = 0.5
"""Largest share of accelerator memory that "auto" placement gives to the dataset."""


class Learner:
    """A rank. Reads the dataset, restores the newest checkpoint of the run if there is one, then executes orders."""

    def __init__(self, spec: RunSpec, run_dir: Path, contract: Contract | None = None) -> None:
        """Load everything that an update needs.

        Args:
            spec: of the run.
            run_dir: the run's folder.
            contract: of the environment that the policy is for; None takes the dataset's.

        Raises:
            UserError: data, contract or checkpoint that do not fit; by name.
        """
        platform = setup_jax(spec.device)
        self.spec, self.run_dir = spec, run_dir
        policy_spec = spec.policy
        self.demonstrations = load_demonstrations(
            spec.data,
            n_obs_steps=policy_spec.n_obs_steps,
            horizon=policy_spec.horizon,
            action_horizon=policy_spec.n_action_steps,
        )
        self.contract = self._contract(contract)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec("data")) if jax.device_count() > 1 else None
        if spec.algo.batch_size % jax.device_count():
            raise UserError(
                f"algo.batch_size: {spec.algo.batch_size} is not a multiple of the {jax.device_count()} devices"
            )
        policy = make_policy(policy_spec.model_dump(mode="json"), self.contract, spec.precision)
        self.algorithm: Algorithm = ALGORITHMS[spec.algo.name](
            policy, self.demonstrations.normalizer, spec.algo, total_steps=spec.total_steps, batch_sharding=rows
        )
        self.key = jax.random.key(spec.seed)
        self._train = self._place(self.demonstrations.train, platform)
        held_back = self.demonstrations.validation
        self._validation = None if held_back is None else self._put(held_back)
        self.state = jax.jit(self.algorithm.init, out_shardings=self._everywhere)(jax.random.fold_in(self.key, 0))
        committed = checkpoint.steps(self.checkpoints)
        if committed:
            self.state, _ = checkpoint.load(self.checkpoints, committed[-1], self.state)

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.state.step)

    def execute(self, order: Order) -> dict[str, Any]:
        """Carry out one order and wait for the device; the result is the same on every rank."""
        if order.kind == "update":
            update_key = jax.random.fold_in(self.key, 1)
            self.state, metrics = self.algorithm.update(
                order.hook, self.state, self._train, update_key, order.num_updates
            )
            return {name: float(value) for name, value in metrics.items()}
        if order.kind == "validate" and self._validation is not None:
            return {
                "loss": float(self.algorithm.validate(self.state, self._validation, jax.random.fold_in(self.key, 2)))
            }
        if order.kind == "export":
            return {"bundle": str(self.export(self.run_dir / "bundles" / str(order.step)))}
        if order.kind == "checkpoint":
            return {"checkpoint": str(checkpoint.save(self.checkpoints, self.step, self.state, {}))}
        return {}

    def export(self, path: Path) -> Path:
        """Write the bundle of the acting weights; the first rank alone does."""
        if jax.process_index() == 0:
            write_bundle(
                path,
                policy=self.spec.policy.model_dump(mode="json"),
                contract=self.contract,
                normalizer=self.demonstrations.normalizer,
                params=flatten_params(self.algorithm.acting_params(self.state)),
                precision=self.spec.precision,
                run={"project": self.spec.project, "name": self.spec.name, "step": self.step, "seed": self.spec.seed},
            )
        return path

    def _contract(self, env: Contract | None) -> Contract:
        mine = self.demonstrations.contract
        if env is None:
            return mine
        mine.check_same(env, "dataset", f"environment {self.spec.env.name if self.spec.env else ''}")
        # The environment knows units and bounds that a dataset does not.
        observation = {key: env.observation[key] for key in mine.observation}
        return Contract(observation, env.action, mine.rate_hz, mine.n_obs_steps, mine.action_horizon)

    def _place(self, data: Windows, platform: str) -> Windows:
        """On the device when asked for or when it fits, else in host memory, from where batches are gathered."""
        wanted = self.spec.data.placement
        memory = jax.local_devices()[0].memory_stats() if platform == "gpu" else None
        fits = memory is None or data.nbytes <= DEVICE_SHARE * memory["bytes_limit"]
        return self._put(data) if wanted == "device" or (wanted == "auto" and fits) else data

    def _put(self, data: Windows) -> Windows:
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._everywhere, lambda at: np.asarray(x)[at]), data
        )
