"""A folder like a fresh clone, in which commands of the documentation run apart from what else is on this machine."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from rlsvc.serve.haproxy import free_ports, haproxy_environment

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def workplace(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder like a clone with its environment, and variables that keep its Ray apart from others on this machine.

    Whatever was started there and still runs at the end is ended.
    """
    folder = tmp_path / "clone"
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for path in Path(sys.prefix).iterdir():
        if path.name != "bin":
            (folder / ".venv" / path.name).symlink_to(path)
    for path in (Path(sys.prefix) / "bin").iterdir():  # a folder of its own, since `make haproxy` writes into it
        if path.name != "rlsvc-haproxy":
            (programs / path.name).symlink_to(path)
    for name in ("Makefile", "datasets", "deployments", "pyproject.toml", "uv.lock", "rlsvc"):
        (folder / name).symlink_to(ROOT / name)
    home = tmp_path / "home"
    home.mkdir()
    usual = ("8000", "8265", "6379")
    *ports, agent, client = free_ports(len(usual) + 2)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RLSVC_"))}
    # Sockets of Ray and of HAProxy need a short path.
    with tempfile.TemporaryDirectory(prefix="rlsvc-", ignore_cleanup_errors=True) as short:
        haproxy = haproxy_environment(Path(short))
        environment = {
            **inherited,
            **{
                name: value
                for name, value in haproxy.items()
                if name.endswith(("_PATH", "_LOC", "_BASE", "_FILE", "_PORT"))
            },
            "HOME": str(home),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": short,
            "JAX_PLATFORMS": "cpu",
            "START": f"--dashboard-agent-listen-port={agent} --ray-client-server-port={client}",
            **{f"PORT_{name}": str(port) for name, port in zip(usual, ports, strict=True)},
        }
        try:
            yield folder, environment
        finally:
            left = [process for process in psutil.process_iter() if belongs(process, tmp_path)]
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)


def belongs(process: psutil.Process, folder: Path) -> bool:
    """Whether it was started below this folder: by its environment or, since Ray's agents overwrite it, its place."""
    with contextlib.suppress(psutil.Error, OSError):
        if process.environ().get("HOME", "").startswith(f"{folder}/"):
            return True
    with contextlib.suppress(psutil.Error, OSError):
        return process.cwd().startswith(f"{folder}/")
    return False
