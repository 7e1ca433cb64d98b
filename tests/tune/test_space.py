"""Search spaces: what is refused, by which message, before any trial runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlsvc.core.errors import SpecError
from rlsvc.spec.compose import validate
from rlsvc.spec.space import DISTRIBUTIONS, combinations, sample
from rlsvc.spec.sweep import AshaSpec, SweepSpec, check_space, complete, set_keys
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
    assert spec.space["algo.learning_rate"].loguniform == (1e-5, 1e-3)
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
        (("asha", "ashes"), r"scheduler.*'ashes'.*'fifo', 'asha', 'hyperband', 'median', 'pbt', 'pb2'"),
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


ARGUMENTS = {
    "uniform": [-1.0, 2.0], "quniform": [-1.0, 2.0, 0.5], "loguniform": [1e-5, 1e-1], "qloguniform": [1.0, 100.0, 0.5],
    "randn": [2.0, 3.0], "qrandn": [2.0, 3.0, 0.5], "randint": [-3, 9], "qrandint": [-20, 80, 5],
    "lograndint": [1, 200], "qlograndint": [5, 500, 5], "choice": ["a", "b", "c"],
}  # fmt: skip


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_a_distribution_draws_what_ray_tunes_own_of_its_name_draws(name):
    import numpy as np
    from ray import tune
    from scipy.stats import ks_2samp

    domain = DISTRIBUTIONS[name].model_validate({name: ARGUMENTS[name]})
    arguments = [ARGUMENTS[name]] if name == "choice" else ARGUMENTS[name]
    theirs = getattr(tune, name)(*arguments).sample(size=4000, random_state=np.random.RandomState(0))
    ours = [domain.at(u) for u in np.random.default_rng(1).random(4000).tolist()]
    assert {type(value) for value in ours} == {type(getattr(value, "item", lambda v=value: v)()) for value in theirs}
    if name == "choice":
        theirs, ours = ([ARGUMENTS[name].index(value) for value in values] for values in (theirs, ours))
    assert ks_2samp(ours, theirs).pvalue > 1e-3
    if "int" in name:
        assert (min(ours), max(ours)) == (min(theirs), max(theirs))
    domains = to_tune({"x": domain})["x"]
    assert type(domains) is type(getattr(tune, name)(*arguments))


def test_all_of_ray_tunes_domains_are_there():
    from ray import tune

    theirs = {name for name in ("uniform", "quniform", "loguniform", "qloguniform", "randn", "qrandn", "randint",
              "qrandint", "lograndint", "qlograndint", "choice") if hasattr(tune, name)}  # fmt: skip
    assert theirs == set(ARGUMENTS)
    assert set(DISTRIBUTIONS) == {*theirs, "grid", "value"}


def test_a_trials_values_are_a_function_of_seed_and_number_and_grids_are_run_through():
    space = sweep(space={"algo.learning_rate": {"uniform": [0, 1]}, "seed": {"grid": [1, 2]},
                         "algo.batch_size": {"grid": [8, 16, 32]}}).space  # fmt: skip
    drawn = [sample(space, 0, number) for number in range(12)]
    assert [(each["seed"], each["algo.batch_size"]) for each in drawn[:6]] == [
        (1, 8), (1, 16), (1, 32), (2, 8), (2, 16), (2, 32)
    ]  # fmt: skip
    assert len({each["algo.learning_rate"] for each in drawn}) == 12
    assert sample(space, 0, 7) == drawn[7]
    assert sample(space, 1, 7) != drawn[7]


BACKBONES = {
    "policy.backbone": {"choice": [{"name": "unet1d", "down_dims": [16, 32]}, {"name": "transformer"}]},
    "policy.backbone.layers": {"randint": [2, 5], "when": {"policy.backbone.name": "transformer"}},
    "policy.backbone.down_dims": {"choice": [[8, 16], [16, 32]], "when": {"policy.backbone.name": ["unet1d"]}},
}


def test_a_conditional_key_is_set_where_its_condition_holds_and_nowhere_else(base):
    spec = sweep(space=BACKBONES)
    check_space(spec, base)
    drawn = [sample(spec.space, 0, number) for number in range(40)]
    assert {each["policy.backbone"]["name"] for each in drawn} == {"unet1d", "transformer"}
    for each in drawn:
        transformer = each["policy.backbone"]["name"] == "transformer"
        assert ("policy.backbone.layers" in each) == transformer
        assert ("policy.backbone.down_dims" in each) != transformer
        run = set_keys(base, each)
        assert not transformer or run.policy.backbone.layers == each["policy.backbone.layers"]
    assert [option.get("layers") for option in spec.space["policy.backbone"].choice] == [None, None]  # as it was
    assert sum(1 for _ in combinations(spec.space, lambda domain: domain.points(9))) == 2 + 3


def test_a_computed_key_follows_from_others_of_the_space_from_variables_and_from_the_run(base):
    spec = sweep(space={
        "_share": {"uniform": [0.1, 0.5]}, "algo.batch_size": {"choice": [8, 16]},
        "algo.schedule.warmup_steps": {"value": "${int:${mul:${_share},${total_steps}}}"},
        "learner.updates_per_call": {"value": "${div:${algo.batch_size},4}"},
        "evaluation.first_seed": {"value": "${add:${learner.updates_per_call},${algo.schedule.warmup_steps}}"},
    })  # fmt: skip
    check_space(spec, base)
    drawn = sample(spec.space, 0, 3)
    values = complete(spec, base, drawn)
    assert list(values) == list(spec.space)
    run = set_keys(base, values)
    assert run.algo.schedule.warmup_steps == int(drawn["_share"] * 100)
    assert run.learner.updates_per_call == drawn["algo.batch_size"] // 4
    assert run.evaluation.first_seed == run.learner.updates_per_call + run.algo.schedule.warmup_steps


def test_an_element_of_a_list_is_varied_by_its_number(base):
    spec = sweep(space={"data.datasets.0.path": {"choice": ["a", "b"]}})
    check_space(spec, base)
    assert set_keys(base, {"data.datasets.0.path": "b"}).data.datasets[0].path == "b"


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
        (
            {"algo.batch_size": {"choice": [8]}, "seed": {"randint": [0, 3], "when": {"algo.batch_sise": 8}}},
            r"'seed': when: 'algo\.batch_sise' is no key above it in the space\. Did you mean 'algo\.batch_size'",
        ),
        (
            {"algo.batch_size": {"choice": [8]}, "seed": {"randint": [0, 3], "when": {"algo.batch_size": 9}}},
            r"'seed': when: \{'algo\.batch_size': 9\} never holds",
        ),
        ({"seed": {"value": "${add:${sed},1}"}}, r"'seed': value: got .* cannot be computed: .*sed"),
        ({"seed": {"value": "${add:1,"}}, r"'seed': value: got .* cannot be computed"),
        (
            {**BACKBONES, "policy.backbone.layer": {"choice": [1], "when": {"policy.backbone.name": "transformer"}}},
            r"unknown key 'policy\.backbone\.layer'\. Did you mean 'layers'",
        ),
        (
            {"policy.backbone.down_dims": {"choice": [[8]], "when": {"seed": 0}}, "seed": {"choice": [0]}},
            r"no key above it in the space",
        ),
        ({"_a.b": {"choice": [1]}}, r"the name of a variable has no dots"),
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


ROOT = Path(__file__).parents[2]
SPACES = sorted((ROOT / "tune_spaces").glob("*.yaml"))


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_space_that_ships_fits_its_run_and_the_schema(path):
    from rlsvc.spec.compose import compose

    spec = load_sweep(path)
    check_space(spec, compose(spec.run))
    assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    assert [error.message for error in schema().iter_errors(plain(path.read_text()))] == []
    assert spec.name == path.stem


def test_every_algorithm_has_a_space():
    from rlsvc.spec.algorithms import ALGORITHMS
    from rlsvc.spec.compose import compose

    bases = [compose(load_sweep(path).run) for path in SPACES]
    assert {run.algo.name for run in bases} == set(ALGORITHMS)
    assert {run.policy.name for run in bases} >= {"diffusion", "pi0", "pi0_fast", "gaussian", "tdmpc2", "value_mlp"}


def schema():
    from jsonschema import Draft202012Validator

    from rlsvc.spec.sweep_schema import sweep_schema

    Draft202012Validator.check_schema(sweep_schema())
    return Draft202012Validator(sweep_schema())


def plain(text: str):
    """As an editor reads it: YAML 1.2, where 3e-5 is a number."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text))


def test_the_schema_that_ships_is_that_of_the_code():
    import json

    from rlsvc.spec.sweep_schema import sweep_schema

    assert json.loads((ROOT / "tune_spaces" / "schema.json").read_text()) == sweep_schema()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("loguniform", "loguniforn"), "loguniforn"),
        (("samples", "sampels"), "sampels"),
        (("[1e-5, 1e-3]", "[1e-5]"), "loguniform"),
        (("grace: 10", "grace: ten"), "ten"),
        (("name: asha", "name: asher"), "asher"),
        (("run: [experiment=pusht_diffusion]", "runs: x"), "run"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(change, fault):
    assert [error.message for error in schema().iter_errors(plain(YAML))] == []
    errors = [error.message for error in schema().iter_errors(plain(YAML.replace(*change)))]
    assert errors
    assert any(fault in error for error in errors)


def test_the_schema_names_the_keys_of_the_run_for_an_editor_to_complete():
    keys = schema().schema["properties"]["space"]["properties"]
    assert {"algo.learning_rate", "policy.backbone.layers", "policy.lora_expert.rank", "seed"} <= set(keys)
    assert keys["policy.horizon"]["description"]


def test_a_space_is_validated_without_jax_torch_or_ray():
    program = (
        "import sys; import rlsvc.spec.sweep, rlsvc.tune.space, rlsvc.commands.sweep\n"
        "print([m for m in ('jax', 'torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
