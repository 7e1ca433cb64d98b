"""Search spaces: what is refused, by which message, before any trial runs."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import validate
from rlsvc.spec.sweep import DISTRIBUTIONS, AshaSpec, SweepSpec, check_space, set_keys
from rlsvc.tune.space import load_sweep, to_tune

YAML = """\
name: demo
run: [experiment=pusht_diffusion]
space:
  algo.learning_rate: {loguniform: [1e-5, 1e-3]}
  algo.batch_size: {choice: [64, 128]}
samples: 4
metric: eval/max_reward
scheduler: {name: asha, grace: 10}
"""


def sweep(**changes) -> SweepSpec:
    return validate(
        SweepSpec, {"run": ["experiment=x"], "space": {"algo.learning_rate": {"uniform": [0.1, 0.2]}}, **changes}
    )


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


def test_a_space_is_read_with_yaml_floats_as_floats(tmp_path):
    spec = load_sweep(written(tmp_path, YAML))
    assert spec.space["algo.learning_rate"].model_dump() == {"loguniform": (1e-5, 1e-3)}
    assert spec.scheduler == AshaSpec(grace=10)
    assert spec.run == ("experiment=pusht_diffusion",)


def test_overrides_of_the_sweep_change_it_and_all_others_go_to_the_run(tmp_path):
    overrides = ["samples=9", "scheduler.grace=7", "space.seed={grid: [1, 2]}", "total_steps=50", "resources.cpu=0.5"]
    spec = load_sweep(written(tmp_path, YAML), overrides)
    assert (spec.samples, spec.scheduler, spec.resources.cpu, spec.trials) == (9, AshaSpec(grace=7), 0.5, 18)
    assert spec.run == ("experiment=pusht_diffusion", "total_steps=50")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("loguniform", "loguniforn"),
            r"space\.yaml:4.*unknown distribution 'loguniforn'\. Did you mean 'loguniform'\?.*grid",
        ),
        (("samples", "sampels"), r"space\.yaml:6.*unknown key 'sampels'\. Did you mean 'samples'\?"),
        (("grace", "grase"), r"unknown key 'scheduler\.grase'\. Did you mean 'grace'\?"),
        (("[1e-5, 1e-3]", "[1e-3, 1e-5]"), r"algo\.learning_rate: loguniform: got \[0\.001, 1e-05\].*low < high"),
        (("[1e-5, 1e-3]", "[0, 1]"), r"expected low > 0"),
        (("[1e-5, 1e-3]", "[1, 2, 3]"), r"algo\.learning_rate: loguniform: got \[1, 2, 3\]"),
        (("{loguniform: [1e-5, 1e-3]}", "3"), r"algo\.learning_rate: got 3, expected one distribution"),
        (("[64, 128]", "[]"), r"algo\.batch_size: choice: got \[\]"),
        (("asha", "ashes"), r"scheduler.*'ashes'.*'asha', 'fifo'"),
        (("samples: 4", "samples: many"), r"'samples': got 'many'"),
        (("space:", "space: ["), r"cannot be read as YAML"),
    ],
)
def test_a_space_that_is_wrong_is_refused_by_place_and_nearest_name(tmp_path, change, message):
    with pytest.raises(SpecError, match=message):
        load_sweep(written(tmp_path, YAML.replace(*change)))


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(SpecError, match="no such file"):
        load_sweep(tmp_path / "none.yaml")


@pytest.mark.parametrize("name", ["uniform", "loguniform", "randint"])
def test_samples_lie_in_the_range_and_its_high_end_is_exclusive_for_integers(name):
    distribution = DISTRIBUTIONS[name].model_validate({name: [2, 5]})
    rng = random.Random(0)
    values = [distribution.sample(rng) for _ in range(200)]
    assert 2 <= min(values) < 2.5
    assert 4 <= max(values) < 5
    assert distribution.corners() == ((2, 4) if name == "randint" else (2, 5))


def test_values_are_set_by_dotted_key_and_validated_together(base):
    run = set_keys(base, {
        "algo.learning_rate": 0.5, "policy.backbone": {"name": "transformer", "layers": 2},
        "data.normalization.x": "mean_std",
    })  # fmt: skip
    assert (run.algo.learning_rate, run.policy.backbone.name, run.data.normalization) == (
        0.5,
        "transformer",
        {"x": "mean_std"},
    )


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {"algo.learnin_rate": {"uniform": [0, 1]}},
            r"unknown key 'algo\.learnin_rate'\. Did you mean 'algo\.learning_rate'\?",
        ),
        (
            {"algorithm.learning_rate": {"uniform": [0, 1]}},
            r"unknown key 'algorithm\.learning_rate'.*the run has: name",
        ),
        ({"seed.x": {"choice": [1]}}, r"seed is 0 in the base run and has no keys"),
        ({"group.x": {"choice": [1]}}, r"group is None.*set it in `run` first"),
        (
            {"algo.learning_rate": {"uniform": [-1, 1]}},
            r"with algo\.learning_rate = -1\.0: 'algo\.learning_rate'.*greater than 0",
        ),
        ({"policy.target": {"choice": ["epsilon", "x0"]}}, r"with policy\.target = 'x0'"),
        ({"algo.batch_size": {"uniform": [8.5, 64.5]}}, r"with algo\.batch_size = 8\.5"),
        ({"policy.horizon": {"randint": [4, 17]}}, r"with policy\.horizon = 4"),
        (
            {"policy.horizon": {"choice": [16, 8]}, "policy.n_action_steps": {"choice": [8, 4]}},
            r"policy\.horizon = 8, policy\.n_action_steps = 8: .*at most horizon",
        ),
        (
            {"algo": {"choice": [{}]}, "algo.batch_size": {"choice": [1]}},
            r"'algo' and 'algo\.batch_size' set the same section",
        ),
    ],
)
def test_a_key_or_value_that_the_run_refuses_is_found_before_the_first_trial(base, space, message):
    with pytest.raises(SpecError, match=message):
        check_space(sweep(space=space), base)


def test_values_that_fit_only_together_are_not_refused_one_by_one(base):
    check_space(
        sweep(space={"policy.horizon": {"choice": [16, 32]}, "policy.n_action_steps": {"choice": [8, 4]}}), base
    )


def test_a_grace_longer_than_the_run_and_a_metric_of_an_evaluation_that_never_is_are_refused(base):
    with pytest.raises(SpecError, match=r"scheduler\.grace: got 500, at most max_t = 100"):
        check_space(sweep(scheduler={"name": "asha", "grace": 500}), base)
    with pytest.raises(SpecError, match="never evaluated"):
        check_space(sweep(), base.replace(env=None))


def test_every_distribution_becomes_the_tune_domain_of_its_name(base):
    from ray import tune

    space = {
        "algo.learning_rate": {"loguniform": [1e-5, 1e-3]}, "algo.ema.power": {"uniform": [0.5, 0.9]},
        "seed": {"randint": [0, 9]}, "policy.target": {"choice": ["epsilon", "v"]},
        "algo.batch_size": {"grid": [8, 16]},
    }  # fmt: skip
    domains = to_tune(sweep(space=space).space)
    assert domains["algo.batch_size"] == {"grid_search": [8, 16]}
    assert domains["policy.target"].categories == ["epsilon", "v"]
    assert (domains["seed"].lower, domains["seed"].upper) == (0, 9)
    assert isinstance(domains["seed"], tune.search.sample.Integer)
    assert isinstance(domains["algo.learning_rate"].sampler, tune.search.sample.LogUniform)
    assert (domains["algo.ema.power"].lower, domains["algo.ema.power"].upper) == (0.5, 0.9)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "tune_spaces").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_space_that_ships_fits_its_run(path):
    from rlsvc.spec.compose import compose

    spec = load_sweep(path)
    check_space(spec, compose(spec.run))


def test_a_space_is_validated_without_jax_torch_or_ray():
    program = (
        "import sys; import rlsvc.spec.sweep, rlsvc.tune.space, rlsvc.commands.sweep\n"
        "print([m for m in ('jax', 'torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
