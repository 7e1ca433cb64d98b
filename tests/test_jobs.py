"""Jobs: the package, the client against a Ray head with tokens, and what goes wrong."""

import contextlib
import hashlib
import io
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlsvc.commands import jobs as commands
from rlsvc.core.errors import BusyError, NotFoundError, SpecError
from rlsvc.jobs import Job, JobError, JobsClient, find_token, pack

ROOT = Path(__file__).parents[1]
TOKEN = "a" * 32
APP = typer.Typer()
APP.command()(commands.submit)
APP.add_typer(commands.app, name="jobs")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git working tree with a tracked, a changed, a new, an ignored and a deleted file."""
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    for name, text in (("a.py", "1"), ("sub/run.sh", "echo"), (".gitignore", "runs/\n"), ("gone.py", "x")):
        (folder / name).write_text(text)
    (folder / "sub/run.sh").chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    (folder / "a.py").write_text("2")
    (folder / "new.py").write_text("3")
    (folder / "runs").mkdir()
    (folder / "runs" / "big").write_text("ignored")
    (folder / "gone.py").unlink()
    return folder


def test_a_package_holds_tracked_changed_and_new_files_and_what_is_added(tree):
    package = pack(tree, {"spec.yaml": b"seed: 1"})
    archive = zipfile.ZipFile(io.BytesIO(package.data))
    assert sorted(archive.namelist()) == [".gitignore", "a.py", "new.py", "spec.yaml", "sub/run.sh"]
    assert archive.read("a.py") == b"2"
    assert archive.read("spec.yaml") == b"seed: 1"
    assert stat.S_IMODE(archive.getinfo("sub/run.sh").external_attr >> 16) & 0o111
    assert package.files == 5


def test_the_same_tree_gives_the_same_package_and_another_one_another(tree):
    first = pack(tree)
    os.utime(tree / "a.py", (0, 0))
    assert pack(tree).uri == first.uri
    (tree / "a.py").write_text("4")
    assert pack(tree).uri != first.uri


def test_a_tree_that_is_too_large_is_refused_by_its_largest_files(tree):
    (tree / "weights.bin").write_bytes(os.urandom(300_000))
    with pytest.raises(JobError, match=r"over 0 MiB as a zip.*weights\.bin \(0\.3 MiB\).*\.gitignore"):
        pack(tree, limit=200_000)


def test_a_folder_that_is_no_git_tree_is_refused(tmp_path):
    with pytest.raises(JobError, match=r"expected a git working tree.*--working-dir"):
        pack(tmp_path)


@pytest.mark.parametrize(
    ("command", "error", "message"),
    [
        (["tran", "experiment=pusht_diffusion"], NotFoundError, r"unknown command 'tran'\. Did you mean 'train'\?"),
        (["train", "experiment=pusht_diffusion", "algo.learnin_rate=1"], SpecError, "learnin_rate"),
        (["train", "experiment=pusht"], NotFoundError, "pusht_diffusion"),
        (["sweep"], SpecError, "expected the file of a search space"),
        (["sweep", "none.yaml"], SpecError, "no such file"),
    ],
)
def test_what_is_wrong_with_a_run_is_found_before_anything_is_sent(command, error, message):
    result = CliRunner().invoke(APP, ["submit", "--address", "http://127.0.0.1:9", "--", *command])
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception


def test_a_run_is_sent_resolved_and_its_relative_root_leaves_the_jobs_temporary_folder():
    entrypoint, files, note = commands.resolve(["train", "experiment=pusht_diffusion", "total_steps=7", "--resume"])
    assert entrypoint == 'python -m rlsvc.cli train rlsvc_spec.yaml --resume "root=$HOME/rlsvc/runs"'
    assert b"total_steps: 7" in files["rlsvc_spec.yaml"]
    assert "$HOME/rlsvc/runs" in note
    entrypoint, _, note = commands.resolve(["train", "experiment=pusht_diffusion", "root=/shared/runs"])
    assert entrypoint == "python -m rlsvc.cli train rlsvc_spec.yaml"
    assert not note


@pytest.mark.parametrize("text", ["A", "=1", "a-b=1"])
def test_an_environment_variable_of_a_wrong_form_is_refused(text):
    result = CliRunner().invoke(APP, ["submit", "--env", text, "--", "doctor"])
    assert isinstance(result.exception, SpecError)


def test_a_cluster_that_cannot_be_reached_is_named():
    with (
        JobsClient("127.0.0.1:9") as client,
        pytest.raises(JobError, match=r"http://127\.0\.0\.1:9: cannot be reached"),
    ):
        client.version()
    with pytest.raises(JobError, match="not Ray's own port"):
        JobsClient("ray://127.0.0.1:10001")


def test_the_token_is_looked_for_where_ray_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert find_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert find_token() == "home"
    (tmp_path / "path").write_text("path")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "path"))
    assert find_token() == "path"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "env")
    assert find_token() == "env"
    (tmp_path / "file").write_text("file")
    assert find_token(tmp_path / "file") == "file"
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="is empty"):
        find_token(tmp_path / "file")
    with pytest.raises(JobError, match="cannot be read"):
        find_token(tmp_path / "none")


def test_a_job_hands_on_the_exit_code_of_its_command():
    def job(status, code):
        return Job.from_json({"submission_id": "j", "status": status, "driver_exit_code": code})

    assert [job("SUCCEEDED", 0).code, job("FAILED", 7).code, job("FAILED", None).code, job("STOPPED", None).code] == [
        0,
        7,
        1,
        130,
    ]
    assert not job("RUNNING", None).over


def test_a_server_error_is_one_line_without_the_servers_traceback():
    class Broken(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"Traceback (most recent call last):\n  File x\nRuntimeError: no agent")

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one_line = r"GET /api/version answered 500: RuntimeError: no agent$"
        with JobsClient(f"127.0.0.1:{server.server_port}") as client, pytest.raises(JobError, match=one_line):
            client.version()
        server.shutdown()


def test_submitting_needs_no_ray():
    program = "import sys, rlsvc.jobs, rlsvc.commands.jobs\nfrom rlsvc.commands.jobs import resolve\n"
    program += "resolve(['train', 'experiment=pusht_diffusion'])\n"
    program += "print([m for m in ('jax', 'torch', 'ray', 'mlflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """The dashboard's address of a Ray head of this module's own, which asks for a token."""
    folder = Path("/tmp") / f"rlsvc_head_{os.getpid()}"  # short: Ray's sockets have names of at most 107 bytes
    gcs, dashboard, client, agent = free_ports(4)
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}",
        f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", "--include-dashboard=true", "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": path}
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        with JobsClient(f"http://127.0.0.1:{dashboard}", TOKEN) as cluster:
            deadline = time.monotonic() + 180
            while True:
                try:
                    cluster.version()
                    break
                except JobError:
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.5)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def submit(head: str, *words: str, **env: str):
    return CliRunner(env={"RAY_AUTH_TOKEN": TOKEN, **env}).invoke(APP, ["submit", "--address", head, *words])


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_runs_the_sent_tree_its_log_is_followed_and_it_does_not_run_twice(head, tmp_path):
    tree = package_tree(
        tmp_path, "import os, sys, time; print('hello', sys.argv[1:], os.environ['COLOR'], open('data.txt').read())"
    )
    (tree / "data.txt").write_text("sent")
    words = ("--working-dir", str(tree), "--name", "greet", "--env", "COLOR=red", "--", "doctor", "--json")
    first = submit(head, *words)
    assert first.exit_code == 0, first.output
    assert "hello ['doctor', '--json'] red sent" in first.output
    assert "Job greet submitted" in first.output
    assert "Job greet SUCCEEDED" in first.output

    second = submit(head, *words)
    assert second.exit_code == 0
    assert "does not run twice" in second.output
    assert second.output.count("hello") == 1  # the first one's log
    (tree / "data.txt").write_text("changed")
    other = submit(head, *words)
    assert isinstance(other.exception, BusyError)
    assert "Choose another --name" in str(other.exception)

    with JobsClient(head, TOKEN) as client:
        assert [job.id for job in client.jobs()] == ["greet"]
        assert client.logs("greet").count("hello") == 1
        with pytest.raises(NotFoundError, match=r"unknown job 'gret'\. Did you mean 'greet'\?"):
            client.job("gret")
        package = pack(tree)
        assert (client.upload(package), client.upload(package)) == (True, False)
    listed = CliRunner(env={"RAY_AUTH_TOKEN": TOKEN, "COLUMNS": "200"}).invoke(APP, ["jobs", "list", "--address", head])
    assert "greet" in listed.output
    assert "SUCCEEDED" in listed.output


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_fails_hands_on_its_exit_code_and_one_that_runs_is_stopped(head, tmp_path):
    failing = package_tree(tmp_path / "a", "import sys; print('bad'); sys.exit(7)")
    result = submit(head, "--working-dir", str(failing), "--", "doctor")
    assert result.exit_code == 7, result.output
    assert "bad" in result.output

    waiting = package_tree(tmp_path / "b", "import time; print('waiting', flush=True); time.sleep(600)")
    result = submit(head, "--working-dir", str(waiting), "--name", "wait", "--no-follow", "--", "doctor")
    assert result.exit_code == 0
    with JobsClient(head, TOKEN) as client:
        assert any("waiting" in text for text in client.follow("wait"))  # while it runs
    runner = CliRunner(env={"RAY_AUTH_TOKEN": TOKEN})
    assert "STOPPED" in runner.invoke(APP, ["jobs", "stop", "wait", "--address", head]).output
    assert runner.invoke(APP, ["jobs", "status", "wait", "--address", head]).exit_code == 130
    assert "waiting" in runner.invoke(APP, ["jobs", "logs", "wait", "--address", head]).output
    assert "had ended already" in runner.invoke(APP, ["jobs", "stop", "wait", "--address", head]).output


@pytest.mark.ray
@pytest.mark.slow
def test_this_tree_trains_a_policy_as_a_job(head, tmp_path):
    small = [
        "total_steps=2", "log_interval=1", "learner.updates_per_call=1", "algo.batch_size=8", "tracking.trackers=[]",
        "policy.backbone.down_dims=[16,32]", "env=null", "checkpoint.interval=2", f"root={tmp_path}", "name=job",
    ]  # fmt: skip
    result = submit(head, "--working-dir", str(ROOT), "--", "train", "experiment=pusht_demo", *small, "--local")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "rlsvc" / "job" / "bundles" / "2" / "bundle.json").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_a_missing_and_a_wrong_token_are_refused_with_what_to_do(head):
    with (
        JobsClient(head) as client,
        pytest.raises(JobError, match=r"asks for a token and got none\. Set RAY_AUTH_TOKEN"),
    ):
        client.jobs()
    wrong = hashlib.sha256(b"wrong").hexdigest()
    with JobsClient(head, wrong) as client, pytest.raises(JobError, match="refuses this token"):
        client.jobs()


def package_tree(folder: Path, program: str) -> Path:
    """A working tree whose own `rlsvc.cli` is `program`: what a job must run is what was sent."""
    (folder / "rlsvc").mkdir(parents=True)
    (folder / "rlsvc" / "__init__.py").touch()
    (folder / "rlsvc" / "cli.py").write_text(program)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder
