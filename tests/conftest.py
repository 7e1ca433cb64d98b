"""What the whole suite shares: JAX set up for tests, and one Ray for all of them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Before JAX is imported anywhere: tests run on the CPU, and a broadcast that was not meant is an error.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")

# Array shapes in the annotations of nets and algorithms are checked in every call, as long as tests run.
install_import_hook(["rlsvc.nn", "rlsvc.algos"], "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of "localhost" and its key in one file; beside it certificate.pem and key.pem, one each."""
    pem = tmp_path / "tls.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "certificate.pem")],
        check=True, capture_output=True,
    )  # fmt: skip
    pem.write_text((tmp_path / "certificate.pem").read_text() + (tmp_path / "key.pem").read_text())
    return pem


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A Ray of the suite's own, with two CPUs, started once; Serve answers through HAProxy, as `rlsvc serve` has it."""
    import ray

    from rlsvc.serve.haproxy import haproxy_environment

    # Sockets of Ray and of HAProxy need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="rlsvc-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in haproxy_environment(Path(folder)).items():
            patch.setenv(name, os.environ.get(name, value))
        context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        yield context
        ray.shutdown()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes the cluster carries the mark. Of several processes one runs all tests of Ray.

    What keeps time with a robot comes first, before Ray has both CPUs; then Ray's, which take longest.
    """
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
        ray = item.get_closest_marker("ray") is not None
        item.add_marker(pytest.mark.xdist_group("ray" if ray else item.location[0]))
    items.sort(key=lambda item: 0 if _keeps_time(item) else 1 if item.get_closest_marker("ray") else 2)


def _keeps_time(item: pytest.Item) -> bool:
    tests = ROOT / "tests"
    return item.path.is_relative_to(tests / "robots") or item.path in (
        tests / "test_collect.py", tests / "envs" / "test_robot.py",
    )  # fmt: skip
