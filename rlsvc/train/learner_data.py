"""What one rank learns from: demonstrations, rollouts, or both, as its algorithm draws them.

Every rank holds all of it and draws the same rows; each puts its share of a batch on its own devices.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import UserError
from rlsvc.core.types import INTERVENTION, Chunk, EpisodeTable
from rlsvc.data.episodes import EpisodeAssembler, GrowingWindows
from rlsvc.data.interventions import PeoplesView
from rlsvc.data.journal import Journal
from rlsvc.data.labels import reward_labels
from rlsvc.data.mixture import load_demonstrations, table_contract
from rlsvc.data.normalize import Normalizer
from rlsvc.data.repack import load_features
from rlsvc.data.replay import Replay
from rlsvc.data.replay_table import replay_from_table
from rlsvc.data.sequence import mix
from rlsvc.data.texts import decode_texts
from rlsvc.data.transforms import RobotTransforms
from rlsvc.data.windows import Windows
from rlsvc.policies import make_prompter
from rlsvc.spec.algorithms import ALGORITHMS
from rlsvc.spec.reward_classifier import RewardClassifierSpec, RewardLearningSpec
from rlsvc.spec.rllib import RLlibPolicySpec
from rlsvc.spec.run import RunSpec
from rlsvc.spec.torch_lerobot import LeRobotPolicySpec
from rlsvc.store import checkpoint
from rlsvc.train.orchestrator import Order
from rlsvc.train.rollout_worker import extra_columns
from rlsvc.value import advantage_conditioning, advantage_selection

DEVICE_SHARE = 0.5
"""Largest share of accelerator memory that "auto" placement gives to the dataset."""


class WindowData:
    """Demonstrations as windows, for algorithms that imitate, and for value functions."""

    def __init__(self, spec: RunSpec, env: Contract | None, put: Callable[[Any], Any], platform: str) -> None:
        """Read the datasets; `env`: the environment's contract, `put`: lays arrays on all devices."""
        assert spec.data is not None
        policy = spec.policy
        assert not isinstance(policy, LeRobotPolicySpec | RLlibPolicySpec), "Torch has its own windows"
        self.prompter = make_prompter(policy.model_dump(mode="json"))
        advantage, selection, conditioning = getattr(spec.algo, "advantage", None), None, None
        where = {"root": spec.root, "uri": spec.tracking.mlflow_uri, "device": spec.device}
        if advantage is not None and advantage.mode == "filter":
            selection = advantage_selection(advantage, spec.data, **where)
        elif advantage is not None:
            conditioning = advantage_conditioning(advantage, spec.data, seed=spec.seed, **where)
        labels = None
        if isinstance(policy, RewardClassifierSpec) and isinstance(spec.algo, RewardLearningSpec):
            labels = reward_labels(spec.algo, spec.data, policy.classes)
        self.demonstrations = load_demonstrations(
            spec.data,
            n_obs_steps=policy.n_obs_steps,
            horizon=policy.horizon,
            action_horizon=policy.n_action_steps,
            prepare=self.prompter,
            returns=getattr(policy, "returns", None),
            labels=labels,
            selection=selection,
            conditioning=conditioning,
            robot=spec.robot,
        )
        self.normalizer = self.demonstrations.normalizer
        self.contract = joined(self.demonstrations.contract, env, spec)
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

    def metrics(self) -> dict[str, float]:
        """What is logged of the data with every update."""
        return {}

    @staticmethod
    def _place(spec: RunSpec, data: Windows, put: Callable[[Any], Any], platform: str) -> Windows:
        """On the device when asked for or when it fits, else in host memory, from where batches are gathered."""
        assert spec.data is not None
        wanted = spec.data.placement
        memory = jax.local_devices()[0].memory_stats() if platform == "gpu" else None
        fits = memory is None or data.nbytes <= DEVICE_SHARE * memory["bytes_limit"]
        return put(data) if wanted == "device" or (wanted == "auto" and fits) else data


class FromJournal(abc.ABC):
    """Data that holds what rollouts collected; chunks come with orders, or from the journal, each once and in order.

    Attributes:
        cursor: records of the journal that it holds.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self.cursor = run_dir, 0

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
            self._add(chunk)
        self.cursor = order.cursor

    @abc.abstractmethod
    def _add(self, chunk: Chunk) -> None:
        """Hold what a chunk brings."""

    def _read_journal(self, stop: int) -> None:
        with Journal(self._run_dir / "journal", read_only=True, verify=False) as journal:
            for chunk in journal.read(self.cursor, stop):
                self._add(chunk)
        self.cursor = stop


class EpisodeData(FromJournal, WindowData):
    """Demonstrations, and whole episodes of rollouts that the algorithm learns from, as windows in host memory."""

    def __init__(
        self, spec: RunSpec, env: Contract | None, put: Callable[[Any], Any], platform: str, run_dir: Path
    ) -> None:
        """Arguments as of `WindowData` and `FromJournal`.

        Raises:
            UserError: an observation of the datasets that the environment does not give.
        """
        FromJournal.__init__(self, run_dir)
        WindowData.__init__(self, spec, env, put, platform)
        assert spec.data is not None
        path, _, function = str(ALGORITHMS[spec.algo.name].episodes).partition(":")
        self._learned_rows = getattr(importlib.import_module(path), function)
        self._spec, self._action = spec, spec.data.action
        self._group = self.normalizer.group_index(spec.evaluation.group)
        self._assembler = EpisodeAssembler()
        self._windows = GrowingWindows(self._train, spec.replay.capacity, self._group)
        self._ended, self._accepted = 0, 0

    def source(self, buffer: dict[str, float]) -> Any:
        """Windows of both by the phase's shares; of demonstrations alone while too little was accepted."""
        share = buffer.get("replay", 0.0) / sum(buffer.values())
        return self._windows.view(share if self._accepted >= self._spec.algo.min_accepted else 0.0)

    def restore(self, cursor: int, folder: Path) -> None:
        """Hold what was held when a checkpoint was written."""
        if cursor:
            self._read_journal(cursor)

    def metrics(self) -> dict[str, float]:
        """Episodes that are held, their steps, and the share that was accepted of all that ended."""
        windows = self._windows
        return {
            "accepted_episodes": float(windows.num_episodes),
            "accepted_steps": float(windows.num_steps),
            "accepted_share": self._accepted / max(self._ended, 1),
        }

    def _add(self, chunk: Chunk) -> None:
        for episode in self._assembler.add(chunk):
            self._ended += 1
            rows = self._learned_rows(episode, self._spec.algo, self.contract)
            if rows is None:
                continue
            self._accepted += 1
            count = len(rows["action"])
            for name, feature in self.contract.observation.items():
                if feature.dtype == TEXT:
                    rows[name] = decode_texts(rows[name])
            if self._action != "action":
                rows[self._action] = rows.pop("action")
            table = EpisodeTable(
                rows, np.array([count]), self.contract.rate_hz, np.zeros(count, np.int32), [""], "an accepted episode"
            )
            self._windows.add(self.demonstrations.prepared(table, self._group))

    @staticmethod
    def _place(spec: RunSpec, data: Windows, put: Callable[[Any], Any], platform: str) -> Windows:
        """In host memory, where it can grow."""
        return data


class SequenceData(FromJournal):
    """Replay of rollouts, and demonstrations in the same form, for algorithms that learn from sequences.

    Every rank holds all of it, and draws the same sequences; the rows of a batch are spread over the devices.
    """

    validation = None
    prompter = None

    def __init__(
        self, spec: RunSpec, env: Contract | None, put: Callable[[Any], Any], run_dir: Path, length: int
    ) -> None:
        """Empty replay, and the datasets if the run has any; `length`: steps of a sequence."""
        super().__init__(run_dir)
        self._put = put
        table = None if spec.data is None else self._read(spec)
        if table is not None:
            assert spec.data is not None
            env = joined(table_contract(table, spec.data, spec.policy.n_obs_steps), env, spec)
        assert env is not None
        self.contract = env
        self.normalizer = Normalizer.from_contract(env)
        self._replays: dict[str, Replay] = {}
        folder = run_dir / "replay" / f"rank{jax.process_index()}"
        if spec.online:
            streams = spec.rollout.workers * spec.rollout.envs_per_worker
            spec.replay.check(streams, length)
            schema = {**env.observation, "action": env.action, **extra_columns(spec, env)}
            if spec.people_intervene:
                schema[INTERVENTION] = Feature((), "bool")
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

    def source(self, buffer: dict[str, float]) -> Any:
        """What updates draw from: a replay, or a mix of both. What people did in rollouts is demonstrated, too."""
        views: dict[str, Any] = {name: self._global(self._replays[name].view()) for name in buffer}
        rollouts = self._replays.get("replay")
        if "demonstrations" in views and rollouts is not None and INTERVENTION in rollouts.schema:
            views["demonstrations"] = PeoplesView(views["demonstrations"], self._global(rollouts.view()))
        return next(iter(views.values())) if len(views) == 1 else mix(views, buffer)

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

    def _add(self, chunk: Chunk) -> None:
        self._replays["replay"].add(chunk)

    def metrics(self) -> dict[str, float]:
        """What is logged of the data with every update."""
        return {}

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


def joined(mine: Contract, env: Contract | None, spec: RunSpec) -> Contract:
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
