"""SweepSpec: a search space over the RunSpec, and how it is searched (rlsvc/tune)."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from rlsvc.core.errors import SpecError, nearest
from rlsvc.spec.base import Spec
from rlsvc.spec.compose import validate
from rlsvc.spec.run import NAME, RunSpec


class Uniform(Spec):
    """A float in [low, high)."""

    uniform: tuple[float, float]
    """Low and high, the high one excluded."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_range(*self.uniform)
        return self

    def sample(self, rng: random.Random) -> float:
        """One value."""
        return rng.uniform(*self.uniform)

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return self.uniform


class LogUniform(Spec):
    """A float in [low, high) whose logarithm is uniform."""

    loguniform: tuple[float, float]
    """Low and high, the high one excluded."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_range(*self.loguniform)
        if self.loguniform[0] <= 0:
            raise ValueError("expected low > 0")
        return self

    def sample(self, rng: random.Random) -> float:
        """One value."""
        return math.exp(rng.uniform(*map(math.log, self.loguniform)))

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return self.loguniform


class RandInt(Spec):
    """An integer in [low, high), as in numpy and Ray Tune."""

    randint: tuple[int, int]
    """Low and high, the high one excluded."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_range(*self.randint)
        return self

    def sample(self, rng: random.Random) -> int:
        """One value."""
        return rng.randrange(*self.randint)

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return (self.randint[0], self.randint[1] - 1)


class Choice(Spec):
    """One of these values, each as likely; a value may be a whole section (`{name: transformer, layers: 4}`)."""

    choice: tuple[Any, ...] = Field(min_length=1)
    """The values."""

    def sample(self, rng: random.Random) -> Any:
        """One value."""
        return rng.choice(self.choice)

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return self.choice


class Grid(Spec):
    """Every one of these values: `samples` counts runs through the whole grid."""

    grid: tuple[Any, ...] = Field(min_length=1)
    """The values."""

    def sample(self, rng: random.Random) -> Any:
        """One value."""
        return rng.choice(self.grid)

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return self.grid


DISTRIBUTIONS = {"uniform": Uniform, "loguniform": LogUniform, "randint": RandInt, "choice": Choice, "grid": Grid}


def _check_range(low: float, high: float) -> None:
    if not low < high:
        raise ValueError("expected [low, high] with low < high")


def _distribution(value: Any) -> Any:
    if isinstance(value, Spec):
        return value
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(
            f"got {value!r}, expected one distribution such as {{uniform: [0, 1]}}. "
            f"There are: {', '.join(DISTRIBUTIONS)}"
        )
    (name,) = value
    if name not in DISTRIBUTIONS:
        guess = nearest(str(name), DISTRIBUTIONS)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise ValueError(f"unknown distribution '{name}'.{hint} There are: {', '.join(DISTRIBUTIONS)}")
    try:
        return DISTRIBUTIONS[name].model_validate(value)
    except ValidationError as error:
        faults = (fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False))
        raise ValueError(f"{name}: got {value[name]!r}: {'; '.join(faults)}") from error


Distribution = Annotated[Uniform | LogUniform | RandInt | Choice | Grid, BeforeValidator(_distribution)]


class AshaSpec(Spec):
    """Asynchronous successive halving (arXiv:1810.05934): the worse trials stop early. Time is gradient updates."""

    name: Literal["asha"] = "asha"
    grace: int = Field(default=1000, ge=1)
    """Updates that every trial gets."""
    reduction: float = Field(default=4, gt=1)
    """Of the trials that reach a rung, one in `reduction` goes on."""
    max_t: int | None = Field(default=None, ge=1)
    """Updates after which a trial stops in any case; null means the run's total_steps."""


class FifoSpec(Spec):
    """Every trial runs to its end."""

    name: Literal["fifo"] = "fifo"


class ResourcesSpec(Spec):
    """What one trial holds."""

    cpu: float = Field(default=1.0, gt=0)
    """Of one trial."""
    gpu: float = Field(default=0.0, ge=0)
    """A fraction lets several trials share one GPU."""


class SweepSpec(Spec):
    """A sweep: trials of one run specification that differ in the keys of `space`."""

    name: str = Field(default="sweep", pattern=NAME)
    """The sweep lies in `<root>/sweeps/<name>/`, root being the run's."""
    run: tuple[str, ...] = Field(min_length=1)
    """What `rlsvc train` would take: `experiment=...` or a file, then overrides."""
    space: dict[str, Distribution] = Field(min_length=1)
    """Distributions by the dotted key of the RunSpec."""
    samples: int = Field(default=1, ge=1)
    """Trials, or with a grid runs through the whole grid."""
    metric: str = "eval/max_reward"
    """What is judged: its best value in the course of a trial."""
    mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower metric is better."""
    scheduler: Annotated[AshaSpec | FifoSpec, Field(discriminator="name")] = FifoSpec()
    """Whether weak trials are ended early."""
    concurrency: int = Field(default=1, ge=1)
    """Trials that run at the same time, if the cluster has room for them."""
    resources: ResourcesSpec = ResourcesSpec()
    """What one trial holds; see below."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the search; the runs' own seed is `seed` in `run`, or a key of the space."""

    @property
    def trials(self) -> int:
        """How many trials the sweep has."""
        grids = (len(each.grid) for each in self.space.values() if isinstance(each, Grid))
        return self.samples * math.prod(grids)

    def better(self, a: float, b: float) -> bool:
        """Whether the metric value `a` is better than `b`."""
        return a > b if self.mode == "max" else a < b


def set_keys(base: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """A validated copy of `base` with these dotted keys set.

    Raises:
        SpecError: a key is not in the schema (the message has the nearest one), or the values do not fit together.
    """
    tree = base.model_dump(mode="json")
    for key, value in values.items():
        _check_key(base, key)
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[last] = value
    try:
        return validate(RunSpec, tree)
    except SpecError as error:
        shown = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        raise SpecError(f"space: with {shown}: {error}") from error


def check_space(spec: SweepSpec, base: RunSpec) -> None:
    """Tries the space against the run's schema before anything runs.

    The bounds or options of every key are tried one by one, then all combinations of a small space, or 200 random ones.

    Raises:
        SpecError: a key or value that the RunSpec refuses, or a metric or scheduler that the run cannot serve.
    """
    for key, distribution in spec.space.items():
        _check_key(base, key)
        overlap = next((other for other in spec.space if other.startswith(f"{key}.")), None)
        if overlap:
            raise SpecError(f"space: '{key}' and '{overlap}' set the same section; leave one of them out")
        if not isinstance(distribution, Choice | Grid):
            for value in distribution.corners():
                set_keys(base, {key: value})
    for values in _combinations(spec):
        set_keys(base, values)
    if spec.metric.startswith("eval/") and base.env is None:
        raise SpecError(
            f"metric '{spec.metric}': the run has no env, so it is never evaluated. Set env in run, or another metric"
        )
    if isinstance(spec.scheduler, AshaSpec) and (limit := spec.scheduler.max_t or base.length) < spec.scheduler.grace:
        raise SpecError(f"scheduler.grace: got {spec.scheduler.grace}, at most max_t = {limit} updates")


def _combinations(spec: SweepSpec) -> Iterator[dict[str, Any]]:
    corners = [distribution.corners() for distribution in spec.space.values()]
    if math.prod(map(len, corners)) <= 200:
        yield from (dict(zip(spec.space, values, strict=True)) for values in itertools.product(*corners))
    else:
        rng = random.Random(spec.seed)
        for _ in range(200):
            yield {key: distribution.sample(rng) for key, distribution in spec.space.items()}


def _check_key(base: RunSpec, key: str) -> None:
    node: Any = base
    parts = key.split(".")
    for depth, part in enumerate(parts):
        place = ".".join(parts[:depth]) or "the run"
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
