"""SweepSpec: a search space over the RunSpec (rlsvc/spec/space.py), and how it is searched (rlsvc/tune)."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, Field, model_validator

from rlsvc.core.errors import SpecError, nearest
from rlsvc.spec.base import Spec
from rlsvc.spec.compose import register_arithmetic, validate
from rlsvc.spec.run import NAME, RunSpec
from rlsvc.spec.space import (
    Choice,
    Distribution,
    Domain,
    Grid,
    LogUniform,
    Uniform,
    Value,
    Values,
    active,
    check_conditions,
    combinations,
    sample,
)

TRIED = 200
"""Combinations of values that are tried against the run's schema before the first trial."""
Mode = Literal["max", "min"]


class RandomSpec(Spec):
    """Values drawn at random."""

    name: Literal["random"] = "random"


class GridSpec(Spec):
    """Every combination of the values of all keys; a range gives `points` values, evenly over its quantiles."""

    name: Literal["grid"] = "grid"
    points: int = Field(default=3, ge=1)
    """Values of each range, both ends included."""


class TpeSpec(Spec):
    """Optuna's tree-structured Parzen estimator (arXiv:2304.11127), for one metric or several."""

    name: Literal["tpe"] = "tpe"
    startup: int = Field(default=10, ge=1)
    """Configurations at random before the model is asked."""


class BayesSpec(Spec):
    """Bayesian optimisation: Optuna's Gaussian process with the expected improvement.

    Of the hypervolume, for several metrics. Keys under conditions are drawn at random.
    """

    name: Literal["bayes"] = "bayes"
    startup: int = Field(default=10, ge=1)
    """Configurations at random before the model is asked."""


class FifoSpec(Spec):
    """Every trial runs to its end."""

    name: Literal["fifo"] = "fifo"


class AshaSpec(Spec):
    """Asynchronous successive halving (arXiv:1810.05934): the worse trials stop early. Time is the run's clock."""

    name: Literal["asha"] = "asha"
    grace: int = Field(default=1000, ge=1)
    """Updates that every trial gets (environment steps, in online phases)."""
    reduction: float = Field(default=4, gt=1)
    """Of the trials that reach a rung, one in `reduction` goes on."""
    max_t: int | None = Field(default=None, ge=1)
    """Updates after which a trial stops in any case; null means the run's length."""


class HyperBandSpec(Spec):
    """HyperBand (arXiv:1603.06560): brackets of trials that are halved together.

    A trial waits for its bracket, and goes on from its run's checkpoint.
    """

    name: Literal["hyperband"] = "hyperband"
    grace: int = Field(default=1000, ge=1)
    """One unit of the run's clock, which the shortest bracket gives each trial."""
    reduction: float = Field(default=3, gt=1)
    """Of the trials of a bracket, one in `reduction` goes on."""


class MedianSpec(Spec):
    """Median stopping: a trial stops if its best value is below the median of the others' means up to that time."""

    name: Literal["median"] = "median"
    grace: int = Field(default=1000, ge=1)
    """Updates that every trial gets (environment steps, in online phases)."""
    min_trials: int = Field(default=3, ge=1)
    """Others that must have come as far."""


class PbtSpec(Spec):
    """Population-based training (arXiv:1711.09846).

    Trials below go on from the checkpoint of one above, with changed values. The keys of the space must be floats of
    `algo`, which a run can change as it goes.
    """

    name: Literal["pbt"] = "pbt"
    interval: int = Field(default=1000, ge=1)
    """Updates between two exchanges (environment steps, in online phases); a checkpoint and an evaluation each."""
    burn_in: int = Field(default=0, ge=0)
    """Updates before the first exchange."""
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the population below that is replaced, and above that is copied."""
    resample: float = Field(default=0.25, ge=0, le=1)
    """Probability of drawing a value anew; otherwise it is multiplied by 0.8 or 1.2."""


class Pb2Spec(Spec):
    """PB2 (arXiv:2002.02518): as pbt, with changed values chosen by a Gaussian process.

    Every key must be `uniform` or `loguniform`.
    """

    name: Literal["pb2"] = "pb2"
    interval: int = Field(default=1000, ge=1)
    """Updates between two exchanges (environment steps, in online phases); a checkpoint and an evaluation each."""
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the population below that is replaced, and above that is copied."""


POPULATION = ("pbt", "pb2")
PAUSING = ("hyperband", *POPULATION)
"""Schedulers that interrupt a trial and go on with it later."""


class PlateauSpec(Spec):
    """When nothing moves any more."""

    reports: int = Field(default=5, ge=2)
    """Of a trial: its last so many values. Of the sweep: so many trials in a row that change nothing."""
    std: float = Field(gt=0)
    """Standard deviation below which it counts as standing still: of those values, or of the best 10 trials."""


class StopSpec(Spec):
    """Rules that end a trial or the sweep early; whichever comes first."""

    steps: int | None = Field(default=None, ge=1)
    """Of the run's clock, after which a trial ends."""
    reached: float | None = None
    """Value of the metric at which a trial ends."""
    plateau: PlateauSpec | None = None
    """Ends a trial whose metric stands still."""
    sweep_reached: float | None = None
    """Value of the metric at which the whole sweep ends."""
    sweep_plateau: PlateauSpec | None = None
    """Ends the sweep when its best trials stand still."""


class BudgetSpec(Spec):
    """What the sweep may cost besides its number of trials.

    What is running then is ended; `--resume` with a larger budget goes on with it.
    """

    hours: float | None = Field(default=None, gt=0)
    """Of wall time, over all sessions of the sweep."""
    gpu_hours: float | None = Field(default=None, gt=0)
    """GPUs of a trial times its hours, added up over all trials."""


class ResourcesSpec(Spec):
    """What a trial holds that runs in one process.

    A run with several learner ranks, several or asynchronous rollout workers, or several evaluation workers holds what
    its own keys say instead.
    """

    cpu: float = Field(default=1.0, gt=0)
    """Of one trial."""
    gpu: float = Field(default=0.0, ge=0)
    """A fraction lets several trials share one GPU."""


def _words(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class SweepSpec(Spec):
    """A sweep: trials of one run specification that differ in the keys of `space`."""

    name: str = Field(default="sweep", pattern=NAME)
    """The sweep lies in `<root>/sweeps/<name>/`, root being the run's."""
    run: Annotated[tuple[str, ...], BeforeValidator(_words, json_schema_input_type=str | tuple[str, ...])] = Field(
        min_length=1
    )
    """What `rlsvc train` would take: `experiment=...` or a file, then overrides."""
    space: dict[str, Distribution] = Field(min_length=1)
    """Distributions by the dotted key of the RunSpec; `_name` is a variable for those with `value`."""
    samples: int = Field(default=1, ge=1)
    """Configurations, or with `grid` keys runs through the whole grid."""
    seeds: int = Field(default=1, ge=1)
    """Runs of each configuration, with the run's seed and those after it; their mean is judged, step by step."""
    metric: str = "eval/max_reward"
    """What is judged: its best value in the course of a trial."""
    mode: Mode = "max"
    """Whether a higher or a lower metric is better."""
    objectives: dict[str, Mode] = Field(default={})
    """Further metrics that count as much, each max or min: the report has the Pareto front."""
    searcher: Annotated[RandomSpec | GridSpec | TpeSpec | BayesSpec, Field(discriminator="name")] = RandomSpec()
    """Which configuration is tried next."""
    scheduler: Annotated[
        FifoSpec | AshaSpec | HyperBandSpec | MedianSpec | PbtSpec | Pb2Spec, Field(discriminator="name")
    ] = FifoSpec()
    """Whether weak trials are ended early."""
    stop: StopSpec = StopSpec()
    """Rules that end a trial or the sweep early."""
    budget: BudgetSpec = BudgetSpec()
    """Hours and GPU-hours; `samples` is the budget in trials."""
    concurrency: int | None = Field(default=None, ge=1)
    """Trials that run at the same time at most; null has as many as the cluster has room for."""
    resources: ResourcesSpec = ResourcesSpec()
    """What one trial holds; see below."""
    retries: int = Field(default=1, ge=0)
    """How often a trial whose process died, or that raised what is no one's mistake, goes on from its checkpoint."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the search; the runs' own seed is `seed` in `run`, or a key of the space."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_conditions(self.space)
        if self.metric in self.objectives:
            raise ValueError(f"objectives: '{self.metric}' is the metric already; leave it out")
        if self.objectives and self.scheduler.name != "fifo":
            raise ValueError(
                f"scheduler.name: got {self.scheduler.name}, expected fifo with `objectives`: trials are ended early "
                "by one metric alone"
            )
        if self.seeds > 1 and "seed" in self.space:
            raise ValueError("seeds: the space has 'seed' already; leave one of them out")
        grids = [key for key, domain in self.space.items() if isinstance(domain, Grid)]
        if grids and self.searcher.name in ("tpe", "bayes"):
            raise ValueError(
                f"searcher.name: got {self.searcher.name}, but '{grids[0]}' is a grid, every value of which is to run; "
                "write choice, or take searcher random or grid"
            )
        if self.searcher.name == "grid" and self.samples != 1:
            raise ValueError(f"samples: got {self.samples}, expected 1: searcher grid has {self.configurations} trials")
        if self.scheduler.name in POPULATION:
            self._check_population()
        return self

    def _check_population(self) -> None:
        name = self.scheduler.name
        if self.searcher.name != "random":
            raise ValueError(f"searcher.name: got {self.searcher.name}, expected random: {name} changes values itself")
        if self.seeds > 1:
            raise ValueError(f"seeds: got {self.seeds}, expected 1: {name} changes the values of each trial by itself")
        for key, domain in self.space.items():
            ranges = isinstance(domain, Uniform | LogUniform)
            options = isinstance(domain, Choice) and all(isinstance(each, float) for each in domain.choice)
            if not key.startswith("algo.") or domain.when or not (ranges or (options and name == "pbt")):
                raise ValueError(
                    f"'{key}': {name} changes it while the run goes on, so it must be a float of `algo`, uniform"
                    f"{', loguniform or choice of floats' if name == 'pbt' else ' or loguniform'}, without conditions"
                )
        if self.configurations < 2:
            raise ValueError(f"samples: got {self.samples}, expected 2 or more: {name} needs a population")

    @property
    def configurations(self) -> int:
        """How many configurations the sweep has."""
        if isinstance(self.searcher, GridSpec):
            points = self.searcher.points
            return sum(1 for _ in combinations(self.space, lambda domain: domain.points(points)))
        grids = (len(each.grid) for each in self.space.values() if isinstance(each, Grid))
        return self.samples * math.prod(grids)

    @property
    def trials(self) -> int:
        """How many trials the sweep has: every seed of every configuration."""
        return self.configurations * self.seeds

    @property
    def goals(self) -> dict[str, Mode]:
        """All that counts: the metric first."""
        return {self.metric: self.mode, **self.objectives}

    def better(self, a: float, b: float) -> bool:
        """Whether the metric value `a` is better than `b`."""
        return a > b if self.mode == "max" else a < b


def set_keys(base: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """A validated copy of `base` with these dotted keys set, in their order; variables (`_name`) are not keys.

    Raises:
        SpecError: a key is not in the schema (the message has the nearest one), or the values do not fit together.
    """
    try:
        return validate(RunSpec, _tree(base, values))
    except SpecError as error:
        shown = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        raise SpecError(f"space: with {shown}: {error}") from error


def complete(spec: SweepSpec, base: RunSpec, values: Values) -> Values:
    """The values with those that are computed, in the order of the space.

    Raises:
        SpecError: an expression that cannot be computed.
    """
    wanted = {
        key: domain.value for key, domain in spec.space.items() if isinstance(domain, Value) and active(domain, values)
    }
    if not wanted:
        return values
    register_arithmetic()
    tree, found = _tree(base, {**values, **wanted}, variables=True), dict(values)
    for key, expression in wanted.items():
        try:
            node: Any = OmegaConf.create(tree)
            *path, last = [key] if key.startswith("_") else key.split(".")
            for part in path:
                node = node[int(part) if OmegaConf.is_list(node) else part]
            value = node[int(last) if OmegaConf.is_list(node) else last]
        except (OmegaConfBaseException, ArithmeticError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise SpecError(f"space: '{key}': value: got {expression!r}, which cannot be computed: {reason}") from error
        found[key] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return {key: found[key] for key in spec.space if key in found}


def _tree(base: RunSpec, values: Mapping[str, Any], variables: bool = False) -> dict[str, Any]:
    """The base run's plain values with these keys set; with `variables`, those stand beside them."""
    tree = base.model_dump(mode="json")
    chosen: list[str] = []
    for key, value in values.items():
        if key.startswith("_"):
            if variables:
                tree[key] = value
            continue
        if not any(key.startswith(f"{other}.") for other in chosen):
            _check_key(base, key)
        *path, last = key.split(".")
        node: Any = tree
        for depth, part in enumerate(path):
            node = node[int(part)] if isinstance(node, list) else node.get(part)
            if not isinstance(node, dict | list):
                place = ".".join(path[: depth + 1])
                raise SpecError(f"space: '{key}': {place} is {node!r} in what was chosen above, and has no keys")
        # A copy: a key below sets a part of the section that was chosen, which other trials choose too.
        if isinstance(node, list):
            node[int(last)] = copy.deepcopy(value)
        else:
            node[last] = copy.deepcopy(value)
        chosen.append(key)
    return tree


def check_space(spec: SweepSpec, base: RunSpec) -> None:
    """Tries the space against the run's schema before anything runs.

    The bounds or options of every key are tried one by one, then all combinations of a small space, or 200 random ones.

    Raises:
        SpecError: a key or value that the RunSpec refuses, or a metric or scheduler that the run cannot serve.
    """
    for key, domain in spec.space.items():
        if key.startswith("_") and "." in key:
            raise SpecError(f"space: '{key}': the name of a variable has no dots")
        parts = [other for other in spec.space if key.startswith(f"{other}.")]
        if parts and not domain.when:
            raise SpecError(
                f"space: '{parts[0]}' and '{key}' set the same section; leave one of them out, or say by `when` for "
                f"which choice of '{parts[0]}' this one is"
            )
        if parts and list(spec.space).index(parts[0]) > list(spec.space).index(key):
            raise SpecError(f"space: '{key}' stands above '{parts[0]}', which would set it back; put it below")
        if not parts and not key.startswith("_"):
            _check_key(base, key)
        alone = not parts and not domain.when and not key.startswith("_")
        if alone and not isinstance(domain, Choice | Grid):
            for value in domain.corners():
                set_keys(base, {key: value})
    unused = set(spec.space)
    for values in tried(spec):
        found = complete(spec, base, values)
        unused -= set(found)
        set_keys(base, found)
    if unused:
        key = next(key for key in spec.space if key in unused)
        raise SpecError(f"space: '{key}': when: {spec.space[key].when} never holds, so it would never be set")
    _check_judging(spec, base)


def _check_judging(spec: SweepSpec, base: RunSpec) -> None:
    for metric in spec.goals:
        if metric.startswith("eval/") and base.env is None:
            raise SpecError(
                f"metric '{metric}': the run has no env, so it is never evaluated. Set env in run, or another metric"
            )
    scheduler = spec.scheduler
    grace = getattr(scheduler, "grace", 0)
    limit = getattr(scheduler, "max_t", None) or base.length
    if limit < grace:
        raise SpecError(f"scheduler.grace: got {grace}, at most max_t = {limit} updates")
    if spec.scheduler.name in PAUSING and spec.concurrency is not None:
        raise SpecError(
            f"concurrency: got {spec.concurrency} with scheduler {scheduler.name}, which interrupts trials and goes on "
            "with as many as there is room for; leave it out, and set resources"
        )
    key, every = next(
        (each for prefix, each in _cadences(base).items() if spec.metric.startswith(prefix)),
        ("log_interval", base.log_interval),
    )
    if scheduler.name != "fifo" and every is None:
        raise SpecError(
            f"scheduler.name: {scheduler.name} judges trials as they go, but {spec.metric} comes at the end alone "
            "(evaluation.interval is null). Set evaluation.interval in run, or scheduler: {name: fifo}"
        )
    interval = getattr(scheduler, "interval", grace)
    if scheduler.name in PAUSING and base.checkpoint.interval > interval:
        raise SpecError(
            f"scheduler.name: {scheduler.name} goes on from checkpoints every {interval} steps, but "
            f"checkpoint.interval is {base.checkpoint.interval}. Set checkpoint.interval={interval} in run"
        )
    if scheduler.name in PAUSING and every is not None and every > interval:
        raise SpecError(
            f"scheduler.name: {scheduler.name} judges every {interval} steps, but {spec.metric} comes every {every}. "
            f"Set {key}={interval} in run"
        )


def _cadences(base: RunSpec) -> dict[str, tuple[str, int | None]]:
    """The key that says how often metrics of a prefix come, and its value; all others come at log_interval."""
    return {
        "eval/": ("evaluation.interval", base.evaluation.interval),
        "validation/": ("checkpoint.interval", base.checkpoint.interval),
    }


def tried(spec: SweepSpec) -> Iterator[Values]:
    """Values that stand for the whole space: all combinations of its corners if they are few, else random ones."""
    corners = list(itertools.islice(combinations(spec.space, Domain.corners), TRIED + 1))
    if len(corners) <= TRIED:
        yield from corners
    else:
        yield from (sample(spec.space, spec.seed, number) for number in range(TRIED))


def _check_key(base: RunSpec, key: str) -> None:
    node: Any = base
    parts = key.split(".")
    for depth, part in enumerate(parts):
        place = ".".join(parts[:depth]) or "the run"
        if isinstance(node, tuple | list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
            continue
        if not isinstance(node, BaseModel):
            if isinstance(node, dict):
                return  # a table by free names, such as data.normalization
            hint = "; set it in `run` first, to have something to vary" if node is None else ""
            raise SpecError(f"space: '{key}': {place} is {node!r} in the base run and has no keys{hint}")
        fields = type(node).model_fields
        if part not in fields:
            guess = nearest(part, fields)
            hint = f" Did you mean '{'.'.join([*parts[:depth], guess])}'?" if guess else ""
            raise SpecError(f"space: unknown key '{key}'.{hint} {place} has: {', '.join(fields)}")
        node = getattr(node, part)
