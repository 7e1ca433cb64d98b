"""An S3 of the tests' own: moto's server in a process of its own, which Arrow's client speaks to as to any other."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsvc.serve.haproxy import free_ports

KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3:
    """A server that can be stopped and started again; what it holds is gone with it."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.endpoint}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < deadline
            assert self._process.poll() is None
            time.sleep(0.1)

    def bucket(self, name: str) -> str:
        """A new bucket; its URL."""
        import boto3

        client = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1",
                              aws_access_key_id="key", aws_secret_access_key="secret")  # fmt: skip
        client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def pause(self) -> None:
        """Answer nobody, as a network that is gone."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)
        self._process.kill()
        self._process.wait(30)


def running() -> Iterator[S3]:
    server = S3()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """An S3 for all tests of the session."""
    yield from running()


@pytest.fixture
def s3(s3_server: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """It, with the environment by which it is found, and a cache of this test's own."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("RLSVC_CACHE", str(tmp_path / "cache"))
    return s3_server
