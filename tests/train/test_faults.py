"""Seeded faults in the rollout plane, on a Ray of their own; benchmarks/faults.py runs a hundred and more of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.ray
def test_no_acknowledged_transition_is_lost_or_doubled_through_twenty_faults(root: Path) -> None:
    command = [sys.executable, str(root / "benchmarks" / "faults.py"), "--faults", "20", "--seed", "7", "--no-store"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.search(r"20 faults survived; (\d+) transitions acknowledged, 0 lost, 0 doubled, 0 that", done.stdout)
    assert found, done.stdout[-500:]
    assert int(found[1]) > 1000
    held_up = re.search(r"held up for ([0-9.]+) s", done.stdout)
    assert held_up
    assert float(held_up[1]) < 2.0
