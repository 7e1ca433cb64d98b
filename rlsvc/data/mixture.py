"""Demonstrations of a run: datasets read, filtered, split by episode, normalised by group, cut into windows.

Letters: E episodes, T observation steps, H horizon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlsvc.core.contract import TEXT, Contract, Feature
from rlsvc.core.errors import BundleError, ContractError, DatasetError
from rlsvc.core.types import EpisodeTable
from rlsvc.data.labels import LABEL, Labels
from rlsvc.data.monte_carlo import monte_carlo_returns, outcome_columns, read_outcomes
from rlsvc.data.norm_stats import read_norm_stats, to_normalizer
from rlsvc.data.normalize import FIELDS, RETURN, Normalizer, Stats, compute_stats
from rlsvc.data.prompts import ADVANTAGE
from rlsvc.data.repack import load_features
from rlsvc.data.transforms import ACTION, RobotTransforms
from rlsvc.data.windows import Windows
from rlsvc.spec.data import DataSpec
from rlsvc.spec.robot import RobotSpec
from rlsvc.spec.value_function import ReturnsSpec


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


BLOCK = 4096
"""Windows that are gathered at once for statistics."""


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
        prepared: from a table of other episodes with the same features, raw, and a normaliser group to the columns that
            the windows of `train` have.
    """

    train: Windows
    validation: Windows | None
    normalizer: Normalizer
    contract: Contract
    splits: dict[str, Split]
    prepared: Callable[[EpisodeTable, int], dict[str, np.ndarray]]


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


@dataclass(frozen=True)
class Selection:
    """Which training steps are learned from.

    Attributes:
        columns: what `choose` looks at besides what `data` names of rewards and ends; they are read with the datasets.
        choose: from the tables of the training episodes, one for each dataset, to an [N] bool for each.
        reason: why steps are left out, for messages.
    """

    columns: tuple[str, ...]
    choose: Callable[[Sequence[EpisodeTable]], list[np.ndarray]]
    reason: str


@dataclass(frozen=True)
class Conditioning:
    """What prompts tell of the actions of each step.

    Attributes:
        columns: as of `Selection`.
        tell: from tables of episodes, one for each dataset, to [N] texts for each: positive, negative, or "" for
            nothing.
    """

    columns: tuple[str, ...]
    tell: Callable[[Sequence[EpisodeTable]], list[np.ndarray]]


KNOWN_LABELS = Selection(
    (),
    lambda tables: [table.columns[LABEL] >= 0 for table in tables],
    "none has a label; see algo.label, and which episodes succeeded",
)
KNOWN = "return_known"
KNOWN_RETURNS = Selection(
    (),
    lambda tables: [table.columns[KNOWN] for table in tables],
    "policy.returns.truncated=drop leaves out episodes that were cut; name data.terminated or data.success if they "
    "were not, or set policy.returns.tolerance, or keep them",
)


def load_demonstrations(
    spec: DataSpec,
    *,
    n_obs_steps: int,
    horizon: int,
    action_horizon: int,
    returns: ReturnsSpec | None = None,
    labels: Labels | None = None,
    selection: Selection | None = None,
    conditioning: Conditioning | None = None,
    prepare: Prepare | None = None,
    robot: RobotSpec | None = None,
) -> Demonstrations:
    """Read every dataset of the mixture.

    Args:
        spec: the datasets, and which of their features the policy sees.
        n_obs_steps: T.
        horizon: H.
        action_horizon: how many of the H actions are executed.
        returns: gives batches a `return` [B] float32 and the normaliser its statistics; steps whose return is not known
            are left out.
        labels: gives batches a `label` [B] int32; steps without one are left out, in validation too.
        selection: of training steps; validation keeps all of its own, so that its loss compares between selections.
        conditioning: gives `prepare` what the prompts are to tell, of training and validation steps alike.
        prepare: what the policy needs done with texts and actions; None for a policy that reads no text.
        robot: whose numbers these are; the windows hold what it makes of them, and the statistics are theirs.

    Raises:
        ContractError: a text among the observations, and nobody to read it; or a robot that does not fit the data.
        DatasetError: a dataset that cannot be used, datasets whose features or rates differ, a feature that is missing,
            or a dataset of which no step is left; the message names dataset and feature.
    """
    keys = (*spec.observation, spec.action)
    if returns is not None and RETURN in keys:
        raise DatasetError(f"data.observation, data.action: '{RETURN}' is the target of a value function; leave it out")
    judges = [judge for judge in (selection, conditioning) if judge is not None]
    judged, besides = returns is not None or bool(judges), [name for judge in judges for name in judge.columns]
    transforms = RobotTransforms(robot)
    tables = []
    for dataset in spec.datasets:
        outcomes = outcome_columns(spec, dataset) if judged else ()
        named = () if labels is None else labels.columns(dataset)
        table = _encoded(load_features(dataset, (*keys, *outcomes, *besides, *named)), spec, transforms)
        if labels is not None:
            table.columns[LABEL] = labels.of(table, dataset)
        tables.append(table)
    features = _common_features(tables, keys)
    observation = {key: features[key] for key in spec.observation}
    contract = Contract(observation, features[spec.action], tables[0].fps, n_obs_steps, action_horizon)
    if returns is not None:
        for table, dataset in zip(tables, spec.datasets, strict=True):
            known = read_outcomes(table, spec, returns.success_bonus, dataset.success)
            table.columns[RETURN], table.columns[KNOWN] = monte_carlo_returns(known, returns)
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

    delta = None if robot is None else robot.delta
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
            observation=() if delta is None else (delta.of,),
            action=spec.action,
            n_obs_steps=n_obs_steps,
            horizon=horizon,
            delta=delta,
        )

    given = {} if spec.norm_stats is None else openpi_stats(spec.norm_stats, contract)

    def fitted() -> Normalizer:
        fit = Normalizer.fit(by_group, named, spec.normalization)
        if delta is not None and not given:
            fit = fit.with_stats(ACTION, relative_stats(chunks(train, group_of), len(groups)))
        for key, stats in given.items():
            try:
                fit = fit.with_stats(key, stats * len(groups))
            except BundleError as error:
                raise DatasetError(f"data.norm_stats, data.normalization: {error}") from error
        return fit

    normalizer = fitted()

    if prepare is not None:
        prepare.fit(chunks(train, group_of), normalizer)

    targets = (*((RETURN,) if returns else ()), *((LABEL,) if labels else ()))
    always = KNOWN_RETURNS if returns else KNOWN_LABELS if labels else None

    def prepared(table: EpisodeTable, group: int, told: np.ndarray | None) -> EpisodeTable:
        observation = {key: table.columns[key] for key in spec.observation}
        if told is not None:
            observation[ADVANTAGE] = told
        if prepare is not None:
            observation = prepare(observation, normalizer, group, chunks([table], [group]))
        besides = {key: table.columns[key] for key in (spec.action, *targets)}
        return replace(table, columns={**observation, **besides})

    def windows(raw: list[EpisodeTable], selection: Selection | None) -> Windows:
        told = [None] * len(raw) if conditioning is None else conditioning.tell(raw)
        parts = [prepared(*row) for row in zip(raw, group_of, told, strict=True)]
        built = Windows.build(
            parts,
            weights=[dataset.weight for dataset in spec.datasets],
            groups=group_of,
            observation=tuple(key for key in parts[0].columns if key not in (spec.action, *targets)),
            action=spec.action,
            n_obs_steps=n_obs_steps,
            horizon=horizon,
            extra=targets,
            delta=delta,
        )
        return built if selection is None else built.select(_chosen(raw, selection))

    learned = windows(train, always or selection)
    if returns is not None:
        named[RETURN] = Feature((), "float32")
        for i, group in enumerate(groups):
            by_group[group][RETURN] = learned.columns[RETURN][learned.anchor[learned.group == i]]
        normalizer = fitted()
    held_back = [table.select(list(split.validation)) for table, split in zip(tables, splits, strict=True)]
    return Demonstrations(
        train=learned,
        validation=windows(held_back, always) if spec.validation_fraction else None,
        normalizer=normalizer,
        contract=contract,
        splits={dataset.path: split for dataset, split in zip(spec.datasets, splits, strict=True)},
        prepared=lambda table, group: prepared(_encoded(table, spec, transforms), group, None).columns,
    )


def openpi_stats(path: str, contract: Contract) -> dict[str, tuple[Stats]]:
    """By feature the statistics of openpi's norm_stats.json.

    Raises:
        DatasetError: not openpi's, or of another robot; names the key.
    """
    found = to_normalizer(read_norm_stats(path), contract, "mean_std").stats
    return {key: (stats,) for key, (stats,) in found.items()}


def relative_stats(windows: Windows, num_groups: int) -> tuple[Stats, ...]:
    """By group the statistics of relative actions: of each that is not padded, in each of the windows.

    Args:
        windows: in host memory, with a delta.
        num_groups: G.
    """
    assert windows.delta is not None
    windows = replace(windows, observation=(windows.delta.of,))
    out = []
    for group in range(num_groups):
        rows = np.flatnonzero(windows.group == group)
        batches = (windows.gather(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK))
        actions = np.concatenate([batch["action"][batch["mask"]] for batch in batches])
        # One dimension at a time, since statistics are made in float64.
        columns = [compute_stats(actions[:, dim]) for dim in range(actions.shape[-1])]
        out.append(Stats(*(np.stack([getattr(c, name) for c in columns]) for name in FIELDS), count=len(actions)))
    return tuple(out)


def _encoded(table: EpisodeTable, spec: DataSpec, transforms: RobotTransforms) -> EpisodeTable:
    """The table with the numbers that a policy learns, and images of the size that it sees."""
    observation = {key: feature_of(table, key) for key in spec.observation}
    transforms.check(Contract(observation, feature_of(table, spec.action), table.fps))
    columns = {key: transforms.encode(ACTION if key == spec.action else key, x) for key, x in table.columns.items()}
    return replace(table, columns=columns)


def table_contract(table: EpisodeTable, spec: DataSpec, n_obs_steps: int) -> Contract:
    """What a policy of one table sees and does; the action's bounds are the smallest and largest value in it."""
    action, column = feature_of(table, spec.action), table.columns[spec.action]
    low, high = (tuple(float(x) for x in f(axis=0)) for f in (column.min, column.max))
    observation = {key: feature_of(table, key) for key in spec.observation}
    return Contract(observation, replace(action, low=low, high=high), table.fps, n_obs_steps, 1)


def _chosen(tables: Sequence[EpisodeTable], selection: Selection) -> np.ndarray:
    """[N] bool over all tables.

    Raises:
        DatasetError: no step of a table is chosen.
    """
    keep = selection.choose(tables)
    for table, rows in zip(tables, keep, strict=True):
        if not rows.any():
            raise DatasetError(f"{table.source}: none of its {table.num_steps} steps is left ({selection.reason})")
    return np.concatenate(keep)


def _common_features(tables: list[EpisodeTable], keys: tuple[str, ...]) -> dict[str, Feature]:
    first = tables[0]
    features = {key: feature_of(first, key) for key in keys}
    for table in tables[1:]:
        for key in keys:
            other = feature_of(table, key)
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


def feature_of(table: EpisodeTable, key: str) -> Feature:
    """What a column of a table is."""
    column = table.columns[key]
    dtype = "float32" if column.dtype.kind == "f" else TEXT if column.dtype.kind in "UO" else str(column.dtype)
    return Feature(column.shape[1:], dtype, table.units.get(key, ""), table.names.get(key, ()))
