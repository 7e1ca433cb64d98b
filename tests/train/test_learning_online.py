"""Learning is the proof: a small TD-MPC2, and a small SAC, swing a pendulum up within minutes on a CPU."""

from __future__ import annotations

import pytest

from rlsvc.spec.compose import compose
from rlsvc.train.run import train


@pytest.mark.slow
def test_tdmpc2_learns_to_swing_a_pendulum_up(tmp_path):
    """Random actions score about -1200, a good controller about -150, on 100 decisions of two simulator steps."""
    spec = compose(
        ["experiment=tdmpc2_pendulum", f"root={tmp_path}", "tracking.trackers=[]", "evaluation.videos=false"]
    )
    result = train(spec, local=True)
    assert result.metrics["eval/return"] > -400


@pytest.mark.slow
def test_sac_learns_to_swing_a_pendulum_up(tmp_path):
    """As above; with two updates a step, it has collected 2,500 decisions, of which 600 were random."""
    spec = compose(["experiment=sac_pendulum", f"root={tmp_path}", "tracking.trackers=[]", "evaluation.videos=false"])
    result = train(spec, local=True)
    assert result.metrics["eval/return"] > -400
