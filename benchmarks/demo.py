"""What `make demo` takes and reaches on this machine: minutes, and the trained policy's overlap over a random one's.

    python benchmarks/demo.py

The packages are installed already; both policies act on the same 50 seeds, which training never saw. Words after the
command change the demo's run, as for `rlsvc demo`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, write_result

PACKAGES = ("rlsvc", "jax", "flax", "ray", "gym-pusht")


def main() -> None:
    """Run the demo, store its figures."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [str(Path(sys.executable).parent / "rlsvc"), "demo", "--output", str(output), *sys.argv[1:]]
        subprocess.run(command, cwd=ROOT, check=True)
        figures = json.loads(output.read_text())
    trained, chance = figures["trained"], figures["random"]
    write_result("demo_minutes", figures["minutes"], "minutes", packages=PACKAGES, seeds=[0])
    write_result(
        "demo_overlap_over_random",
        trained["max_reward"] / chance["max_reward"],
        "ratio",
        peer="a random policy (mean max overlap)",
        peer_value=chance["max_reward"],
        ratio=trained["max_reward"] / chance["max_reward"],
        packages=PACKAGES,
        seeds=[0],
    )
    print(
        f"{figures['minutes']:.1f} minutes; mean max overlap {trained['max_reward']:.3f} "
        f"[{trained['max_reward_low']:.3f}, {trained['max_reward_high']:.3f}] against {chance['max_reward']:.3f} "
        f"[{chance['max_reward_low']:.3f}, {chance['max_reward_high']:.3f}]: "
        f"ratio {trained['max_reward'] / chance['max_reward']:.2f}"
    )


if __name__ == "__main__":
    main()
