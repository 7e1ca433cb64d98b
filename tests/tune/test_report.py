"""The report of a sweep: order, best trial, files."""

import csv

from rlsvc.spec.compose import compose, validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.report import best_trial, draw, write_report
from rlsvc.tune.trial import Trial


def sweep(**changes) -> SweepSpec:
    space = {"algo.learning_rate": {"loguniform": [1e-4, 0.9]}, "policy.target": {"choice": ["epsilon", "v"]}}
    return validate(SweepSpec, {"name": "s", "run": ["x"], "space": space, "samples": 4, **changes})


def trials() -> list[Trial]:
    def values(rate, target):
        return {"algo.learning_rate": rate, "policy.target": target}

    return [
        Trial(0, values(1e-3, "v"), "finished", history=[(10, 0.2), (20, 0.6), (30, 0.5)]),
        Trial(1, values(1e-2, "epsilon"), "stopped", history=[(10, 0.3)]),
        Trial(2, values(1e-1, "epsilon"), "failed", "eval/max_reward is nan at step 20", history=[(10, 0.9)]),
        Trial(3, values(2e-1, "v"), "failed", "MemoryError"),
    ]


def test_the_best_trial_has_the_best_value_of_its_course_and_a_failed_one_does_not_count():
    assert best_trial(sweep(), trials()).number == 0
    assert best_trial(sweep(mode="min"), trials()).number == 0  # 0.2 at step 10
    assert best_trial(sweep(), trials()[2:]) is None


def test_a_report_has_table_plot_best_run_and_best_bundle(tmp_path, base):
    all_trials = trials()
    bundle = tmp_path / "demo" / "trial_00000" / "bundles" / "20"
    bundle.mkdir(parents=True)
    (bundle / "bundle.json").write_text("{}")
    all_trials[0].bundle = str(bundle)
    report = write_report(tmp_path, sweep(), base, all_trials)
    with report.table.open() as file:
        table = list(csv.DictReader(file))
    assert [row["trial"] for row in table] == ["2", "0", "1", "3"]
    assert table[1] == {
        "trial": "0", "status": "finished", "eval/max_reward": "0.6", "best_step": "20", "steps": "30",
        "algo.learning_rate": "0.001", "policy.target": "v", "reason": "",
    }  # fmt: skip
    assert table[0]["reason"] == "eval/max_reward is nan at step 20"
    assert report.plot.read_bytes().startswith(b"\x89PNG")
    assert (report.best_bundle / "bundle.json").samefile(bundle / "bundle.json")
    assert report.complete


def test_every_option_has_its_place_in_the_plot_whatever_its_type(tmp_path):
    options = [[16, 32], {"name": "transformer", "layers": 2}, None, True, "v", 3]
    spec = sweep(space={"policy.backbone": {"choice": options}}, samples=6)
    judged = [Trial(number, {"policy.backbone": option}, "finished", history=[(1, 0.1 * number)])
              for number, option in enumerate(options)]  # fmt: skip
    draw(tmp_path / "plot.png", spec, judged, judged[5])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_best_yaml_is_a_run_that_composes_as_it_is(tmp_path, base):
    report = write_report(tmp_path, sweep(), base, trials())
    run = compose([str(report.best_yaml)])
    assert run == base.replace(
        name="s-best",
        algo={**base.algo.model_dump(), "learning_rate": 1e-3},
        policy={**base.policy.model_dump(), "target": "v"},
    )


def test_the_bundle_of_a_trial_that_was_stopped_is_the_one_nearest_to_its_best_step(tmp_path, base):
    for step in (5, 10, 30):
        (tmp_path / "demo" / "trial_00001" / "bundles" / str(step)).mkdir(parents=True)
    (tmp_path / "demo" / "trial_00001" / "bundles" / "10" / "here").touch()
    report = write_report(tmp_path, sweep(), base, [trials()[1]])
    assert (report.best_bundle / "here").exists()
    assert not report.complete


def test_a_sweep_without_a_judged_trial_still_has_a_table_and_a_plot(tmp_path, base):
    report = write_report(tmp_path, sweep(), base, [trials()[3]])
    assert (report.best, report.best_yaml, report.best_bundle) == (None, None, None)
    assert "MemoryError" in report.table.read_text()
    assert report.plot.exists()
