"""One rank of the learner group: data on the device, the algorithm's state, and the orders it carries out.

Ranks are data parallel: every rank draws the same window numbers, the rows of a batch are spread over the devices of
all ranks, and XLA adds the gradients up. So the loss does not depend on the number of ranks, up to rounding. Large
models are cut over devices besides (rlsvc/train/sharding.py), which changes nothing but where numbers lie.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlsvc.algos import load_algorithm
from rlsvc.algos.api import Algorithm, Phase
from rlsvc.core.contract import Contract
from rlsvc.core.errors import UserError
from rlsvc.core.types import Chunk, EpisodeTable
from rlsvc.data.interventions import INTERVENTION, PeoplesView
from rlsvc.data.journal import Journal
from rlsvc.data.mixture import load_demonstrations, table_contract
from rlsvc.data.normalize import Normalizer
from rlsvc.data.repack import load_features
from rlsvc.data.replay import Replay
from rlsvc.data.replay_table import replay_from_table
from rlsvc.data.sequence import mix
from rlsvc.data.transforms import RobotTransforms
from rlsvc.data.windows import Windows
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import flatten_params, leaf_names
from rlsvc.policies import make_policy, make_prompter, make_value_function
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint
from rlsvc.store.bundle import write_bundle
from rlsvc.store.weights import load_weights
from rlsvc.train.orchestrator import Order
from rlsvc.train.rollout_worker import extra_columns
from rlsvc.train.sharding import ROWS, gathered, make_mesh, state_shardings
from rlsvc.value import advantage_conditioning, advantage_selection

log = logging.getLogger(__name__)

DEVICE_SHARE = 0.5
"""Largest share of accelerator memory that "auto" placement gives to the dataset."""


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
        mesh = make_mesh(spec.learner)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        rows = NamedSharding(mesh, PartitionSpec(ROWS)) if jax.device_count() > 1 else None
        shares = mesh.shape["data"] * mesh.shape["fsdp"]
        if spec.algo.batch_size % shares:
            raise UserError(
                f"algo.batch_size: {spec.algo.batch_size} is not a multiple of the {shares} devices that share a batch"
            )
        entry = ALGORITHMS[spec.algo.name]
        self.data: WindowData | SequenceData
        if entry.sequence_length is None:
            self.data = WindowData(spec, contract, self._put, self.platform)
        else:
            self.data = SequenceData(spec, contract, self._put, run_dir, entry.sequence_length(spec.policy))
        make = make_policy if entry.acts else make_value_function
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

    def execute(self, order: Order) -> dict[str, Any]:
        """Carry out one order and wait for the device; the result is the same on every rank."""
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
            result = {name: float(value) for name, value in jax.device_get(metrics).items()}
        elif order.kind == "validate" and self.data.validation is not None:
            key = jax.random.fold_in(self.key, 2)
            metrics = self.algorithm.validate(self.state, self.data.validation, key)
            result = {name: float(value) for name, value in jax.device_get(metrics).items()}
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
        if jax.process_index() == 0:
            run = {"project": self.spec.project, "name": self.spec.name, "seed": self.spec.seed}
            write_bundle(
                path,
                policy=getattr(self.algorithm.policy, "merged_spec", self.spec.policy).model_dump(mode="json"),
                contract=self.data.contract,
                normalizer=self.data.normalizer,
                params=flatten_params(params),
                precision=self.spec.precision,
                run={**run, "step": self.clock if clock is None else clock, "updates": self.step},
                files={} if self.data.prompter is None else self.data.prompter.files(),
                robot=self.spec.robot,
            )
        return path

    def _save(self, order: Order) -> Path:
        arrays = self.data.priorities()
        return checkpoint.save(self.checkpoints, order.step, self.state, order.meta, arrays)

    def _put(self, data: Any) -> Any:
        """On every device of every rank."""
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._everywhere, lambda at: np.asarray(x)[at]), data
        )


class WindowData:
    """Demonstrations as windows, for algorithms that imitate, and for value functions."""

    def __init__(self, spec: RunSpec, env: Contract | None, put: Callable[[Any], Any], platform: str) -> None:
        """Read the datasets; `env`: the environment's contract, `put`: lays arrays on all devices."""
        assert spec.data is not None
        policy = spec.policy
        self.prompter = make_prompter(policy.model_dump(mode="json"))
        advantage, selection, conditioning = getattr(spec.algo, "advantage", None), None, None
        where = {"root": spec.root, "uri": spec.tracking.mlflow_uri, "device": spec.device}
        if advantage is not None and advantage.mode == "filter":
            selection = advantage_selection(advantage, spec.data, **where)
        elif advantage is not None:
            conditioning = advantage_conditioning(advantage, spec.data, seed=spec.seed, **where)
        self.demonstrations = load_demonstrations(
            spec.data,
            n_obs_steps=policy.n_obs_steps,
            horizon=policy.horizon,
            action_horizon=policy.n_action_steps,
            prepare=self.prompter,
            returns=getattr(policy, "returns", None),
            selection=selection,
            conditioning=conditioning,
            robot=spec.robot,
        )
        self.normalizer = self.demonstrations.normalizer
        self.contract = _joined(self.demonstrations.contract, env, spec)
        self._train = self._place(spec, self.demonstrations.train, put, platform)
        held_back = self.demonstrations.validation
        self.validation = None if held_back is None else put(held_back)

    def source(self, buffer: dict[str, float]) -> Any:
        """What updates draw from."""
        del buffer
        return self._train

    def absorb(self, order: Order) -> None:
        """Nothing is collected for it."""

    def restore(self, cursor: int, folder: Path) -> None:
        """Nothing but the algorithm's state has to be restored."""

    def update_priorities(self, metrics: dict[str, Any]) -> None:
        """Windows have no priorities."""

    def priorities(self) -> dict[str, np.ndarray]:
        """See `update_priorities`."""
        return {}

    @staticmethod
    def _place(spec: RunSpec, data: Windows, put: Callable[[Any], Any], platform: str) -> Windows:
        """On the device when asked for or when it fits, else in host memory, from where batches are gathered."""
        assert spec.data is not None
        wanted = spec.data.placement
        memory = jax.local_devices()[0].memory_stats() if platform == "gpu" else None
        fits = memory is None or data.nbytes <= DEVICE_SHARE * memory["bytes_limit"]
        return put(data) if wanted == "device" or (wanted == "auto" and fits) else data


class SequenceData:
    """Replay of rollouts, and demonstrations in the same form, for algorithms that learn from sequences.

    Every rank holds all of it, and draws the same sequences; the rows of a batch are spread over the devices.
    """

    validation = None
    prompter = None

    def __init__(
        self, spec: RunSpec, env: Contract | None, put: Callable[[Any], Any], run_dir: Path, length: int
    ) -> None:
        """Empty replay, and the datasets if the run has any; `length`: steps of a sequence."""
        self._put, self._run_dir = put, run_dir
        table = None if spec.data is None else self._read(spec)
        if table is not None:
            assert spec.data is not None
            env = _joined(table_contract(table, spec.data, spec.policy.n_obs_steps), env, spec)
        assert env is not None
        self.contract = env
        self.normalizer = Normalizer.from_contract(env)
        self._replays: dict[str, Replay] = {}
        folder = run_dir / "replay" / f"rank{jax.process_index()}"
        if spec.online:
            streams = spec.rollout.workers * spec.rollout.envs_per_worker
            spec.replay.check(streams, length)
            schema = {**env.observation, "action": env.action, **extra_columns(spec, env)}
            self._replays["replay"] = Replay(
                spec.replay, schema, range(streams), observation=tuple(env.observation), folder=folder / "rollouts"
            )
        if table is not None:
            assert spec.data is not None
            self._replays["demonstrations"] = replay_from_table(
                table,
                observation=tuple(env.observation),
                action=spec.data.action,
                reward=spec.data.reward,
                terminated=spec.data.terminated,
                spec=spec.replay,
                folder=folder / "demonstrations",
            )
        self.cursor = 0

    def source(self, buffer: dict[str, float]) -> Any:
        """What updates draw from: a replay, or a mix of both. What people did in rollouts is demonstrated, too."""
        views: dict[str, Any] = {name: self._global(self._replays[name].view()) for name in buffer}
        rollouts = self._replays.get("replay")
        if "demonstrations" in views and rollouts is not None and INTERVENTION in rollouts.schema:
            views["demonstrations"] = PeoplesView(views["demonstrations"], self._global(rollouts.view()))
        return next(iter(views.values())) if len(views) == 1 else mix(views, buffer)

    def absorb(self, order: Order) -> None:
        """Take in the chunks of an order, and from the journal whatever stands there between them and the last ones."""
        if order.cursor <= self.cursor:
            return
        chunks = [chunk if isinstance(chunk, Chunk) else _fetch(chunk) for chunk in order.chunks]
        first = order.cursor - len(chunks)
        if first > self.cursor:
            self._read_journal(first)
        # A group that came back has read some of them from the journal already.
        for chunk in chunks[max(0, self.cursor - first) :]:
            self._replays["replay"].add(chunk)
        self.cursor = order.cursor

    def restore(self, cursor: int, folder: Path) -> None:
        """Fill the replay as it was when a checkpoint was written."""
        if cursor:
            self._read_journal(cursor)
            saved = checkpoint.load_extra(folder)
            if saved:
                self._replays["replay"].restore_priorities(saved)

    def update_priorities(self, metrics: dict[str, Any]) -> None:
        """Give the replay the priorities that an update found, and take them out of its metrics."""
        if "priority" in metrics:
            self._replays["replay"].update_priorities(metrics.pop("index"), metrics.pop("priority"))

    def priorities(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps of the replay, beside the journal's cursor."""
        replay = self._replays.get("replay")
        return {} if replay is None else replay.priorities()

    def _read_journal(self, stop: int) -> None:
        with Journal(self._run_dir / "journal", read_only=True, verify=False) as journal:
            for chunk in journal.read(self.cursor, stop):
                self._replays["replay"].add(chunk)
        self.cursor = stop

    def _global(self, view: Any) -> Any:
        if jax.process_count() == 1 or view.on_host:
            return view
        return jax.tree.map(self._put, view)

    @staticmethod
    def _read(spec: RunSpec) -> EpisodeTable:
        assert spec.data is not None
        if len(spec.data.datasets) > 1:
            raise UserError(f"data.datasets: {spec.algo.name} learns from one dataset, got {len(spec.data.datasets)}")
        extra = [name for name in (spec.data.reward, spec.data.terminated) if name is not None]
        return load_features(next(iter(spec.data.datasets)), (*spec.data.observation, spec.data.action, *extra))


def _joined(mine: Contract, env: Contract | None, spec: RunSpec) -> Contract:
    """The dataset's contract with the units and bounds of the environment, which knows them.

    Raises:
        ContractError: they differ.
    """
    if env is None:
        return mine
    env = RobotTransforms(spec.robot).seen(env)
    mine.check_same(env, "dataset", f"environment {spec.env.name if spec.env else ''}")
    observation = {key: env.observation[key] for key in mine.observation}
    return Contract(observation, env.action, mine.rate_hz, mine.n_obs_steps, mine.action_horizon)


def _fetch(ref: Any) -> Chunk:
    import ray

    return ray.get(ref)
