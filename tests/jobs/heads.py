"""A Ray head that asks for a token, working trees whose `rlsvc.cli` is a test's own program, commands against both."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import typer
from typer.testing import CliRunner

from rlsvc.commands import jobs as commands
from rlsvc.jobs.client import JobsClient
from rlsvc.jobs.package import JobError
from rlsvc.serve.haproxy import free_ports

ROOT = Path(__file__).parents[2]
TOKEN = "a" * 32
APP = typer.Typer()
APP.command()(commands.submit)
APP.add_typer(commands.app, name="jobs")


class Head:
    """A head with two CPUs; `kill` ends all of it at once, as a lost machine does."""

    def __init__(self, log: Path, ports: tuple[int, ...] | None = None) -> None:
        # Short: Ray's sockets have names of at most 107 bytes.
        self.folder = Path("/tmp") / f"rlsvc_head_{os.getpid()}_{time.monotonic_ns() % 10**6}"
        self.ports = ports or tuple(free_ports(4))
        gcs, dashboard, client, agent = self.ports
        self.address, self.log = f"http://127.0.0.1:{dashboard}", log
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2",
            f"--temp-dir={self.folder}", f"--port={gcs}", f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}",
            "--include-dashboard=true", "--disable-usage-stats", "--node-ip-address=127.0.0.1",
        ]  # fmt: skip
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": path}
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def wait(self) -> None:
        with JobsClient(self.address, TOKEN) as cluster:
            deadline = time.monotonic() + 180
            while True:
                try:
                    cluster.version()
                    return
                except JobError:
                    assert self._process.poll() is None, self.log.read_text()
                    assert time.monotonic() < deadline, self.log.read_text()
                    time.sleep(0.5)

    def kill(self) -> None:
        """SIGKILL to everything that it started: its session, and what has left it by a session of its own."""
        import psutil

        children = psutil.Process(self._process.pid).children(recursive=True)
        for each in [*children, psutil.Process(self._process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait(30)

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def invoke(head: str, *words: str, **env: str):
    """`rlsvc submit ...` or `rlsvc jobs ...` against a head."""
    at = words.index("--") if "--" in words else len(words)
    words = (*words[:at], "--address", head, *words[at:])
    return CliRunner(env={"RAY_AUTH_TOKEN": TOKEN, "COLUMNS": "250", **env}).invoke(APP, list(words))


def program_tree(folder: Path, program: str) -> Path:
    """A working tree whose own `rlsvc.cli` is `program`, all else as here: what a job must run is what was sent."""
    shutil.copytree(ROOT / "rlsvc", folder / "rlsvc", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "rlsvc" / "cli.py").write_text(program)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def wait_for(what, timeout: float = 90.0) -> None:
    """Until `what()` is true."""
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.2)
