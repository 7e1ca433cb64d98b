"""Learning is the proof: a small policy learns PushT from the human demonstrations well beyond chance."""

from __future__ import annotations

import pytest

from rlsvc.spec.compose import compose
from rlsvc.train.run import train
from rlsvc.train.standalone import evaluate_bundle


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_policy_trained_for_minutes_on_people_pushes_the_block_far_better_than_chance(tmp_path, root, monkeypatch):
    monkeypatch.chdir(root)
    spec = compose([
        "experiment=pusht_demo", f"root={tmp_path}", "total_steps=1200", "tracking.trackers=[]",
        "evaluation.episodes=30", "evaluation.parallel=30", "evaluation.videos=false",
    ])  # fmt: skip
    trained = train(spec, local=True).metrics
    assert spec.env is not None
    chance = evaluate_bundle("random", spec.env, episodes=30, parallel=30, local=True).interval("max_reward")
    assert trained["eval/max_reward_low"] > chance.high
    assert trained["eval/max_reward"] > 2 * chance.mean
