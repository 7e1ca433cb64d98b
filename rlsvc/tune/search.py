"""Which configuration is tried next.

Random and grid searches are functions of the trial's number. Optuna's samplers learn: their history is rebuilt from the
trials' records, which outlive everything, so that a resumed sweep goes on with all that was found.
"""

from __future__ import annotations

import importlib
import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from rlsvc.core.errors import UserError
from rlsvc.spec.run import RunSpec
from rlsvc.spec.space import (
    TAIL,
    Distribution,
    Normal,
    Options,
    Range,
    Space,
    Value,
    Values,
    combinations,
    draw,
    sample,
)
from rlsvc.spec.sweep import BayesSpec, GridSpec, SweepSpec, complete
from rlsvc.tune.judge import Configuration, configurations
from rlsvc.tune.trial import load_trials

if TYPE_CHECKING:
    import optuna


def fixed_values(spec: SweepSpec, base: RunSpec) -> Callable[[int], Values]:
    """The values of a configuration by its number, for a search that does not learn."""
    if isinstance(spec.searcher, GridSpec):
        points = spec.searcher.points
        table = list(combinations(spec.space, lambda domain: domain.points(points)))
        return lambda number: complete(spec, base, table[number])
    return lambda number: complete(spec, base, sample(spec.space, spec.seed, number))


def to_optuna(domain: Distribution) -> optuna.distributions.BaseDistribution:
    """A distribution as Optuna has it: quantiles for a normal one, JSON texts for options.

    A logarithmic range with a step is searched without it, and rounded afterwards.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(domain, Options):
        return CategoricalDistribution([json.dumps(option) for option in domain.options])
    if isinstance(domain, Normal):
        return FloatDistribution(TAIL, 1 - TAIL)
    assert isinstance(domain, Range)
    low, _, step = domain.bounds
    if domain.INTEGER:
        return IntDistribution(low, int(domain.last), log=domain.LOG, step=1 if domain.LOG or step is None else step)
    return FloatDistribution(low, domain.last, log=domain.LOG, step=None if domain.LOG else step)


def encode(domain: Distribution, value: Any) -> Any:
    """A value as Optuna's parameter."""
    if isinstance(domain, Options):
        return json.dumps(value)
    if isinstance(domain, Normal):
        mean, deviation, _ = domain.bounds
        return min(max(NormalDist(mean, deviation).cdf(value), TAIL), 1 - TAIL)
    return value


def decode(domain: Distribution, parameter: Any) -> Any:
    """Optuna's parameter as a value."""
    if isinstance(domain, Options):
        return next(option for option in domain.options if json.dumps(option) == parameter)
    if isinstance(domain, Normal):
        return domain.at(parameter)
    assert isinstance(domain, Range)
    _, _, step = domain.bounds
    if step is None:
        return parameter
    rounded = round(parameter / step) * step
    return int(rounded) if domain.INTEGER else float(f"{rounded:.12g}")


def make_study(spec: SweepSpec, known: Sequence[Configuration] = ()) -> optuna.Study:
    """A study in memory with what is known: judged configurations, and failed ones.

    Raises:
        UserError: Optuna, or what its Gaussian process needs, is not installed.
    """
    try:
        import optuna

        for package in ("scipy", "torch") if isinstance(spec.searcher, BayesSpec) else ():
            importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"searcher {spec.searcher.name} needs {error.name}, which is not installed: pip install 'rlsvc[all]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        seed = spec.seed + len(known)  # a resumed search does not draw again what it drew first
        if isinstance(spec.searcher, BayesSpec):
            sampler: optuna.samplers.BaseSampler = optuna.samplers.GPSampler(
                seed=seed, n_startup_trials=spec.searcher.startup
            )
        else:
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=getattr(spec.searcher, "startup", 10), constant_liar=True
            )
        to = optuna.study.StudyDirection
        directions = [to.MAXIMIZE if mode == "max" else to.MINIMIZE for mode in spec.goals.values()]
        study = optuna.create_study(directions=directions, sampler=sampler)
    for each in known:
        study.add_trial(frozen(spec.space, each))
    return study


def frozen(space: Space, known: Configuration) -> optuna.trial.FrozenTrial:
    """A configuration that is over, as a trial of a study."""
    import optuna

    searched = {key: domain for key, domain in space.items() if not isinstance(domain, Value) and key in known.values}
    return optuna.trial.create_trial(
        params={key: encode(domain, known.values[key]) for key, domain in searched.items()},
        distributions={key: to_optuna(domain) for key, domain in searched.items()},
        values=None if known.scores is None else list(known.scores.values()),
        state=optuna.trial.TrialState.FAIL if known.scores is None else optuna.trial.TrialState.COMPLETE,
    )


class OptunaSearch(Searcher):
    """Ray Tune's searcher over an Optuna study.

    Each suggestion is {"number", "values"}. A configuration whose record is there, begun before the sweep was resumed,
    is suggested again with its values. At most `concurrency` trials are under way.
    """

    def __init__(self, folder: Path, spec: SweepSpec, base: RunSpec, concurrency: int) -> None:
        super().__init__()
        self._folder, self._spec, self._base, self._concurrency = folder, spec, base, concurrency
        trials = load_trials(folder, spec.metric)
        self._recorded = {trial.number // spec.seeds: trial.values for trial in trials}
        known = [each for each in configurations(spec, trials) if each.over]
        self._told = {each.number for each in known}
        self._study = make_study(spec, known)
        self._asked: dict[int, Any] = {}
        self._numbers = itertools.count()
        self._live: dict[str, int] = {}
        self._left: dict[int, int] = {}
        self._values: Values = {}

    @property
    def study(self) -> optuna.Study:
        """What was found."""
        return self._study

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial; None while as many as may be are under way."""
        if len(self._live) >= self._concurrency:
            return None
        number = next(self._numbers)
        if number >= self._spec.trials:
            return Searcher.FINISHED  # pyright: ignore[reportReturnType]
        configuration, seed = divmod(number, self._spec.seeds)
        if seed == 0:
            self._values = self._recorded.get(configuration) or self._ask(configuration)
        self._live[trial_id] = configuration
        self._left.setdefault(configuration, self._spec.seeds)
        return {"number": number, "values": self._values}

    def _ask(self, configuration: int) -> Values:
        asked = self._study.ask()
        self._asked[configuration] = asked

        def choose(key: str, domain: Distribution) -> Any:
            import optuna

            match to_optuna(domain):
                case optuna.distributions.CategoricalDistribution(choices=choices):
                    found: Any = asked.suggest_categorical(key, choices)
                case optuna.distributions.IntDistribution() as ints:
                    found = asked.suggest_int(key, ints.low, ints.high, step=ints.step, log=ints.log)
                case optuna.distributions.FloatDistribution() as floats:
                    found = asked.suggest_float(key, floats.low, floats.high, step=floats.step, log=floats.log)
                case other:
                    raise AssertionError(f"{key}: {other}")
            return decode(domain, found)

        return complete(self._spec, self._base, draw(self._spec.space, choose))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells the study of a configuration all of whose seeds are over, by their records."""
        import optuna

        number = self._live.pop(trial_id, None)
        if number is None:
            return
        self._left[number] -= 1
        if self._left[number] or number in self._told:
            return
        trials = load_trials(
            self._folder, self._spec.metric, of=range(number * self._spec.seeds, (number + 1) * self._spec.seeds)
        )
        (known,) = configurations(self._spec, trials) or [None]
        if known is None:
            return
        self._told.add(number)
        asked = self._asked.pop(number, None)
        if asked is None:
            self._study.add_trial(frozen(self._spec.space, known))
        elif known.scores is None:
            self._study.tell(asked, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(asked, list(known.scores.values()))

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' records are the search's history."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: it was rebuilt from the trials' records."""
