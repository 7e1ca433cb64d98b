"""Jobs: the package, the client against a Ray head with tokens, and what goes wrong."""

import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from heads import APP, ROOT, TOKEN, invoke, program_tree
from typer.testing import CliRunner

from rlsvc.commands.job_command import resolve
from rlsvc.core.errors import BusyError, NotFoundError, SpecError, UserError
from rlsvc.jobs import sent
from rlsvc.jobs.client import JobsClient, find_token
from rlsvc.jobs.package import JobError, Package, git_state, pack, python_env
from rlsvc.jobs.sent import recall, remember
from rlsvc.jobs.types import RESUMED, Capacity, Job, Submission, continued

AUTHOR = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


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
        (["evaluate", "runs/x", "--episodes", "many"], SpecError, "evaluate: .*--episodes"),
        (["serve", "runs/x", "--replica", "2"], SpecError, "serve: .*--replica"),
        (["collect", "none.yaml"], SpecError, "none.yaml"),
    ],
)
def test_what_is_wrong_with_a_run_is_found_before_anything_is_sent(command, error, message):
    result = CliRunner().invoke(APP, ["submit", "--address", "http://127.0.0.1:9", "--", *command])
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception


def test_a_run_is_sent_resolved_and_its_relative_root_leaves_the_jobs_temporary_folder():
    made = resolve(["train", "experiment=pusht_diffusion", "total_steps=7", "--resume"])
    assert made.entrypoint() == 'python -m rlsvc.cli train rlsvc_spec.yaml --resume "root=$HOME/rlsvc/runs"'
    assert "total_steps: 7" in made.text
    assert "$HOME/rlsvc/runs" in made.note
    for root in ("/shared/runs", "s3://bucket/runs"):
        made = resolve(["train", "experiment=pusht_diffusion", f"root={root}"])
        assert made.entrypoint() == "python -m rlsvc.cli train rlsvc_spec.yaml"
        assert not made.note


def test_a_policy_of_the_registry_is_looked_for_where_jobs_that_train_keep_theirs():
    made = resolve(["serve", "models:/rlsvc-pusht@production", "--replicas", "2", "--gpus", "0.5"])
    assert made.entrypoint().endswith(
        'serve models:/rlsvc-pusht@production --replicas 2 --gpus 0.5 --root "$HOME/rlsvc/runs"'
    )
    assert made.asks == {"CPU": 2.0, "GPU": 1.0}
    made = resolve(["evaluate", "models:/a@b", "--root", "/shared/runs", "--workers", "3"])
    assert made.entrypoint() == "python -m rlsvc.cli evaluate models:/a@b --root /shared/runs --workers 3"
    assert made.asks == {"CPU": 3.0}


def test_what_a_run_asks_for_is_known_before_it_is_sent():
    run = ["experiment=pusht_diffusion", "learner.ranks=4", "learner.gpus_per_rank=1", "evaluation.gpus=0.5"]
    made = resolve(["train", *run, "evaluation.workers=3", "evaluation.cpus_per_worker=2"])
    assert made.asks == {"CPU": 4 * 1.0 + 3 * 2.0, "GPU": 4.5}
    assert resolve(["train", *run, "--local"]).asks == {}
    assert resolve(["sweep", str(ROOT / "tune_spaces/pusht_diffusion.yaml"), "resources.cpu=3"]).asks == {
        "CPU": 3.0,
        "GPU": 0.25,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--priority", "3"], "--priority 3: of which queue"),
        (["--queue", "a b"], "--queue 'a b': expected letters"),
        (["--packages", "conda"], "--packages 'conda': expected cluster, uv, pip"),
        (["--packages", "uv", "--image", "x"], "choose one"),
        (["--extra", "cuda"], "--extra: goes with --packages"),
        (["--resource", "robot:arm1"], "--resource 'robot:arm1': expected NAME=AMOUNT"),
        (["--kuberay"], "--kuberay: prints a manifest"),
        (["--kuberay", "--dry-run", "--queue", "a"], "nobody waits"),
        (["--name", "a/b"], "--name 'a/b'"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(options, message):
    result = CliRunner().invoke(APP, ["submit", *options, "--", "doctor"])
    with pytest.raises(UserError, match=message):
        raise result.exception


@pytest.mark.parametrize("options", [["--priority", "high", "--queue", "a"], ["--retries", "-1"], ["--cpus", "two"]])
def test_what_is_no_number_is_refused_with_exit_code_2(options):
    result = CliRunner().invoke(APP, ["submit", *options, "--", "doctor"])
    assert result.exit_code == 2
    assert f"Invalid value for '{options[0]}'" in result.output


def test_what_is_not_committed_is_named(tree):
    assert str(git_state(tree)).startswith("no commit yet, 5 files not committed")
    subprocess.run(["git", "commit", "-qm", "x"], cwd=tree, check=True, env={**os.environ, **AUTHOR})
    state = git_state(tree)
    assert state.uncommitted == ("a.py", "gone.py", "new.py")
    assert str(state) == f"commit {state.commit[:12]}, 3 files not committed: a.py, gone.py, new.py"
    assert git_state(tree / "sub").uncommitted == ()
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    subprocess.run(["git", "commit", "-qm", "y"], cwd=tree, check=True, env={**os.environ, **AUTHOR})
    assert str(git_state(tree)) == f"commit {git_state(tree).commit[:12]}"


LOCKED = """version = 1
revision = 3
requires-python = ">=3.12"

[[package]]
name = "tiny"
version = "0.1.0"
source = { virtual = "." }
dependencies = [{ name = "idna" }, { name = "ray" }]

[package.metadata]
requires-dist = [{ name = "idna", specifier = ">=3" }, { name = "ray" }]

[[package]]
name = "idna"
version = "3.10"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://example.org/idna-3.10-py3-none-any.whl", hash = "sha256:HASH", size = 70442 }]

[[package]]
name = "ray"
version = "2.60.0"
source = { registry = "https://pypi.org/simple" }
wheels = [{ url = "https://example.org/ray-2.60.0-py3-none-any.whl", hash = "sha256:HASH", size = 70442 }]
""".replace("HASH", "0" * 64)
TINY = '[project]\nname = "tiny"\nversion = "0.1.0"\nrequires-python = ">=3.12"\ndependencies = ["idna>=3", "ray"]\n'


def test_packages_come_pinned_from_the_lock_file_without_ray(tmp_path):
    (tmp_path / "pyproject.toml").write_text(TINY)
    (tmp_path / "uv.lock").write_text(LOCKED)
    assert python_env("pip", tmp_path, ()).runtime_env == {"pip": {"packages": ["idna==3.10"], "pip_check": False}}
    made = python_env("uv", tmp_path, ())
    assert made.python == "uv run --frozen --no-dev python"
    assert made.runtime_env == {}
    assert made.env_vars["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "1", "Ray starts the workers of such a driver likewise"
    folder = made.env_vars["UV_PROJECT_ENVIRONMENT"]
    assert python_env("uv", tmp_path, ()).env_vars["UV_PROJECT_ENVIRONMENT"] == folder
    (tmp_path / "uv.lock").write_text(LOCKED.replace("3.10", "3.11"))
    assert python_env("uv", tmp_path, ()).env_vars["UV_PROJECT_ENVIRONMENT"] != folder
    assert python_env("cluster", tmp_path, ()).runtime_env == {}
    with pytest.raises(JobError, match=r"gives no requirements: .*nothere"):
        python_env("pip", tmp_path, ("nothere",))
    (tmp_path / "uv.lock").unlink()
    with pytest.raises(JobError, match=r"has no uv\.lock.*uv lock"):
        python_env("uv", tmp_path, ())


def test_rays_own_check_takes_what_is_sent(tree):
    """Of the runtime environments of each kind, and of the request around them."""
    from ray.dashboard.modules.job.common import JobSubmitRequest
    from ray.runtime_env import RuntimeEnv

    (tree / "pyproject.toml").write_text(TINY + "[project.optional-dependencies]\nall = []\n")
    (tree / "uv.lock").write_text(LOCKED.replace("requires-dist", 'provides-extras = ["all"]\nrequires-dist'))
    for options in (["--packages", "uv"], ["--packages", "pip"], ["--image", "rlsvc/cpu:0.1.0"], []):
        words = ["submit", "--dry-run", *options, "--working-dir", str(tree), "--cpus", "1", "--memory", "2"]
        result = CliRunner().invoke(APP, [*words, "--", "train", "experiment=pusht_demo"])
        assert result.exit_code == 0, (result.output, result.exception)
        request = JobSubmitRequest(**json.loads(result.output))
        RuntimeEnv(**request.runtime_env)
        assert (request.entrypoint_num_cpus, request.entrypoint_memory) == (1.0, 2 * 2**30)


def test_a_cluster_that_does_not_grow_refuses_at_once_what_it_will_never_have():
    fixed = Capacity({"CPU": 8.0, "GPU": 2.0, "memory": 4 * 2**30}, grows=False)
    fixed.check({"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(JobError, match=r"asks for 3 GPU in all, the cluster has 2 and does not grow"):
        fixed.check({"GPU": 3.0})
    with pytest.raises(JobError, match=r"asks for 6\.0 GiB memory in all, the cluster has 4\.0"):
        fixed.check({"memory": 6 * 2**30})
    with pytest.raises(JobError, match=r"has the robot 'arm1'.*ray start --address=HEAD:6379"):
        fixed.check({"robot:arm1": 1.0})
    Capacity({"CPU": 8.0}, grows=True).check({"GPU": 3.0})


def test_a_job_goes_on_by_its_own_command():
    plain = 'python -m rlsvc.cli train rlsvc_spec.yaml "root=$HOME/rlsvc/runs"'
    again = 'python -m rlsvc.jobs.run --again -- train rlsvc_spec.yaml "root=$HOME/rlsvc/runs"'
    assert continued(plain) == continued(again) == again
    tried = "uv run python -m rlsvc.jobs.run --attempts 3 -- sweep a.yaml"
    assert continued(tried) == "uv run python -m rlsvc.jobs.run --again --attempts 3 -- sweep a.yaml"
    waited = "python -m rlsvc.jobs.run --again --since 7.000 --queue a -- train b"
    assert continued("python -m rlsvc.jobs.run --queue a -- train b", 7.0) == continued(waited, 7.0) == waited
    with pytest.raises(JobError, match="was not submitted by rlsvc"):
        continued("python train.py")


def test_a_job_that_goes_on_is_still_the_one_that_was_submitted():
    first = Submission(
        "j", "python -m rlsvc.cli train a", {"working_dir": "gcs://a.zip"}, {}, {"CPU": 2.0, "robot:a": 1.0}
    )
    second = Submission.from_json(first.to_json()).again("python -m rlsvc.jobs.run --again -- train a")
    assert second.digest == first.digest
    assert second.resources == first.resources
    third = Submission.from_json(second.to_json()).again("x")
    assert (third.digest, third.metadata[RESUMED]) == (first.digest, "2")
    assert Submission("j", first.entrypoint, first.runtime_env, {}, {"CPU": 1.0}).digest != first.digest


def test_what_was_sent_is_remembered_for_this_user_alone(tmp_path):
    for number in range(sent.KEPT + 2):
        remember(Submission(f"j{number}", "x", {"env_vars": {"SECRET": "s"}}), Package(b"zip", 1))
        os.utime(tmp_path / "cache/jobs" / f"j{number}.json", (number, number))
    assert recall("j0") == (None, None)
    submission, package = recall(f"j{sent.KEPT + 1}")
    assert submission is not None
    assert package is not None
    assert (submission.runtime_env["env_vars"], package.data) == ({"SECRET": "s"}, b"zip")
    files = list((tmp_path / "cache/jobs").iterdir())
    assert len(files) == 2 * sent.KEPT
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


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
    program = "import sys, rlsvc.jobs.client, rlsvc.jobs.sent\nfrom rlsvc.commands.jobs import resolve\n"
    program += "resolve(['train', 'experiment=pusht_diffusion'])\n"
    program += "print([m for m in ('jax', 'torch', 'ray', 'mlflow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def submit(head: str, *words: str, **env: str):
    return invoke(head, "submit", *words, **env)


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_runs_the_sent_tree_its_log_is_followed_and_it_does_not_run_twice(head, tmp_path):
    tree = program_tree(
        tmp_path / "tree",
        "import os, sys, time; print('hello', sys.argv[1:], os.environ['COLOR'], open('data.txt').read())",
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
        assert [job.id for job in client.jobs()].count("greet") == 1
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
    failing = program_tree(tmp_path / "a", "import sys; print('bad'); sys.exit(7)")
    result = submit(head, "--working-dir", str(failing), "--", "doctor")
    assert result.exit_code == 7, result.output
    assert "bad" in result.output

    waiting = program_tree(tmp_path / "b", "import time; print('waiting', flush=True); time.sleep(600)")
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
