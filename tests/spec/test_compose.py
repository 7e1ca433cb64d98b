from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from rlsvc.core.errors import NotFoundError, SpecError
from rlsvc.spec.compose import CONFIGS, compose, experiments, to_yaml
from rlsvc.spec.diffusion import TransformerSpec
from rlsvc.spec.imitation import ImitationSpec

PUSHT = "experiment=pusht_diffusion"


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_that_ships_composes_under_its_own_name(name):
    assert compose([f"experiment={name}"]).name == name


def test_the_shipped_experiments_are_what_the_folder_holds():
    assert experiments() == sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
    assert "pusht_diffusion" in experiments()


def test_the_papers_sizes_and_learning_rate_are_where_the_experiments_start():
    spec = compose([PUSHT])
    assert spec.policy.backbone.down_dims == (256, 512, 1024)
    assert (spec.policy.n_obs_steps, spec.policy.horizon, spec.policy.n_action_steps) == (2, 16, 8)
    assert spec.algo.batch_size == 256
    assert ImitationSpec().learning_rate == 1e-4


def test_words_change_the_experiment_whether_or_not_it_names_the_key():
    spec = compose(
        [PUSHT, "algo.learning_rate=3e-4", "algo.optimizer.grad_clip=1.0", "group=a", "checkpoint.keep_last=7"]
    )
    assert (spec.algo.learning_rate, spec.algo.optimizer.grad_clip) == (3e-4, 1.0)
    assert (spec.group, spec.checkpoint.keep_last) == ("a", 7)


def test_another_backbone_is_chosen_by_name():
    spec = compose([PUSHT, "~policy.backbone", "policy.backbone.name=transformer", "policy.backbone.layers=2"])
    assert isinstance(spec.policy.backbone, TransformerSpec)
    assert spec.policy.backbone.layers == 2


def test_arithmetic_is_resolved():
    words = [PUSHT, "total_steps='${mul:3,${add:100,20}}'", "log_interval=${div:100,4}", "seed=${sub:9,2}"]
    spec = compose(
        [*words, "checkpoint.interval=${max:5,7}", "evaluation.episodes=${min:5,7}", "algo.learning_rate=${div:1,8}"]
    )
    assert (spec.total_steps, spec.log_interval, spec.seed) == (360, 25, 7)
    assert (spec.checkpoint.interval, spec.evaluation.episodes, spec.algo.learning_rate) == (7, 5, 0.125)


def test_an_unknown_key_names_the_nearest_and_the_command_line():
    with pytest.raises(
        SpecError, match=r"command line: unknown key 'algo\.learning_rat'\. Did you mean 'learning_rate'\?"
    ):
        compose([PUSHT, "algo.learning_rat=1"])


def test_an_unknown_key_in_a_tagged_part_lists_that_part_alone():
    with pytest.raises(
        SpecError, match=r"unknown key 'policy\.backbone\.down_dim'\. Did you mean 'down_dims'\?"
    ) as caught:
        compose([PUSHT, "policy.backbone.down_dim=[8]"])
    assert "heads" not in str(caught.value)


def test_an_unknown_key_in_a_file_names_file_and_line(tmp_path):
    text = (
        "defaults: [/experiment: pusht_diffusion, _self_]\nname: mine\nalgo:\n  batch_size: 64\n  learning_rat: 1e-3\n"
    )
    with pytest.raises(SpecError, match=r"mine\.yaml:5: unknown key 'algo\.learning_rat'"):
        compose([write(tmp_path / "mine.yaml", text)])


def test_several_faults_are_told_together():
    with pytest.raises(SpecError) as caught:
        compose([PUSHT, "seed=-1", "algo.batch=3"])
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("total_steps=many", r"command line: 'total_steps': got 'many', input should be a valid integer"),
        ("total_steps=1.5", r"command line: 'total_steps': got 1\.5"),
        ("seed=-1", r"command line: 'seed': got -1, input should be greater than or equal to 0"),
        ("algo.learning_rate=.nan", r"'algo\.learning_rate': got "),
        ("precision=fp16", r"'precision': got 'fp16', input should be 'fp32' or 'bf16'"),
        ("name=a/b", r"command line: 'name': got 'a/b'"),
        ("policy.horizon=18", r"horizon: got 18, the U-Net halves it 2 times, so it must be a multiple of 4"),
        ("policy.n_action_steps=16", r"n_action_steps: got 16, at most horizon - n_obs_steps \+ 1 = 15"),
        ("policy.sample_steps=101", r"sample_steps: got 101, at most train_steps = 100"),
        ("policy.guidance_scale=2", r"guidance_scale: other than 1 needs condition_dropout > 0"),
        ("evaluation.group=arm", r"evaluation.group: got arm, expected the environment's among default"),
        (
            "data.datasets=[{path: a, group: arm}, {path: b, group: hand}]",
            r"evaluation.group: got None, expected the environment's among arm, hand",
        ),
        ("policy.backbone.down_dims=[12]", r"down_dims: 12 is not a multiple of n_groups = 8"),
        ("policy.backbone.kernel_size=4", r"kernel_size: got 4, expected an odd number"),
        (
            "learner.ranks=3",
            r"algo\.batch_size: 256 is not a multiple of learner\.ranks x algo\.optimizer\.accumulation = 3",
        ),
        ("algo.optimizer.accumulation=7", r"algo\.batch_size: 256 is not a multiple of .* = 7"),
        ("data.heldout_fraction=0.99", r"validation_fraction \+ heldout_fraction: must leave episodes"),
        ("data.datasets=[]", r"'data\.datasets': got \[\]"),
        ("policy.name=difusion", r"'policy\.name': got 'difusion', expected one of 'diffusion', .*'tdmpc2'.*diffusion"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_was_expected(word, message):
    with pytest.raises(SpecError, match=message):
        compose([PUSHT, word])


def test_resume_and_overwrite_together_are_refused():
    with pytest.raises(SpecError, match="resume, overwrite: choose one"):
        compose([PUSHT, "resume=true", "overwrite=true"])


def test_a_misspelt_experiment_names_the_nearest():
    with pytest.raises(NotFoundError, match=r"unknown experiment 'pusht_difusion'\. Did you mean 'pusht_diffusion'\?"):
        compose(["experiment=pusht_difusion"])


def test_words_without_an_experiment_list_those_that_ship():
    with pytest.raises(
        SpecError, match=r"no experiment: name one with experiment=NAME or give a YAML file\..*pusht_demo"
    ):
        compose(["seed=1"])


def test_a_word_that_is_no_override_is_refused():
    with pytest.raises(SpecError, match="command line: got 'seed', expected key=value"):
        compose([PUSHT, "seed"])


def test_deleting_a_key_that_is_not_there_is_refused():
    with pytest.raises(SpecError, match=r"command line: Could not delete from config\. 'policy\.nope' does not exist"):
        compose([PUSHT, "~policy.nope"])


def test_broken_override_grammar_and_interpolation_are_one_line():
    with pytest.raises(SpecError, match=r"^command line: no viable alternative at input '\[1,'$"):
        compose([PUSHT, "seed=[1,"])
    with pytest.raises(SpecError, match=r"^command line: Interpolation key 'nowhere' not found full_key: name$"):
        compose([PUSHT, "name=${nowhere}"])


def test_a_file_of_ones_own_builds_on_an_experiment(tmp_path):
    text = "defaults:\n  - pusht_demo\n  - _self_\nname: mine\npolicy:\n  backbone: {down_dims: [8, 8]}\n"
    spec = compose([write(tmp_path / "mine.yaml", text), "seed=3"])
    assert (spec.name, spec.seed, spec.policy.backbone.down_dims) == ("mine", 3, (8, 8))
    assert spec.algo.learning_rate == compose(["experiment=pusht_demo"]).algo.learning_rate


def test_the_documented_form_of_defaults_works(tmp_path):
    text = "defaults: [/experiment: pusht_diffusion, _self_]\nname: mine\n"
    assert compose([write(tmp_path / "mine.yaml", text)]).name == "mine"


def test_a_misspelt_experiment_in_a_file_is_named(tmp_path):
    with pytest.raises(NotFoundError, match=r"unknown experiment 'pusht_difusion'\. Did you mean 'pusht_diffusion'\?"):
        compose([write(tmp_path / "mine.yaml", "defaults: [pusht_difusion]\n")])


def test_what_a_file_leaves_out_is_named(tmp_path):
    with pytest.raises(SpecError, match="'policy' is missing\n'algo' is missing"):
        compose([write(tmp_path / "mine.yaml", "name: mine\n")])


def test_a_file_and_an_experiment_together_are_refused(tmp_path):
    with pytest.raises(SpecError, match="got both the file"):
        compose([write(tmp_path / "mine.yaml", "name: x\n"), PUSHT])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not a YAML file"), ("- 1\n- 2\n", "expected a mapping"), ("a: \x00", "not a YAML file")],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path, text, message):
    with pytest.raises(SpecError, match=f"mine.yaml: .*{message}"):
        compose([write(tmp_path / "mine.yaml", text)])


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(SpecError, match=r"nowhere\.yaml: no such file.*experiment=NAME"):
        compose(["nowhere.yaml"])


def test_the_stored_specification_of_a_run_composes_to_the_same_one(tmp_path):
    words = [
        PUSHT,
        "policy.target=v",
        "algo.ema=null",
        "data.normalization={action: mean_std}",
        "tracking.trackers=[wandb]",
    ]
    spec = compose(words)
    assert compose([write(tmp_path / "spec.yaml", to_yaml(spec))]) == spec


def test_the_stored_specification_names_every_key(tmp_path):
    stored = yaml.safe_load(to_yaml(compose([PUSHT])))
    assert stored["checkpoint"]["keep_last"] == 2
    assert set(stored) == set(type(compose([PUSHT])).model_fields)


def test_a_specification_is_frozen():
    spec = compose([PUSHT])
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 3


def test_replace_validates_what_a_plain_copy_would_not():
    spec = compose([PUSHT])
    assert spec.replace(seed=3).seed == 3
    with pytest.raises(ValidationError, match="choose one"):
        spec.replace(resume=True, overwrite=True)
    with pytest.raises(ValidationError, match="Extra inputs"):
        spec.replace(sead=3)
