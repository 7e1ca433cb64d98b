"""Schedulers and stop rules, without Ray's processes."""

import random

import pytest

from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.schedule import Meter, StopRules, make_scheduler


def sweep(**changes) -> SweepSpec:
    space = {"algo.learning_rate": {"loguniform": [1e-4, 1e-2]}, "algo.tau": {"choice": [0.1, 0.2, 0.3]}}
    return validate(SweepSpec, {"run": "x", "space": space, "samples": 8, **changes})


def test_a_population_never_leaves_the_ranges_and_options_of_its_space(base):
    from ray.tune.schedulers.pbt import _explore

    random.seed(0)
    pbt = make_scheduler(sweep(scheduler={"name": "pbt", "interval": 10}), base)
    config = {"number": 0, "algo.learning_rate": 0.009, "algo.tau": 0.3}
    seen = []
    for _ in range(200):
        config, _ = _explore(config, pbt._hyperparam_mutations, 0.1, pbt._perturbation_factors, pbt._custom_explore_fn)
        seen.append((config["algo.learning_rate"], config["algo.tau"]))
    assert all(1e-4 <= rate <= 1e-2 for rate, _ in seen)
    assert {tau for _, tau in seen} == {0.1, 0.2, 0.3}
    assert len({rate for rate, _ in seen}) > 50


@pytest.mark.parametrize(
    ("mode", "values", "ends"), [("max", (0.2, 0.5), (False, True)), ("min", (0.2, 0.5), (True, False))]
)
def test_a_metric_that_is_reached_ends_a_trial_in_the_direction_of_the_mode(tmp_path, mode, values, ends):
    spec = sweep(mode=mode, stop={"reached": 0.5 if mode == "max" else 0.2})
    rules = StopRules(spec, Meter(tmp_path, spec))
    found = tuple(rules("t", {"step": 1, "eval/max_reward": value}) for value in values)
    assert found == ends
    assert not rules.stop_all()


def test_a_trial_that_stands_still_ends_and_so_does_a_sweep_whose_best_do(tmp_path):
    spec = sweep(stop={"plateau": {"reports": 3, "std": 0.01}})
    rules = StopRules(spec, Meter(tmp_path, spec))
    ended = [rules("t", {"step": i, "eval/max_reward": 0.2 * min(i, 3)}) for i in range(6)]
    assert ended == [False, False, False, False, False, True]  # three values alike, the first at step 3
    spec = sweep(stop={"sweep_plateau": {"reports": 2, "std": 0.01}})
    meter = Meter(tmp_path, spec)
    rules = StopRules(spec, meter)
    for i in range(20):
        rules("t", {"step": i, "eval/max_reward": 0.5})
    assert rules.stop_all()
    assert "sweep_plateau" in meter.ended


def test_hours_and_gpu_hours_add_up_over_sessions_until_they_are_spent(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlsvc.tune.schedule.time.monotonic", lambda: now[0])
    spec = sweep(budget={"hours": 2, "gpu_hours": 3})
    meter = Meter(tmp_path, spec)
    now[0] += 3600
    meter.tick(gpus=2.0)
    assert (meter.seconds, meter.gpu_seconds, meter.spent) == (3600, 7200, "")
    meter.save()
    now[0] += 99999  # nobody ran it meanwhile
    meter = Meter(tmp_path, spec)
    now[0] += 1800
    meter.tick(gpus=2.0)
    assert meter.spent == "budget.gpu_hours: 3"
    now[0] += 1800
    meter.tick(gpus=0.0)
    assert meter.spent == "budget.hours: 2"


@pytest.mark.parametrize("name", ["fifo", "asha", "hyperband", "median", "pbt", "pb2"])
def test_every_scheduler_is_ray_tunes_own_of_its_name(base, name):
    space = {"algo.learning_rate": {"loguniform": [1e-4, 1e-2]}}
    timed = {"grace": 10} if name in ("asha", "hyperband", "median") else {}
    made = make_scheduler(sweep(space=space, scheduler={"name": name, **timed}), base)
    assert type(made).__name__ == {
        "fifo": "FIFOScheduler", "asha": "AsyncHyperBandScheduler", "hyperband": "HyperBandScheduler",
        "median": "MedianStoppingRule", "pbt": "PopulationBasedTraining", "pb2": "PB2",
    }[name]  # fmt: skip
