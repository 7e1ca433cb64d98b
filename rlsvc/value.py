"""What a value function makes of recorded steps: values, advantages, and what imitation makes of those.

Letters: N steps of all episodes, B batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlsvc.algos.imitation import normalize_batch
from rlsvc.core.contract import Contract
from rlsvc.core.errors import BundleError, ContractError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.mixture import Conditioning, Selection, feature_of
from rlsvc.data.monte_carlo import Outcomes, is_positive, monte_carlo_returns, n_step_advantages, read_outcomes
from rlsvc.data.normalize import RETURN
from rlsvc.data.prompts import NEGATIVE, POSITIVE
from rlsvc.data.windows import Batch, Windows
from rlsvc.nn.backend import setup_jax
from rlsvc.nn.params import unflatten_params
from rlsvc.policies import make_prompter, make_value_function
from rlsvc.spec.data import DataSpec
from rlsvc.spec.value_function import AdvantageSpec, ReturnsSpec
from rlsvc.store.bundle import Bundle, read_bundle
from rlsvc.store.registry import resolve

log = logging.getLogger(__name__)

BATCH, BATCH_OF_IMAGES = 1024, 32
"""Steps that are judged at once."""


class ValueRunner:
    """A bundle of a value function made ready to judge: weights on the device, compiled once for all tables."""

    def __init__(self, bundle: Bundle, *, device: str = "auto") -> None:
        """Put the weights on the device.

        Args:
            bundle: verified.
            device: auto, cpu or gpu.

        Raises:
            ContractError: the bundle is of a policy.
            BundleError: weights that do not fit, or no statistics of the return.
        """
        setup_jax(device)
        function = make_value_function(bundle.policy, bundle.contract, bundle.precision)
        normalizer = bundle.normalizer
        if RETURN not in normalizer.modes:
            raise BundleError(
                f"{bundle.path}: its normaliser has no statistics for '{RETURN}', the scale of its values"
            )
        self.contract, self.normalizer = bundle.contract, normalizer
        self.returns: ReturnsSpec = function.spec.returns
        self._horizon: int = function.spec.horizon
        self._prepare = make_prompter(bundle.policy, bundle.path)
        sees_images = any(feature.is_image for feature in bundle.contract.observation.values())
        self._batch = BATCH_OF_IMAGES if sees_images else BATCH
        like = jax.eval_shape(function.init, jax.random.key(0))
        self._params = jax.device_put(unflatten_params(bundle.params, like))

        def values(params: object, batch: Batch) -> jax.Array:
            logits = function.logits(params, normalize_batch(batch, normalizer)).astype(jnp.float32)
            return normalizer.unnormalize(RETURN, function.head.mean(logits), batch["group"])

        self._values = jax.jit(values)

    @classmethod
    def load(cls, path: str | Path, *, device: str = "auto") -> ValueRunner:
        """Read, verify and make ready."""
        return cls(read_bundle(path), device=device)

    def values(self, table: EpisodeTable, *, action: str = "action", group: str | None = None) -> np.ndarray:
        """V(s_t), or Q of s_t and the recorded actions from it on, of every step.

        Args:
            table: the episodes, with the columns that the value function sees.
            action: name of the action's column.
            group: the table's normaliser group; not looked at where the bundle has only one.

        Returns:
            [N] float32, in the units of the reward.

        Raises:
            ContractError: a column that is missing, or differs from those it was trained on.
            BundleError: an unknown group.
        """
        several = len(self.normalizer.groups) > 1
        windows = self._windows(table, action, self.normalizer.group_index(group if several else None))
        parts = []
        for start in range(0, table.num_steps, self._batch):
            index = np.minimum(np.arange(start, start + self._batch), table.num_steps - 1)
            parts.append(np.asarray(self._values(self._params, windows.gather(index))))
        return np.concatenate(parts)[: table.num_steps]

    def advantages(
        self, outcomes: Outcomes, values: np.ndarray, n_steps: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """How much better than V(s_t) it went on, from the values of a table and how its episodes went.

        Args:
            outcomes: of the same table; their bonus is to be `returns.success_bonus`.
            values: of `values` [N].
            n_steps: rewards of so many steps and the value after them; None takes the whole return.

        Returns:
            A [N] float32, in the units of the reward, and [N] bool: False where it is not known, since the episode was
            cut.

        Raises:
            ContractError: this is a Q(s, a), which has no advantage of its own.
        """
        if self.contract.action_horizon:
            raise ContractError(
                "advantages are over V(s), and this value function is a Q(s, a); train one with policy.n_action_steps=0"
            )
        if n_steps is not None:
            return n_step_advantages(outcomes, values, self.returns.discount, n_steps)
        returns, known = monte_carlo_returns(outcomes, self.returns)
        return returns - values, known

    def _windows(self, table: EpisodeTable, action: str, group: int) -> Windows:
        observation = tuple(self.contract.observation)
        if missing := [name for name in (*observation, action) if name not in table.columns]:
            raise ContractError(
                f"{table.source or 'table'} has no '{missing[0]}', which the value function needs; "
                f"it has: {', '.join(table.columns)}"
            )
        features = {name: feature_of(table, name) for name in (*observation, action)}
        theirs = Contract({name: features[name] for name in observation}, features[action], table.fps)
        self.contract.check_same(theirs, "value function", table.source or "table")
        seen = {name: table.columns[name] for name in observation}
        if self._prepare is not None:
            seen = self._prepare(seen, self.normalizer, group)
        return Windows.build(
            [replace(table, columns={**seen, action: table.columns[action]})],
            weights=[1.0],
            groups=[group],
            observation=tuple(seen),
            action=action,
            n_obs_steps=self.contract.n_obs_steps,
            horizon=self._horizon,
        )


def advantage_selection(
    spec: AdvantageSpec, data: DataSpec, *, root: str, uri: str | None = None, device: str = "auto"
) -> Selection:
    """The training steps that a value function finds good enough.

    Args:
        spec: which value function, and what is good enough.
        data: of the run; names rewards, ends and successes besides what the policy sees.
        root: of runs; the model registry lies there too, if `uri` names no other.
        uri: of the model registry.
        device: auto, cpu or gpu.

    Raises:
        NotFoundError, BundleError, ContractError: no bundle, or none of a V(s) that fits the data.
    """
    runner = ValueRunner.load(resolve(spec.bundle, root=root, uri=uri), device=device)

    def choose(tables: Sequence[EpisodeTable]) -> list[np.ndarray]:
        keep, _ = _good_enough(runner, spec, data, tables)
        log.info("algo.advantage: %d of %d training steps are learned from", keep.sum(), len(keep))
        return _by_table(keep, tables)

    bound = f"quantile = {spec.quantile}" if spec.threshold is None else f"threshold = {spec.threshold}"
    return Selection(tuple(runner.contract.observation), choose, f"algo.advantage: {bound}")


def advantage_conditioning(
    spec: AdvantageSpec, data: DataSpec, *, seed: int, root: str, uri: str | None = None, device: str = "auto"
) -> Conditioning:
    """What prompts tell of the steps' advantages, as a value function finds them; see `advantage_selection`.

    `seed`: which steps are told nothing (`spec.dropout`), the same ones throughout a run: steps beside each other are
    alike, so that drawing anew for every batch would teach no more.
    """
    runner = ValueRunner.load(resolve(spec.bundle, root=root, uri=uri), device=device)

    def tell(tables: Sequence[EpisodeTable]) -> list[np.ndarray]:
        good, known = _good_enough(runner, spec, data, tables)
        told = known & (np.random.default_rng(seed).random(len(known)) >= spec.dropout)
        log.info(
            "algo.advantage: of %d steps %d are told to be positive, %d negative, and nothing is told of the others",
            len(told), (told & good).sum(), (told & ~good).sum(),
        )  # fmt: skip
        return _by_table(np.where(told, np.where(good, POSITIVE, NEGATIVE), ""), tables)

    return Conditioning(tuple(runner.contract.observation), tell)


def _good_enough(
    runner: ValueRunner, spec: AdvantageSpec, data: DataSpec, tables: Sequence[EpisodeTable]
) -> tuple[np.ndarray, np.ndarray]:
    """Which steps of all tables are good enough, and of which it is known, [N] bool each."""
    prompts = sorted({prompt for table in tables for prompt in table.tasks})
    advantages, known, task = [], [], []
    for table, dataset in zip(tables, data.datasets, strict=True):
        values = runner.values(table, action=data.action, group=dataset.group)
        outcomes = read_outcomes(table, data, runner.returns.success_bonus, dataset.success)
        advantage, is_known = runner.advantages(outcomes, values, spec.n_steps)
        advantages.append(advantage)
        known.append(is_known)
        task.append(np.array([prompts.index(prompt) for prompt in table.tasks])[table.task])
    is_known = np.concatenate(known)
    good = is_positive(
        np.concatenate(advantages), is_known, np.concatenate(task), quantile=spec.quantile, threshold=spec.threshold
    )
    return good, is_known


def _by_table(rows: np.ndarray, tables: Sequence[EpisodeTable]) -> list[np.ndarray]:
    return np.split(rows, np.cumsum([table.num_steps for table in tables])[:-1])
