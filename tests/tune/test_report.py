"""The report of a sweep: order, best trial, files."""

import csv

from rlsvc.spec.compose import compose, validate
from rlsvc.spec.sweep import SweepSpec
from rlsvc.tune.judge import best_configuration, best_trial, configurations, pareto_front
from rlsvc.tune.plots import draw_slices, importance
from rlsvc.tune.report import write_report
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
    assert [row["configuration"] for row in table] == ["0", "1", "2", "3"]
    assert table[0] == {
        "configuration": "0", "trials": "0", "status": "finished", "eval/max_reward": "0.6", "std": "",
        "best_step": "20", "steps": "30", "pareto": "", "algo.learning_rate": "0.001", "policy.target": "v",
        "reason": "",
    }  # fmt: skip
    assert table[2]["reason"] == "eval/max_reward is nan at step 20"
    page = report.page.read_text()
    for plot in report.plots:
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert f'src="{plot.name}"' in page
    assert {plot.stem for plot in report.plots} == {"curves", "slices", "parallel"}
    assert "trial_00002: eval/max_reward is nan at step 20" in page
    assert "Too few configurations" in page  # for their importance
    assert (report.best_bundle / "bundle.json").samefile(bundle / "bundle.json")
    assert report.complete


def test_every_option_has_its_place_in_the_plot_whatever_its_type(tmp_path):
    options = [[16, 32], {"name": "transformer", "layers": 2}, None, True, "v", 3]
    spec = sweep(space={"policy.backbone": {"choice": options}}, samples=6)
    judged = configurations(spec, [
        Trial(number, {"policy.backbone": option}, "finished", history=[(1, 0.1 * number)])
        for number, option in enumerate(options)
    ])  # fmt: skip
    draw_slices(tmp_path / "plot.png", spec, judged, judged[5])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_seeds_are_judged_by_their_mean_at_the_steps_that_all_of_them_reported():
    spec = sweep(seeds=2, samples=2)
    values = {"algo.learning_rate": 1e-3, "policy.target": "v"}
    all_trials = [
        Trial(0, values, "finished", history=[(10, 0.2), (20, 0.9)]),
        Trial(1, values, "finished", history=[(10, 0.4), (20, 0.1), (30, 1.0)]),
        Trial(2, values, "finished", history=[(10, 0.6), (20, 0.3)]),
        Trial(3, values, "finished", history=[(10, 0.5), (20, 0.2)]),
    ]
    found = configurations(spec, all_trials)
    assert [(step, round(mean, 6)) for step, mean, _ in found[0].curve] == [(10, 0.3), (20, 0.5)]
    assert round(found[0].curve[0][2], 6) == 0.141421
    assert best_configuration(spec, found).number == 1
    assert (found[1].step, round(found[1].scores["eval/max_reward"], 6)) == (10, 0.55)
    assert best_trial(spec, all_trials).number == 2
    all_trials[3].status = "failed"
    assert best_configuration(spec, configurations(spec, all_trials)).number == 0
    assert configurations(spec, all_trials[:3])[1].scores is None  # its second seed has not begun


def test_the_pareto_front_holds_what_nothing_beats_in_one_goal_without_losing_in_another(tmp_path, base):
    spec = sweep(objectives={"train/loss": "min"}, samples=5)
    points = [(0.9, 0.5), (0.5, 0.1), (0.4, 0.2), (0.9, 0.6), (0.95, 0.9)]
    all_trials = [
        Trial(number, {"algo.learning_rate": 1e-3 * (number + 1), "policy.target": "v"}, "finished",
              history=[(10, reward)], objectives={10: {"train/loss": loss}})
        for number, (reward, loss) in enumerate(points)
    ]  # fmt: skip
    front = pareto_front(spec, configurations(spec, all_trials))
    assert [each.number for each in front] == [0, 1, 4]
    report = write_report(tmp_path, spec, base, all_trials)
    assert "pareto" in {plot.stem for plot in report.plots}
    with report.table.open() as file:
        assert [row["configuration"] for row in csv.DictReader(file) if row["pareto"]] == ["4", "0", "1"]


def test_importance_is_with_the_key_that_the_metric_follows():
    import random

    spec, rng = sweep(samples=30), random.Random(0)
    all_trials = []
    for number in range(30):
        values = {"algo.learning_rate": 10 ** rng.uniform(-4, -0.1), "policy.target": rng.choice(["epsilon", "v"])}
        score = -abs(values["algo.learning_rate"] - 0.3)
        all_trials.append(Trial(number, values, "finished", history=[(10, score)]))
    weights = importance(spec, configurations(spec, all_trials))
    assert weights["algo.learning_rate"] > 0.9
    assert weights["policy.target"] < 0.1


def test_a_report_of_many_configurations_shows_importance_and_leaves_out_what_only_some_have(tmp_path, base):
    space = {"policy.target": {"choice": ["epsilon", "v"]},
             "algo.learning_rate": {"loguniform": [1e-4, 0.9], "when": {"policy.target": "v"}}}  # fmt: skip
    spec, values = sweep(space=space, samples=6), ({"policy.target": "epsilon"},
                                                   {"policy.target": "v", "algo.learning_rate": 1e-3})  # fmt: skip
    all_trials = [
        Trial(number, values[number % 2], "finished", history=[(10, number % 2 + 0.1 * number)]) for number in range(6)
    ]  # fmt: skip
    assert list(importance(spec, configurations(spec, all_trials))) == ["policy.target"]
    report = write_report(tmp_path, spec, base, all_trials)
    assert {plot.stem for plot in report.plots} == {"curves", "slices", "parallel", "importance"}


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
    assert [plot.stem for plot in report.plots] == ["curves"]
