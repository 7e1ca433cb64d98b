"""Runs without Ray: what they make, how they stop, resume, and refuse."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from rlsvc.core.errors import BusyError, ContractError, DatasetError, SpecError, UserError
from rlsvc.data.timelapse import step_videos
from rlsvc.spec.compose import compose
from rlsvc.store import checkpoint
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics
from rlsvc.train.run import run_dir, train


def test_a_run_leaves_its_specification_metrics_checkpoints_bundle_and_learning_curve(make_spec):
    spec = make_spec()
    result = train(spec, local=True)
    folder = run_dir(spec)
    assert result.step == 8
    assert not result.interrupted
    assert compose([str(folder / "spec.yaml")]) == spec
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row] == [4, 8]
    assert checkpoint.steps(folder / "checkpoints") == [4, 8]
    bundle = read_bundle(result.bundle)
    assert bundle.run["step"] == 8
    # Units and bounds come from the environment, which knows them.
    assert bundle.contract.action.unit == "px"
    assert bundle.contract.action.high == (512.0,)
    assert {"eval/max_reward", "eval/success", "validation/loss"} <= result.metrics.keys()
    assert result.plot is not None
    assert result.plot.read_bytes()[:4] == b"\x89PNG"


def test_a_run_tells_of_each_checkpoint_once_it_is_on_disk(make_spec):
    spec, told = make_spec("env=null"), []

    def listen(step: int, metrics: dict[str, float]) -> None:
        if "progress/checkpoint" in metrics:
            told.append((step, checkpoint.steps(run_dir(spec) / "checkpoints")[-1]))

    train(spec, local=True, on_metrics=listen)
    assert told == [(4, 4), (8, 8)]


@pytest.mark.slow
def test_a_stopped_run_resumes_where_it_stopped_and_ends_as_one_that_was_not_stopped(make_spec):
    whole = train(make_spec("name=whole"), local=True)
    stop = threading.Event()

    def after_first_log(step: int, _: dict[str, float]) -> None:
        if step >= 4:
            stop.set()

    stopped = train(make_spec("name=parts"), local=True, on_metrics=after_first_log, stop=stop)
    assert stopped.interrupted
    assert stopped.step == 4
    resumed = train(make_spec("name=parts", "resume=true"), local=True)
    assert resumed.step == 8
    # The same weights give the same id, bit for bit.
    assert read_bundle(resumed.bundle).params.keys() == read_bundle(whole.bundle).params.keys()
    assert read_bundle(resumed.bundle).id == read_bundle(whole.bundle).id


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_mlflow_run_and_registers_its_bundle(make_spec, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    stop = threading.Event()
    words = ("tracking.trackers=[mlflow]", "evaluation.episodes=1")
    train(make_spec(*words), local=True, on_metrics=lambda *_: stop.set(), stop=stop)
    folder = run_dir(make_spec())
    first = json.loads((folder / "tracking.json").read_text())
    result = train(make_spec(*words, "resume=true"), local=True)
    assert json.loads((folder / "tracking.json").read_text()) == first
    assert result.registered == "models:/rlsvc-tiny/1"


def test_a_folder_that_holds_a_run_is_neither_continued_nor_deleted_unasked(make_spec):
    train(make_spec("env=null", "total_steps=4"), local=True)
    with pytest.raises(BusyError, match=r"--resume.*--overwrite"):
        train(make_spec("env=null", "total_steps=4"), local=True)
    again = train(make_spec("env=null", "total_steps=4", "overwrite=true"), local=True)
    assert again.step == 4


def test_resuming_with_another_policy_is_refused_by_name(make_spec):
    train(make_spec("env=null", "total_steps=4"), local=True)
    with pytest.raises(SpecError, match="'policy' differs"):
        train(make_spec("env=null", "total_steps=8", "resume=true", "policy.horizon=12"), local=True)


def test_resuming_what_was_never_started_is_refused(make_spec):
    with pytest.raises(UserError, match="no run in"):
        train(make_spec("resume=true"), local=True)


def test_a_policy_that_sees_what_the_environment_does_not_give_is_refused_before_training(make_spec):
    with pytest.raises(ContractError, match=r"gives no 'observation\.environment_state'"):
        train(make_spec("env.observation=state"), local=True)


def test_a_dataset_that_is_not_there_is_named_and_leaves_the_name_of_the_run_free(make_spec):
    with pytest.raises(DatasetError, match="nowhere"):
        train(make_spec("data.datasets=[{path: nowhere}]"), local=True)
    assert train(make_spec("env=null", "total_steps=4"), local=True).step == 4


@pytest.mark.slow
def test_an_error_after_the_first_checkpoint_leaves_a_run_that_resumes(make_spec):
    def refuse(step: int, metrics: object) -> None:
        if any((run_dir(make_spec()) / "checkpoints").glob("*")):
            raise UserError("enough")

    with pytest.raises(UserError, match="enough"):
        train(make_spec("env=null", "total_steps=8", "checkpoint.interval=2"), local=True, on_metrics=refuse)
    assert train(make_spec("env=null", "total_steps=8", "resume=true"), local=True).step == 8


def test_a_run_that_is_resumed_and_refused_keeps_its_specification(make_spec):
    words = ("env=null", "total_steps=8", "checkpoint.interval=8")
    train(make_spec(*words), local=True)
    shutil.rmtree(run_dir(make_spec()) / "checkpoints")

    def refuse(step: int, metrics: object) -> None:
        raise UserError("enough")

    with pytest.raises(UserError, match="enough"):
        train(make_spec(*words, "resume=true"), local=True, on_metrics=refuse)
    assert (run_dir(make_spec()) / "spec.yaml").is_file()


def test_a_run_folder_that_cannot_be_made_is_named(make_spec, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        train(make_spec(f"root={blocked}"), local=True)


@pytest.mark.slow
def test_only_the_last_and_the_best_are_kept(make_spec):
    spec = make_spec("total_steps=16", "evaluation.interval=4", "checkpoint.keep_last=1", "evaluation.step_videos=true")
    train(spec, local=True)
    folder = run_dir(spec)
    assert list(step_videos(folder / "videos")) == [4, 8, 12, 16]
    scores = {int(step): score for step, score in json.loads((folder / "evaluations.json").read_text()).items()}
    best = max(scores, key=lambda step: (scores[step], step))
    kept = sorted(int(path.name) for path in Path(folder / "bundles").iterdir())
    assert kept == sorted({best, 16})
    assert checkpoint.steps(folder / "checkpoints") == kept
