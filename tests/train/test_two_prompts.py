"""A small pi0 goes to the disc that its prompt names, and to the other one when the prompt names that."""

from __future__ import annotations

import numpy as np
import pytest

from rlsvc.envs.two_goals import demonstrations
from rlsvc.spec.compose import compose
from rlsvc.spec.env import GymnasiumSpec
from rlsvc.train.run import train
from rlsvc.train.standalone import evaluate_bundle


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_success_with_the_right_prompt_is_far_above_success_with_the_wrong_one(tmp_path):
    """Three to five minutes of training on two cores."""
    data = tmp_path / "two_goals.npz"
    np.savez(data, **demonstrations(1500))
    words = [
        "experiment=pi05_debug", "policy.variant=pi0", "policy.max_tokens=24", "total_steps=2000",
        f"data.datasets.0.path={data}", f"root={tmp_path}", "env=null", "tracking.trackers=[]",
        "data.validation_fraction=0",
    ]  # fmt: skip
    bundle = train(compose(words), local=True).bundle
    share = {}
    for mislead in (False, True):
        env = GymnasiumSpec(id="rlsvc/TwoGoals-v0", import_module="rlsvc.envs.two_goals", kwargs={"mislead": mislead})
        found = evaluate_bundle(str(bundle), env, episodes=100, workers=1, parallel=50, local=True)
        share[mislead] = float(np.mean(found.scores("success")))
    assert share[False] - share[True] >= 0.8, share
