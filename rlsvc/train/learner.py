"""One rank of the learner group: data on the device, the algorithm's state, and the orders it carries out.

Ranks are data parallel: every rank draws the same window numbers, the rows of a batch are spread over the devices of
all ranks, and XLA adds the gradients up. So the loss does not depend on the number of ranks, up to rounding. Large
models are cut over devices besides (rlsvc/train/sharding.py), which changes nothing but where numbers lie.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from rlsvc.algos import load_algorithm
from rlsvc.algos.api import Algorithm, Phase
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import flatten_params, leaf_names
from rlsvc.nn.sharding import ROWS
from rlsvc.policies import make_judge, make_policy
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.reward_classifier import RewardLearningSpec
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import write_bundle
from rlsvc.store.weights import load_weights
from rlsvc.train.calibration import CALIBRATION, Calibration, calibrate_windows, to_bytes
from rlsvc.train.learner_data import EpisodeData, SequenceData, WindowData
from rlsvc.train.orchestrator import Order
from rlsvc.train.rollout_worker import ACTING
from rlsvc.train.sharding import gathered, make_mesh, state_shardings

log = logging.getLogger(__name__)


class Learner:
    """A rank. Reads the data, restores the newest checkpoint of the run if there is one, then executes orders."""

    def __init__(self, spec: RunSpec, run_dir: Path, contract: Contract | None = None) -> None:
        """Load everything that an update needs.

        Args:
            spec: of the run.
            run_dir: the run's folder.
            contract: of the environment that the policy is for; None takes the dataset's.

        Raises:
            UserError: data, contract or checkpoint that do not fit; by name.
        """
        self.platform = setup_jax(spec.device)
        self.spec, self.run_dir = spec, run_dir
        self._mesh = mesh = make_mesh(spec.learner)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec(ROWS)) if jax.device_count() > 1 else None
        shares = mesh.shape["data"] * mesh.shape["fsdp"]
        if spec.algo.batch_size % shares:
            raise UserError(
                f"algo.batch_size: {spec.algo.batch_size} is not a multiple of the {shares} devices that share a batch"
            )
        entry = ALGORITHMS[spec.algo.name]
        self.data: WindowData | SequenceData
        if entry.episodes is not None:
            self.data = EpisodeData(spec, contract, self._put, self.platform, run_dir)
        elif entry.sequence_length is None:
            self.data = WindowData(spec, contract, self._put, self.platform)
        else:
            self.data = SequenceData(spec, contract, self._put, run_dir, entry.sequence_length(spec.policy))
        make = make_policy if entry.acts else make_judge
        policy = make(spec.policy.model_dump(mode="json"), self.data.contract, spec.precision)
        updates = sum(phase.num_updates for phase in spec.curriculum)
        self.algorithm: Algorithm = load_algorithm(spec.algo.name)(
            policy, self.data.normalizer, spec.algo, total_steps=updates, batch_sharding=rows
        )
        self.key = jax.random.key(spec.seed)
        first = jax.random.fold_in(self.key, 0)
        self._sharding = state_shardings(jax.eval_shape(self.algorithm.init, first), mesh)
        self.state = jax.jit(self.algorithm.init, out_shardings=self._sharding)(first)
        self._load_weights()
        self.clock = 0
        committed = checkpoint.steps(self.checkpoints)
        if committed:
            self.clock = committed[-1]
            self.state, meta = checkpoint.load(self.checkpoints, self.clock, self.state)
            self.data.restore(int(meta.get("cursor", 0)), self.checkpoints / str(self.clock))
        if entry.episodes is not None and jax.process_index() == 0:
            self._write(run_dir / ACTING, {}, {}, {})

    def _load_weights(self) -> None:
        """Begin with trained weights, where the run has them; a run that resumes has its own."""
        source = getattr(self.spec.algo, "weights", None)
        if source is None or checkpoint.steps(self.checkpoints):
            return
        loaded, report = load_weights(source, self.spec.policy, self.state.params, self.data.contract)
        log.info("%s", report)
        names, (leaves, tree) = leaf_names(self.state.params), jax.tree.flatten(self.state.params)
        put = [
            leaf
            if name not in loaded
            else jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at, x=loaded[name]: x[at])
            for name, leaf in zip(names, leaves, strict=True)
        ]
        start = jax.jit(self.algorithm.start_from, out_shardings=self._sharding)  # pyright: ignore
        self.state = start(jax.tree.unflatten(tree, put))

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.run_dir / "checkpoints"

    @property
    def step(self) -> int:
        """Updates done."""
        return int(self.state.step)

    @staticmethod
    def agree(value: int) -> int:
        """The first rank's value, on every rank."""
        return int(multihost_utils.broadcast_one_to_all(np.int32(value)))

    def execute(self, order: Order) -> dict[str, Any]:
        """Carry out one order and wait for the device; the result is the same on every rank."""
        with jax.set_mesh(self._mesh):  # products of cut weights look for it: rlsvc/nn/sharding.py
            return self._execute(order)

    def _execute(self, order: Order) -> dict[str, Any]:
        self.data.absorb(order)
        result: dict[str, Any] = {}
        if order.kind == "update":
            self.state, metrics = self.algorithm.update(
                order.hook,
                self.state,
                self.data.source(order.buffer),
                jax.random.fold_in(self.key, 1),
                order.num_updates,
                Phase(*order.phase),
            )
            self.data.update_priorities(metrics)
            result = {name: float(value) for name, value in jax.device_get(metrics).items()} | self.data.metrics()
        elif order.kind == "validate" and self.data.validation is not None:
            key = jax.random.fold_in(self.key, 2)
            metrics = self.algorithm.validate(self.state, self.data.validation, key)
            result = {name: float(value) for name, value in jax.device_get(metrics).items()}
            calibration = self._calibration()
            result |= {} if calibration is None else calibration.metrics()
        elif order.kind == "export":
            result = {"bundle": str(self.export(self.run_dir / "bundles" / str(order.step), order.step))}
        elif order.kind == "checkpoint":
            result = {"checkpoint": str(self._save(order))}
        self.clock = order.step
        if order.with_weights:
            result["params"] = self.algorithm.acting_params(self.state)
        return result

    def export(self, path: Path, clock: int | None = None) -> Path:
        """Write the bundle of the acting weights; the first rank alone does. `clock`: None is the last order's."""
        params = jax.tree.map(gathered, self.algorithm.acting_params(self.state))
        calibration = self._calibration()
        if jax.process_index() == 0:
            run = {"project": self.spec.project, "name": self.spec.name, "seed": self.spec.seed}
            run |= {"step": self.clock if clock is None else clock, "updates": self.step}
            files = {} if calibration is None else {CALIBRATION: to_bytes(calibration)}
            self._write(path, flatten_params(params), run, files)
        return path

    def _calibration(self) -> Calibration | None:
        """Of a reward classifier's acting weights; None of anything else."""
        algo, held_out = self.spec.algo, self.data.validation
        if not isinstance(algo, RewardLearningSpec) or held_out is None:
            return None
        return calibrate_windows(self.algorithm, self.algorithm.acting_params(self.state), held_out, algo.threshold)

    def _write(self, path: Path, params: dict[str, np.ndarray], run: dict[str, Any], files: dict[str, bytes]) -> None:
        write_bundle(
            path,
            policy=getattr(self.algorithm.policy, "merged_spec", self.spec.policy).model_dump(mode="json"),
            contract=self.data.contract,
            normalizer=self.data.normalizer,
            params=params,
            precision=self.spec.precision,
            run=run,
            files={**files, **({} if self.data.prompter is None else self.data.prompter.files())},
            robot=self.spec.robot,
        )

    def _save(self, order: Order) -> Path:
        arrays = self.data.priorities()
        return checkpoint.save(self.checkpoints, order.step, self.state, order.meta, arrays)

    def _put(self, data: Any) -> Any:
        """On every device of every rank."""
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._everywhere, lambda at: np.asarray(x)[at]), data
        )
