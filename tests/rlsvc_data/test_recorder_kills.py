"""Real kills; benchmarks/recorder_kills.py counts 300 of them."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_thirty_kills_lose_no_acknowledged_episode(root):
    command = [sys.executable, str(root / "benchmarks" / "recorder_kills.py"), "--kills", "30", "--seed", "7"]
    done = subprocess.run([*command, "--no-store"], capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = re.search(r"30 kills .* (\d+) at a call or a byte\): (\d+) episodes acknowledged, 0 lost", done.stdout)
    assert found, done.stdout
    by_itself, acknowledged = map(int, found.groups())
    assert by_itself > 5
    assert acknowledged > 15
