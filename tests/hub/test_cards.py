"""Cards of policies: what they say is what the run and the bundle say."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from shared_bundle import CONTRACT, make_bundle

from rlsvc.spec.compose import compose, to_yaml
from rlsvc.store.bundle import read_bundle, read_versions
from rlsvc.store.dataset_card import write_origin
from rlsvc.store.mlflow_store import experiment_id, open_store
from rlsvc.store.model_card import portable
from rlsvc.store.registry import Registry

ROOT = Path(__file__).parents[2]
PUSHT = ROOT / "datasets" / "pusht_human"
SCORES = {
    "eval/episodes": 50.0, "eval/success": 0.1, "eval/success_low": 0.043, "eval/success_high": 0.214,
    "eval/max_reward": 0.8, "eval/max_reward_low": 0.74, "eval/max_reward_high": 0.85,
}  # fmt: skip


def make_run(root: Path, *words: str, step: int = 30, scores: dict | None = None) -> Path:
    """A run folder with two bundles, as training leaves it; the one of `step` is the better one."""
    spec = compose(["experiment=pusht_demo", "name=demo", "project=pusht", f"root={root}", *words])
    folder = root / "pusht" / "demo"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(to_yaml(spec))
    for each in (step - 10, step):
        run = {"project": "pusht", "name": "demo", "seed": spec.seed, "step": each, "updates": each}
        make_bundle(folder / "bundles" / str(each), run=run, policy=spec.policy.model_dump(mode="json"))
    (folder / "evaluations.json").write_text(json.dumps({str(step - 10): 0.5, str(step): 0.8}))
    rows = [{"step": step - 10, **SCORES, "eval/max_reward": 0.5}, {"step": step, "train/loss": 1.0}]
    if scores is None or scores:
        rows.append({"step": step, **(scores or SCORES)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def card(rlsvc, hub, token_file):
    """Push, and the card that the hub has then."""

    def push(source, *words):
        rlsvc("policies", "push", source, "mylab/demo", "--token-file", token_file, *words)
        return ModelCard(hub.files("model", "mylab/demo")["README.md"].decode())

    return push


def configuration(card: ModelCard) -> str:
    (block,) = [part.split("```")[0] for part in card.text.split("```yaml\n")[1:]]
    return block


def test_a_runs_best_bundle_is_pushed_with_what_was_measured_of_it(card, hub, tmp_path):
    run = make_run(tmp_path / "runs")
    found = card(run)
    assert hub.files("model", "mylab/demo")["bundle.json"] == (run / "bundles/30/bundle.json").read_bytes()
    assert found.data.library_name == "rlsvc"
    assert found.data.pipeline_tag == "robotics"
    assert found.data.tags == ["robotics", "rlsvc", "diffusion", "imitation", "pusht"]
    results = {result.metric_type: result for result in found.data.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {"max_reward": 0.8, "success": 0.1}
    assert results["success"].metric_name == "success, mean of 50 episodes, 95 % interval 0.043 to 0.214"
    assert "| max_reward | 0.800 | 0.740 to 0.850 |" in found.text
    assert "run `pusht/demo`, step 30, seed 0" in found.text


def test_a_bundle_in_a_run_knows_its_run_and_its_own_scores(card, tmp_path):
    found = card(make_run(tmp_path / "runs") / "bundles" / "20")
    assert "| max_reward | 0.500 |" in found.text
    assert "step 20" in found.text


def test_a_bundle_elsewhere_finds_its_run_in_the_root_and_no_other_run(card, tmp_path):
    make_run(tmp_path / "runs")
    policy = compose(["experiment=pusht_demo"]).policy.model_dump(mode="json")
    run = {"project": "pusht", "name": "demo", "seed": 0, "step": 30}
    mine = make_bundle(tmp_path / "mine", run=run, policy=policy)
    assert "| `pusht_human` |" in card(mine, "--root", tmp_path / "runs").text
    other = make_bundle(tmp_path / "other", run={**run, "seed": 1}, policy=policy)
    assert "## Training data\n\nNot known." in card(other, "--root", tmp_path / "runs").text


@pytest.mark.parametrize("scores", [{}, {"eval/max_reward": 0.8}])
def test_without_a_measured_result_there_is_none(card, tmp_path, scores):
    found = card(make_run(tmp_path / "runs", scores=scores))
    assert found.data.eval_results is None
    assert "model-index" not in found.content
    assert "## Evaluation\n\nNot measured.\n" in found.text


def test_an_evaluation_afterwards_is_added_and_one_of_another_bundle_refused(card, rlsvc, tmp_path, token_file):
    run = make_run(tmp_path / "runs", scores={})
    metrics = {name.removeprefix("eval/"): value for name, value in SCORES.items()}
    file, env = tmp_path / "scores.json", {"name": "pusht", "observation": "keypoints"}
    made = {"policy": read_bundle(run / "bundles/30").id, "env": env, "sample_steps": None}
    file.write_text(json.dumps({"made": made, "metrics": {**metrics, "task_success/push": 0.25}}))
    found = card(run, "--evaluation", file)
    assert [result.dataset_name for result in found.data.eval_results] == ["pusht keypoints"] * 2
    assert "| push | 0.250 |" in found.text
    words = ("policies", "push", make_bundle(tmp_path / "other"), "mylab/demo", "--token-file", token_file)
    assert "is of the policy" in rlsvc(*words, "--evaluation", file, code=2)
    file.write_text("{}")
    assert "is no file of scores" in rlsvc(*words, "--evaluation", file, code=2)


def test_the_configuration_in_the_card_is_the_runs_own_and_composes(card, tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs", "algo.learning_rate=2e-3", "total_steps=77")
    (tmp_path / "mine.yaml").write_text(configuration(card(run)))
    monkeypatch.chdir(ROOT)
    again, before = compose([str(tmp_path / "mine.yaml")]), compose([str(run / "spec.yaml")])
    assert again == before.replace(root="runs")
    assert (again.algo.learning_rate, again.total_steps) == (2e-3, 77)


def test_what_is_of_one_machine_or_secret_does_not_stand_in_the_card(card, tmp_path):
    run = make_run(
        tmp_path / "runs",
        "data.datasets=[{path: /home/mylab/secret/pusht}, {path: /mnt/other/pusht, weight: 2}]",
        "tracking.mlflow_uri='http://mylab:pa55@mlflow.lab:5000'",
        "env.runtime={packages: [gym-pusht], variables: {API_TOKEN: t0ken, MODE: fast}}",
    )
    found = card(run).content
    for secret in ("/home/mylab", "/mnt", "pa55", "mlflow.lab", "t0ken", str(tmp_path)):
        assert secret not in found
    tree = yaml.safe_load(configuration(ModelCard(found)))
    assert [d["path"] for d in tree["data"]["datasets"]] == ["datasets/pusht", "datasets/pusht_2"]
    assert tree["env"]["runtime"]["variables"] == {"MODE": "fast"}
    assert "`datasets/pusht_2`: a path of the machine that trained it" in found
    assert "`env.runtime.variables.API_TOKEN`: left out" in found


def test_an_address_loses_its_password_and_a_device_keeps_its_path(tmp_path):
    spec = compose(["experiment=pusht_demo", "policy.name=diffusion", "group='http://a:b@host/x'"])
    assert portable(spec)[0].group == "http://host/x"
    assert portable(spec.replace(group="/dev/ttyACM0"))[0].group == "/dev/ttyACM0"
    assert portable(spec.replace(group="~/weights"))[0].group == "weights"


def test_datasets_are_told_with_licence_source_and_place(card, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = card(make_run(tmp_path / "runs"))
    assert "| `pusht_human` | 206 | 25650 | mit | humanoid-collective/diffusion_policy_soup @ 091389f2" in found.text
    assert found.data.datasets is None
    named = card(make_run(tmp_path / "more"), "--dataset", "lab/pusht")
    assert named.data.datasets == ["lab/pusht"]
    assert "[lab/pusht](https://huggingface.co/datasets/lab/pusht)" in named.text


def test_a_registered_policy_knows_the_run_that_made_it(card, tmp_path):
    run, registry = make_run(tmp_path / "here"), Registry(tmp_path / "runs")
    client = open_store(registry.uri)
    made = client.create_run(experiment_id(client, registry.uri, "pusht"), tags={"rlsvc.run_dir": str(run)})
    registry.promote("demo", registry.register(run / "bundles/20", "demo", made.info.run_id), "best")
    found = card("models:/demo@best", "--root", tmp_path / "runs")
    assert "run `pusht/demo`, step 20" in found.text
    assert "| max_reward | 0.500 |" in found.text


def test_a_dataset_that_was_pulled_is_named_by_itself(card, tmp_path):
    shutil.copytree(PUSHT, tmp_path / "pusht")
    write_origin(tmp_path / "pusht", "lab/pusht", "c" * 40)
    found = card(make_run(tmp_path / "runs", f"data.datasets=[{{path: {tmp_path / 'pusht'}}}]"))
    assert found.data.datasets == ["lab/pusht"]
    assert f"lab/pusht) at {'c' * 12}" in found.text


def test_as_many_datasets_are_named_as_the_run_has(rlsvc, hub, tmp_path, token_file):
    words = ("policies", "push", make_run(tmp_path / "runs"), "mylab/demo", "--token-file", token_file)
    assert "--dataset: got 2, but the run has 1" in rlsvc(*words, "--dataset", "a/b", "--dataset", "a/c", code=2)
    words = ("policies", "push", make_bundle(tmp_path / "b"), "mylab/demo", "--token-file", token_file)
    assert "no run is known that trained" in rlsvc(*words, "--dataset", "a/b", code=2)


def test_the_contract_is_a_table_with_every_feature(card, bundle):
    text = card(bundle).text
    assert "| sees | `observation.state` | 2 | float32 | px | 0 to 512 | x, y |" in text
    assert "| sees | `observation.image` | 8 x 8 x 3 | uint8 |   | 0 to 255 |   |" in text
    assert "| sees | `task` | 1 | text |" in text
    assert "| does | `action` | 2 | float32 | px |" in text
    assert f"It sees {CONTRACT.n_obs_steps} observation step(s)" in text
    assert "gives 8 action(s) at a time, at 10 Hz" in text


def test_versions_and_commit_are_those_of_the_bundle(card, bundle):
    versions = read_versions(bundle)
    assert {"rlsvc", "numpy", "commit"} <= versions.keys()
    text = card(bundle).text
    assert f"numpy {versions['numpy']}" in text
    assert f"- commit of rlsvc: {versions['commit']}" in text


def test_a_name_with_a_bar_or_a_line_break_stays_in_its_cell(card, tmp_path):
    state = replace(CONTRACT.observation["observation.state"], unit="a|b\n## Not a heading")
    contract = replace(CONTRACT, observation={**CONTRACT.observation, "observation.state": state})
    text = card(make_bundle(tmp_path / "b", contract=contract)).text
    assert "| a\\|b ## Not a heading |" in text
    assert "\n## Not a heading" not in text


def test_a_run_whose_specification_no_longer_fits_is_pushed_without_it_and_says_so(rlsvc, hub, tmp_path, token_file):
    run = make_run(tmp_path / "runs")
    tree = yaml.safe_load((run / "spec.yaml").read_text())
    (run / "spec.yaml").write_text(yaml.safe_dump({**tree, "gone": 1}))
    printed = rlsvc("policies", "push", run, "mylab/demo", "--token-file", token_file)
    assert "does not fit this rlsvc" in printed
    text = hub.files("model", "mylab/demo")["README.md"].decode()
    assert "```yaml" not in text
    assert "| max_reward | 0.800 | 0.740 to 0.850 |" in text


def test_a_run_without_a_bundle_is_said(rlsvc, hub, tmp_path, token_file):
    run = make_run(tmp_path / "runs")
    for step in ("20", "30"):
        (run / "bundles" / step / "bundle.json").unlink()
        (run / "bundles" / step / "params.safetensors").unlink()
        (run / "bundles" / step).rmdir()
    printed = rlsvc("policies", "push", run, "mylab/demo", "--token-file", token_file, code=2)
    assert "the run has no bundle yet" in printed
    assert hub.requests == []


def test_a_licence_stands_in_the_metadata_where_it_is_said(card, bundle):
    assert card(bundle).data.license is None
    assert card(bundle, "--license", "apache-2.0").data.license == "apache-2.0"
