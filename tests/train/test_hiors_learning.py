"""Learning is the proof: from five demonstrations, Hi-ORS with a stand-in for a person goes beyond imitating them."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.data.journal import Journal
from rlsvc.envs.planar_push import demonstrations
from rlsvc.spec.compose import compose
from rlsvc.train.run import run_dir, train

BC = "phases=[{name: bc, type: offline, buffer: demonstrations, hooks: {update: 1}, duration_updates: 2400}]"


@pytest.mark.slow
def test_hiors_goes_beyond_bc_on_the_same_demonstrations(tmp_path):
    """Both make 2400 updates of the same policy, and are judged alone on the same 50 starts."""
    np.savez(tmp_path / "push.npz", **demonstrations(5))
    words = [
        "experiment=hiors_planar_push", f"root={tmp_path}", f"data.datasets.0.path={tmp_path / 'push.npz'}",
        "evaluation.interval=null", "checkpoint.interval=10000", "tracking.trackers=[]",
    ]  # fmt: skip
    spec = compose([*words, "name=hiors"])
    hiors = train(spec, local=True)
    bc = train(compose([*words, "name=bc", "algo.name=imitation", "rollout.stand_in=null", BC]), local=True)
    assert hiors.metrics["progress/updates"] == bc.step == 2400
    assert hiors.metrics["eval/success"] >= bc.metrics["eval/success"] + 0.2
    with Journal(run_dir(spec) / "journal", read_only=True) as journal:
        acted = [chunk.columns["intervention"][~chunk.columns["is_last"]] for chunk in journal.read()]
    first, *_, last = (part.mean() for part in np.array_split(np.concatenate(acted), 4))
    assert last < first
