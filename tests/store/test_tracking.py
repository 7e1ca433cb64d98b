"""Tracking: what is logged, what survives, and that it never ends a run."""

import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlsvc.spec.run import RunSpec
from rlsvc.store.mlflow_store import TrackingError, open_store, store_uri
from rlsvc.store.tracking import JsonlTracker, MlflowTracker, RunTracker, flatten, make_tracker, read_metrics


def run_spec(root: Path, **tracking) -> RunSpec:
    return RunSpec.model_validate({
        "name": "one", "project": "demo", "group": "g", "root": str(root), "total_steps": 10,
        "policy": {"name": "diffusion"}, "algo": {"name": "imitation"},
        "data": {"datasets": [{"path": "d"}], "observation": ["observation.state"]}, "tracking": tracking,
    })  # fmt: skip


class BrokenTracker:
    """Fails at every call, as an unreachable store does."""

    def log(self, step, metrics):
        raise ConnectionError("no route to host")

    def log_params(self, spec):
        raise ConnectionError("no route to host")

    def artifact(self, path):
        raise ConnectionError("no route to host")

    def close(self, status="finished"):
        raise ConnectionError("no route to host")


def mlflow_history(root: Path, run_id: str, name: str) -> list[tuple[int, float]]:
    history = open_store(store_uri(root)).get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in history]


def test_the_default_store_lies_in_root_and_the_environment_wins_over_it_and_the_spec_over_both(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert store_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://store:5000")
    assert store_uri(tmp_path) == "http://store:5000"
    assert store_uri(tmp_path, "sqlite:////elsewhere.db") == "sqlite:////elsewhere.db"


def test_mlflow_gets_the_metrics_the_params_and_the_artifacts_of_a_run(root):
    spec = run_spec(root)
    run_dir = root / "demo" / "one"
    tracker = make_tracker(spec, run_dir, resume=False)
    tracker.log_params(spec)
    (run_dir / "plots").mkdir()
    (run_dir / "plots" / "loss.txt").write_text("plot")
    for step in range(1, 2501):  # more than MLflow takes in one call
        tracker.log(step, {"train/loss": np.float32(1 / step)})
    tracker.artifact(run_dir / "plots")
    tracker.close()

    client = open_store(store_uri(root))
    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["algo.learning_rate"] == "0.0001"
    assert run.data.tags["rlsvc.run_dir"] == str(run_dir)
    assert len(mlflow_history(root, tracker.run_id, "train/loss")) == 2500
    assert [file.path for file in client.list_artifacts(tracker.run_id, "plots")] == ["plots/loss.txt"]
    assert (root / "mlflow-artifacts" / "demo").is_dir()
    assert tracker.failures == {"metrics.jsonl": 0, "mlflow": 0}


def test_a_resumed_run_goes_on_in_the_same_mlflow_run_and_tags_what_changed(root):
    spec, run_dir = run_spec(root), root / "demo" / "one"
    first = make_tracker(spec, run_dir, resume=False)
    first.log_params(spec)
    first.log(1, {"train/loss": 1.0})
    first.close("failed")
    second = make_tracker(spec.replace(total_steps=20), run_dir, resume=True)
    second.log_params(spec.replace(total_steps=20))
    second.log(2, {"train/loss": 0.5})
    second.close()

    assert second.run_id == first.run_id
    assert mlflow_history(root, first.run_id, "train/loss") == [(1, 1.0), (2, 0.5)]
    run = open_store(store_uri(root)).get_run(first.run_id)
    assert (run.info.status, run.data.params["total_steps"], run.data.tags["resumed.total_steps"]) == (
        "FINISHED",
        "10",
        "20",
    )
    assert second.failures["mlflow"] == 0


def test_a_new_run_in_the_same_folder_is_a_new_mlflow_run(root):
    first = make_tracker(run_spec(root), root / "demo" / "one", resume=False)
    first.close()
    second = make_tracker(run_spec(root), root / "demo" / "one", resume=False)
    second.close()
    assert first.run_id != second.run_id


def test_resuming_against_a_store_that_does_not_know_the_run_says_where_it_was_made(root, tmp_path_factory):
    make_tracker(run_spec(root), root / "demo" / "one", resume=False).close()
    other = f"sqlite:///{tmp_path_factory.mktemp('other')}/other.db"
    with pytest.raises(TrackingError, match=f"was made in sqlite:///{root}/mlflow.db"):
        make_tracker(run_spec(root, mlflow_uri=other), root / "demo" / "one", resume=True)


def test_metrics_that_are_not_finite_are_counted_and_the_others_are_logged(root):
    # mlflow#26108: one NaN blocked the logging of everything beside it
    tracker = make_tracker(run_spec(root), root / "demo" / "one", resume=False)
    tracker.log(1, {"train/loss": float("nan"), "train/grad_norm": np.inf, "train/learning_rate": 1e-4})
    tracker.log(2, {"train/loss": 0.25})
    tracker.close()
    assert mlflow_history(root, tracker.run_id, "tracking/nonfinite") == [(1, 2.0)]
    assert mlflow_history(root, tracker.run_id, "train/learning_rate") == [(1, 1e-4)]
    assert mlflow_history(root, tracker.run_id, "train/loss") == [(2, 0.25)]
    records = read_metrics(root / "demo" / "one" / "metrics.jsonl")
    assert records[0]["tracking/nonfinite"] == 2
    assert "train/loss" not in records[0]
    assert all(math.isfinite(value) for record in records for value in record.values())
    assert tracker.failures["mlflow"] == 0


def test_a_tracker_that_fails_in_mid_run_warns_once_is_counted_and_does_not_stop_the_others(tmp_path, caplog):
    tracker = RunTracker(tmp_path, {"broken": BrokenTracker()})
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            tracker.log(step, {"train/loss": 1.0})
        assert len(caplog.records) == 1
        assert "no route to host" in caplog.text
        tracker.close()
    assert tracker.failures["broken"] == 6
    assert "6 calls failed" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


def test_metrics_of_a_store_that_was_away_for_a_while_arrive_when_it_is_back():
    class Client:
        def __init__(self):
            self.away, self.got = True, []

        def log_batch(self, run_id, metrics):
            if self.away:
                raise ConnectionError("store is away")
            self.got += [metric.step for metric in metrics]

        def set_terminated(self, run_id, status):
            pass

    client = Client()
    tracker = MlflowTracker(client, {"run_id": "r"}, flush_s=0.0, retry_s=0.0, capacity=3)
    for step in range(5):
        with pytest.raises(ConnectionError):
            tracker.log(step, {"train/loss": 1.0})
    client.away = False
    tracker.close()
    assert client.got == [2, 3, 4]  # the newest `capacity` of them


def test_a_store_that_cannot_be_used_is_an_error_at_the_start_that_names_it(tmp_path):
    (tmp_path / "bad.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(TrackingError, match=r"bad\.db cannot be used.*leave mlflow out of tracking\.trackers"):
        make_tracker(run_spec(tmp_path, mlflow_uri=f"sqlite:///{tmp_path}/bad.db"), tmp_path / "run", resume=False)


FIRST_USE = """
import multiprocessing, os, sys, tempfile
import mlflow.store.tracking.sqlalchemy_store
from rlsvc.store.mlflow_store import experiment_id, open_store

def first_use(uri, temporary):
    os.mkdir(temporary)
    tempfile.tempdir = temporary
    client = open_store(uri)
    run = client.create_run(experiment_id(client, uri, "shared"))
    client.log_metric(run.info.run_id, "train/loss", 1.0)
    return run.info.experiment_id

with multiprocessing.get_context("fork").Pool(8) as pool:
    print(*pool.starmap(first_use, [(sys.argv[1], f"{sys.argv[2]}/tmp{i}") for i in range(8)], chunksize=1))
"""


@pytest.mark.slow
def test_eight_processes_that_use_a_new_store_at_once_migrate_it_once(tmp_path):
    # mlflow#5222, #6388. MLflow's own lock lies in the temporary folder, which containers that share a run folder do
    # not share, so each process gets its own. All of it in a process apart, which may fork.
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    command = [sys.executable, "-c", FIRST_USE, uri, str(tmp_path)]
    ids = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout.split()
    assert len(ids) == 8
    assert len(set(ids)) == 1
    assert len(open_store(uri).search_runs(ids[:1])) == 8


def test_metrics_jsonl_survives_sigkill(tmp_path):
    program = (
        "import sys; from pathlib import Path; from rlsvc.store.tracking import JsonlTracker\n"
        "t = JsonlTracker(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    t.log(step, {'train/loss': 1.0}); print(step, flush=True)\n"
    )
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(50)][-1]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert [record["step"] for record in read_metrics(path)][: acknowledged + 1] == list(range(acknowledged + 1))


def test_a_line_cut_short_costs_that_line_alone_and_the_later_record_of_a_step_wins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(2, {"train/loss": 0.9})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "train/lo')
    tracker.log(2, {"train/loss": 0.8})
    tracker.log(2, {"eval/max_reward": 0.5})
    records = read_metrics(path)
    assert [(record["step"], record["train/loss"]) for record in records] == [(1, 1.0), (2, 0.8)]
    assert records[1]["eval/max_reward"] == 0.5


def test_tensorboard_and_wandb_offline_log_the_same_run_at_once_and_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    spec = run_spec(tmp_path, trackers=["tensorboard", "wandb"])
    for resume, step in ((False, 1), (True, 2)):
        tracker = make_tracker(spec, tmp_path / "run", resume=resume)
        tracker.log_params(spec)
        tracker.log(step, {"train/loss": 0.5 * step})
        (tmp_path / "run" / "note.txt").write_text("artifact")
        tracker.artifact(tmp_path / "run" / "note.txt")
        tracker.close()
        assert tracker.failures == {"metrics.jsonl": 0, "tensorboard": 0, "wandb": 0}

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    values = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("train/loss")]
    assert values == [(1, 0.5), (2, 1.0)]

    run_id = json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"]["run_id"]
    stores = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert stores
    assert wandb_history(stores) == [(1, 0.5), (2, 1.0)]


def wandb_history(paths: list[Path]) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in paths:
        for data in wandb_records(path.read_bytes()):
            history = Record.FromString(data).history.item
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history}
            if "train/loss" in items:
                found.append((items["step"], items["train/loss"]))
    return sorted(found)


def wandb_records(data: bytes) -> list[bytes]:
    """The records of an offline run: a LevelDB log (blocks of 32 KiB; crc, length, type, payload) after 7 bytes."""
    records, at = [], 7
    while at + 7 <= len(data):
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if 32768 - at % 32768 < 7 or not kind:
            at += 32768 - at % 32768
            continue
        payload = data[at + 7 : at + 7 + length]
        if kind in (1, 2):  # a whole record, or its first part
            records.append(payload)
        else:
            records[-1] += payload
        at += 7 + length
    return records


def test_tracking_without_mlflow_imports_neither_mlflow_torch_nor_jax(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from rlsvc.spec.run import RunSpec; from rlsvc.store.tracking import make_tracker\n"
        "spec = RunSpec.model_validate_json(sys.argv[1])\n"
        "make_tracker(spec, Path(sys.argv[2]), resume=False).close()\n"
        "print([m for m in ('mlflow', 'torch', 'jax', 'tensorflow', 'ray') if m in sys.modules])\n"
    )
    spec = run_spec(tmp_path, trackers=["tensorboard"]).model_dump_json()
    done = subprocess.run(
        [sys.executable, "-c", program, spec, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_flatten_gives_dotted_keys_and_keeps_lists_and_empty_mappings_as_leaves():
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1, 2]})) == {"a.b": 1, "a.c": {}, "d": [1, 2]}
