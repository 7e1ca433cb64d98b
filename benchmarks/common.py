"""What every benchmark shares: where results go, and what a result says about the machine and the code that made it."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUIET = 1.0
"""Load of others above which a figure of processor speed is printed and not stored."""


def hardware(gpu: bool = False, gpus: int | None = None) -> str:
    """This machine in words: "2 CPU cores (Intel ...)", or its GPUs, the first `gpus` of them, when `gpu` is set.

    Raises:
        RuntimeError: `gpu` is set and nvidia-smi finds none.
    """
    if gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", *([f"--id={visible}"] if visible else [])]
        try:
            found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError("hardware(gpu=True) needs nvidia-smi and a GPU") from error
        names = [name.strip() for name in found.splitlines() if name.strip()][:gpus]
        return f"{len(names)}x {names[0]}"
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = models[0] if models else model
    return f"{len(os.sched_getaffinity(0))} CPU cores ({model})"


def load_of_others() -> float:
    """Processes that wanted a core in the last minute, on average; ask before the measuring begins."""
    return os.getloadavg()[0]


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions by package name, Python's own included; a package that is missing is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that is checked out, with "+changes" when tracked files differ from it.

    Outside a checkout (a copy on a GPU machine) what RLSVC_COMMIT says, else "unknown".
    """
    if os.environ.get("RLSVC_COMMIT"):
        return os.environ["RLSVC_COMMIT"]
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def percentile_interval(
    samples: Sequence[float], q: float, *, seed: int = 0, resamples: int = 500
) -> tuple[float, float, float]:
    """A percentile of the samples and its 95 % bootstrap interval.

    Args:
        samples: [N], any unit.
        q: percentile, 0 to 100.
        seed: of the bootstrap.
        resamples: how many bootstrap draws.

    Returns:
        (value, low, high) in the samples' unit.
    """
    array = np.asarray(samples, np.float64)
    draws = np.random.default_rng(seed).choice(array, (resamples, len(array)))
    low, high = np.percentile(np.percentile(draws, q, axis=1), [2.5, 97.5])
    return float(np.percentile(array, q)), float(low), float(high)


def write_result(
    name: str,
    value: float,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    peer: str = "",
    peer_value: float | None = None,
    ratio: float | None = None,
    gpu: bool = False,
    gpus: int | None = None,
    packages: Iterable[str] = (),
    seeds: Sequence[int] = (),
    folder: Path = RESULTS,
) -> Path:
    """Store one figure as `<folder>/<name>.json`.

    Args:
        name: of the figure, as in the project's list of figures.
        value: what was measured.
        unit: of `value`, `low`, `high` and `peer_value`.
        low: lower end of the 95 % interval.
        high: upper end of the 95 % interval.
        peer: what it was measured beside, in the same run ("openpi's server").
        peer_value: the peer's measurement.
        ratio: `value` over `peer_value`, or the other way round where the name says speedup.
        gpu: whether it ran on a GPU; decides what "hardware" says.
        gpus: how many it ran on; None is all that can be seen.
        packages: whose versions matter for this figure.
        seeds: random seeds that the figure rests on.
        folder: where to write.

    Returns:
        The path written.

    Raises:
        ValueError: `value` is not finite, so that a failed measurement never looks like a figure.
    """
    if not math.isfinite(value):
        raise ValueError(f"{name}: measured {value}, which is not a figure")
    result: dict[str, Any] = {
        "name": name,
        "value": value,
        "unit": unit,
        "low": low,
        "high": high,
        "peer": peer,
        "peer_value": peer_value,
        "ratio": ratio,
        "hardware": hardware(gpu, gpus),
        "versions": versions(packages),
        "seeds": list(seeds),
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
    return path


def _relative(arguments: Sequence[str]) -> list[str]:
    """Command-line words with absolute paths shortened: a result does not hold one machine's folders."""
    words = []
    for word in arguments:
        path = Path(word)
        if path.is_absolute():
            word = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        words.append(word)
    return words
