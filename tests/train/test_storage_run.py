"""Runs whose root is an S3 bucket: committed there, resumed and served from there, and what happens when it is away."""

import logging
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlsvc.commands import policies
from rlsvc.core.errors import BusyError, NotFoundError, SpecError, UserError
from rlsvc.data.journal import Journal
from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec
from rlsvc.store import checkpoint, storage
from rlsvc.store.bundle import read_bundle
from rlsvc.store.registry import resolve
from rlsvc.store.run_store import RunStore
from rlsvc.store.storage import StorageError
from rlsvc.train.cluster import check_own_node
from rlsvc.train.run import has_begun, run_dir, train
from rlsvc.train.standalone import evaluate_bundle


@pytest.fixture
def url(s3, tmp_path) -> str:
    import hashlib

    return s3.bucket(f"t{hashlib.md5(str(tmp_path).encode()).hexdigest()}") + "/runs"


def elsewhere(monkeypatch, tmp_path: Path, name: str) -> None:
    """Another machine: nothing of the run lies on it."""
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / name))


def committed(spec: RunSpec) -> dict:
    return RunStore(spec.root, spec.project, spec.name).manifest() or {}


def test_a_runs_artefacts_are_in_the_bucket_and_evaluation_serving_and_the_registry_find_them(
    make_spec, url, tmp_path, monkeypatch
):
    spec = make_spec(f"root={url}")
    result = train(spec, local=True)
    assert result.registered == "models:/rlsvc-tiny/1"
    files = committed(spec)["files"]
    kept = {
        "spec.yaml",
        "metrics.jsonl",
        "plots/learning_curve.png",
        "checkpoints/8/meta.json",
        "bundles/8/bundle.json",
    }
    assert kept <= set(files)
    assert not any(name.startswith(".") for name in files)
    made = read_bundle(result.bundle)

    elsewhere(monkeypatch, tmp_path, "laptop")
    for target in (f"{url}/rlsvc/tiny/bundles/8", "models:/rlsvc-tiny/1", "models:/rlsvc-tiny/latest"):
        assert read_bundle(resolve(target, root=url)).id == made.id
    scores = evaluate_bundle("models:/rlsvc-tiny/1", spec.env, episodes=1, parallel=1, local=True, root=url)
    assert len(scores.episodes) == 1

    runner = CliRunner(env={"COLUMNS": "200"})
    assert "rlsvc-tiny" in runner.invoke(policies.app, ["list", "--root", url]).output
    assert runner.invoke(policies.app, ["promote", "rlsvc-tiny", "1", "production", "--root", url]).exit_code == 0
    assert "production -> 1" in runner.invoke(policies.app, ["list", "--root", url]).output

    from rlsvc.serve.application import deployments_of
    from rlsvc.spec.compose import validate
    from rlsvc.spec.serve import ServeConfigSpec

    args = {"policy": "models:/rlsvc-tiny@production", "root": url}
    app = {"import_path": "rlsvc.serve.application:build", "args": args}
    (deployment,) = deployments_of(
        validate(ServeConfigSpec, {"applications": [app], "http_options": {"host": "127.0.0.1"}})
    )
    assert deployment.name == "rlsvc-tiny"


def test_a_run_goes_on_on_another_machine_as_if_it_had_not_moved(make_spec, url, tmp_path, monkeypatch):
    whole = train(make_spec("name=whole", "env=null"), local=True)
    stop = threading.Event()

    def after_first_checkpoint(step: int, metrics: dict[str, float]) -> None:
        if "progress/checkpoint" in metrics:
            stop.set()

    spec = make_spec("name=parts", "env=null", f"root={url}")
    stopped = train(spec, local=True, on_metrics=after_first_checkpoint, stop=stop)
    assert stopped.interrupted
    assert committed(spec)["step"] == stopped.step < 8
    assert has_begun(spec)
    elsewhere(monkeypatch, tmp_path, "other")
    assert has_begun(spec)
    assert not has_begun(make_spec("name=never", f"root={url}"))
    with pytest.raises(BusyError, match=r"s3://.*/rlsvc/parts holds a run already.*--resume"):
        train(spec, local=True)
    resumed = train(spec.replace(resume=True), local=True)
    assert resumed.step == 8
    assert (resumed.bundle / "params.safetensors").read_bytes() == (whole.bundle / "params.safetensors").read_bytes()


@pytest.mark.slow
def test_a_storage_that_goes_away_ends_the_run_and_what_was_made_is_uploaded_later(
    make_spec, url, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    spec, upload = make_spec(f"root={url}", "env=null"), storage.Storage._upload
    tries = []

    def refuse(self, path, file):
        tries.append(path)
        raise OSError("the network is gone")

    def after_first_checkpoint(step: int, metrics: dict[str, float]) -> None:
        if "progress/checkpoint" in metrics:
            monkeypatch.setattr(storage.Storage, "_upload", refuse)

    with pytest.raises(StorageError, match=r"the network is gone.*The run is whole in .* on this machine.*--resume"):
        train(spec, local=True, on_metrics=after_first_checkpoint)
    assert len(tries) == storage.TRIES
    assert committed(spec)["step"] == 4
    assert checkpoint.steps(run_dir(spec) / "checkpoints")[-1] == 8
    monkeypatch.setattr(storage.Storage, "_upload", upload)
    with caplog.at_level(logging.WARNING):
        assert train(spec.replace(resume=True), local=True).step == 8
    assert "going on from the folder" in caplog.text
    assert committed(spec)["step"] == 8


@pytest.mark.slow
def test_overwriting_deletes_it_in_the_bucket_too(make_spec, url, tmp_path, monkeypatch):
    train(make_spec(f"root={url}", "env=null"), local=True)
    elsewhere(monkeypatch, tmp_path, "other")
    spec = make_spec(f"root={url}", "env=null", "total_steps=4", "overwrite=true")
    train(spec, local=True)
    assert committed(spec)["step"] == 4
    assert not any("checkpoints/8" in name for name in committed(spec)["files"])


ONLINE = """
name: online
log_interval: 100
env: {name: gymnasium, id: Pendulum-v1}
policy: {name: tdmpc2, size: 1M, encoder_dim: 16, hidden_dim: 16, latent_dim: 16, num_q: 2, episode_length: 200,
         plan: false}
algo: {name: tdmpc2, batch_size: 16}
replay: {capacity: 4000}
rollout: {workers: 1, envs_per_worker: 2, chunk_steps: 25}
phases:
  - {name: seed, type: online, acting: random, hooks: {collect: 1}, duration_steps: 200}
  - {name: train, type: online, hooks: {collect: 4, update: 1}, duration_steps: 200}
learner: {updates_per_call: 25}
checkpoint: {interval: 300}
evaluation: {interval: null, episodes: 1, parallel: 1, metric: return, videos: false}
tracking: {trackers: [], register_bundle: false}
"""


@pytest.mark.slow
def test_an_online_run_goes_on_elsewhere_with_the_steps_that_its_checkpoint_counts(url, tmp_path, monkeypatch):
    (tmp_path / "online.yaml").write_text(ONLINE)
    spec, stop = compose([str(tmp_path / "online.yaml"), f"root={url}"]), threading.Event()

    def after_first_checkpoint(step: int, metrics: dict[str, float]) -> None:
        if "progress/checkpoint" in metrics:
            stop.set()

    assert train(spec, local=True, on_metrics=after_first_checkpoint, stop=stop).interrupted
    elsewhere(monkeypatch, tmp_path, "other")
    assert train(spec.replace(resume=True), local=True).step == 400
    with Journal(run_dir(spec) / "journal", read_only=True) as journal:
        assert sum(chunk.num_steps for chunk in journal.read()) == 400


def test_a_run_that_is_nowhere_cannot_be_resumed_and_mlflow_needs_a_store(make_spec, url):
    with pytest.raises(NotFoundError, match="there is no run at s3://"):
        train(make_spec(f"root={url}", "resume=true"), local=True)
    with pytest.raises(UserError, match="mlflow keeps a database, which cannot lie at s3://"):
        train(make_spec(f"root={url}", "tracking.trackers=[mlflow]"), local=True)


def test_a_file_url_is_a_folder(make_spec, tmp_path):
    assert make_spec(f"root=file://{tmp_path}/a").root == f"{tmp_path}/a"


@pytest.mark.slow
@pytest.mark.ray
def test_ranks_and_what_acts_are_where_the_runs_files_are(make_spec, url, ray_cluster):
    spec = make_spec(f"root={url}")
    result = train(spec)
    assert result.registered == "models:/rlsvc-tiny/1"
    assert committed(spec)["step"] == 8
    with pytest.raises(UserError, match=r"the driver's own node.*ask for 16 CPU, it has 2"):
        check_own_node(spec.replace(learner=spec.learner.replace(ranks=8, cpus_per_rank=2.0)))


def test_a_sweep_needs_a_folder(url, root):
    from rlsvc.tune.run import run_sweep
    from rlsvc.tune.space import load_sweep

    sweep = load_sweep(root / "tune_spaces" / "pusht_diffusion.yaml", [f"root={url}"])
    with pytest.raises(SpecError, match=r"a sweep's root is a folder that all of its nodes reach, no URL yet"):
        run_sweep(sweep, compose(sweep.run))
