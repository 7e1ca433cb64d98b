"""What trials hold, and how many fit."""

import pytest

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import compose, validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.resources import Needs, check_fit, fit, in_one_process, needs_of


def sweep(**changes) -> SweepSpec:
    return validate(SweepSpec, {"run": ["x"], "space": {"seed": {"choice": [0]}}, **changes})


def test_a_trial_in_one_process_holds_what_the_sweep_says():
    run = compose(["experiment=sac_pendulum"])
    assert in_one_process(run)
    assert needs_of(sweep(resources={"cpu": 0.5, "gpu": 0.25}), run, 1.0).bundles == [{"CPU": 0.5, "GPU": 0.25}]


def test_a_trial_with_a_group_holds_its_workers_in_one_placement_group_and_no_cpu_of_its_ranks():
    run = compose(["experiment=sac_pendulum", "rollout.workers=3", "learner.ranks=2", "evaluation.workers=2"])
    needs = needs_of(sweep(), run, 0.0)
    assert needs.own == [{"CPU": 0.01}, *[{"CPU": 0.5}] * 3, *[{"CPU": 0.5}] * 2]
    assert needs.ranks == [{"CPU": 1.0}] * 2
    with_gpus = needs_of(sweep(), run, 4.0)
    assert with_gpus.ranks == [{"CPU": 1.0, "GPU": 1.0}] * 2
    assert {"GPU": 0.25} in with_gpus.own


@pytest.mark.parametrize(
    ("bundles", "nodes", "count"),
    [
        ([{"CPU": 1}], [{"CPU": 2}, {"CPU": 3}], 5),
        ([{"CPU": 2}], [{"CPU": 3}, {"CPU": 3}], 2),  # a bundle lies on one node
        ([{"CPU": 0.01}, {"CPU": 1}, {"CPU": 1}], [{"CPU": 2}], 0),
        ([{"CPU": 0.01}, {"CPU": 1}, {"CPU": 0.5}], [{"CPU": 4}], 2),
        ([{"GPU": 0.25, "CPU": 1}], [{"CPU": 16, "GPU": 1}], 4),
        ([{"GPU": 0.25, "CPU": 1}], [{"CPU": 16}], 0),
    ],
)
def test_as_many_trials_run_at_once_as_fit_with_all_of_their_bundles(bundles, nodes, count):
    assert fit(Needs(bundles), nodes, 9) == count
    assert fit(Needs(bundles), nodes, 1) == min(count, 1)


def test_what_the_cluster_can_never_hold_is_refused_with_what_it_has():
    with pytest.raises(SpecError, match=r"a trial asks for 2 GPU \(2 x 1 CPU, 1 GPU\), the cluster has 1"):
        check_fit(Needs([{"CPU": 1.0, "GPU": 1.0}] * 2), [{"CPU": 8.0, "GPU": 1.0, "memory": 1e9}])
    with pytest.raises(SpecError, match=r"asks for 4 CPU, which no nodes of the cluster hold: 2 CPU; 2 CPU"):
        check_fit(Needs([{"CPU": 4.0}]), [{"CPU": 2.0, "node:10.0.0.1": 1.0}, {"CPU": 2.0}])
    check_fit(Needs([{"CPU": 2.0}] * 2), [{"CPU": 2.0}, {"CPU": 2.0}])
