"""Where a run's metrics go: `metrics.jsonl` in the run folder always, and MLflow, TensorBoard and W&B as chosen.

A `Tracker` is one of them; `RunTracker` is all of a run's together. Tracking never ends a training run: values that are
not finite are left out and counted (`tracking/nonfinite`), and a tracker that fails in mid-run warns once and is tried
again later. At start-up a tracker that cannot work is an error, since nothing is lost yet.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from rlsvc.spec.run import RunSpec
from rlsvc.store.mlflow_store import RUN_DIR_TAG, TrackingError, experiment_id, open_store, store_uri

NONFINITE = "tracking/nonfinite"
Status = Literal["finished", "failed"]
log = logging.getLogger(__name__)


class Tracker(Protocol):
    """What a training run reports to. Metric values are finite floats, names have slashes (`train/loss`)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one gradient update."""
        ...

    def log_params(self, spec: RunSpec) -> None:
        """Takes the run's specification."""
        ...

    def artifact(self, path: Path) -> None:
        """Takes a file or a folder of the run (a plot, a video)."""
        ...

    def close(self, status: Status = "finished") -> None:
        """Writes what is still held back, and ends the run."""
        ...


class RunTracker:
    """All trackers of a run. Whatever one of them raises after start-up is counted, never raised.

    Attributes:
        run_id: the MLflow run's id, "" without the mlflow tracker.
        failures: calls that failed, by tracker.
    """

    def __init__(self, run_dir: Path, trackers: Mapping[str, Tracker], run_id: str = "") -> None:
        self.run_id = run_id
        self.failures = dict.fromkeys(("metrics.jsonl", *trackers), 0)
        self._trackers: dict[str, Tracker] = {"metrics.jsonl": JsonlTracker(run_dir / "metrics.jsonl"), **trackers}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs scalars (float, numpy or JAX). Those not finite are left out, and counted in `tracking/nonfinite`."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if len(finite) < len(values):
            finite[NONFINITE] = float(len(values) - len(finite))
        self._each("log", step, finite)

    def log_params(self, spec: RunSpec) -> None:
        """Logs the specification to every tracker."""
        self._each("log_params", spec)

    def artifact(self, path: Path) -> None:
        """Hands a file or a folder to every tracker."""
        self._each("artifact", path)

    def close(self, status: Status = "finished") -> None:
        """Ends the run in every tracker, and says which of them missed something."""
        self._each("close", status)
        for name, count in self.failures.items():
            if count:
                log.warning("%s: %d calls failed during this run, so it may miss some metrics", name, count)

    def _each(self, method: str, *args: Any) -> None:
        for name, tracker in self._trackers.items():
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # a tracker is a third party's code over a network; training outlives it
                self.failures[name] += 1
                if self.failures[name] == 1:
                    log.warning(
                        "%s fails, training goes on without it for now: %s: %s", name, type(error).__name__, error
                    )


def make_tracker(spec: RunSpec, run_dir: Path, resume: bool) -> RunTracker:
    """Starts the trackers that `spec.tracking` names.

    Their run ids are kept in `<run_dir>/tracking.json`; with `resume` the same MLflow and W&B runs go on.

    Raises:
        TrackingError: a tracker cannot start, or its store no longer knows the run to be resumed.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    ids_path = run_dir / "tracking.json"
    ids: dict[str, Any] = json.loads(ids_path.read_text()) if resume and ids_path.exists() else {}
    trackers: dict[str, Tracker] = {}
    for name in spec.tracking.trackers:
        if name == "mlflow":
            trackers[name] = mlflow = MlflowTracker.start(spec, run_dir, ids.get(name))
            ids[name] = mlflow.ids
        elif name == "wandb":
            trackers[name] = wandb = WandbTracker(spec, run_dir, ids.get(name))
            ids[name] = wandb.ids
        else:
            trackers[name] = TensorBoardTracker(run_dir)
    temporary = ids_path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(ids, indent=2) + "\n")
    temporary.replace(ids_path)
    return RunTracker(run_dir, trackers, run_id=ids["mlflow"]["run_id"] if "mlflow" in trackers else "")


class JsonlTracker:
    """`metrics.jsonl`: a JSON object a line, {"step", "time" (unix s), metrics...}, each written with one system call.

    What was logged survives a SIGKILL. A line that a full disk cut short is ended before the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line."""
        line = json.dumps({"step": int(step), "time": round(time.time(), 3), **metrics}).encode() + b"\n"
        with self._path.open("ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            if file.write(line) != len(line):
                raise OSError(f"{self._path}: the line was cut short; the disk may be full")

    def log_params(self, spec: RunSpec) -> None:
        """Nothing to do: spec.yaml lies beside."""

    def artifact(self, path: Path) -> None:
        """Nothing to do: artifacts lie beside."""

    def close(self, status: Status = "finished") -> None:
        """Nothing to do: every line is on its way to the disk already."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a `metrics.jsonl`, one a step in order of steps; of a metric logged twice the later value counts.

    A resumed run may log steps anew that it had logged before it was killed; a line cut short is left out.
    """
    by_step: dict[int, dict[str, float]] = {}
    for record in _lines(path):
        by_step.setdefault(int(record["step"]), {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def _lines(path: Path) -> Iterator[dict[str, float]]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class MlflowTracker:
    """An MLflow run. Metrics are sent in batches, since one call for each would take milliseconds of every step.

    At most `flush_s` seconds of metrics are held back; a SIGKILL loses those here, not in metrics.jsonl. When the store
    fails, the batch is kept (its newest `capacity` values) and sent `retry_s` seconds later.
    """

    MAX_BATCH = 1000  # MLflow's limits for one log_batch call
    MAX_PARAMS = 100
    MAX_PARAM_LENGTH = 6000

    def __init__(
        self, client: Any, ids: dict[str, str], *, flush_s: float = 5.0, retry_s: float = 60.0, capacity: int = 100_000
    ) -> None:
        self.ids = ids
        self._client, self._run_id = client, ids["run_id"]
        self._flush_s, self._retry_s, self._capacity = flush_s, retry_s, capacity
        self._pending: list[Any] = []
        self._next_flush = time.monotonic() + flush_s

    @classmethod
    def start(cls, spec: RunSpec, run_dir: Path, ids: Mapping[str, str] | None) -> MlflowTracker:
        """Creates the run, or goes on with the one that `ids` names."""
        uri = store_uri(spec.root, spec.tracking.mlflow_uri)
        client = open_store(uri)
        if ids is not None:
            try:
                client.update_run(ids["run_id"], status="RUNNING")
            except Exception as error:  # an unknown id, or a store that stopped answering; the message carries it
                raise TrackingError(
                    f"MLflow store {uri} does not know run {ids['run_id']} of {run_dir} ({error}). It was made in "
                    f"{ids['uri']}: set tracking.mlflow_uri to that, or delete tracking.json in the run folder to "
                    "begin a new MLflow run"
                ) from error
            return cls(client, {"uri": uri, "run_id": ids["run_id"]})
        tags = {RUN_DIR_TAG: str(run_dir.absolute()), "rlsvc.group": spec.group or ""}
        if spec.tracking.parent_run is not None:
            tags["mlflow.parentRunId"] = spec.tracking.parent_run
        run = client.create_run(experiment_id(client, uri, spec.project), run_name=spec.name, tags=tags)
        return cls(client, {"uri": uri, "run_id": run.info.run_id})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds to the batch, and sends it when it is full or old."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._pending += [Metric(name, value, now, int(step)) for name, value in metrics.items()]
        del self._pending[: -self._capacity]
        if time.monotonic() >= self._next_flush:
            self._flush()

    def log_params(self, spec: RunSpec) -> None:
        """Sends every leaf of the specification by its dotted key.

        MLflow's params never change: what a resumed run changed becomes a tag `resumed.<key>`.
        """
        from mlflow.entities import Param

        params = {key: str(value)[: self.MAX_PARAM_LENGTH] for key, value in flatten(spec.model_dump(mode="json"))}
        before = self._client.get_run(self._run_id).data.params
        for key in params:
            if key in before and before[key] != params[key]:
                self._client.set_tag(self._run_id, f"resumed.{key}", params[key])
        new = [Param(key, value) for key, value in params.items() if key not in before]
        for start in range(0, len(new), self.MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + self.MAX_PARAMS])

    def artifact(self, path: Path) -> None:
        """Copies a file, or a folder under its name, into the run's artifacts."""
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), artifact_path=path.name)
        else:
            self._client.log_artifact(self._run_id, str(path))

    def close(self, status: Status = "finished") -> None:
        """Sends the rest and sets the run's status."""
        self._flush()
        self._client.set_terminated(self._run_id, status=status.upper())

    def _flush(self) -> None:
        self._next_flush = time.monotonic() + self._retry_s
        while self._pending:
            self._client.log_batch(self._run_id, metrics=self._pending[: self.MAX_BATCH])
            del self._pending[: self.MAX_BATCH]
        self._next_flush = time.monotonic() + self._flush_s


class TensorBoardTracker:
    """TensorBoard event files under `<run_dir>/tensorboard`, through its own writer, which needs numpy alone."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise TrackingError(
                "TensorBoard is not installed. Install rlsvc[tracking], or leave tensorboard out of tracking.trackers"
            ) from error
        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds scalars; the writer's own thread puts them on disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_params(self, spec: RunSpec) -> None:
        """Nothing to do: TensorBoard shows scalars; spec.yaml lies in the run folder."""

    def artifact(self, path: Path) -> None:
        """Nothing to do: artifacts lie in the run folder."""

    def close(self, status: Status = "finished") -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run, offline unless the spec says online (`wandb sync` uploads it later).

    Offline, a resumed run is a second folder with the same run id, which `wandb sync` joins to the first.
    """

    def __init__(self, spec: RunSpec, run_dir: Path, ids: Mapping[str, str] | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise TrackingError(
                "W&B is not installed. Install rlsvc[tracking], or leave wandb out of tracking.trackers"
            ) from error
        self.ids = {"run_id": ids["run_id"] if ids else uuid.uuid4().hex[:8]}
        try:
            self._run = wandb.init(
                project=spec.project, group=spec.group, name=spec.name, id=self.ids["run_id"], resume="allow",
                mode=spec.tracking.wandb_mode, dir=str(run_dir), settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        except Exception as error:  # wandb raises its own kinds, and its service's
            raise TrackingError(
                f"W&B cannot start ({spec.tracking.wandb_mode}): {error}. Log in with `wandb login`, set "
                "tracking.wandb_mode=offline, or leave wandb out of tracking.trackers"
            ) from error
        # W&B refuses a step that goes backwards, which a resumed run does; an axis of our own has no such rule.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs against the axis `step`."""
        self._run.log({"step": step, **metrics})

    def log_params(self, spec: RunSpec) -> None:
        """Sets the run's config."""
        self._run.config.update(spec.model_dump(mode="json"), allow_val_change=True)

    def artifact(self, path: Path) -> None:
        """Saves a file, or every file of a folder."""
        self._run.save(str(path / "**" if path.is_dir() else path), base_path=str(path.parent), policy="now")

    def close(self, status: Status = "finished") -> None:
        """Finishes the run."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping with their dotted keys; lists and empty mappings are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
