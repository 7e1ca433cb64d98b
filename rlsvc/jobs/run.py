"""What a job runs on the cluster when `rlsvc submit` was given retries, a queue or a record.

    python -m rlsvc.jobs.run [--attempts N] [--again] [--queue NAME --priority N] [--record FOLDER] -- train FILE ...

It writes the job down, waits for its turn, then runs `rlsvc train FILE ...` in a process of its own until that ends
well, a person's mistake or a person ends it, or the attempts are used up. Each attempt after the first goes on from the
run's last commit. It exits with the code of the last one. It dies with its job, and what it runs dies with it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsvc.jobs.queue import NeverError, Ticket, Turn

SPEC, SPEC_FILE = "RLSVC_JOB_SPEC", "rlsvc_spec.yaml"
"""Environment variable with what is in the command's specification, for a job that is sent no files (an image), and the
word of the command that stands for it."""
FINAL = (0, 2, 130)
"""Exit codes after which nothing is tried again: done, bad input, stopped by a person."""
STOPPED = 130
PAUSE_S = 5.0
"""Before a second attempt; twice as long before each further one, up to a minute. What the driver that died had started
on other nodes ends meanwhile."""
SET_PARENT_DEATH_SIGNAL = 1
LIBC = ctypes.CDLL(None)


def going_on(command: Sequence[str]) -> list[str]:
    """The options by which a command goes on from what an attempt before it has saved."""
    verb = command[0]
    if verb in ("train", "sweep") and not {"--continue", "--resume"} & set(command):
        return ["--continue"]
    if verb == "evaluate" and "--resume" not in command and any(w.split("=")[0] == "--output" for w in command):
        return ["--resume"]
    return []


def run(command: Sequence[str], attempts: int, again: bool, stop: threading.Event) -> int:
    """Run an rlsvc command, at most so many times.

    Args:
        command: words after `rlsvc`.
        attempts: at least 1.
        again: whether the first one goes on already.
        stop: set when the job is asked to stop; the process under way has been told then.

    Returns:
        The exit code of the last one; 128 + the signal for one that a signal ended.
    """
    code = 0
    for attempt in range(1, attempts + 1):
        words = [*command, *(going_on(command) if again or attempt > 1 else [])]
        child = subprocess.Popen([sys.executable, "-m", "rlsvc.cli", *words], preexec_fn=_die_with_parent)
        code = child.wait()
        code = code if code >= 0 else 128 - code
        if stop.is_set() or code in FINAL or attempt == attempts:
            break
        wait = min(60.0, PAUSE_S * 2 ** (attempt - 1))
        _say(f"attempt {attempt} of {attempts} ended with {_named(code)}; the next one begins in {wait:g} s")
        if stop.wait(wait):
            return STOPPED
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser("rlsvc.jobs.run", allow_abbrev=False)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--queue")
    parser.add_argument("--priority", type=int, default=0)
    parser.add_argument("--asks", type=json.loads, default={})
    parser.add_argument("--since", type=float, default=None)
    parser.add_argument("--record")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    since = time.time() if options.since is None else options.since
    stop = threading.Event()
    job = job_of(os.environ)
    options.command = _with_spec(options.command, os.environ.pop(SPEC, None))
    record = None
    if options.record is not None:
        from rlsvc.jobs.record import Record

        record = Record(options.record, job, since)
        record.write()
    code = _in_turn(options, Ticket(job["submission_id"], options.priority, since, options.asks), stop)
    if record is not None:
        record.erase()
    return code


def _in_turn(options: argparse.Namespace, ticket: Ticket, stop: threading.Event) -> int:
    """Run the command once it is its turn, or at once where there is no queue; the exit code."""
    turn = None
    if options.queue is not None:
        turn = Turn(options.queue, ticket, _say)
        try:
            begun = turn.wait(lambda: _stop_on_signals(stop), stop)
        except NeverError as error:
            _say(f"error: {error}")
            return 2
        if not begun:
            return STOPPED
    _stop_on_signals(stop)
    code = run(options.command, options.attempts, options.again, stop)
    if turn is not None:
        turn.over()
    return code


def job_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """What Ray says of the job that this process is: submission_id, runtime_env, and the metadata that is rlsvc's."""
    config = json.loads(environment.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    metadata = dict(config.get("metadata") or {})
    return {
        "submission_id": metadata.pop("job_submission_id", ""),
        "runtime_env": config.get("runtime_env") or {},
        "metadata": {name: value for name, value in metadata.items() if name.startswith(("rlsvc.", "user."))},
    }


def _with_spec(command: Sequence[str], text: str | None) -> list[str]:
    """The command with the path of a specification that came by the environment."""
    if text is None:
        return [*command]
    file = Path(tempfile.mkdtemp(prefix="rlsvc-job-")) / SPEC_FILE
    file.write_text(text)
    return [str(file) if word == SPEC_FILE else word for word in command]


def _stop_on_signals(stop: threading.Event) -> None:
    """Ray tells every process of a job to stop at once, the command's too: here it is only noted."""

    def note(number: int, frame: Any) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)


def _die_with_parent() -> None:
    LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _named(code: int) -> str:
    try:
        return f"{signal.Signals(code - 128).name}" if code > 128 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _say(text: str) -> None:
    print(f"rlsvc: {text}", flush=True)  # noqa: T201 - the job's log


if __name__ == "__main__":
    sys.exit(main())
