"""Whole runs on a virtual arm, by the command, with a Ray of their own: the suite's has no robot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlsvc.robots.virtual.cr5 import VirtualCR5
from rlsvc.store.bundle import read_bundle
from rlsvc.store.tracking import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
HOME = np.array([0.0, 0, -90, 0, 90, 0])
GUARD = {
    "low": [-3.0] * 6, "high": [3.0] * 6, "velocity": [0.5] * 6, "acceleration": [20.0] * 6, "step": [0.2] * 6,
    "workspace": None, "time_to_live_s": 1.0, "expiry_s": 2.0, "torque": "hold", "on_limit": "clip",
}  # fmt: skip
LEARNERS = {
    "SAC": {
        "policy": {"name": "gaussian", "hidden_dims": [8]},
        "algo": {"name": "sac", "batch_size": 8, "critic_dims": [8]},
        "replay": {"capacity": 200},
        "phases": [
            {"name": "seed", "type": "online", "acting": "random", "hooks": {"collect": 1}, "duration_steps": 16},
            {"name": "train", "type": "online", "hooks": {"collect": 4, "update": 1}, "duration_steps": 32},
        ],
        "rollout": {"mode": "async", "chunk_steps": 4, "timeout_s": 60, "cpus_per_worker": 0.5},
        "learner": {"cpus_per_rank": 0.5},
    },
    "RLlib's PPO": {
        "policy": {"name": "rllib", "config": {"fcnet_hiddens": [8]}},
        "algo": {
            "name": "rllib", "type": "ppo",
            "config": {"train_batch_size_per_learner": 32, "minibatch_size": 32, "num_epochs": 1},
        },
        "total_steps": 48,
        "rollout": {"timeout_s": 60, "cpus_per_worker": 0.5},
    },
}  # fmt: skip


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_run_steps_an_arm_behind_its_guard_and_ends_without_trying_the_policy_on_it(tmp_path, root: Path, learner):
    """Workers of an evaluation would wait for the arm that the rollout worker holds."""
    with VirtualCR5(HOME, enabled=True) as arm:
        driver = {"name": "dobot", "host": "127.0.0.1", **{f"{name}_port": port for name, port in arm.ports.items()}}
        station = {"id": "cr5", "driver": driver, "guard": GUARD, "rate_hz": 20, "max_skew_s": 1.0}
        env = {"name": "robot", "start": "auto", "console": None, "max_steps": 16, "start_timeout_s": 20}
        file = tmp_path / "arm.yaml"
        file.write_text(yaml.safe_dump({
            "name": "arm", "root": str(tmp_path), "log_interval": 16, "env": {**env, "station": station},
            "evaluation": {"interval": None}, "tracking": {"trackers": []}, "device": "cpu", **LEARNERS[learner],
        }))  # fmt: skip
        run = subprocess.run(
            [Path(sys.executable).with_name("rlsvc"), "train", str(file)], cwd=root, capture_output=True, text=True,
            timeout=400, env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert np.abs(arm.arm.q - HOME).max() > 0.1, "deg"
    folder = tmp_path / "rlsvc" / "arm"
    (bundle,) = (folder / "bundles").iterdir()
    assert read_bundle(bundle).contract.action.names == tuple(f"joint_{i}" for i in range(6))
    assert int(bundle.name) >= 48
    assert not any(name.startswith("eval/") for row in read_metrics(folder / "metrics.jsonl") for name in row)
