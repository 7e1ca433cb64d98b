"""Seeded faults on Rays of their own; benchmarks/faults.py runs a hundred and more of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_no_acknowledged_transition_is_lost_or_doubled_through_twenty_faults(root: Path) -> None:
    """Eleven of the rollout plane, and each of the nine of a whole run."""
    command = [sys.executable, str(root / "benchmarks" / "faults.py"), "--seed", "7", "--no-store"]
    done = subprocess.run(
        [*command, "--faults", "11", "--group-faults", "9"],
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "20 faults survived" in done.stdout
    parts = re.findall(r"(\d+) transitions acknowledged, 0 lost, 0 doubled, 0 that", done.stdout)
    plane, whole_run = (int(count) for count in parts)
    assert plane > 1000
    assert whole_run > 500
    held_up = re.search(r"held up for ([0-9.]+) s", done.stdout)
    assert held_up
    assert float(held_up[1]) < 2.0
