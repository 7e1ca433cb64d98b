"""Jobs on a real cluster: retries, going on after SIGKILL of the driver and of the head, queues, records, refusals."""

import re
import shutil
import time
from pathlib import Path

import pytest
from heads import ROOT, TOKEN, Head, invoke, program_tree, wait_for

from rlsvc.core.errors import BusyError, NotFoundError
from rlsvc.jobs.client import JobsClient
from rlsvc.jobs.package import JobError
from rlsvc.store import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.ray]
SMALL = [
    "experiment=pusht_demo", "log_interval=5", "learner.updates_per_call=1", "algo.batch_size=8", "device=cpu",
    "tracking.trackers=[]", "policy.backbone.down_dims=[16,32]", "env=null", "checkpoint.interval=10", "name=job",
]  # fmt: skip
# Says what it is, then waits for a file.
WAITING = """
import os, pathlib, sys, time
print("begins", sys.argv[-1], flush=True)
pathlib.Path(os.environ["FOLDER"], sys.argv[-1] + ".begun").touch()
while not pathlib.Path(os.environ["FOLDER"], sys.argv[-1] + ".end").exists():
    time.sleep(0.1)
"""

# Says which environment its driver and a worker have, and then nothing for longer than a WebSocket is pinged for.
WHERE = """
import sys, time, ray
ray.init()
print("driver in", sys.prefix)
print("worker in", ray.get(ray.remote(lambda: sys.prefix).remote()), flush=True)
time.sleep(45)
print("the end")
"""
LOCKED = '[project]\nname = "tiny"\nversion = "0.1.0"\nrequires-python = ">=3.12"\ndependencies = ["ray==2.60.0"]\n'


def clean_tree(folder: Path) -> Path:
    """This tree's code and data for a small run, of one commit."""
    import os
    import subprocess

    for name in ("rlsvc", "datasets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True, env={**os.environ, **author})
    return folder


def train_process(root: Path) -> int | None:
    """The driver of a run with this root, not what runs it."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "rlsvc.cli train" in line and "jobs.run" not in line and "sh -c" not in line:
            with_root = root_of(process.pid)
            if with_root is not None and str(root) in with_root:
                return process.pid
    return None


def root_of(pid: int) -> str | None:
    try:
        return (Path(f"/proc/{pid}/cwd") / "rlsvc_spec.yaml").read_text()
    except OSError:
        return None


def test_a_driver_that_is_killed_goes_on_from_its_last_commit_by_itself(head, tmp_path):
    import os
    import signal

    tree, root = clean_tree(tmp_path / "tree"), tmp_path / "runs"
    words = ["train", *SMALL, f"root={root}", "total_steps=80"]
    options = ["--working-dir", str(tree), "--name", "killed", "--retries", "2", "--no-follow"]
    assert invoke(head, "submit", *options, "--", *words).exit_code == 0
    checkpoints = root / "rlsvc" / "job" / "checkpoints"
    wait_for(lambda: checkpoint.steps(checkpoints), 300)
    pid = train_process(root)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with JobsClient(head, TOKEN) as client:
        found = client.wait("killed", 400)
        log = client.logs("killed")
    assert found.status == "SUCCEEDED", log
    assert "attempt 1 of 3 ended with SIGKILL" in log
    steps = [int(line.split('"step": ')[1].split(",")[0]) for line in (checkpoints.parent / "metrics.jsonl").open()]
    assert steps.count(5) == 1  # one that began anew would be there twice
    assert steps[-1] == 80


def test_a_job_and_its_workers_run_in_the_environment_of_the_lock_file_and_its_log_is_followed_to_the_end(
    head, tmp_path, caplog
):
    import platform
    import subprocess
    import sys

    tree = program_tree(tmp_path / "tree", WHERE)
    (tree / "pyproject.toml").write_text(LOCKED + "[project.optional-dependencies]\nall = []\n")
    (tree / ".python-version").write_text(platform.python_version())
    uv = Path(sys.executable).parent / "uv"
    subprocess.run([uv, "lock", "--quiet"], cwd=tree, check=True)
    environment = tmp_path / "environment"
    options = ["--working-dir", str(tree), "--packages", "uv", "--env", f"UV_PROJECT_ENVIRONMENT={environment}"]
    followed = invoke(head, "submit", *options, "--name", "locked", "--", "evaluate", "random", "--root", "/r")
    assert followed.exit_code == 0, followed.output
    assert f"driver in {environment}" in followed.output
    assert f"worker in {environment}" in followed.output
    assert "the end" in followed.output
    assert "ping" not in caplog.text


def test_a_stopped_run_is_resumed_and_a_running_or_finished_one_is_not(head, tmp_path):
    tree, root = clean_tree(tmp_path / "tree"), tmp_path / "runs"
    words = ["train", *SMALL, f"root={root}", "total_steps=80"]
    options = ["--working-dir", str(tree), "--name", "stopped", "--metadata", "why=night", "--no-follow"]
    submitted = invoke(head, "submit", *options, "--", *words)
    assert re.search(r"Job stopped submitted \(.*commit [0-9a-f]{12}\)", submitted.output), submitted.output
    checkpoints = root / "rlsvc" / "job" / "checkpoints"
    wait_for(lambda: checkpoint.steps(checkpoints), 300)
    assert isinstance(invoke(head, "jobs", "resume", "stopped").exception, BusyError)
    assert "STOPPED" in invoke(head, "jobs", "stop", "stopped").output
    at = checkpoint.steps(checkpoints)[-1]
    assert 0 < at < 80
    resumed = invoke(head, "jobs", "resume", "stopped")
    assert resumed.exit_code == 0, resumed.output
    assert checkpoint.steps(checkpoints)[-1] == 80
    said = invoke(head, "jobs", "status", "stopped").output
    assert "SUCCEEDED" in said
    assert "resumed: 1" in said
    assert "why: night" in said
    with pytest.raises(JobError, match="has succeeded; there is nothing to resume"):
        raise invoke(head, "jobs", "resume", "stopped").exception
    with pytest.raises(NotFoundError, match=r"unknown job 'stoped'\. Did you mean 'stopped'\?"):
        raise invoke(head, "jobs", "resume", "stoped").exception
    assert "does not run twice" in invoke(head, "submit", *options, "--", *words).output


def test_what_the_cluster_will_never_have_is_refused_at_once(head):
    with JobsClient(head, TOKEN) as client:  # a head says some seconds after its start that it does not grow
        wait_for(lambda: not client.capacity().grows)
    begin = time.monotonic()
    for options, command, message in (
        ([], [*SMALL, "learner.gpus_per_rank=1"], "asks for 1 GPU in all, the cluster has 0"),
        ([], [*SMALL, "learner.ranks=16", "algo.batch_size=16"], "asks for 16 CPU in all, the cluster has 2"),
        (["--resource", "robot:arm7=1"], SMALL, "has the robot 'arm7'"),
        (["--cpus", "5"], SMALL, "CPU in all, the cluster has 2"),
    ):
        result = invoke(head, "submit", "--working-dir", str(ROOT), *options, "--", "train", *command)
        with pytest.raises(JobError, match=message):
            raise result.exception
    assert time.monotonic() - begin < 60
    with JobsClient(head, TOKEN) as client:
        assert client.capacity().total["CPU"] == 2.0
        assert not client.capacity().grows


def test_the_queue_takes_the_urgent_first_says_who_waits_and_lets_one_be_taken_out(head, tmp_path):
    tree = program_tree(tmp_path / "tree", WAITING)
    options = ["--working-dir", str(tree), "--env", f"FOLDER={tmp_path}", "--queue", "q1", "--no-follow"]

    def send(name: str, priority: int) -> None:
        command = ["evaluate", "bundle", "--workers", "2", "--root", "/r", "--group", name]
        result = invoke(head, "submit", *options, "--name", name, "--priority", str(priority), "--", *command)
        assert result.exit_code == 0, (result.output, result.exception)

    def begun(name: str) -> bool:
        return (tmp_path / f"{name}.begun").exists()

    def states() -> dict[str, str]:
        with JobsClient(head, TOKEN) as client:
            return {job.id: client.state(job) for job in client.jobs() if job.id in ("first", "low", "high", "dropped")}

    send("first", 0)
    wait_for(lambda: begun("first"))
    send("low", 1)
    send("dropped", 9)
    send("high", 5)
    with JobsClient(head, TOKEN) as client:
        for name in ("low", "high", "dropped"):
            wait_for(lambda name=name: "waits in queue 'q1'" in client.logs(name))  # the queue knows it
    assert states() == {"first": "RUNNING", "low": "QUEUED", "high": "QUEUED", "dropped": "QUEUED"}
    listed = invoke(head, "jobs", "list").output
    assert re.search(r"high\s+.*QUEUED\s+.*q1 5", listed), listed
    assert "STOPPED" in invoke(head, "jobs", "stop", "dropped").output
    (tmp_path / "first.end").touch()
    wait_for(lambda: begun("high"))
    assert not begun("low")
    assert not begun("dropped")
    (tmp_path / "high.end").touch()
    wait_for(lambda: begun("low"))
    (tmp_path / "low.end").touch()
    with JobsClient(head, TOKEN) as client:
        assert client.wait("low", 60).status == "SUCCEEDED"


def test_jobs_go_on_after_their_head_was_killed(tmp_path):
    """One from the computer that sent it, one that waited from the record on storage that both clusters reach."""
    tree, root = clean_tree(tmp_path / "tree"), tmp_path / "runs"
    words = ["train", *SMALL, f"root={root}", "total_steps=80"]
    options = ["--working-dir", str(tree), "--queue", "night", "--record", str(tmp_path / "record"), "--no-follow"]
    checkpoints = root / "rlsvc" / "job" / "checkpoints"
    first = Head(tmp_path / "first.log")
    try:
        first.wait()
        assert invoke(first.address, "submit", *options, "--name", "ran", "--", *words).exit_code == 0
        with JobsClient(first.address, TOKEN) as client:
            wait_for(lambda: "its turn in the queue" in client.logs("ran"))
        asked = ["evaluate", "random", "--workers", "2", "--episodes", "1", "--output", str(tmp_path / "scores.json")]
        assert invoke(first.address, "submit", *options, "--name", "waited", "--", *asked).exit_code == 0
        wait_for(lambda: (tmp_path / "record" / "waited.json").exists())
        wait_for(lambda: checkpoint.steps(checkpoints), 300)
        first.kill()
    finally:
        first.close()
    at = checkpoint.steps(checkpoints)[-1]
    second = Head(tmp_path / "second.log")
    try:
        second.wait()
        with JobsClient(second.address, TOKEN) as client:
            assert client.find("ran") is None
        shutil.rmtree(tmp_path / "cache")  # another computer, which has only the record
        restored = invoke(second.address, "jobs", "restore", str(tmp_path / "record"))
        assert restored.exit_code == 0, (restored.output, restored.exception)
        with JobsClient(second.address, TOKEN) as client:
            assert client.wait("ran", 400).status == "SUCCEEDED", client.logs("ran")
            assert client.wait("waited", 200).status == "SUCCEEDED", client.logs("waited")
            log = client.logs("waited")
        assert checkpoint.steps(checkpoints)[-1] == 80 > at
        assert "its turn in the queue" in log
        assert list((tmp_path / "record").iterdir()) == []
    finally:
        second.close()


def test_a_job_goes_on_with_a_new_head_from_the_computer_that_sent_it(tmp_path):
    tree = program_tree(
        tmp_path / "tree", "import sys, time; print(sys.argv[1:]); time.sleep(0 if '--continue' in sys.argv else 600)"
    )
    words = ["--working-dir", str(tree), "--name", "sent", "--no-follow", "--", "train", *SMALL, "root=/shared"]
    first = Head(tmp_path / "first.log")
    try:
        first.wait()
        assert invoke(first.address, "submit", *words).exit_code == 0
        with JobsClient(first.address, TOKEN) as client:
            wait_for(lambda: client.job("sent").status == "RUNNING")
        first.kill()
    finally:
        first.close()
    second = Head(tmp_path / "second.log")
    try:
        second.wait()
        resumed = invoke(second.address, "jobs", "resume", "sent")
        assert resumed.exit_code == 0, (resumed.output, resumed.exception)
        assert "'train', 'rlsvc_spec.yaml', '--continue'" in resumed.output
    finally:
        second.close()
