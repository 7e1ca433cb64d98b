"""A run that takes seconds; ledger_env is importable, in whatever way pytest imports test modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from moto_s3 import s3, s3_server  # noqa: F401 - fixtures

from rlsvc.spec.compose import compose
from rlsvc.spec.run import RunSpec

sys.path.insert(0, str(Path(__file__).parent))

MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def make_spec(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSpec:
    """A tiny PushT run on the shipped demonstrations under `tmp_path`; takes overrides."""
    monkeypatch.chdir(root)

    def make(*overrides: str) -> RunSpec:
        words = [
            "experiment=pusht_demo", f"root={tmp_path}", "name=tiny", "total_steps=8", "log_interval=4",
            "learner.updates_per_call=4", "learner.cpus_per_rank=0.5", "checkpoint.interval=4", "algo.batch_size=8",
            "policy.backbone.down_dims=[8,8]", "policy.backbone.step_embed_dim=8", "policy.sample_steps=2",
            "data.max_train_episodes=4", "evaluation.interval=null", "evaluation.episodes=2", "evaluation.parallel=2",
            "evaluation.videos=false", "env.max_steps=16", "tracking.trackers=[]",
        ]  # fmt: skip
        return compose([*words, *overrides])

    return make
