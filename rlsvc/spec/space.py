"""Search spaces: what a sweep varies, in YAML (`space:` of a SweepSpec).

Every distribution of Ray Tune under its own name and with its own arguments; `when` makes a key conditional, `value`
computes one from others. A name that begins with `_` is a variable of the space alone, which `value` may use.

    algo.learning_rate: {loguniform: [1e-5, 1e-3]}
    policy.backbone: {choice: [{name: unet1d}, {name: transformer}]}
    policy.backbone.layers: {randint: [4, 9], when: {policy.backbone.name: transformer}}
    _warmup: {uniform: [0.0, 0.1]}
    algo.schedule.warmup_steps: {value: "${int:${mul:${_warmup},${total_steps}}}"}

A distribution is drawn from by its quantile function, which every searcher shares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rlsvc.core.errors import nearest
from rlsvc.spec.base import Spec

TAIL = 1e-5
"""Of a normal distribution, at either end, that is left out: values lie within 4.26 standard deviations."""


class Domain(Spec):
    """What one key may be."""

    when: dict[str, Any] = Field(default={})
    """Keys above this one in the space, or parts of what they chose, and the value (or a list of values) that each must
    have; otherwise the key keeps the base run's value. All of them must hold."""

    def at(self, u: float) -> Any:
        """The value at the quantile u in [0, 1]."""
        raise NotImplementedError

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return (self.at(0.0), self.at(1.0))

    def points(self, count: int) -> tuple[Any, ...]:
        """At most `count` values, evenly over the quantiles, both ends included."""
        return tuple(dict.fromkeys(self.at(i / max(count - 1, 1)) for i in range(count)))


class Range(Domain):
    """A number between two others."""

    LOG: ClassVar[bool] = False
    INTEGER: ClassVar[bool] = False

    @property
    def bounds(self) -> tuple[Any, Any, Any]:
        """Low, high and the step, None for one without."""
        numbers = getattr(self, type(self).__name__.lower())
        return numbers if len(numbers) == 3 else (*numbers, None)

    @property
    def last(self) -> float:
        """The largest value; the high end, or for integers without a step the one below it."""
        _, high, step = self.bounds
        return high - 1 if self.INTEGER and step is None else high

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high, step = self.bounds
        if not low < high:
            raise ValueError("expected [low, high] with low < high")
        if self.LOG and low <= 0:
            raise ValueError("expected low > 0")
        if step is not None:
            if step <= 0:
                raise ValueError("expected a step above 0")
            if any(abs(end / step - round(end / step)) > 1e-6 for end in (low, high)):
                raise ValueError(f"expected low and high to be multiples of the step {step:g}")
        return self

    def at(self, u: float) -> float | int:
        """The value at the quantile u in [0, 1]."""
        low, high, step = self.bounds
        if self.INTEGER and step is not None:  # the multiples are what is drawn, as in Ray Tune
            first, last = round(low / step), round(high / step)
            return min(math.floor(self._between(first, last + 1, u) + 1e-9), last) * step
        x = self._between(low, high, u)
        if self.INTEGER:
            return int(min(math.floor(x + 1e-9), self.last))
        return float(min(max(x if step is None else float(f"{round(x / step) * step:.12g}"), low), high))

    def _between(self, low: float, high: float, u: float) -> float:
        return math.exp(math.log(low) + u * math.log(high / low)) if self.LOG else low + u * (high - low)


class Uniform(Range):
    """A float in [low, high)."""

    uniform: tuple[float, float]
    """Low and high."""


class QUniform(Range):
    """A float in [low, high] that is a multiple of the step."""

    quniform: tuple[float, float, float]
    """Low, high and the step, of which both are multiples."""


class LogUniform(Range):
    """A float in [low, high) whose logarithm is uniform."""

    LOG = True
    loguniform: tuple[float, float]
    """Low, above 0, and high."""


class QLogUniform(Range):
    """A float in [low, high] whose logarithm is uniform, rounded to a multiple of the step."""

    LOG = True
    qloguniform: tuple[float, float, float]
    """Low, above 0, high and the step, of which both are multiples."""


class RandInt(Range):
    """An integer in [low, high), as in numpy and Ray Tune."""

    INTEGER = True
    randint: tuple[int, int]
    """Low and high, the high one excluded."""


class QRandInt(Range):
    """An integer in [low, high] that is a multiple of the step."""

    INTEGER = True
    qrandint: tuple[int, int, int]
    """Low, high, which is included, and the step, of which both are multiples."""


class LogRandInt(Range):
    """An integer in [low, high) whose logarithm is uniform."""

    LOG = True
    INTEGER = True
    lograndint: tuple[int, int]
    """Low, above 0, and high, which is excluded."""


class QLogRandInt(Range):
    """An integer in [low, high] whose logarithm is uniform, rounded to a multiple of the step."""

    LOG = True
    INTEGER = True
    qlograndint: tuple[int, int, int]
    """Low, above 0, high, which is included, and the step, of which both are multiples."""


class Normal(Domain):
    """A number around a mean."""

    @property
    def bounds(self) -> tuple[float, float, float | None]:
        """Mean, standard deviation and the step, None for one without."""
        numbers = getattr(self, type(self).__name__.lower())
        return numbers if len(numbers) == 3 else (*numbers, None)

    @model_validator(mode="after")
    def _spread(self) -> Self:
        _, deviation, step = self.bounds
        if deviation <= 0:
            raise ValueError("expected [mean, standard deviation] with a standard deviation above 0")
        if step is not None and step <= 0:
            raise ValueError("expected a step above 0")
        return self

    def at(self, u: float) -> float:
        """The value at the quantile u in [0, 1]."""
        mean, deviation, step = self.bounds
        x = NormalDist(mean, deviation).inv_cdf(min(max(u, TAIL), 1 - TAIL))
        return x if step is None else float(f"{round(x / step) * step:.12g}")


class RandN(Normal):
    """A normally distributed float, within 4.26 standard deviations of the mean."""

    randn: tuple[float, float]
    """Mean and standard deviation."""


class QRandN(Normal):
    """A normally distributed float, rounded to a multiple of the step."""

    qrandn: tuple[float, float, float]
    """Mean, standard deviation and step."""


class Options(Domain):
    """One of several values."""

    @property
    def options(self) -> tuple[Any, ...]:
        """The values."""
        return getattr(self, type(self).__name__.lower())

    def at(self, u: float) -> Any:
        """The value at the quantile u in [0, 1]."""
        return self.options[min(int(u * len(self.options)), len(self.options) - 1)]

    def corners(self) -> tuple[Any, ...]:
        """Values that must fit the RunSpec if all are to fit."""
        return self.options

    def points(self, count: int) -> tuple[Any, ...]:
        """All of them."""
        return self.options


class Choice(Options):
    """One of these values, each as likely; a value may be a whole section (`{name: transformer, layers: 4}`)."""

    choice: tuple[Any, ...] = Field(min_length=1)
    """The values."""


class Grid(Options):
    """Every one of these values: `samples` counts runs through the whole grid."""

    grid: tuple[Any, ...] = Field(min_length=1)
    """The values."""


class Value(Domain):
    """Computed from other keys, of the space or of the run, for each trial."""

    value: str
    """An expression as in a run's YAML: `${mul:${algo.batch_size},2}`, with add, sub, mul, div, max, min, pow, int."""

    def corners(self) -> tuple[Any, ...]:
        """None: it follows from the others."""
        return ()


_KINDS = (
    Uniform, QUniform, LogUniform, QLogUniform, RandN, QRandN, RandInt, QRandInt, LogRandInt, QLogRandInt, Choice, Grid,
    Value,
)  # fmt: skip
DISTRIBUTIONS: dict[str, type[Domain]] = {kind.__name__.lower(): kind for kind in _KINDS}


def _distribution(value: Any) -> Any:
    if isinstance(value, Spec):
        return value
    names = [name for name in value if name != "when"] if isinstance(value, Mapping) else []
    if len(names) != 1:
        raise ValueError(
            f"got {value!r}, expected one distribution such as {{uniform: [0, 1]}}. "
            f"There are: {', '.join(DISTRIBUTIONS)}"
        )
    (name,) = names
    if name not in DISTRIBUTIONS:
        guess = nearest(str(name), DISTRIBUTIONS)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise ValueError(f"unknown distribution '{name}'.{hint} There are: {', '.join(DISTRIBUTIONS)}")
    try:
        return DISTRIBUTIONS[name].model_validate(value)
    except ValidationError as error:
        faults = (fault["msg"].removeprefix("Value error, ") for fault in error.errors(include_url=False))
        raise ValueError(f"{name}: got {value[name]!r}: {'; '.join(faults)}") from error


Distribution = Annotated[
    Uniform | QUniform | LogUniform | QLogUniform | RandN | QRandN | RandInt | QRandInt | LogRandInt | QLogRandInt
    | Choice | Grid | Value,
    BeforeValidator(_distribution),
]  # fmt: skip
Space = Mapping[str, Distribution]
Values = dict[str, Any]


def active(domain: Domain, values: Mapping[str, Any]) -> bool:
    """Whether the conditions of a key hold, given the values of those above it."""
    return all(_matches(_look_up(values, key), wanted) for key, wanted in domain.when.items())


def draw(space: Space, choose: Callable[[str, Distribution], Any]) -> Values:
    """Values of the keys whose conditions hold, in the order of the space; computed ones are still to come."""
    values: Values = {}
    for key, domain in space.items():
        if not isinstance(domain, Value) and active(domain, values):
            values[key] = choose(key, domain)
    return values


def sample(space: Space, seed: int, number: int) -> Values:
    """The values of trial `number` in a random search: a function of seed and number, so that it can be asked again.

    Trials run through the product of all `grid` keys, the last one fastest.
    """
    rng = random.Random(f"{seed}/{number}")
    at = {key: rng.random() for key in space}
    rest = number
    for key in reversed([key for key, domain in space.items() if isinstance(domain, Grid)]):
        options = space[key].corners()
        at[key] = (rest % len(options) + 0.5) / len(options)
        rest //= len(options)
    return draw(space, lambda key, domain: domain.at(at[key]))


def combinations(space: Space, options: Callable[[Distribution], Sequence[Any]]) -> Iterator[Values]:
    """Every combination of the options of each key, those whose conditions do not hold left out."""
    keys = [key for key, domain in space.items() if not isinstance(domain, Value)]

    def go_on(values: Values, depth: int) -> Iterator[Values]:
        if depth == len(keys):
            yield dict(values)
            return
        key = keys[depth]
        if not active(space[key], values):
            yield from go_on(values, depth + 1)
            return
        for option in options(space[key]):
            yield from go_on({**values, key: option}, depth + 1)

    return go_on({}, 0)


def check_conditions(space: Space) -> None:
    """Conditions refer to keys above, and to nothing that is computed.

    Raises:
        ValueError: names the key, its condition and what there is.
    """
    above: list[str] = []
    for key, domain in space.items():
        for wanted in domain.when:
            if not any(wanted == other or wanted.startswith(f"{other}.") for other in above):
                guess = nearest(wanted, above)
                hint = f" Did you mean '{guess}'?" if guess else ""
                raise ValueError(
                    f"'{key}': when: '{wanted}' is no key above it in the space.{hint} "
                    f"There are: {', '.join(above) or 'none'}"
                )
        if not isinstance(domain, Value):
            above.append(key)


def _matches(got: Any, wanted: Any) -> bool:
    return got == wanted or (isinstance(wanted, list | tuple) and got in wanted)


def _look_up(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key, or a part of the section that was chosen; None where there is none."""
    if key in values:
        return values[key]
    for other in sorted(values, key=len, reverse=True):
        if key.startswith(f"{other}."):
            node = values[other]
            for part in key[len(other) + 1 :].split("."):
                node = node.get(part) if isinstance(node, Mapping) else None
            return node
    return None
