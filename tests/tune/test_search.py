"""Searchers: what they suggest, what they learn from, what is left of it after a kill."""

import pytest

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import validate
from rlsvc.spec.space import DISTRIBUTIONS
from rlsvc.spec.sweep import SweepSpec, check_space
from rlsvc.tune.search import OptunaSearch, decode, encode, fixed_values, make_study, to_optuna
from rlsvc.tune.trial import Trial

KEY = "algo.learning_rate"


def sweep(**changes) -> SweepSpec:
    space = {KEY: {"loguniform": [1e-4, 0.9]}}
    spec = {"name": "s", "run": ["x"], "space": space, "samples": 30, "searcher": {"name": "tpe", "startup": 5}}
    return validate(SweepSpec, {**spec, **changes})


def finish(folder, number, values, score, status="finished", objectives=None):
    """The record of a trial that reported once."""
    from rlsvc.store.tracking import JsonlTracker

    Trial(number, values, status).save(folder)
    metrics = {"eval/max_reward": score, **(objectives or {})}
    JsonlTracker(folder / "trials" / f"{number:05d}.jsonl").log(10, metrics)


def run(search, folder, score, count, objectives=lambda values: None):
    """Runs `count` trials one after another; what was suggested."""
    suggested = []
    for i in range(count):
        found = search.suggest(f"t{i}")
        suggested.append(found)
        finish(folder, found["number"], found["values"], score(found["values"]), objectives=objectives(found["values"]))
        search.on_trial_complete(f"t{i}")
    return suggested


@pytest.mark.parametrize("name", ["tpe", "bayes"])
def test_a_searcher_that_learns_comes_nearer_to_the_best_than_chance(tmp_path, base, name):
    import math

    spec = sweep(searcher={"name": name, "startup": 5})
    suggested = run(OptunaSearch(tmp_path, spec, base, 1), tmp_path, lambda v: -abs(math.log(v[KEY] / 0.01)), 30)
    distances = [abs(math.log(each["values"][KEY] / 0.01)) for each in suggested]
    chance = (math.log(100) ** 2 + math.log(90) ** 2) / 2 / math.log(9000)  # the mean distance of a random draw
    assert sum(distances[10:]) / 20 < 0.65 * chance
    assert [each["number"] for each in suggested] == list(range(30))


def test_a_resumed_search_knows_all_that_was_found_and_suggests_what_had_begun_again(tmp_path, base):
    spec = sweep()
    suggested = run(OptunaSearch(tmp_path, spec, base, 1), tmp_path, lambda values: values[KEY], 8)
    finish(tmp_path, 8, {KEY: 0.5}, 0.0, status="running")
    finish(tmp_path, 9, {KEY: 0.6}, 0.0, status="failed")
    resumed = OptunaSearch(tmp_path, spec, base, 20)
    import optuna

    found = {trial.params[KEY]: trial.values for trial in resumed.study.trials}
    assert found == {each["values"][KEY]: [each["values"][KEY]] for each in suggested} | {0.6: None}
    assert resumed.study.trials[-1].state is optuna.trial.TrialState.FAIL
    again = [resumed.suggest(f"r{number}") for number in range(10)]
    assert again == [*suggested, {"number": 8, "values": {KEY: 0.5}}, {"number": 9, "values": {KEY: 0.6}}]
    fresh = resumed.suggest("r10")
    assert fresh["values"] not in [each["values"] for each in again]
    finish(tmp_path, 8, {KEY: 0.5}, 0.7)
    for number in range(9):
        resumed.on_trial_complete(f"r{number}")
    values = [trial.values for trial in resumed.study.trials if trial.state is optuna.trial.TrialState.COMPLETE]
    assert values[-1] == [0.7]
    assert len(values) == 9  # those that it knew are not told again


def test_no_more_are_suggested_than_may_run_and_the_last_one_ends_the_search(tmp_path, base):
    search = OptunaSearch(tmp_path, sweep(samples=3), base, 2)
    first, second = search.suggest("a"), search.suggest("b")
    assert search.suggest("c") is None
    finish(tmp_path, 0, first["values"], 0.1)
    search.on_trial_complete("a")
    assert search.suggest("c")["number"] == 2
    search.on_trial_complete("b", error=True)
    assert second["number"] == 1
    assert search.suggest("d") == search.FINISHED


def test_the_seeds_of_a_configuration_have_its_values_and_their_mean_is_told_once(tmp_path, base):
    search = OptunaSearch(tmp_path, sweep(seeds=2), base, 4)
    found = [search.suggest(name) for name in "abcd"]
    assert found[0]["values"] == found[1]["values"] != found[2]["values"]
    for number, score in ((0, 0.2), (1, 0.6)):
        finish(tmp_path, number, found[number]["values"], score)
        search.on_trial_complete("ab"[number])
    told = [trial.values for trial in search.study.trials if trial.values is not None]
    assert told == [[pytest.approx(0.4)]]


def test_several_objectives_are_told_together_and_the_front_is_theirs(tmp_path, base):
    spec = sweep(objectives={"train/loss": "min"}, searcher={"name": "tpe", "startup": 3})
    search = OptunaSearch(tmp_path, spec, base, 1)
    run(search, tmp_path, lambda v: v[KEY], 8, objectives=lambda values: {"train/loss": values[KEY] ** 2})
    assert [direction.name for direction in search.study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert all(trial.values[1] == pytest.approx(trial.values[0] ** 2) for trial in search.study.trials)
    assert len(search.study.best_trials) == 8  # each is better in one and worse in the other


def test_conditional_and_computed_keys_are_searched(tmp_path, base):
    space = {
        "policy.backbone": {"choice": [{"name": "unet1d", "down_dims": [16, 32]}, {"name": "transformer"}]},
        "policy.backbone.layers": {"randint": [2, 5], "when": {"policy.backbone.name": "transformer"}},
        "learner.updates_per_call": {"value": "${div:${algo.batch_size},4}"},
    }
    spec = sweep(space=space)
    check_space(spec, base)
    suggested = run(OptunaSearch(tmp_path, spec, base, 1), tmp_path, lambda values: float(len(values)), 12)
    for each in suggested:
        values = each["values"]
        assert ("policy.backbone.layers" in values) == (values["policy.backbone"]["name"] == "transformer")
        assert values["learner.updates_per_call"] == base.algo.batch_size // 4


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("uniform", [-1.0, 2.0]), ("quniform", [-1.0, 2.0, 0.5]), ("loguniform", [1e-5, 1e-1]),
        ("qloguniform", [1.0, 100.0, 0.5]), ("randn", [2.0, 3.0]), ("qrandn", [2.0, 3.0, 0.5]), ("randint", [-3, 9]),
        ("qrandint", [-20, 80, 5]), ("lograndint", [1, 200]), ("qlograndint", [5, 500, 5]),
        ("choice", ["a", [1, 2], {"b": None}, 1.5, True]),
    ],
)  # fmt: skip
def test_every_distribution_survives_the_way_to_optuna_and_back(name, arguments):
    import optuna

    domain = DISTRIBUTIONS[name].model_validate({name: arguments})
    values = [domain.at(i / 40) for i in range(41)]
    for value in values:
        back = decode(domain, encode(domain, value))
        assert back == (value if name != "randn" else pytest.approx(value, rel=1e-6))
        assert to_optuna(domain)._contains(to_optuna(domain).to_internal_repr(encode(domain, value)))
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = []
    for _ in range(30):
        parameter = study.ask({"x": to_optuna(domain)}).params["x"]
        drawn.append(decode(domain, parameter))
    if name != "choice":
        assert min(values) <= min(drawn) <= max(drawn) <= max(values)
    assert all(type(value) is type(values[0]) for value in drawn) or name == "choice"


def test_a_grid_has_every_combination_with_both_ends_of_each_range(base):
    space = {KEY: {"loguniform": [1e-4, 1e-2]}, "policy.target": {"choice": ["epsilon", "v"]}}
    spec = sweep(space=space, samples=1, searcher={"name": "grid", "points": 3})
    values = fixed_values(spec, base)
    assert spec.trials == 6
    assert [(round(values(n)[KEY], 9), values(n)["policy.target"]) for n in range(6)] == [
        (rate, target) for rate in (1e-4, 1e-3, 1e-2) for target in ("epsilon", "v")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": {KEY: {"grid": [0.1, 0.2]}}}, r"searcher\.name: got tpe, but 'algo\.learning_rate' is a grid"),
        ({"searcher": {"name": "grid"}}, r"samples: got 30, expected 1: searcher grid has 3 trials"),
        ({"objectives": {"eval/max_reward": "max"}}, r"objectives: 'eval/max_reward' is the metric already"),
        (
            {"objectives": {"x": "max"}, "scheduler": {"name": "asha"}},
            r"scheduler\.name: got asha, expected fifo with `objectives`",
        ),
        ({"seeds": 2, "space": {"seed": {"randint": [0, 9]}}}, r"seeds: the space has 'seed' already"),
        ({"scheduler": {"name": "pbt"}}, r"searcher\.name: got tpe, expected random: pbt changes values itself"),
        (
            {"scheduler": {"name": "pbt"}, "searcher": {"name": "random"}, "seeds": 2},
            r"seeds: got 2, expected 1: pbt changes the values",
        ),
        (
            {"scheduler": {"name": "pbt"}, "searcher": {"name": "random"}, "samples": 1},
            r"samples: got 1, expected 2 or more: pbt needs a population",
        ),
        (
            {
                "scheduler": {"name": "pb2"}, "searcher": {"name": "random"},
                "space": {"policy.horizon": {"randint": [8, 32]}},
            },
            r"'policy\.horizon': pb2 changes it while the run goes on, so it must be a float of `algo`",
        ),
        ({"searcher": {"name": "tpa"}}, r"searcher\.name.*'tpa'.*Did you mean 'tpe'"),
    ],
)  # fmt: skip
def test_a_search_that_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(SpecError, match=message):
        sweep(**changes)


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        ({"evaluation": {"interval": None}}, {"scheduler": {"name": "asha", "grace": 10}},
         r"asha judges trials as they go, but eval/max_reward comes at the end alone"),
        ({}, {"scheduler": {"name": "hyperband", "grace": 10}},
         r"hyperband goes on from checkpoints every 10 steps, but checkpoint\.interval is 1000"),
        ({"checkpoint": {"interval": 10}}, {"scheduler": {"name": "hyperband", "grace": 10}},
         r"hyperband judges every 10 steps, but eval/max_reward comes every 1000"),
        ({}, {"scheduler": {"name": "hyperband", "grace": 10}, "concurrency": 2},
         r"concurrency: got 2 with scheduler hyperband"),
        ({"env": None}, {"objectives": {"eval/success": "max"}, "metric": "train/loss"},
         r"metric 'eval/success': the run has no env"),
    ],
)  # fmt: skip
def test_a_scheduler_that_needs_what_the_run_does_not_give_is_refused_before_the_first_trial(
    base, run, changes, message
):
    with pytest.raises(SpecError, match=message):
        check_space(sweep(**{"searcher": {"name": "random"}, **changes}), base.replace(**run))


def test_a_study_draws_otherwise_after_it_was_rebuilt(tmp_path, base):
    first = run(OptunaSearch(tmp_path, sweep(), base, 1), tmp_path, lambda values: 1.0, 2)
    fresh = OptunaSearch(tmp_path, sweep(), base, 9)
    again = [fresh.suggest(f"r{i}")["values"] for i in range(3)]
    assert again[:2] == [each["values"] for each in first]
    assert again[2] not in again[:2]
    assert len(make_study(sweep()).trials) == 0
