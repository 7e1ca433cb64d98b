"""Recorded episodes as RLlib's CQL, MARWIL and BC learn from them, in memory.

They are drawn here, where RLlib would read files through Ray Data: a batch follows from seed and update number alone,
so that resuming is exact. BC and CQL draw single transitions. MARWIL draws whole episodes, since its advantages are
those of returns to the episode's end; RLlib's own reader would cut them into single steps, whose advantages are one
step's. A last observation stands for the one after the last step as in a replay (rlsvc/data/replay_table.py): what
ended for good bootstraps from nothing, what was cut off from its last observation.

Two things of RLlib 2.60 are mended: CQL cannot learn with one local learner (it hands a batch where an iterator is
expected), and counts the updates of its warm-up by behaviour cloning anew in every call, so that it never ends.

Letters: N transitions of all episodes, B rows of a batch, L steps of an episode.
"""

from __future__ import annotations

import rlsvc.backends.rllib_opengl  # noqa: F401 # pyright: ignore[reportUnusedImport] - before RLlib

# isort: split

from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.rllib.algorithms.bc.bc import BC
from ray.rllib.algorithms.cql.cql import CQL
from ray.rllib.algorithms.cql.torch.cql_torch_learner import CQLTorchLearner
from ray.rllib.algorithms.marwil.marwil import MARWIL
from ray.rllib.core import ALL_MODULES, DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.result import TRAINING_ITERATION  # pyright: ignore[reportPrivateImportUsage]

from rlsvc.backends.rllib_spaces import ModuleSpaces
from rlsvc.core.errors import DatasetError

Rows = dict[str, np.ndarray]
"""One episode as `rlsvc.data.replay_table.rows_of_episode` gives it: L + 1 rows, the last one its final observation."""


class RecordedEpisodes(OfflineData):
    """The episodes, in the place of RLlib's reader.

    Attributes:
        updates: batches that were learned from.
        due: batches that the next `train()` learns from.
    """

    def __init__(self, config: Any) -> None:  # RLlib's own would open files
        self.config = config
        self.updates, self.due = 0, 0
        self.iter_batches_kwargs: dict[str, Any] = {}
        self.episodes: list[dict[str, Any]] = []

    def fill(self, episodes: Sequence[Rows], module: ModuleSpaces, seed: int, reward_scale: float = 1.0) -> None:
        """Hold these episodes, in the module's numbers, with rewards times `reward_scale`.

        Raises:
            DatasetError: there is no transition.
        """
        self._seed = seed
        self.episodes = []
        for rows in episodes:
            steps = len(rows["reward"]) - 1
            if steps < 1:
                continue
            self.episodes.append({
                "observation": module.observe(rows),
                "action": module.to_module(rows["action"][:steps]),
                "reward": reward_scale * rows["reward"][:steps].astype(np.float32),
                "terminated": bool(rows["terminated"][steps - 1]),
            })  # fmt: skip
        if not self.episodes:
            raise DatasetError("data: no episode has two steps, so that there is no transition to learn from")
        self._lengths = np.array([len(episode["reward"]) for episode in self.episodes])
        ends = np.concatenate([np.arange(n) == n - 1 for n in self._lengths])
        terminated = np.concatenate([np.full(len(e["reward"]), e["terminated"]) for e in self.episodes])
        self._columns = {
            Columns.OBS: np.concatenate([e["observation"][:-1] for e in self.episodes]),
            Columns.NEXT_OBS: np.concatenate([e["observation"][1:] for e in self.episodes]),
            Columns.ACTIONS: np.concatenate([e["action"] for e in self.episodes]),
            Columns.REWARDS: np.concatenate([e["reward"] for e in self.episodes]),
            Columns.TERMINATEDS: ends & terminated,
            Columns.TRUNCATEDS: ends & ~terminated,
        }

    def transitions(self, size: int, number: int) -> MultiAgentBatch:
        """The batch of one update: `size` transitions, drawn with replacement."""
        index = self._generator(number).integers(0, len(self._columns[Columns.REWARDS]), size)
        batch = {name: column[index] for name, column in self._columns.items()}
        return MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(batch)}, env_steps=size)

    def whole(self, size: int, number: int) -> list[SingleAgentEpisode]:
        """Whole episodes for one update, drawn with replacement until they have `size` steps together."""
        generator, found, steps = self._generator(number), [], 0
        while steps < size:
            which = int(generator.integers(len(self.episodes)))
            episode = self.episodes[which]
            found.append(
                SingleAgentEpisode(
                    id_=f"{number}-{len(found)}",
                    observations=episode["observation"].copy(),
                    actions=episode["action"].copy(),
                    rewards=episode["reward"].copy(),
                    infos=[{} for _ in range(self._lengths[which] + 1)],
                    terminated=episode["terminated"],
                    truncated=not episode["terminated"],
                    len_lookback_buffer=0,
                )
            )
            steps += int(self._lengths[which])
        return found

    def _generator(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, number))


class _Recorded:
    """An algorithm's training step on RecordedEpisodes: `due` updates."""

    whole = False

    def training_step(self: Any) -> None:
        data, size = self.offline_data, self.config.train_batch_size_per_learner * max(1, self.config.num_learners)
        for _ in range(data.due):
            number = data.updates
            batch = {"episodes": data.whole(size, number)} if self.whole else {"batch": data.transitions(size, number)}
            results = self.learner_group.update(**batch, timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: number * size})
            self.metrics.aggregate(results, key=LEARNER_RESULTS)
            data.updates += 1


class RecordedBC(_Recorded, BC):
    """Behaviour cloning."""


class RecordedCQL(_Recorded, CQL):
    """Conservative Q-learning (arXiv:2006.04779)."""


class RecordedMARWIL(_Recorded, MARWIL):
    """Monotonic advantage re-weighted imitation (Wang et al., 2018)."""

    whole = True


ALGORITHMS = {"bc": RecordedBC, "cql": RecordedCQL, "marwil": RecordedMARWIL}


class CountingCQLLearner(CQLTorchLearner):
    """CQL's learner, whose warm-up ends after `bc_iters` updates."""

    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        """Tell of the updates before this one, to which RLlib adds one."""
        self.metrics.log_value((ALL_MODULES, TRAINING_ITERATION), self._weights_seq_no - 1, reduce="sum")
        return super().compute_loss_for_module(**kwargs)
