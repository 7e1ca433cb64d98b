"""What runs a job's command on the cluster: attempts, going on, stopping."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from heads import program_tree, wait_for

from rlsvc.jobs.run import SPEC, going_on

# Writes down how it was called; ends as its environment says, one word a call.
PROGRAM = """
import os, pathlib, signal, sys, time
log = pathlib.Path(os.environ["LOG"])
with log.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
ends = os.environ["ENDS"].split()
word = ends[min(len(log.read_text().splitlines()), len(ends)) - 1]
if word == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if word == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    time.sleep(60)
sys.exit(int(word))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return program_tree(tmp_path_factory.mktemp("tree") / "t", PROGRAM)


def start(tree: Path, log: Path, ends: str, *words: str, **env: str) -> subprocess.Popen[str]:
    program = f"import sys, rlsvc.jobs.run as r; r.PAUSE_S = 0.05; sys.exit(r.main({words!r}))"
    environment = {**os.environ, "LOG": str(log), "ENDS": ends, "PYTHONPATH": str(tree), **env}
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
    )


def ran(tree: Path, log: Path, ends: str, *words: str, **env: str) -> tuple[int, list[str], str]:
    """Exit code, how the command was called each time, and what was printed."""
    process = start(tree, log, ends, *words, **env)
    output, _ = process.communicate(timeout=60)
    return process.returncode, log.read_text().splitlines(), output


TRAIN = ("--", "train", "rlsvc_spec.yaml", "root=/shared/runs")


def test_an_attempt_that_was_killed_is_followed_by_one_that_goes_on(tree, tmp_path):
    code, calls, output = ran(tree, tmp_path / "log", "kill 7 0", "--attempts", "3", *TRAIN)
    assert code == 0
    assert calls == [
        "train rlsvc_spec.yaml root=/shared/runs",
        *2 * ["train rlsvc_spec.yaml root=/shared/runs --continue"],
    ]
    assert "attempt 1 of 3 ended with SIGKILL" in output
    assert "attempt 2 of 3 ended with exit code 7" in output


def test_the_last_attempts_exit_code_is_handed_on(tree, tmp_path):
    assert ran(tree, tmp_path / "a", "7 kill", "--attempts", "2", *TRAIN)[0] == 128 + signal.SIGKILL
    assert ran(tree, tmp_path / "b", "75", "--attempts", "2", *TRAIN)[0] == 75


@pytest.mark.parametrize("code", [0, 2, 130])
def test_done_bad_input_and_a_persons_stop_are_not_tried_again(tree, tmp_path, code):
    ended, calls, _ = ran(tree, tmp_path / "log", str(code), "--attempts", "3", *TRAIN)
    assert (ended, len(calls)) == (code, 1)


def test_a_resumed_job_goes_on_from_the_first_attempt(tree, tmp_path):
    _, calls, _ = ran(tree, tmp_path / "log", "0", "--again", *TRAIN)
    assert calls == ["train rlsvc_spec.yaml root=/shared/runs --continue"]


def test_a_job_that_is_stopped_ends_with_its_command_and_is_not_tried_again(tree, tmp_path):
    log = tmp_path / "log"
    process = start(tree, log, "wait", "--attempts", "3", *TRAIN)
    wait_for(lambda: log.exists() and log.read_text())
    time.sleep(0.3)  # the command sets its handler
    (child,) = children(process.pid)
    for pid in (process.pid, child):  # Ray tells all of a job's processes
        os.kill(pid, signal.SIGTERM)
    assert process.wait(30) == 130
    assert len(log.read_text().splitlines()) == 1


def test_the_command_dies_with_what_runs_it(tree, tmp_path):
    log = tmp_path / "log"
    process = start(tree, log, "wait", "--attempts", "3", *TRAIN)
    wait_for(lambda: log.exists() and log.read_text())
    (child,) = children(process.pid)
    process.kill()
    process.wait(30)
    wait_for(lambda: not alive(child))


def test_the_specification_comes_by_the_environment_where_no_files_are_sent(tree, tmp_path):
    """An image brings its own code; the specification comes beside it."""
    program = program_tree(tmp_path / "p", "import sys; print(open(sys.argv[2]).read())")
    process = start(program, tmp_path / "log", "", *TRAIN, **{SPEC: "seed: 1"})
    output, _ = process.communicate(timeout=60)
    assert output == "seed: 1\n"
    assert not (program / "rlsvc_spec.yaml").exists()


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("train a.yaml", ["--continue"]),
        ("train a.yaml --resume", []),
        ("sweep a.yaml", ["--continue"]),
        ("evaluate b --output s.json", ["--resume"]),
        ("evaluate b", []),
        ("serve b", []),
    ],
)
def test_each_command_goes_on_in_its_own_way(command, more):
    assert going_on(command.split()) == more


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
