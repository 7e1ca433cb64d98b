"""The doctor: what it finds, what it advises, and when it fails."""

import json
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rlsvc import doctor
from rlsvc.commands.doctor import doctor as command
from rlsvc.doctor import Check

Usage = namedtuple("Usage", "total used free")
APP = typer.Typer()
APP.command()(command)


def test_every_line_that_is_not_ok_says_what_to_do():
    checks = doctor.examine()
    assert {"Python", "base packages", "CPU", "memory", "GPU", "JAX", "Vulkan", "Ray", "disk for runs", "/dev/shm"} <= {
        check.name for check in checks
    }
    assert all(check.mend for check in checks if check.status != "ok")
    assert not any(check.broken for check in checks)


def test_the_command_prints_json_and_fails_only_if_something_needed_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda root: [Check("Vulkan", "missing", "none", "install it")])
    fine = CliRunner().invoke(APP, ["--json"])
    assert fine.exit_code == 0
    assert json.loads(fine.output) == [
        {"name": "Vulkan", "status": "missing", "found": "none", "mend": "install it", "needed": False}
    ]
    monkeypatch.setattr(doctor, "examine", lambda root: [Check("Python", "missing", "3.9", "use 3.12", needed=True)])
    broken = CliRunner().invoke(APP, [])
    assert broken.exit_code == 1
    assert "use 3.12" in broken.output


def test_an_extra_that_is_not_installed_says_how_to_install_it_and_is_not_needed(monkeypatch):
    def version(name):
        if name in ("ray", "mlflow"):
            raise PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", lambda name: [
        "numpy>=2.2", 'ray==2.60.0; extra == "cluster"', 'mlflow==3.17.2; extra == "cluster"',
        'zarr>=3; extra == "zarr"',
    ])  # fmt: skip
    lines = {check.name: check for check in doctor.check_packages()}
    assert lines["base packages"].status == lines["extra zarr"].status == "ok"
    cluster = lines["extra cluster"]
    assert (cluster.status, cluster.found, cluster.broken) == ("missing", "not installed: ray, mlflow", False)
    assert "rlsvc[cluster]" in cluster.mend


def test_a_base_package_of_a_wrong_version_is_broken_and_an_extras_one_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "1.0")
    monkeypatch.setattr(doctor, "requires", lambda name: ["numpy>=2.2", 'ray==2.60.0; extra == "cluster"'])
    base, cluster = doctor.check_packages()
    assert (base.status, base.found, base.broken) == ("missing", "numpy 1.0, expected >=2.2", True)
    assert (cluster.status, cluster.found, cluster.broken) == ("warning", "ray 1.0, expected ==2.60.0", False)


def test_what_an_extra_of_a_requirement_adds_is_looked_for_too(monkeypatch):
    def version(name):
        if name == "jax-cuda13-plugin":
            raise PackageNotFoundError(name)
        return "0.11.2"

    asked = {
        "rlsvc": ['jax[cuda13]==0.11.2; extra == "cuda"'],
        "jax": ["numpy", 'jax-cuda13-plugin; extra == "cuda13"'],
    }
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", asked.get)
    _, cuda = doctor.check_packages()
    assert cuda.found == "not installed: jax-cuda13-plugin"


@pytest.mark.parametrize(
    ("free_gib", "status", "broken"), [(80.0, "ok", False), (2.0, "warning", False), (0.2, "missing", True)]
)
def test_a_disk_that_runs_full_is_a_warning_and_a_full_one_is_broken(monkeypatch, tmp_path, free_gib, status, broken):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100 * 2**30, 0, int(free_gib * 2**30)))
    check = doctor.check_disk("disk for runs", tmp_path / "not" / "yet", 5, "root=/elsewhere", needed=True)
    assert (check.status, check.broken) == (status, broken)
    assert str(tmp_path) in check.found


def test_a_disk_beyond_95_percent_is_a_warning_since_ray_spills_nothing_there(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1000 * 2**30, 0, 30 * 2**30))
    assert doctor.check_disk("disk for Ray", tmp_path, 5, "elsewhere").status == "warning"


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = doctor.check_port(port, "Serve")
    assert (check.name, check.status) == (f"port {port}", "warning")
    assert "Serve" in check.mend
    assert doctor.check_port(port, "Serve").status == "ok"


def test_a_probe_that_crashes_or_hangs_or_raises_is_told_in_one_line(monkeypatch):
    assert doctor.probe("import os; os.abort()") == (-6, "crashed with signal 6")
    assert doctor.probe("raise RuntimeError('no device')") == (1, "RuntimeError: no device")
    assert doctor.probe("print('a'); print('b')") == (0, "b")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    assert doctor.probe("import time; time.sleep(60)") == (1, "no answer within 0.2 s")


def test_a_gpu_driver_is_read_and_an_old_one_is_a_warning(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_gpu()[0].status == "missing"
    for driver, status in (("580.65.06", "ok"), ("535.1", "warning")):
        tool.write_text(f"#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, {driver}'\n")
        tool.chmod(0o755)
        (check,) = doctor.check_gpu()
        assert (check.status, driver in check.found) == (status, True)


def test_a_jax_that_does_not_see_the_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda program, env: (0, '["cpu:cpu"]'))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (check,) = doctor.check_jax()
    assert (check.status, "rlsvc[cuda]" in check.mend) == ("warning", True)


def test_a_cluster_that_is_named_and_does_not_answer_is_missing(monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    cluster = doctor.check_ray()[-1]
    assert (cluster.name, cluster.status) == ("Ray cluster", "missing")
    assert "127.0.0.1:9" in cluster.found


def test_the_doctor_imports_neither_jax_torch_ray_nor_mlflow():
    program = (
        "import sys, rlsvc.doctor, rlsvc.commands.doctor\n"
        "print([m for m in ('jax', 'torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == "[]"
