"""Demonstrations of a run: datasets read, filtered, split by episode, normalised by group, cut into windows.

Letters: E episodes, T observation steps, H horizon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import ContractError, DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.load import load_table
from rlsvc.data.normalize import Normalizer
from rlsvc.data.windows import Windows
from rlsvc.spec.data import DataSpec


class Prepare(Protocol):
    """What a policy needs done with texts and actions before it sees them (rlsvc/policies/prompt.py)."""

    def fit(self, chunks: Windows, normalizer: Normalizer) -> None:
        """Learn what has to be learnt from the training data's actions, raw; is called once, before the first call."""
        ...

    def __call__(
        self, observation: dict[str, np.ndarray], normalizer: Normalizer, group: int, chunks: Windows | None = None
    ) -> dict[str, Any]:
        """Observations by name [N, ...], with texts, to what a policy sees.

        The same for the columns of a dataset and for a request; `chunks`: the actions from each row on, in a dataset.
        """
        ...


@dataclass(frozen=True)
class Split:
    """Episode numbers of one dataset, disjoint."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    heldout: tuple[int, ...]


@dataclass(frozen=True)
class Demonstrations:
    """What a learner needs of the data.

    Attributes:
        train: windows to learn from.
        validation: windows whose loss is logged, None when there are none.
        normalizer: fitted on the training episodes.
        contract: what a policy of this data sees and does.
        splits: by dataset path.
    """

    train: Windows
    validation: Windows | None
    normalizer: Normalizer
    contract: Contract
    splits: dict[str, Split]


def split_episodes(num_episodes: int, spec: DataSpec) -> Split:
    """Shuffle the episodes with `split_seed` and cut; a share above zero takes at least one episode.

    Raises:
        DatasetError: no episode is left to train on.
    """
    order = np.random.default_rng(spec.split_seed).permutation(num_episodes)
    sizes = [max(1, round(f * num_episodes)) if f else 0 for f in (spec.validation_fraction, spec.heldout_fraction)]
    if sum(sizes) >= num_episodes:
        raise DatasetError(
            f"{num_episodes} episodes: {sizes[0]} for validation and {sizes[1]} held out leave none to train on; "
            "lower data.validation_fraction and data.heldout_fraction, or add episodes"
        )
    validation, heldout, train = np.split(order, np.cumsum(sizes))
    train = train[: spec.max_train_episodes]
    return Split(*(tuple(sorted(int(e) for e in part)) for part in (train, validation, heldout)))


def load_demonstrations(
    spec: DataSpec, *, n_obs_steps: int, horizon: int, action_horizon: int, prepare: Prepare | None = None
) -> Demonstrations:
    """Read every dataset of the mixture.

    Args:
        spec: the datasets, and which of their features the policy sees.
        n_obs_steps: T.
        horizon: H.
        action_horizon: how many of the H actions are executed.
        prepare: what the policy needs done with texts and actions; None for a policy that reads no text.

    Raises:
        ContractError: a text among the observations, and nobody to read it.
        DatasetError: a dataset that cannot be used, datasets whose features or rates differ, or a feature that is
            missing; the message names dataset and feature.
    """
    keys = (*spec.observation, spec.action)
    tables = [load_table(dataset, keys) for dataset in spec.datasets]
    features = _common_features(tables, keys)
    groups = sorted({dataset.group for dataset in spec.datasets})
    splits = [split_episodes(table.num_episodes, spec) for table in tables]
    train = [table.select(list(split.train)) for table, split in zip(tables, splits, strict=True)]
    by_group = {
        group: {
            key: np.concatenate([t.columns[key] for t, d in zip(train, spec.datasets, strict=True) if d.group == group])
            for key, feature in features.items()
            if feature.dtype != TEXT and not feature.is_image
        }
        for group in groups
    }
    if spec.action != "action" and spec.action in spec.normalization:
        raise DatasetError(f"data.normalization names '{spec.action}'; the action's mode goes under 'action'")
    by_group = {
        g: {("action" if k == spec.action else k): c for k, c in columns.items()} for g, columns in by_group.items()
    }
    named = {("action" if key == spec.action else key): feature for key, feature in features.items()}
    normalizer = Normalizer.fit(by_group, named, spec.normalization)

    group_of = [groups.index(dataset.group) for dataset in spec.datasets]
    texts = [key for key in spec.observation if features[key].dtype == TEXT]
    if texts and prepare is None:
        raise ContractError(
            f"observation '{texts[0]}' is a text, which this policy does not read; leave it out of data.observation"
        )

    def chunks(parts: list[EpisodeTable], groups: list[int]) -> Windows:
        return Windows.build(
            parts,
            weights=[1.0] * len(parts),
            groups=groups,
            observation=(),
            action=spec.action,
            n_obs_steps=n_obs_steps,
            horizon=horizon,
        )

    if prepare is not None:
        prepare.fit(chunks(train, group_of), normalizer)

    def prepared(table: EpisodeTable, group: int) -> EpisodeTable:
        observation = {key: table.columns[key] for key in spec.observation}
        if prepare is not None:
            observation = prepare(observation, normalizer, group, chunks([table], [group]))
        return replace(table, columns={**observation, spec.action: table.columns[spec.action]})

    def windows(parts: list[EpisodeTable]) -> Windows:
        parts = [prepared(table, group) for table, group in zip(parts, group_of, strict=True)]
        return Windows.build(
            parts,
            weights=[dataset.weight for dataset in spec.datasets],
            groups=group_of,
            observation=tuple(key for key in parts[0].columns if key != spec.action),
            action=spec.action,
            n_obs_steps=n_obs_steps,
            horizon=horizon,
        )

    held_back = [table.select(list(split.validation)) for table, split in zip(tables, splits, strict=True)]
    observation = {key: features[key] for key in spec.observation}
    return Demonstrations(
        train=windows(train),
        validation=windows(held_back) if spec.validation_fraction else None,
        normalizer=normalizer,
        contract=Contract(observation, features[spec.action], tables[0].fps, n_obs_steps, action_horizon),
        splits={dataset.path: split for dataset, split in zip(spec.datasets, splits, strict=True)},
    )


def table_contract(table: EpisodeTable, spec: DataSpec, n_obs_steps: int) -> Contract:
    """What a policy of one table sees and does; the action's bounds are the smallest and largest value in it."""
    action, column = _feature(table, spec.action), table.columns[spec.action]
    low, high = (tuple(float(x) for x in f(axis=0)) for f in (column.min, column.max))
    observation = {key: _feature(table, key) for key in spec.observation}
    return Contract(observation, replace(action, low=low, high=high), table.fps, n_obs_steps, 1)


def _common_features(tables: list[EpisodeTable], keys: tuple[str, ...]) -> dict[str, Feature]:
    first = tables[0]
    features = {key: _feature(first, key) for key in keys}
    for table in tables[1:]:
        for key in keys:
            other = _feature(table, key)
            if (other.shape, other.dtype) != (features[key].shape, features[key].dtype):
                raise DatasetError(
                    f"'{key}' is {other.dtype} {other.shape} in {table.source} and {features[key].dtype} "
                    f"{features[key].shape} in {first.source}; datasets of one mixture must agree"
                )
        if table.fps != first.fps:
            raise DatasetError(
                f"fps is {table.fps:g} in {table.source} and {first.fps:g} in {first.source}; "
                "datasets of one mixture must agree"
            )
    return features


def _feature(table: EpisodeTable, key: str) -> Feature:
    column = table.columns[key]
    dtype = "float32" if column.dtype.kind == "f" else TEXT if column.dtype.kind in "UO" else str(column.dtype)
    return Feature(column.shape[1:], dtype, table.units.get(key, ""), table.names.get(key, ()))
