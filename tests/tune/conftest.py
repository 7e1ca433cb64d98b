"""What the sweep tests share."""

from pathlib import Path

import pytest

from rlsvc.spec.run import RunSpec


@pytest.fixture
def base(tmp_path: Path) -> RunSpec:
    """A run that lives in the test's folder and tracks nothing."""
    return RunSpec.model_validate({
        "name": "one", "project": "demo", "root": str(tmp_path), "total_steps": 100,
        "policy": {"name": "diffusion"}, "algo": {"name": "imitation"}, "env": {"name": "pusht"},
        "data": {"datasets": [{"path": "d"}], "observation": ["observation.state"]}, "tracking": {"trackers": []},
    })  # fmt: skip
