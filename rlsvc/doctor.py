"""What of this machine rlsvc can use, and the mend for what it cannot.

What may crash a process or hold a GPU (JAX, Vulkan, OpenGL) is tried in a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlsvc.core.errors import UserError
from rlsvc.envs.runtime import find_uv
from rlsvc.envs.vulkan import MEND as VULKAN_MEND
from rlsvc.envs.vulkan import PROBE as RENDERER_PROBE
from rlsvc.jobs.client import JobsClient, find_token

Status = Literal["ok", "warning", "missing"]
GIB = 2**30
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: what was looked at.
        status: ok; warning, when it works with a drawback; missing, when it does not.
        found: what is there.
        mend: what to do about it, "" when ok.
        needed: whether nothing works without it.
    """

    name: str
    status: Status
    found: str
    mend: str = ""
    needed: bool = False

    @property
    def broken(self) -> bool:
        """Whether rlsvc cannot work here."""
        return self.needed and self.status == "missing"


def examine(root: str = "runs") -> list[Check]:
    """Looks at everything.

    Args:
        root: where runs shall lie.
    """
    checks: list[Callable[[], list[Check]]] = [
        check_python, check_packages, check_processor, check_gpu, check_jax, check_vulkan, check_mujoco,
        check_uv, check_ray, lambda: [check_port(8000, "Serve")], lambda: check_disks(Path(root)),
    ]  # fmt: skip
    return [line for check in checks for line in check()]


def check_python() -> list[Check]:
    """Python 3.12, which LeRobot and flax need."""
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 12):
        return [Check("Python", "ok", found, needed=True)]
    return [Check("Python", "missing", found, "use Python 3.12: uv venv --python 3.12", needed=True)]


def check_packages() -> list[Check]:
    """The base install, then each extra, against what rlsvc's own metadata asks for."""
    try:
        requirements = [Requirement(text) for text in requires("rlsvc") or []]
    except PackageNotFoundError:
        return [
            Check(
                "packages",
                "warning",
                "rlsvc runs from a folder and is not installed",
                "uv sync --all-extras, or pip install rlsvc",
            )
        ]
    extras: dict[str, list[Requirement]] = {"": []}
    for requirement in requirements:
        name = _extra(requirement)
        if canonicalize_name(requirement.name) != "rlsvc":
            extras.setdefault(name, []).append(requirement)
    extras.pop("all", None)
    return [_check_extra(name, wanted) for name, wanted in extras.items()]


def _extra(requirement: Requirement) -> str:
    marker = str(requirement.marker or "")
    return marker.split("extra ==")[1].strip().strip("\"'") if "extra ==" in marker else ""


def _check_extra(extra: str, wanted: list[Requirement]) -> Check:
    absent, wrong = [], []
    for requirement in [each for one in wanted for each in _with_its_extras(one)]:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            absent.append(requirement.name)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found}, expected {requirement.specifier}")
    name = f"extra {extra}" if extra else "base packages"
    mend = (
        f"pip install 'rlsvc[{extra}]' (uv sync --extra {extra} in a clone)" if extra else "pip install --upgrade rlsvc"
    )
    if wrong:
        return Check(name, "missing" if not extra else "warning", "; ".join(wrong), mend, needed=not extra)
    if absent:
        return Check(name, "missing", f"not installed: {', '.join(absent)}", mend, needed=not extra)
    return Check(name, "ok", ", ".join(f"{each.name} {version(each.name)}" for each in wanted), needed=not extra)


def _with_its_extras(requirement: Requirement) -> list[Requirement]:
    """A requirement such as `jax[cuda13]`, then those that its extras add."""
    found = [requirement]
    if requirement.extras and _installed(requirement.name):
        for each in map(Requirement, requires(requirement.name) or []):
            if each.marker and any(each.marker.evaluate({"extra": extra}) for extra in requirement.extras):
                added = not each.marker.evaluate({"extra": ""})
                found += [each] if added else []
    return found


def check_processor() -> list[Check]:
    """Cores that this process may use, and memory."""
    cores = len(os.sched_getaffinity(0))
    memory = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
    }
    free, total = memory["MemAvailable"] / GIB, memory["MemTotal"] / GIB
    few, little = cores < 2, free < 4
    return [
        Check("CPU", "warning" if few else "ok", f"{cores} cores", "Ray and a learner want 2 or more" if few else ""),
        Check(
            "memory", "warning" if little else "ok", f"{free:.1f} GiB free of {total:.1f} GiB",
            "training with Ray wants 4 GiB; end other programs" if little else "",
        ),
    ]  # fmt: skip


def check_gpu() -> list[Check]:
    """NVIDIA's driver."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return [
            Check(
                "GPU",
                "missing",
                "no nvidia-smi",
                "a CPU works, slower; for a GPU install NVIDIA's driver, 580 or newer",
            )
        ]
    except subprocess.TimeoutExpired:
        return [Check("GPU", "warning", "nvidia-smi does not answer", "reload the driver or restart the machine")]
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr or done.stdout).strip().splitlines()[:1]
        return [Check("GPU", "missing", f"nvidia-smi: {''.join(reason)}", "install NVIDIA's driver, 580 or newer")]
    lines = done.stdout.strip().splitlines()
    major = int(lines[0].rsplit(",", 1)[1].strip().split(".")[0])
    old = major < 580
    return [
        Check("GPU", "warning" if old else "ok", "; ".join(lines), "CUDA 13 needs driver 580 or newer" if old else "")
    ]


def check_jax() -> list[Check]:
    """Which devices JAX computes on."""
    if not _installed("jax"):
        return [Check("JAX", "missing", "not installed", "pip install 'rlsvc[learn]'; a robot's computer needs none")]
    program = "import json, jax; print(json.dumps([f'{d.platform}:{d.device_kind}' for d in jax.devices()]))"
    code, output = probe(program, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    if code:
        return [Check("JAX", "missing", output, "pip install --force-reinstall 'rlsvc[learn]'")]
    devices = json.loads(output)
    idle = shutil.which("nvidia-smi") is not None and not any(device.startswith(("gpu", "cuda")) for device in devices)
    mend = "JAX does not see the GPU: pip install 'rlsvc[cuda]'" if idle else ""
    return [Check("JAX", "warning" if idle else "ok", ", ".join(devices), mend)]


VULKAN_PROBE = """
import ctypes
vulkan = ctypes.CDLL('libvulkan.so.1')
class CreateInfo(ctypes.Structure):
    _fields_ = [('type', ctypes.c_int), ('next', ctypes.c_void_p), ('flags', ctypes.c_uint32), ('app', ctypes.c_void_p),
                ('n_layers', ctypes.c_uint32), ('layers', ctypes.c_void_p),
                ('n_extensions', ctypes.c_uint32), ('extensions', ctypes.c_void_p)]
instance, count = ctypes.c_void_p(), ctypes.c_uint32()
code = vulkan.vkCreateInstance(ctypes.byref(CreateInfo(type=1)), None, ctypes.byref(instance))
assert code == 0, f'vkCreateInstance gave {code}'
code = vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
assert code == 0 and count.value, 'no Vulkan device'
print(f'{count.value} device(s)')
"""


def check_vulkan() -> list[Check]:
    """A Vulkan device, which ManiSkill needs even for state observations; a broken driver crashes the process."""
    # A driver that Vulkan takes may be too old for ManiSkill's renderer, so that is asked where it is installed.
    code, output = probe(RENDERER_PROBE if _installed("sapien") else VULKAN_PROBE)
    if code == 0:
        return [Check("Vulkan", "ok", output)]
    return [Check("Vulkan", "missing", output, f"only ManiSkill needs it: {VULKAN_MEND}")]


def check_mujoco() -> list[Check]:
    """OpenGL off screen for MuJoCo's cameras."""
    if not _installed("mujoco"):
        return [
            Check(
                "MuJoCo GL",
                "missing",
                "mujoco is not installed",
                "only MuJoCo's environments need it: pip install 'rlsvc[sim]'",
            )
        ]
    backend = os.environ.get("MUJOCO_GL", "egl")
    program = (
        "import mujoco; context = mujoco.GLContext(64, 64); context.make_current(); context.free(); print('renders')"
    )
    code, output = probe(program, {"MUJOCO_GL": backend})
    if code == 0:
        set_it = "" if "MUJOCO_GL" in os.environ else "set MUJOCO_GL=egl where no display is"
        return [Check("MuJoCo GL", "ok", f"MUJOCO_GL={backend} {output}", set_it)]
    return [
        Check(
            "MuJoCo GL",
            "missing",
            f"MUJOCO_GL={backend}: {output}",
            "apt install libegl1 libgl1-mesa-dri, and set MUJOCO_GL=egl",
        )
    ]


def check_uv() -> list[Check]:
    """uv, which builds the environments of simulators whose packages are of their own."""
    try:
        return [Check("uv", "ok", find_uv())]
    except UserError:
        return [Check("uv", "missing", "not found", "only env.runtime (LIBERO) needs it: pip install uv")]


def check_ray() -> list[Check]:
    """Ray, and a cluster at RAY_API_SERVER_ADDRESS or on this machine."""
    if _installed("ray"):
        lines = [Check("Ray", "ok", version("ray"))]
    else:
        lines = [
            Check(
                "Ray", "missing", "not installed", "pip install 'rlsvc[cluster]'; `rlsvc submit` and --local need none"
            )
        ]
    address = os.environ.get("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:8265")
    try:
        with JobsClient(address, find_token()) as client:
            return [*lines, Check("Ray cluster", "ok", f"Ray {client.version()} at {client.address}")]
    except (UserError, ValueError, KeyError) as error:
        if "RAY_API_SERVER_ADDRESS" in os.environ:
            return [
                *lines,
                Check("Ray cluster", "missing", str(error), "set RAY_API_SERVER_ADDRESS to a dashboard that answers"),
            ]
    none = Check(
        "Ray cluster", "ok", f"none at {address}: commands start their own Ray", "to share one: ray start --head"
    )
    return [*lines, none, check_port(8265, "a Ray dashboard")]


def check_port(port: int, user: str) -> Check:
    """Whether a port of this machine is free."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                f"port {port}",
                "warning",
                f"taken ({error.strerror})",
                f"{user} wants it: end what uses it, or choose another port",
            )
    return Check(f"port {port}", "ok", "free")


def check_disks(root: Path) -> list[Check]:
    """Room for runs, for Ray's session and spilled objects, and for its object store."""
    lines = [check_disk("disk for runs", root, 5, "root=/another/disk/runs", needed=True)]
    ray_folder = Path(os.environ.get("RAY_TMPDIR", "/tmp/ray"))
    lines.append(check_disk("disk for Ray", ray_folder, 5, "set RAY_TMPDIR to a folder on a larger disk"))
    shared = shutil.disk_usage("/dev/shm").total / GIB
    small = shared < 2
    mend = (
        "Ray's object store falls back to the disk: docker run --shm-size=4g, or remount /dev/shm larger"
        if small
        else ""
    )
    return [*lines, Check("/dev/shm", "warning" if small else "ok", f"{shared:.1f} GiB", mend)]


def check_disk(name: str, folder: Path, want_gib: float, mend: str, needed: bool = False) -> Check:
    """Free space where `folder` is or would be made; below a tenth of `want_gib`, or not writable, is missing."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    usage = shutil.disk_usage(place)
    free, used = usage.free / GIB, 1 - usage.free / usage.total
    found = f"{free:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check(name, "missing", f"{place} is not writable", mend, needed)
    if free < want_gib / 10:
        return Check(name, "missing", found, f"free some space, or {mend}", needed)
    if free < want_gib or used > 0.95:  # Ray refuses to spill objects on a disk that is 95 % full
        return Check(name, "warning", f"{found}, {used:.0%} used", f"free some space, or {mend}", needed)
    return Check(name, "ok", found, needed=needed)


def probe(program: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs Python in a process of its own.

    Returns:
        Its exit code (negative for a signal) and the last line that it printed; of a failure its error in one line.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {PROBE_TIMEOUT_S} s"
    if done.returncode < 0:
        return done.returncode, f"crashed with signal {-done.returncode}"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, lines[-1].strip() if lines else ""


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
